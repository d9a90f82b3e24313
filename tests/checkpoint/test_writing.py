"""What is written: whole and of one run, and one sentence where the disk does not take it."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_shard import load_weights, save_weights
from lightning_shard.checkpoint.torch_file import read_torch_file
from lightning_shard.cli.main import main
from lightning_shard.data import atomic
from lightning_shard.trainer.checkpoint_io import CheckpointFiles
from tests.checkpoint.tiny import SaveAt, fit, names, tiny
from tests.pairs import choose
from tests.training import shared_path


def write_again_and_again(path: Path, run: int, kind: str, stop: Event) -> None:
    """Each file or directory holds the number of the run and of the round, many times."""
    torch.set_num_threads(1)
    for number in range(1, 10**6):
        value = torch.full((2**14,), float(run * 10**6 + number))
        if kind == "file":
            content = {"state_dict": {str(i): value for i in range(4)}}
            CheckpointFiles().save_checkpoint(content, path)
        else:
            partial = atomic.partial_of(path)
            partial.mkdir()
            for name in "abcd":
                torch.save(value, partial / name)
            atomic.put_in_place(partial, path)
        if stop.is_set():
            return


def numbers_in(path: Path, kind: str) -> set[float]:
    """The numbers that one read of a checkpoint gives; none if it is just being replaced."""
    try:
        if kind == "file":
            values = CheckpointFiles().load_checkpoint(path)["state_dict"].values()
            return {float(number) for value in values for number in value.unique()}
        folder = os.open(path, os.O_DIRECTORY)
    except FileNotFoundError:
        return set()
    inner = Path(f"/proc/self/fd/{folder}")
    try:
        values = [read_torch_file(inner / name) for name in "abcd"]
        return {float(number) for value in values for number in value.unique()}
    except (FileNotFoundError, ValueError):
        assert len([*inner.iterdir()]) < 4  # the old one is being removed
        return set()
    finally:
        os.close(folder)


@pytest.mark.quick_rows("directory-1.0")
@pytest.mark.parametrize("seconds", [1.0, pytest.param(4.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_two_runs_write_one_name(kind, seconds, tmp_path):
    """Whatever is read under the final name is whole, and all of it of one round of one run."""
    path = tmp_path / "last.ckpt"
    fork = multiprocessing.get_context("fork")
    stop = fork.Event()
    writers = [
        fork.Process(target=write_again_and_again, args=(path, run, kind, stop)) for run in (1, 2)
    ]
    for writer in writers:
        writer.start()
    reads, begun = [], time.monotonic()
    while any(writer.is_alive() for writer in writers):
        reads.append(numbers_in(path, kind))
        seen = {number // 10**6 for found in reads for number in found}
        if time.monotonic() - begun > (seconds if len(seen) == 2 else 60):
            stop.set()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert max(map(len, reads)) == 1
    assert len(seen) == 2
    assert len(numbers_in(path, kind)) == 1
    assert names(tmp_path) == {"last.ckpt"}


KILLED = """\
import sys, time
from pathlib import Path
from lightning_shard.data import atomic
path = Path(sys.argv[1])
partial = atomic.partial_of(path)
partial.mkdir() if sys.argv[2] == "directory" else partial.write_bytes(b"half")
print(partial.name, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_leftovers_of_killed_runs_are_removed(kind, tmp_path):
    """By the next save in the folder, and not while their writer lives."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "other.ckpt"), kind]
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=paths) as writer:
        assert writer.stdout is not None
        left = writer.stdout.readline().strip()
        CheckpointFiles().save_checkpoint({"state_dict": {}}, tmp_path / "some.ckpt")
        assert names(tmp_path) == {"some.ckpt", left}
        writer.send_signal(signal.SIGKILL)
    CheckpointFiles().save_checkpoint({"state_dict": {}}, tmp_path / "some.ckpt")
    assert names(tmp_path) == {"some.ckpt"}


def test_leftovers_of_other_machines(tmp_path):
    """Nobody can ask whether their writer lives, so they stay for a day."""
    fresh, old = (tmp_path / f"a.ckpt.other.{n}.0123abcd.partial" for n in (1, 2))
    for path in (fresh, old):
        path.mkdir()
        (path / "x").touch()
    for path in (old, old / "x"):
        os.utime(path, (0, time.time() - 2 * atomic.ABANDONED_S))
    atomic.remove_leftovers(tmp_path)
    assert names(tmp_path) == {fresh.name}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


SIZES = (0, 100, 3_000, 20_000)  # at the first record, and inside of others
CAUSE = r"'\S*/some\.ckpt' cannot be written: File too large \(EFBIG\)"


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize(("size", "kind"), choose(SIZES, ["single", "sharded", "later"]))
def test_no_room_inside_of_a_record(kind, size):
    """All ranks say path and cause; the old one stays, and nothing else is left."""
    path = shared_path("some.ckpt")
    options = {"checkpoint_format": "async" if kind == "later" else kind}
    wide = tiny(width=400)
    fit((2,), SaveAt(path, 2), module=wide, max_steps=2, max_epochs=-1, **options)

    class Full(SaveAt):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == self.step:
                with largest_file(size):
                    super().on_train_batch_end(trainer, *args)
                    trainer.strategy.saver.finish()

    with pytest.raises((OSError, RuntimeError), match=CAUSE) as caught:
        fit((2,), Full(path, 2), module=tiny(width=400), max_steps=2, max_epochs=-1, **options)
    assert "\n" not in str(caught.value)
    dist.barrier()
    assert names(path.parent) == {"some.ckpt"}
    fit((2,), path=path, module=tiny(width=400), max_steps=3, max_epochs=-1)


@pytest.mark.parametrize("out", ["a.ckpt", "a.pt", "a.safetensors"])
@pytest.mark.parametrize("size", [0, 100, 10_000])
def test_export_without_room(out, size, tmp_path, capsys):
    source = tmp_path / "source.pt"
    torch.save(tiny(width=2000).state_dict(), source)
    with largest_file(size), pytest.raises(SystemExit) as stop:
        main(["export", str(source), str(tmp_path / out)])
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line and "reading" not in line] == [
        f"error: '{tmp_path / out}' cannot be written: File too large (EFBIG)"
    ]
    assert names(tmp_path) == {"source.pt"}


def test_export_to_and_from_where_it_cannot(tmp_path, capsys):
    source, text = tmp_path / "source.pt", tmp_path / "notes.pt"
    torch.save(tiny().state_dict(), source)
    text.write_text("dear diary")
    cases = {
        (source, "/proc/x.pt"): "error: '/proc/x.pt' cannot be written: ",
        (source, "/proc/x/y.pt"): "error: '/proc/x/y.pt' cannot be written: ",
        (source, f"{text}/x.pt"): "/notes.pt/x.pt' cannot be written: ",
        (text, f"{tmp_path}/out.pt"): f"error: '{text}' is not whole, or no file of torch.save",
    }
    for (origin, out), sentence in cases.items():
        with pytest.raises(SystemExit) as stop:
            main(["export", str(origin), out])
        written = capsys.readouterr().err.strip().splitlines()
        assert stop.value.code == 2
        assert len([line for line in written if "error: " in line]) == 1
        assert sentence in written[-1]
        assert "Traceback" not in str(written)


def test_a_folder_that_cannot_be_made():
    """Its own parent is missing, too, which is no reason."""
    path = Path("/sys/missing/folder/some.pt")  # the superuser, too, makes no folder in /sys
    words = rf"'{path}' cannot be written: .* \((EPERM|EACCES|EROFS)\)"
    with pytest.raises(OSError, match=words), atomic.written_file(path):
        pass


def test_a_full_disk(tmp_path):
    """As far as a machine has one to write to: a device that takes nothing."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    path = tmp_path / "some.pt"
    with (
        pytest.raises(OSError, match=r"some\.pt' cannot be written: No space left .*ENOSPC"),
        atomic.disk_errors(path),
        Path("/dev/full").open("wb", buffering=0) as file,
    ):
        torch.save({"a": torch.ones(1000)}, file)


def test_save_weights_says_why_it_cannot(tmp_path):
    module = nn.Linear(100, 100)
    with pytest.raises(ValueError, match=r"a\.zip' ends with none of \.safetensors, \.pt"):
        save_weights(module, tmp_path / "a.zip")
    save_weights(module, tmp_path / "a.pt")
    with largest_file(5_000), pytest.raises(OSError, match=r"a\.pt' cannot be written: .*EFBIG"):
        save_weights(nn.Linear(100, 100), tmp_path / "a.pt")
    assert names(tmp_path) == {"a.pt"}
    other = nn.Linear(100, 100)
    load_weights(other, tmp_path / "a.pt")
    assert torch.equal(other.weight, module.weight)


def test_save_weights_replaces_no_folder(tmp_path):
    (tmp_path / "runs.pt").mkdir()
    save_weights(nn.Linear(1, 1), tmp_path / "runs.pt")  # an empty one holds nothing to be lost
    (tmp_path / "kept.pt").mkdir()
    (tmp_path / "kept.pt/notes.txt").touch()
    with pytest.raises(IsADirectoryError, match=r"kept.pt' is a folder that holds 'notes.txt'"):
        save_weights(nn.Linear(1, 1), tmp_path / "kept.pt")
    save_weights(nn.Linear(1, 1), tmp_path / "kept.pt/last.ckpt")
    assert names(tmp_path / "kept.pt") == {"notes.txt", "last.ckpt"}


@pytest.mark.quick_rows("sharded")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", ["single", "sharded", "async"])
def test_a_run_replaces_no_folder_but_a_checkpoint(kind):
    folder = shared_path("outputs")
    for path in (folder / "last.ckpt", folder / "last.ckpt", folder):
        refused = pytest.raises(
            (IsADirectoryError, RuntimeError), match=r"outputs' is a folder that holds 'last.ckpt'"
        )
        with refused if path is folder else nullcontext():
            fit((2,), SaveAt(path, 1), max_steps=1, max_epochs=-1, checkpoint_format=kind)
        dist.barrier()
        assert names(folder) == {"last.ckpt"}
