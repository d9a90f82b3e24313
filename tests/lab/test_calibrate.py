"""Machines that are measured: rates, files, and what predictions make of them."""

import json
from dataclasses import asdict, replace
from unittest import mock

import pytest
import torch

from lightning_shard.cli.main import main
from lightning_shard.lab import calibrate as measuring
from lightning_shard.lab import kernels
from lightning_shard.lab.calibrate import calibrate, table_of_rates
from lightning_shard.lab.clusters import read_cluster
from lightning_shard.lab.machine import (
    MOST_DEVICES,
    Cluster,
    Collective,
    Cost,
    Device,
    Link,
)
from lightning_shard.lab.timeline import Ledger

DEVICE = Device(
    "snail", 10**9, {"float32": 1e6}, 1e9, 1e-9, "measured",
    {"fft": {"float32": 2e6}, "thin_convolution": {"float32": 3e6}}, [(100, 1e9), (10_000, 3e9)],
)  # fmt: skip
COLLECTIVES = [
    ("all_reduce", 2, [(0, 1.0, 1.0), (100, 3.0, 1.0)]),
    ("all_reduce", 4, [(0, 5.0, 0.0), (100, 5.0, 0.0)]),
]
MACHINE = Cluster(DEVICE, 2, 2, Link(1e6, 1.0), Link(1e5, 2.0), collectives=COLLECTIVES)


@pytest.fixture
def small(monkeypatch):
    """Measures little, in the ranks that are forked from here."""
    monkeypatch.setattr(kernels, "BYTES", (2**10, 2**12))
    monkeypatch.setattr(kernels, "DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(measuring, "SIZES", (64, 4096))


@pytest.mark.usefixtures("small")
def test_two_ranks_are_measured(tmp_path):
    found = calibrate(2, "cpu", seconds=1e-6)
    assert (found.nodes, found.per_node) == (1, 2)
    assert [*found.device.kernels] == [*kernels.KERNELS]
    assert found.device.flops.keys() == {"float32", "bfloat16"}
    assert found.device.kernels["fft"].keys() == {"float32", "float64"}
    assert {(name, ranks) for name, ranks, _ in found.collectives} == {
        (name, 2) for name in measuring._CALLS
    }
    found.save(tmp_path / "machine.json")
    assert read_cluster(str(tmp_path / "machine.json")) == found
    assert "all_to_all of 2" in table_of_rates(found)
    assert 1e-5 < found.device.per_step < 1  # of a Trainer


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_one_rank_has_no_links():
    found = calibrate(1, "cpu", seconds=1e-6)
    assert (found.devices, found.collectives) == (1, [])
    assert "all_to_all" not in table_of_rates(found)


def test_ranks_of_a_launcher_are_those_that_are_measured():
    with (
        mock.patch.object(measuring, "belongs_to_a_group", return_value=True),
        pytest.raises(ValueError, match=r"^a launcher has started 1 ranks"),
    ):
        calibrate(2)


@pytest.mark.parametrize(
    ("world", "per_node", "groups"),
    [(2, 2, {2}), (6, 6, {2, 6}), (4, 1, {2, 4}), (16, 8, {2, 4, 8, 16}), (24, 8, {2, 4, 8, 24})],
)
def test_groups_lie_in_a_node_or_fill_nodes(world, per_node, groups):
    assert {*measuring._groups(world, per_node)} == groups


@pytest.mark.parametrize(
    ("moved", "rate"), [(1, 1e9), (100, 1e9), (1000, 2e9), (10_000, 3e9), (10**9, 3e9)]
)
def test_the_bandwidth_lies_between_those_that_were_measured(moved, rate):
    assert DEVICE.bandwidth_of(moved) == pytest.approx(rate)
    assert replace(DEVICE, bandwidths=[]).bandwidth_of(moved) == DEVICE.bandwidth


@pytest.mark.parametrize(
    ("channels", "rate"), [(2, 3e6), (8, 1e6)]  # that of a product, where nothing is known
)  # fmt: skip
def test_operations_take_the_rate_of_their_kind(channels, rate):
    x, weight = torch.ones(1, channels, 16, 16), torch.ones(8, channels, 1, 1)
    args = (x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    convolution = torch.ops.aten.convolution.default
    ledger = Ledger(DEVICE)
    ledger.note(convolution, args, {}, [x, weight], convolution(*args))
    assert ledger.seconds == pytest.approx(2 * channels * 8 * 16 * 16 / rate)


KINDS = {
    "thin_": 2e6, "thin_strided_": 3e6, "pointwise_": 4e6, "last_": 5e6, "": 6e6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "last", "rate"),
    [
        (3, 3, 1, False, 2e6), (3, 3, 2, False, 3e6), (8, 1, 1, False, 4e6), (8, 3, 1, True, 5e6),
        (8, 3, 1, False, 6e6), (8, 3, 2, False, 6e6),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backward", [False, True])
def test_kinds_of_convolutions_have_rates_of_their_own(
    channels, kernel, stride, last, rate, backward
):
    way = "_backward" if backward else ""
    rates = {f"{kind}convolution{way}": {"float32": value} for kind, value in KINDS.items()}
    ledger = Ledger(replace(DEVICE, kernels=rates))
    stored = torch.channels_last if last else torch.contiguous_format
    x = torch.ones(1, channels, 8, 8).to(memory_format=stored)
    weight = torch.ones(8, channels, kernel, kernel).to(memory_format=stored)
    numbers = [stride] * 2, [0, 0], [1, 1], False, [0, 0], 1
    args = x, weight, None, *numbers
    y = torch.ops.aten.convolution.default(*args)
    operator, flops = torch.ops.aten.convolution.default, 2 * weight.numel() * y[0, 0].numel()
    if backward:
        operator, flops = torch.ops.aten.convolution_backward.default, 2 * flops
        args = y, x, weight, None, *numbers, [True, True, False]
    ledger.note(operator, args, {}, [x, weight], operator(*args))
    assert ledger.seconds == pytest.approx(flops / rate)


def test_a_stem_of_which_nothing_is_known_is_no_thin_convolution():
    """On an H100 it would have taken half of the step of a ResNet-50."""
    kernels = {"thin_convolution": {"float32": 1e6}, "convolution": {"float32": 9e6}}
    ledger = Ledger(replace(DEVICE, kernels=kernels))
    x, weight = torch.ones(1, 3, 16, 16), torch.ones(8, 3, 7, 7)
    args = x, weight, None, [2, 2], [3, 3], [1, 1], False, [0, 0], 1
    convolution = torch.ops.aten.convolution.default
    y = convolution(*args)
    ledger.note(convolution, args, {}, [x, weight], y)
    assert ledger.seconds == pytest.approx(2 * weight.numel() * y[0, 0].numel() / 9e6)


@pytest.mark.parametrize(("precision", "rate"), [("highest", 1e6), ("high", 8e6)])
def test_products_in_tf32_take_the_rate_of_tf32(monkeypatch, precision, rate):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    ledger = Ledger(replace(DEVICE, flops={"float32": 1e6, "tf32": 8e6}))
    x, product = torch.ones(16, 16), torch.ops.aten.mm.default
    ledger.note(product, (x, x), {}, [x, x], product(x, x))
    assert ledger.seconds == pytest.approx(2 * 16**3 / rate)


def test_collectives_take_what_they_took():
    """In a node, and over nodes; others go by the link."""
    cost = MACHINE.cost
    assert cost(Collective("all_reduce", (0, 1), 50)) == Cost(2.0, 1.0)
    assert cost(Collective("all_reduce", (0, 2), 50)) == Cost(5.0, 0.0)
    assert cost(Collective("all_to_all", (0, 1), 50)) == Cost(0.0, 1.0 + 50 / 1e6)


def _changed(place, value):
    given = json.loads(json.dumps(asdict(MACHINE)))
    *way, last = place
    at = given
    for name in way:
        at = at[name]
    at[last] = value
    return given


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (("inside", "bandwidth"), 0, "a rate or a price is none of a machine"),
        (("inside", "latency"), float("nan"), "a time or a number of bytes"),
        (("device", "bandwidth"), float("inf"), "a rate"),
        (("device", "flops"), {"float32": "fast"}, "a rate"),
        (("device", "flops"), {"float64": 1.0}, ".*float32"),
        (("device", "flops"), [1.0], ".*has no attribute 'values'"),
        (("device", "memory"), -1, "a time or a number of bytes"),
        (("device", "name"), "\x1b[31m", "a name"),
        (("device", "kernels"), {"\x1b[31m": {"float32": 1.0}}, "a name"),
        (("device", "bandwidths"), [[2, 1.0], [1, 1.0]], "the order of sizes"),
        (("nodes",), 10**30, "a number of devices"),
        (("nodes",), True, r"a number of devices is none of a machine\); let it write"),
        (("price",), -1, "a rate or a price"),
        (("collectives", 0, 2), [[0, 1, 1]], "a collective of one size"),
        (("collectives", 0), ["all_reduce", 2], "not enough values"),
        (("outside",), {}, ".*unexpected keyword argument 'outside'"),
    ],
)
def test_files_of_machines_that_cannot_be(tmp_path, place, value, sentence):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(_changed(place, value)))
    with pytest.raises(ValueError, match=rf"is no file that `calibrate` wrote \({sentence}"):
        read_cluster(str(file))


@pytest.mark.parametrize("text", ["", "[" * 100_000, "null", '"8x8xH100"', "1" * 5000])
def test_files_of_something_else(tmp_path, text):
    (tmp_path / "machine.json").write_text(text)
    with pytest.raises(ValueError, match="is no file that `calibrate` wrote"):
        read_cluster(str(tmp_path / "machine.json"))


def test_clusters_have_so_many_devices_at_most(tmp_path):
    replace(MACHINE, nodes=MOST_DEVICES).save(tmp_path / "machine.json")
    for text in (str(tmp_path / "machine.json"), "1000000x8xH100"):
        with pytest.raises(ValueError, match=rf"^'{text}' has \d* devices"):
            read_cluster(text)


def test_the_command(capsys, tmp_path):
    file = tmp_path / "own.json"
    with mock.patch.object(measuring, "calibrate", return_value=MACHINE) as measure:
        main(["calibrate", "--output", str(file), "--processes", "2", "--device", "cpu"])
    measure.assert_called_once_with(2, "cpu")
    out, err = capsys.readouterr()
    assert "4 ranks of snail, measured" in out
    assert f"written to {file}" in err
    assert read_cluster(str(file)) == MACHINE


@pytest.mark.spmd(1, "xpu")
def test_a_device_beside_the_host_is_measured(monkeypatch):
    monkeypatch.setattr(kernels, "BYTES", (2**10, 2**12))
    monkeypatch.setattr(kernels, "DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(kernels, "LARGEST", 32)
    found = kernels.measured_device(torch.device("xpu", 0), 1, 1e-6)
    assert found.is_beside_host
    assert found.per_operator > 0
    assert 1e-5 < found.per_step < 1  # of a Trainer
    assert found.workspaces.keys() == {"float32", "bfloat16"}
    assert found.workspace >= 0
    assert found.flops.keys() == {"float32", "bfloat16", "tf32"}
