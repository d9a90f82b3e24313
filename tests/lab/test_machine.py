"""Clusters in a few letters: what is read, and one sentence for each mistake."""

import pytest

from lightning_shard.lab.clusters import DEVICES, LINKS, read_cluster
from lightning_shard.lab.machine import HOW_NEAR, Link
from lightning_shard.processes.device import device_of


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "device"),
    [("8x8xH100", 8, 8, "H100"), ("4xa100", 1, 4, "A100-80"), ("2x12xMax1550", 2, 12, "Max1550")],
)
def test_clusters(text, nodes, per_node, device):
    found = read_cluster(text, price=2.5)
    assert (found.nodes, found.per_node, found.device) == (nodes, per_node, DEVICES[device])
    assert found.devices == nodes * per_node
    assert found.price == 2.5
    assert "data sheets" in found.origin


def test_the_measured_device_is_measured_and_the_others_are_scaled_by_it():
    h100, a100 = (read_cluster(f"8x{name}") for name in ("H100", "A100"))
    assert h100.origin.startswith("The rates of H100: measured on one card with torch 2.11")
    assert a100.origin == (
        "The rates of A100-80: from data sheets, scaled by a measured H100: NVIDIA A100 80GB SXM; "
        f"those of its links: data sheets. {HOW_NEAR}"
    )
    reached = h100.device.flops["bfloat16"] / 989e12
    assert a100.device.flops["bfloat16"] == pytest.approx(312e12 * reached)
    assert a100.device.kernels.keys() == h100.device.kernels.keys()
    assert h100.device.host_rate == 2 * a100.device.host_rate  # PCIe 5, PCIe 4


def test_spectra_choose_by_the_rates_of_the_measured_device():
    """processes/device.py does not read the file, which `plan` does."""
    rates, found = device_of("cuda").rates, DEVICES["H100"]
    assert 1e9 / rates.flop == pytest.approx(found.flops["float32"], rel=0.03)
    assert 1e9 / rates.touch == pytest.approx(found.bandwidth, rel=0.03)
    assert 1e-9 * rates.call == pytest.approx(found.per_call, rel=0.03)


def test_links_are_chosen():
    assert read_cluster("8x8xH100").between == LINKS["NDR"]
    assert read_cluster("8x8xH100:Ethernet25").between == LINKS["Ethernet25"]
    found = read_cluster("8x8xH100:pcie5/hdr")
    assert (found.inside, found.between) == (LINKS["PCIe5"], LINKS["HDR"])
    assert [found.link(ranks) for ranks in (8, 16)] == [LINKS["PCIe5"], LINKS["HDR"]]
    assert read_cluster("2x8xMI250X").between == Link(12.5e9, 30e-6)  # a card for two devices


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_is_in_a_cluster(name):
    found = read_cluster(f"2x4x{name}")
    assert found.inside.bandwidth > found.between.bandwidth
    assert set(found.device.flops) == {"float64", "float32", "tf32", "bfloat16", "float16"}


def test_a_file(tmp_path):
    file = str(tmp_path / "machine.json")
    cluster = read_cluster("2x4xA100-40:HDR")
    cluster.save(file)
    assert read_cluster(file) == cluster
    assert read_cluster(file, price=3).price == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("8x8xH10O", "'H10O' is no known device; did you mean 'H100'?"),
        ("8x8xTPU", "'TPU' is no known device; known are A100-40, .*"),
        ("8x8xH100:NDP", "'NDP' is no known link; did you mean 'NDR'?"),
        ("8x8xH100:HDR/HDR/HDR", "'HDR/HDR/HDR' names 3 links; give the one between nodes.*"),
        ("H100", "'H100' is no cluster: nodes x devices of a node x kind of device.*"),
        ("8x8x", "'8x8x' is no cluster.*"),
        ("0x8xH100", "'0x8xH100' has 0 devices; give at least one node and one.*"),
        ("none.json", "there is no file 'none.json'.*"),
    ],
)
def test_mistakes(text, sentence):
    with pytest.raises(ValueError, match=f"^{sentence.replace('?', '[?]')}$"):
        read_cluster(text)


@pytest.mark.parametrize("price", [0, -1.0, float("nan")])
def test_prices(price):
    with pytest.raises(ValueError, match="price of a device and hour must be larger than 0"):
        read_cluster("8x8xH100", price)


@pytest.mark.parametrize("text", ["[]", "{", '{"device": {}}'])
def test_a_file_of_another_kind(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="is no file that `calibrate` wrote"):
        read_cluster(str(file))
