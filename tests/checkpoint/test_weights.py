"""`load_weights`: each rank reads its part of a file, on any mesh, and nothing else."""

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard import load_weights, parallelize, save_weights
from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.checkpoint.stored import StoredTensor
from lightning_shard.checkpoint.weights import copy_weights, stored_weights
from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.processes.mesh import make_mesh
from tests.training import make, shared_path


class Uneven(nn.Module):
    """Extents that ranks do not divide, a complex weight, a scalar, tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.second = nn.Linear(3, 1)
        self.tied = self.second
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.spectrum = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.norm = nn.BatchNorm1d(3)


def uneven(seed: int) -> Uneven:
    torch.manual_seed(seed)
    module = Uneven()
    module.norm.running_mean.normal_()
    return module


def write(path: Path, state: dict) -> None:
    """Rank 0 writes in the format that the name says."""
    if dist.get_rank() == 0:
        if path.suffix == ".safetensors":
            save_file({k: v.contiguous() for k, v in state.items() if "tied" not in k}, path)
        else:
            torch.save(state, path)
    dist.barrier()


@pytest.mark.spmd(4)
@pytest.mark.parametrize("kind", ["safetensors", "pt", "ckpt", "fsdp1.pt", "ddp.pt"])
def test_each_rank_gets_its_shard(kind):
    module, source = uneven(0), uneven(1)
    parallelize(module, make_mesh("cpu", 2, (2,)))
    state = dict(source.state_dict())
    if kind == "ckpt":
        state = {"state_dict": state, "epoch": 3}
    elif kind == "fsdp1.pt":
        state = {f"_fsdp_wrapped_module.{k}".replace("first.", "first._orig_mod."): v
                 for k, v in state.items()}  # fmt: skip
    elif kind == "ddp.pt":
        state = {f"module.{k}": v for k, v in state.items()}
    path = shared_path(f"weights.{kind}")
    write(path, state)
    load_weights(module, path)
    for name, value in full_module_state(module).items():
        assert torch.equal(value, source.state_dict()[name]), name


@pytest.mark.spmd(4)
def test_reads_no_more_than_the_shards():
    """Weights split by mode too, into a module without memory at first."""
    source, module = make("dense_fno", torch.float32), make("dense_fno", torch.float32)
    path = shared_path("weights.safetensors")
    write(path, {k: v for k, v in source.state_dict().items() if isinstance(v, torch.Tensor)})
    parallelize(module, make_mesh("cpu", 2, (2,)))
    module.to_empty(device="cpu")
    stored = stored_weights(path)
    read = []

    def counted(tensor: StoredTensor) -> StoredTensor:
        def reading(region):
            part = tensor.read(region)
            read.append(part.numel())
            return part

        return replace(tensor, read=reading)

    copy_weights(module, {k: counted(v) for k, v in stored.items()}, str(path))
    for name, value in full_module_state(module).items():
        assert torch.equal(value, source.state_dict()[name]), name
    own = 0
    for p in module.parameters():
        own += p.to_local().numel() if isinstance(p, DTensor) else p.numel()
    assert sum(read) <= own  # pairs of real numbers are one complex number in the file


def test_several_safetensors(tmp_path):
    module, source = uneven(0), uneven(1)
    state = {k: v for k, v in source.state_dict().items() if "tied" not in k}
    names = list(state)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, held in parts.items():
        save_file({k: state[k] for k in held}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    where = {k: file for file, held in parts.items() for k in held}
    index.write_text(json.dumps({"weight_map": where}))
    load_weights(module, index)
    for name, value in source.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


def refused(error, text, module, path, **options):
    with pytest.raises(error, match=re.escape(text)) as caught:
        load_weights(module, path, **options)
    assert "\n" not in str(caught.value)


def test_bad_files(tmp_path):
    module = uneven(0)
    refused(FileNotFoundError, "there is no file", module, tmp_path / "none.pt")
    refused(FileNotFoundError, "there is no file", module, tmp_path / "none.safetensors")
    for kind in ("pt", "safetensors"):
        whole = tmp_path / f"whole.{kind}"
        state = {"a": torch.ones(100)}
        save_file(state, whole) if kind == "safetensors" else torch.save(state, whole)
        cut = tmp_path / f"cut.{kind}"
        cut.write_bytes(whole.read_bytes()[:-50])
        refused(ValueError, "is not whole", module, cut)
        garbage = tmp_path / f"garbage.{kind}"
        garbage.write_bytes(b"hello")
        refused(ValueError, "is not whole", module, garbage)
    torch.save({"a": Fraction(1, 2)}, tmp_path / "code.pt")
    refused(ValueError, "holds a fractions.Fraction besides tensors", module, tmp_path / "code.pt")
    torch.save([1], tmp_path / "list.pt")
    refused(ValueError, "holds no weights", module, tmp_path / "list.pt")


def test_weights_that_do_not_fit(tmp_path):
    path = tmp_path / "weights.pt"
    state = dict(uneven(1).state_dict())
    del state["norm.bias"], state["scale"]
    torch.save(state | {"more": torch.ones(1)}, path)
    refused(RuntimeError, "it has no 'scale', 'norm.bias' and has 'more'", uneven(0), path)
    load_weights(uneven(0), path, strict=False)
    torch.save(uneven(1).state_dict() | {"first.weight": torch.ones(2, 5)}, path)
    refused(ValueError, "'first.weight' in", uneven(0), path)
    torch.save(uneven(1).state_dict() | {"first.bias": torch.ones(3) * 1j}, path)
    refused(ValueError, "is complex, the module's is torch.float32", uneven(0), path)
    torch.save(uneven(1).state_dict(), path)
    with torch.device("meta"):
        module = Uneven()
    refused(RuntimeError, "call module.to_empty(device=...)", module, path)


def test_complex128_as_pairs(tmp_path):
    source = {"a": torch.randn(3, 2, dtype=torch.complex128)}
    save_file({"a": torch.view_as_real(source["a"])}, tmp_path / "a.safetensors",
              metadata={"complex": '["a"]'})  # fmt: skip
    stored = stored_weights(tmp_path / "a.safetensors")["a"]
    assert stored.dtype == torch.complex128
    assert torch.equal(stored.whole(), source["a"])


@pytest.mark.spmd(2)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_block_that_a_program_compiled_keeps_its_names(mode):
    """Plain Lightning asks for them; a module that compiles nothing reads them, too."""

    def made(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    def compiled(module):
        return nn.Sequential(torch.compile(module[0], backend="eager"), module[1])

    module, plain, path = compiled(made(0)), made(1), shared_path("weights.pt")
    names = [*module.state_dict()]
    parallelize(module, make_mesh("cpu", 1, (2,)), options=ShardingOptions(mode=mode))
    save_weights(module, path)
    assert [*torch.load(path)] == names
    load_weights(plain, path)
    for value, expected in zip(plain.parameters(), made(0).parameters(), strict=True):
        assert value.equal(expected)
