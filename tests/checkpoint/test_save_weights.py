"""`save_weights`: one file of a sharded module, gathered one parameter at a time."""

import pytest
import torch
import torch.distributed as dist
from neuralop.models import FNO
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from lightning_shard import load_weights, parallelize, save_weights
from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.processes.mesh import make_mesh
from tests.checkpoint.test_files import Counting
from tests.checkpoint.test_weights import uneven
from tests.pairs import choose
from tests.training import make, shared_path

ENDINGS = (".pt", ".ckpt", ".safetensors")


def sharded(kind: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    module = uneven(seed) if kind == "uneven" else make(kind, torch.float32)
    parallelize(module, make_mesh("cpu", 1, (2,)))
    return module


@pytest.mark.quick_rows("uneven-.pt")
@pytest.mark.spmd(2)
@pytest.mark.parametrize(("kind", "ending"), choose(["uneven", "dense_fno", "tfno"], ENDINGS))
def test_saved_and_loaded(kind, ending):
    """Names, shapes and dtypes are those of the plain module, which reads the file too."""
    module, other = sharded(kind, 0), sharded(kind, 1)
    expected = full_module_state(module)
    path = shared_path(f"a{ending}")
    save_weights(module, path)
    load_weights(other, path)
    found = full_module_state(other)
    torch.manual_seed(1)
    plain = uneven(1) if kind == "uneven" else make(kind, torch.float32)
    load_weights(plain, path)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
            assert torch.equal(plain.state_dict()[name], value), name
            assert found[name].dtype == value.dtype
    if dist.get_rank() == 0 and ending != ".safetensors":
        saved = torch.load(path, weights_only=True)
        saved = saved["state_dict"] if ending == ".ckpt" else saved
        assert list(saved) == list(expected)
        assert not any(isinstance(value, DTensor) for value in saved.values())


@pytest.mark.spmd(2)
@pytest.mark.parametrize("ending", ENDINGS)
def test_one_parameter_is_whole_at_a_time(ending):
    """On rank 0 as well, where the format allows it."""
    count, path = Counting(shared_path("unused"), 0), shared_path(f"a{ending}")
    module = sharded("dense_fno", 0)
    with count.counted():
        save_weights(module, path)
    assert len(count.gathered) >= sum(isinstance(p, DTensor) for p in module.parameters())
    if dist.get_rank() > 0 or ending == ".safetensors":
        assert count.most <= 1


@pytest.mark.spmd(2)
def test_all_ranks_hear_that_it_cannot_be_written():
    path = shared_path("a.safetensors").parent / "file" / "a.safetensors"
    if dist.get_rank() == 0:
        path.parent.write_text("not a folder")
    dist.barrier()
    with pytest.raises((OSError, RuntimeError), match=r"a\.safetensors' cannot be written: "):
        save_weights(sharded("uneven", 0), path)


@pytest.mark.spmd(2)
def test_a_model_that_keeps_functions_in_its_state():
    """neuralop's models add their arguments to the state dict; torch's gathering refuses them."""
    path = shared_path("a.pt")
    modules = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        fno = FNO(n_modes=(4, 4), hidden_channels=4, in_channels=1, out_channels=1, n_layers=1)
        parallelize(fno, make_mesh("cpu", 1, (2,)))
        modules.append(fno)
    options = StateDictOptions(full_state_dict=True)
    with pytest.raises(ValueError, match="Unexpected value type"):
        get_model_state_dict(modules[0], options=options)
    save_weights(modules[0], path)
    load_weights(modules[1], path)
    pairs = zip(modules[0].parameters(), modules[1].parameters(), strict=True)
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


@pytest.mark.spmd(2)
def test_what_plain_torch_save_writes():
    """`torch.save(module.state_dict())` holds this rank's rows alone, as the docs say."""
    module, path = sharded("uneven", 0), shared_path("rows.pt")
    rows = module.state_dict()["first.weight"].to_local()
    assert rows.numel() < module.state_dict()["first.weight"].numel()
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    whole = full_module_state(module)
    save_weights(module, path)
    if dist.get_rank() == 0:
        saved = torch.load(path, weights_only=True)
        for name, value in whole.items():
            assert torch.equal(saved[name], value)
            assert torch.equal(state[name].cpu(), value)


def test_without_processes(tmp_path):
    module = uneven(0)
    for ending in ENDINGS:
        save_weights(module, tmp_path / f"a{ending}")
        other = uneven(1)
        load_weights(other, tmp_path / f"a{ending}")
        for name, value in module.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name
    assert load_file(tmp_path / "a.safetensors")["first.weight"].shape == (3, 5)
    assert torch.load(tmp_path / "a.pt", weights_only=True)._metadata["norm"]["version"] == 2


@pytest.mark.spmd(2)
def test_a_link_stays_a_link():
    module, folder = sharded("uneven", 0), shared_path("linked")
    if dist.get_rank() == 0:
        (folder / "far").mkdir(parents=True)
        (folder / "a.pt").symlink_to(folder / "far" / "a.pt")
    dist.barrier()
    for _ in range(2):
        save_weights(module, folder / "a.pt")
        assert (folder / "a.pt").is_symlink()
        assert (folder / "far" / "a.pt").is_file()
    load_weights(sharded("uneven", 1), folder / "a.pt")
