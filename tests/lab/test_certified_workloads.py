"""The certificates of docs/certificates.md, made anew with fewer steps."""

import json

import pytest

from lightning_shard.cli.main import main
from tests.cli.test_configs import DARCY, NETWORK, files

SMALL = [
    *(f"--data.init_args.{name}={value}" for name, value in DARCY.items()),
    *(f"--model.init_args.{name}={value}" for name, value in NETWORK.items()),
    "--data.init_args.train_resolution=16",
    "--data.init_args.test_resolutions=[16]",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "meshes", "options", "precision", "bound"),
    [
        ("simple_cnn", "1x2,2x2,1x4", [], "64-true", 1e-12),
        ("tfno_darcy", "1x2,2x2,1x2x2", SMALL, "32-true", 1e-5),
    ],
)
def test_a_workload_trains_on_meshes_as_in_one_process(
    config, meshes, options, precision, bound, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = [f"--meshes={meshes}", "--steps=8", "--output=kept"]
    main(["certify", *files(f"{config} quick"), *options, *words])
    told = json.loads((tmp_path / "kept" / "certificate.json").read_text())
    assert told["is_equal"]
    compared = [each for each in told["comparisons"] if each["precision"] == precision]
    assert len(compared) == 3
    assert all(max(each["weights"]) < bound for each in compared)
