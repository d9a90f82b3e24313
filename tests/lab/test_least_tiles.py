"""The least number of tiles that fits, and the memory that `plan` predicts for tiles."""

import gc
import math
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from benchmarks.networks import UNet
from lightning_shard import TiledStrategy, in_tiles, plan
from lightning_shard.lab import least_tiles as least
from lightning_shard.lab.predict import predict
from lightning_shard.memory import free
from tests.lab.test_tiled_training import QUIET, STEPS, Plain, loader
from tests.parity import assert_same

CPU = torch.device("cpu")


class Predicts(Plain):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        print("predicted")
        return self.network(batch)


class Peak(Callback):
    """The most memory of the second step, of which no rank still holds what began the first."""

    most = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and batch_idx == 1:
            torch.accelerator.reset_peak_memory_stats()
        if trainer.is_global_zero and batch_idx == 2:
            Peak.most = torch.accelerator.max_memory_allocated()


def memory_in_use() -> int:
    """Return the bytes on the device that no collection of garbage would free."""
    gc.collect()
    return torch.accelerator.memory_allocated()


@pytest.mark.slow
@pytest.mark.spmd(1, "xpu")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_predicts_the_memory_of_tiles() -> None:
    """Also where parameters and their states are most of it, and where all that waits stays."""
    cases: list[Any] = [(2, 128, "0"), ((2, 2), 128, "0"), (4, 128, "1GiB"), (8, 32, "0")]
    for tiles, rows, budget in cases:
        fields: Any = [torch.randn(3, rows, rows, dtype=torch.float64)] * STEPS
        module, data = Plain(lambda: UNet(16)), torch.utils.data.DataLoader(fields)
        found = predict(module, data, tiles=tiles, tile_budget=budget)
        before = memory_in_use()
        runner = Trainer(
            accelerator="xpu", max_steps=STEPS, callbacks=[Peak()], limit_val_batches=0,
            strategy=TiledStrategy(tiles, tile_budget=budget), **QUIET,
        )  # fmt: skip
        runner.fit(module, data)
        measured = Peak.most - before
        assert 0.85 < measured / found.memory < 1.15, f"{found.memory} for {measured}, {tiles}"
        assert (found.to_host > 0) == (budget == "0")


@pytest.mark.slow
@pytest.mark.spmd(1, "xpu")
def test_predicts_the_memory_of_tiles_without_gradients() -> None:
    net = UNet(16).to("xpu")
    own = sum(p.nbytes for p in net.parameters())
    module, field = Predicts(lambda: UNet(16)).float(), torch.randn(1, 3, 128, 128)
    data = torch.utils.data.DataLoader([field[0]])
    for tiles in (2, 4):
        found = predict(module, data, tiles=tiles, sharding="none", stage="predict").memory + own
        before = memory_in_use() - own
        torch.accelerator.reset_peak_memory_stats()
        with torch.inference_mode(), in_tiles(net, tiles, tile_budget="0"):
            net(field)
        measured = torch.accelerator.max_memory_allocated() - before
        assert least.SHARE < found / measured < 2.5, f"{found} for {measured} in {tiles} tiles"


@pytest.mark.slow
def test_says_what_tiles_need() -> None:
    module, data = Plain(lambda: UNet(8)), loader()
    assert not plan(module, data, tiles="2x2", cluster="1xH100").to_host  # all of it fits
    found = plan(module, data, tiles="2x2", tile_budget="0", cluster="1xH100")
    assert found.in_turns
    assert "PCIe 5, nothing hidden" in str(found)
    assert found.alone is not None
    assert found.to_host + found.from_host > found.on_host > 0
    assert found.seconds == pytest.approx(found.compute + found.link)
    words = str(found)
    assert "2x2 tiles in turns on one device of " in words
    assert "PCIe 5" in words
    assert "host memory" in words
    with pytest.raises(ValueError, match=r"a mesh of 2 ranks or a cluster of 1 devices; leave"):
        predict(module, data, 2, tiles=2)
    with pytest.raises(ValueError, match=r"or a cluster of 8 devices; leave the mesh out"):
        predict(module, data, tiles=2, cluster="8xH100")


def test_chooses_the_least() -> None:
    asked: list[int] = []

    def needs(tiles: int) -> int:
        asked.append(tiles)
        return 1000 // tiles + 10 * tiles

    assert least.fewest(needs, 2000) == (1, 1010)
    asked.clear()
    found = least.fewest(needs, 250)
    assert found[0] == min(n for n in range(1, 20) if needs(n) <= 250)
    assert least.fewest(needs, 100) == (8, 205)  # 16 need more
    assert least.fewest(needs, 2000, first=2) == (2, 520)
    assert least.fewest(needs, 100, most=4) == (4, 290)
    words = str(least.LeastTiles(*found, 250, "on xpu:0"))
    assert words.endswith("of 250 B, 75% of what is free on xpu:0")


def test_no_number_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least, "free_memory", lambda *_: (1000, "here"))
    module = Plain(lambda: nn.Conv2d(3, 3, 3, padding=1))
    with pytest.raises(ValueError, match=r"is enough: \d+ need .* take 750 B.*such as 4x4"):
        least.least_tiles(module, loader(), CPU)


def test_a_budget_is_needed_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least, "free_memory", lambda *_: (4_000_000, "here"))
    module, device = Plain(lambda: nn.Conv2d(3, 3, 3, padding=1)), CPU
    assert least.least_tiles(module, loader(), device).needs < 2_000_000
    assert least.least_tiles(module, loader(), device, tile_budget="2MB").needs == 2_000_000
    with pytest.raises(ValueError, match=r"tile_budget is 7.6 MiB, but .* 2.9 MiB, 75%.*give less"):
        least.least_tiles(module, loader(), device, tile_budget="8MB")


def test_knows_the_limits_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="give tile_memory, a directory on a disk, or a number"):
        least.free_memory(CPU, None)
    if sys.platform != "linux":
        return
    machine, where = least.free_memory(CPU, str(tmp_path))
    assert machine > 0
    left = 2**26
    own = free._table("/proc/self/status")["VmData"]
    no_limit = resource.RLIM_INFINITY
    limits = {resource.RLIMIT_DATA: own + left}
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limits.get(what, no_limit), no_limit))
    found, where = least.free_memory(CPU, str(tmp_path))
    assert where == "within the limit of this process"
    assert abs(found - left) < 2**25


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
@pytest.mark.parametrize(
    ("line", "place", "limit", "use"),
    [
        ("0::/a", "a", "memory.max", "memory.current"),
        ("4:memory:/a", "memory/a", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_knows_the_limit_of_a_cgroup(
    line: str, place: str, limit: str, use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both versions of cgroups; what has no limit is not counted."""
    (tmp_path / "own").write_text(f"5:devices:/b\n{line}\n")
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / use).write_text("2000\n")
    monkeypatch.setattr(free, "_CGROUPS", tmp_path)
    monkeypatch.setattr(free, "_OWN_CGROUPS", tmp_path / "own")
    for bytes_, found in (("5000", (3000, "within the limit of this cgroup")), (str(2**62), None)):
        (tmp_path / place / limit).write_text(f"{bytes_}\n")
        limits = [(where, left) for where, left in free.limits() if "cgroup" in where]
        assert limits == ([] if found is None else [found[::-1]])


def wide() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 3, 3, padding=1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_trains_in_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers are those of one process, whose random numbers the rehearsal leaves alone."""
    pair = [predict(Plain(wide), loader(), tiles=n).memory for n in (2, 3)]
    room = sum(x.nbytes for x in [loader().dataset[0]]) + math.prod(pair) ** 0.5
    monkeypatch.setattr(least, "free_memory", lambda *_: (int(room / least.SHARE), "here"))
    states: list[Any] = []
    for strategy in ("auto", TiledStrategy("auto", tile_memory=str(tmp_path))):
        torch.manual_seed(5)
        module = Plain(wide)
        runner = Trainer(
            accelerator="cpu", strategy=strategy, max_steps=STEPS, limit_val_batches=0, **QUIET
        )
        runner.fit(module, loader())
        states.append({**module.state_dict(), "drawn": torch.rand(3)})
    assert caplog.text.count("3 tiles: a step needs") == 1
    for name, value in states[0].items():
        assert_same(states[1][name], value, name)


def test_the_least_of_two_limits_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of_process = "within the limit of this process"
    limits = [(of_process, 500), (of_process, 900), ("in this machine", 700)]
    monkeypatch.setattr(free, "limits", lambda: iter(limits))
    found = least.free_memory(CPU, str(tmp_path))
    assert found == (500, of_process)
