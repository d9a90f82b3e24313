"""The single file: Lightning's format, streamed, whole or not there."""

import contextlib
import re
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from lightning_shard.trainer.checkpoint_io import CheckpointFiles
from tests.checkpoint.tiny import SaveAt, Tiny, fit, leave_group, loader, quiet, tiny, trainer
from tests.training import shared_path


class Counting(SaveAt):
    """How many gathered tensors were alive when the next one was gathered, while saving."""

    @contextlib.contextmanager
    def counted(self):
        self.gathered, self.most = [], 0
        original = DTensor.full_tensor

        def counting(tensor, **options):
            alive = sum(1 for gathered in self.gathered if gathered() is not None)
            self.most = max(self.most, alive)
            whole = original(tensor, **options)
            self.gathered.append(weakref.ref(whole))
            return whole

        # a thread that looks at frames, as `LoneWaits` does, keeps their tensors while it looks
        unseen = mock.patch.object(sys, "_current_frames", dict)
        with unseen, mock.patch.object(DTensor, "full_tensor", counting):
            yield

    def on_train_batch_end(self, trainer, *args):
        with self.counted():
            super().on_train_batch_end(trainer, *args)


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_one_tensor_is_whole_at_a_time():
    """Ranks other than the first hold no whole tensor when the next one is gathered."""
    count = Counting(shared_path("some.ckpt"), 4)
    fit((2,), count, max_steps=4, max_epochs=-1, sharding="full")
    assert len(count.gathered) > 15
    if dist.get_rank() > 0:
        assert count.most == 0


class Failing(CheckpointFiles):
    """The disk is full half-way, at the second file."""

    def __init__(self) -> None:
        self.calls = 0

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.calls += 1
        if self.calls == 1:
            return super().save_checkpoint(checkpoint, path)
        write = torch.serialization._save

        def fail(*args):
            args[1].write_record("half", b"x" * 100, 100)
            raise OSError(28, "No space left on device")

        torch.serialization._save = fail
        try:
            return super().save_checkpoint(checkpoint, path)
        finally:
            torch.serialization._save = write


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_disk_full():
    """All ranks raise at once, the old file stays, and nothing else is left."""
    path = shared_path("some.ckpt")
    save = [SaveAt(path, 2), SaveAt(path, 4)]
    with pytest.raises((OSError, RuntimeError), match="No space left on device") as caught:
        fit((2,), *save, checkpoint_io=Failing())
    assert type(caught.value) is (OSError if dist.get_rank() == 0 else RuntimeError)
    assert [p.name for p in path.parent.iterdir()] == ["some.ckpt"]
    assert torch.load(path, weights_only=True)["global_step"] == 2


class Other(Tiny):
    """Has a layer that the file lacks."""

    def __init__(self, width=5):
        super().__init__(width=width)
        self.third = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("made", "named", "said"),
    [
        (
            lambda: tiny(width=4),
            True,
            "is of Tiny with width=5, and does not fit Tiny with width=4",
        ),
        (lambda: tiny(width=4), False, "was saved with width=5, and does not fit Tiny with width="),
        (Other, True, "is of Tiny, and does not fit Other: "),
        (Other, False, "does not fit Other: "),
    ],
)
def test_a_file_of_another_model_names_both(tmp_path, made, named, said):
    path = tmp_path / "some.ckpt"
    fit((1,), SaveAt(path, 2), max_steps=2)
    file = torch.load(path, weights_only=True)
    if named:  # as the command line does
        file["hyper_parameters"]["_class_path"] = f"{Tiny.__module__}.Tiny"
    torch.save(file, path)
    with pytest.raises(RuntimeError, match=re.escape(f"'{path}' {said}")) as caught:
        fit((1,), module=made(), path=path)
    assert len(str(caught.value).splitlines()) <= 5
    leave_group()


def test_what_was_there_stays(tmp_path):
    path = tmp_path / "some.ckpt"
    io = CheckpointFiles()
    io.save_checkpoint({"state_dict": {"a": torch.ones(2)}}, path)
    with pytest.raises((AttributeError, TypeError), match=r"pickle|lambda"):
        io.save_checkpoint({"a": lambda: None}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["some.ckpt"]
    assert torch.equal(io.load_checkpoint(path)["state_dict"]["a"], torch.ones(2))


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_a_checkpoint_io_of_the_user_is_used():
    path = shared_path("some.ckpt")
    written = []

    class Own(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            written.append(path)
            super().save_checkpoint(checkpoint, path, storage_options)

    fit((2,), SaveAt(path, 4), checkpoint_io=Own())
    assert written == ([path] if dist.get_rank() == 0 else [])
    fit((2,), path=path)


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_buffers_are_those_of_the_file_on_all_ranks():
    """Replicas saw different samples; after saving they hold the same statistics."""
    path = shared_path("some.ckpt")
    seen = []

    class Look(SaveAt):
        def on_train_batch_end(self, trainer, module, *_):
            super().on_train_batch_end(trainer, module)
            if trainer.global_step == self.step:
                seen.append(module.norm.running_mean.clone())

    fit((2,), Look(path, 4))
    saved = torch.load(path, weights_only=True)["state_dict"]["norm.running_mean"]
    assert torch.equal(seen[0], saved)


@pytest.mark.slow
def test_loads_without_us(tmp_path):
    """Keys of Lightning and one of ours; plain tensors; integer keys; versions of modules."""
    path = tmp_path / "some.ckpt"
    _, state, module = fit((1,), SaveAt(path, 12))
    saved = torch.load(path, weights_only=True)
    inside_an_epoch = {"unfinished", "frozen", "logged", "generators"}
    always = {"mesh", "versions", "random", "orders", "sharding"}
    assert set(saved["lightning_shard"]) == always | inside_an_epoch
    assert saved["state_dict"]._metadata["norm"]["version"] == 2
    assert list(saved["optimizer_states"][0]["state"]) == list(range(8))
    loaded = type(module).load_from_checkpoint(path, weights_only=True)
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in state.items())


def test_files_that_run_code(tmp_path):
    path = tmp_path / "some.ckpt"
    fit((1,), SaveAt(path, 2), max_epochs=1)
    saved = torch.load(path, weights_only=True)
    torch.save(saved | {"more": Path("a")}, path)
    with pytest.raises(
        ValueError, match=r"holds a pathlib\S* besides tensors .* weights_only=False"
    ):
        fit((1,), path=path)
    fit((1,), path=path, weights_only=False)


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_weights_only_false_is_honoured():
    path = shared_path("some.ckpt")
    losses, _, _ = fit((2,), SaveAt(path, 4))
    if dist.get_rank() == 0:
        torch.save(torch.load(path, weights_only=True) | {"more": Path("a")}, path)
    dist.barrier()
    with pytest.raises(ValueError, match="besides tensors"):
        fit((2,), path=path)
    resumed, _, _ = fit((2,), path=path, weights_only=False)
    assert resumed == losses[4:]


def test_options_of_storage_are_refused(tmp_path):
    with pytest.raises(TypeError, match="storage_options"):
        CheckpointFiles().save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"a": 1})


def test_a_raw_state_dict_and_safetensors_are_weights(tmp_path):
    source = tiny(seed=3).float()
    source.spectrum = torch.nn.Parameter(source.spectrum.to(torch.complex64))
    state = source.state_dict()
    torch.save({f"module.{k}": v for k, v in state.items()}, tmp_path / "ddp.pt")
    save_file(state, tmp_path / "a.safetensors")
    for name in ("ddp.pt", "a.safetensors"):
        module = tiny()
        with quiet():
            trainer().validate(module, loader(), ckpt_path=tmp_path / name, verbose=False)
        assert torch.equal(module.first.weight, state["first.weight"].double())
