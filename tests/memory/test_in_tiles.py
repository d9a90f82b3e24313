"""One device in tiles: results are those of the whole field, and little is on the device."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from benchmarks.networks import UNet, ViT
from lightning_shard import Tiles, in_tiles, init_mesh, parallelize, split_inputs
from lightning_shard.memory.recompute import compile_forward
from lightning_shard.tiles.tile_tensor import TileTensor
from tests.double_fno import to_double
from tests.parity import assert_same

MIB = 2**20


class Noisy(nn.Module):
    """A network with statistics, noise, counters and two kinds of results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 2, 5, stride=2, padding=2)
        self.calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        self.calls += 1
        noise = torch.rand(8, 1, 1, dtype=x.dtype, device=x.device)  # of the field as a whole
        y = self.last(F.gelu(self.norm(self.first(x))) + noise)
        y = F.dropout(y, 0.3) + torch.rand_like(y)
        return {"field": y * scale, "mean": y.mean()}

    def encode(self, x: Tensor) -> Tensor:
        return self.first(x)


def network() -> Noisy:
    torch.manual_seed(0)
    return Noisy().double()


def field(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tiles", [2, 3, (2, 2)])
def test_equals_one_process(tiles: int | tuple[int, ...]) -> None:
    one, tiled, x = network(), network(), field(2, 3, 21, 14)
    before = dict(vars(tiled))
    with torch.no_grad():
        torch.manual_seed(5)
        wanted = [one(x, scale=2.0), one(x), one.encode(x), torch.rand(3)]
        torch.manual_seed(5)
        with in_tiles(tiled, tiles, methods=("forward", "encode")):
            found = [tiled(x, scale=2.0), tiled(x), tiled.encode(x), torch.rand(3)]
    for got, want in zip(found[:2], wanted[:2], strict=True):
        assert got.keys() == want.keys()
        assert all(type(got[key]) is Tensor for key in got)
        assert_same(got["field"], want["field"])
        assert_same(got["mean"], want["mean"])
    assert_same(found[2], wanted[2])
    assert torch.equal(found[3], wanted[3])  # the caller's numbers go on as after one process
    assert (tiled.calls, before.keys()) == (one.calls, vars(tiled).keys())
    for name, value in one.state_dict().items():
        assert_same(tiled.state_dict()[name].double(), value.double())


def test_refuses_what_it_cannot() -> None:
    module, x = network(), field(1, 3, 8, 8)
    for tiles in (0, -1, True, 2.5, None, "8x", "x8", (2, 0), (2.0, 2), []):
        with pytest.raises(ValueError, match=r"tiles must be a number from 1 on.*got ") as refused:
            in_tiles(module, tiles).__enter__()
        assert str(refused.value).endswith(f"got {tiles!r}.")
    with pytest.raises(ValueError, match="Noisy has no method 'decode'"):
        in_tiles(module, 2, methods=("decode",)).__enter__()
    with pytest.raises(ValueError, match="give a directory that exists"):
        in_tiles(module, 2, tile_memory="/nowhere/at/all").__enter__()
    with in_tiles(module, 2), pytest.raises(RuntimeError, match="keep no gradients"):
        module(x)
    with torch.no_grad(), in_tiles(module, 2), pytest.raises(ValueError, match="was split"):
        module.forward(x[0, 0])
    with torch.no_grad(), in_tiles(module, 2), pytest.raises(RuntimeError, match="channels"):
        module(x[:, :2])
    with torch.no_grad():  # and it is the module that it was
        assert module(x)["field"].shape == (1, 2, 4, 4)
        with in_tiles(module, 12):  # more than rows
            assert module(x)["field"].shape == (1, 2, 4, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning")
def test_refuses_compiled_modules() -> None:
    by_method, of_this_package = network(), network()
    by_method.first.compile()
    compile_forward([of_this_package.last])
    traced = torch.jit.trace(nn.Conv2d(3, 3, 3), torch.ones(1, 3, 8, 8))
    for module, name in (
        (torch.compile(network()), "OptimizedModule"), (by_method, "Conv2d"),
        (of_this_package, "Conv2d"), (nn.Sequential(traced), "TopLevelTracedModule"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"compiled code hides those of its {name}"):
            in_tiles(module, 2).__enter__()


@pytest.mark.spmd(2)
def test_refuses_sharded_parameters() -> None:
    """A copy of whole weights on each rank computes in tiles beside its process group."""
    module, x = network().eval(), field(1, 3, 16, 16)
    parallelize(sharded := network(), init_mesh({"data": 2}))
    with pytest.raises(ValueError, match=r"needs whole parameters, but 'first.weight' is sharded"):
        in_tiles(sharded, 2).__enter__()
    with torch.no_grad():
        torch.manual_seed(1)
        wanted = module(x)
        torch.manual_seed(1)
        with in_tiles(module, 3):
            assert_same(module(x)["field"], wanted["field"])
    assert torch.distributed.get_world_size() == 2


def test_own_random_numbers() -> None:
    """Without exact random numbers they are others than those of one process."""
    module, x = nn.Dropout(0.5), torch.ones(1, 1, 64, 64)
    found: dict[bool | None, Tensor] = {}
    for exact in (None, True, False):
        torch.manual_seed(0)
        with torch.no_grad():
            if exact is None:
                found[exact] = module(x)
            else:
                with in_tiles(module, 4, exact_random=exact):
                    found[exact] = module(x)
    assert torch.equal(found[True], found[None])
    assert not torch.equal(found[False], found[None])


class Fails(nn.Module):
    """A network that ends by an error, between operations or within one."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.layer, self.error = nn.Conv2d(3, 3, 3, padding=1).double(), error

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y = y - y.mean()
        raise self.error


def test_an_error_leaves_what_a_plain_call_leaves() -> None:
    """Statistics, random numbers and the calls of hooks."""
    left: list[Tensor] = []
    for tiles in (None, 3):
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(3).double()
        net = nn.Sequential(norm, nn.Dropout(0.5), nn.Linear(2, 2).double())
        calls: list[int] = []
        norm.register_forward_hook(lambda *_, to=calls: to.append(1))
        opened = in_tiles(net, tiles) if tiles else nullcontext()
        with torch.no_grad(), opened, pytest.raises(RuntimeError):
            net(field(2, 3, 8, 7))  # a layer of two features
        assert norm.running_mean is not None
        left += [norm.running_mean, torch.rand(3)]
        assert len(calls) == 1
    assert_same(left[2], left[0])
    assert torch.equal(left[3], left[1])


class Together(nn.Module):
    """Waits until two threads are in it, and keeps the types of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.both = nn.Conv2d(3, 2, 3, padding=1).double(), Barrier(2, timeout=30)
        self.seen: list[type] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(type(x))
        self.both.wait()
        return self.layer(x)


def test_a_copy_made_within_is_refused_and_one_made_before_has_its_own_weights(tmp_path) -> None:
    net, x = nn.Conv2d(1, 1, 3, padding=1), torch.randn(1, 1, 8, 8)
    before = copy.deepcopy(net)
    with in_tiles(net, 3):
        with pytest.raises(ValueError, match=r"cannot be copied or pickled .*; copy it before"):
            copy.deepcopy(net)
        with pytest.raises(ValueError, match=r"store its state_dict\(\)"):
            torch.save(nn.Sequential(net), tmp_path / "net.pt")
        torch.save(net.state_dict(), tmp_path / "net.pt")
        nn.init.zeros_(before.weight)
        with in_tiles(before, 2), torch.no_grad():
            assert torch.equal(before(x), before.bias.view(1, 1, 1, 1).expand(1, 1, 8, 8))
    after = copy.deepcopy(net)
    assert torch.equal(after(x), net(x))
    assert vars(after).keys() == vars(net).keys() == vars(nn.Conv2d(1, 1, 1)).keys()


def test_each_call_of_several_threads_is_in_tiles() -> None:
    module, fields = Together(), [field(1, 3, 13 + n, 9) for n in range(2)]

    @torch.inference_mode()
    def called(x: Tensor) -> Tensor:
        return module(x)

    with in_tiles(module, 3), ThreadPoolExecutor(2) as threads:
        found = [*threads.map(called, fields)]
    assert module.seen == [TileTensor] * 2
    for x, got in zip(fields, found, strict=True):
        assert_same(got, module.layer(x))


@pytest.mark.parametrize("inner", [in_tiles, split_inputs])
def test_a_module_is_in_tiles_once(inner) -> None:
    """Else who leaves first would put back what the other has replaced."""
    module, x = network(), field(1, 3, 9, 8)
    before = dict(vars(module))
    with torch.inference_mode(), in_tiles(module, 3):
        with pytest.raises(ValueError, match=r"forward of Noisy is in .* already; leave one"):
            inner(module, Tiles(2) if inner is split_inputs else 2).__enter__()
        with in_tiles(module, 2, methods=["encode"]):
            assert_same(module.encode(x), module.first(x))
    assert vars(module) == before
    with torch.inference_mode(), in_tiles(module, 2):
        assert module(x)["field"].isfinite().all()


@pytest.mark.spmd(1, "xpu")
def test_after_an_error() -> None:
    """The module is as before, and the device computes."""
    for error in (KeyError("mine"), KeyboardInterrupt()):
        module, x = Fails(error).to("xpu"), field(1, 3, 64, 64)
        before = vars(module).copy()
        with torch.no_grad(), in_tiles(module, 4), pytest.raises(type(error)):
            module(x)
        assert vars(module) == before
        assert module.layer(x.to("xpu")).isfinite().all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_waits_in_files(tmp_path: object, mode: type[torch.no_grad]) -> None:
    module, x = network().eval(), field(1, 3, 64, 48)
    with mode():
        torch.manual_seed(2)
        wanted = module(x)["field"]
        torch.manual_seed(2)
        with in_tiles(module, 4, tile_memory=str(tmp_path)):
            assert_same(module(x)["field"], wanted)


def _networks() -> dict[str, tuple[nn.Module, Tensor]]:
    from neuralop.models import TFNO

    torch.manual_seed(0)
    tfno = to_double(TFNO((8, 8), 3, 1, hidden_channels=8, n_layers=2, rank=0.1))
    return {
        "unet": (UNet(16).double(), field(1, 3, 64, 64)),
        "tfno": (tfno, field(1, 3, 48, 48)),
        "vit": (ViT(32, 2, 2).double(), field(1, 3, 64, 64)),
        "noisy": (network().eval(), field(1, 3, 64, 64)),
    }


@pytest.mark.slow
@pytest.mark.spmd(1, "xpu")
def test_on_a_device() -> None:
    """Random numbers of the device belong to each rank; what a module keeps is there afterwards."""
    for name, (module, x) in _networks().items():
        module = module.to("xpu")
        kept: list[Tensor] = []
        module.register_forward_hook(lambda *a, kept=kept: kept.append(a[2]))
        with torch.inference_mode():
            torch.manual_seed(3)
            wanted = module(x.to("xpu"))
            drawn = torch.rand(2, device="xpu")
            torch.manual_seed(3)
            with in_tiles(module, 4 if name == "vit" else (2, 2)):
                found, on_device = module(x), module(x.to("xpu"))
        pairs = [(found, wanted)] if isinstance(found, Tensor) else []
        pairs += [(found[key], wanted[key]) for key in found] if not pairs else []
        for got, want in pairs:
            assert got.device.type == "cpu"
            assert_same(got, want.cpu(), name)
        for value in on_device.values() if isinstance(on_device, dict) else [on_device]:
            assert value.device.type == "xpu"
            assert value.isfinite().all()
        assert drawn.isfinite().all()


@pytest.mark.slow
@pytest.mark.spmd(1, "xpu")
def test_peak_of_the_device() -> None:
    torch.manual_seed(0)
    module = UNet(32).to("xpu")
    x = torch.randn(1, 3, 512, 512)
    peaks = []
    for run in ("plain", "tiles"):
        base = torch.xpu.memory_allocated()
        torch.xpu.reset_peak_memory_stats()
        with torch.inference_mode():
            if run == "plain":
                wanted = module(x.to("xpu")).cpu()
            else:
                with in_tiles(module, 8, tile_budget="0"):
                    assert_same(module(x), wanted)
        peaks.append((torch.xpu.max_memory_allocated() - base) / MIB)
    assert peaks[1] < 0.125 * peaks[0]


class Short(LightningModule):
    """Has a step without a batch number, which Lightning leaves out then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, 1, 3, padding=1)

    def predict_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch)


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_a_step_of_a_trainer_keeps_its_arguments() -> None:
    module, fields = Short(), torch.randn(2, 1, 9)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    with in_tiles(module, 2, methods=("predict_step",)):
        (found,) = trainer.predict(module, torch.utils.data.DataLoader(fields, batch_size=2))
    assert_same(found, module.layer(fields).detach())
