"""Options that this machine or launcher cannot satisfy are refused before anything is built."""

from pathlib import Path

import pytest

from lightning_shard.processes.process_info import LAUNCHERS
from tests.cli.test_errors import BASE, error_of
from tests.cli.test_errors import one_quiet_process as one_quiet_process
from tests.processes.test_process_info import STARTER, TABLE


def test_more_devices_than_visible(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    options = ("--trainer.accelerator", "gpu", "--trainer.devices", "8")
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", *options)
    assert "asks for 8 cuda devices (on the command line) but 2 are visible" in sentence


@pytest.mark.parametrize(
    ("asked", "cuda", "found"),
    [("", False, "xpu"), ("auto", False, "xpu"), ("gpu", False, "xpu"), ("gpu", True, "cuda")],
)
def test_a_machine_with_intel_gpus(capsys, monkeypatch, asked, cuda, found):
    """Lightning's own "auto" is the CPU there, and its "gpu" an error."""
    for name, there in (("xpu", True), ("cuda", cuda)):
        monkeypatch.setattr(f"torch.{name}.is_available", lambda there=there: there)
        monkeypatch.setattr(f"torch.{name}.device_count", lambda: 2)
    Path("base.yaml").write_text(BASE.replace("  accelerator: cpu\n", ""))
    words = ("--trainer.accelerator", asked) if asked else ()
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", "--trainer.devices", "8", *words)
    assert f"asks for 8 {found} devices (on the command line) but 2 are visible" in sentence


DOMAIN = "trainer.strategy.domain_parallel_size"
MESHES = {
    "not a divisor": (
        ["--trainer.devices=4", f"--{DOMAIN}=3"],
        f"{DOMAIN} 3 (on the command line) does not divide the 4 processes "
        "(devices 4 x num_nodes 1); use one of 1, 2, 4",
    ),
    "two dims and nodes": (
        ["--trainer.devices=3", "--trainer.num_nodes=2", f"--{DOMAIN}=[2, 2]"],
        f"{DOMAIN} 2 x 2 (on the command line) does not divide the 6 processes "
        "(devices 3 x num_nodes 2); use one of 1, 2, 3, 6",
    ),
    "zero": (["--trainer.devices=2", f"--{DOMAIN}=0"], f"{DOMAIN} must be 1 or more; got 0"),
    "one process": (
        ["--trainer.devices=1", f"--{DOMAIN}=2"],
        "does not divide the 1 process (devices 1 x num_nodes 1); use 1, or more devices",
    ),
    "both sizes": (
        [
            "--trainer.devices=8",
            f"--{DOMAIN}=2",
            "--trainer.strategy.init_args.data_parallel_size=2",
        ],
        "data_parallel_size 2 x domain_parallel_size 2 is 4 (on the command line), not the "
        "8 processes (devices 8 x num_nodes 1); use data_parallel_size 4 or auto",
    ),
    "a domain that fits itself": (
        [
            "--trainer.devices=8",
            f"--{DOMAIN}=auto",
            "--trainer.strategy.init_args.data_parallel_size=3",
        ],
        "data_parallel_size 3 x domain_parallel_size 2 is 6 (on the command line), not the "
        "8 processes (devices 8 x num_nodes 1); use data_parallel_size 4 or auto",
    ),
}


@pytest.mark.parametrize(("words", "expected"), MESHES.values(), ids=MESHES.keys())
def test_mesh_must_fit_the_processes(capsys, words, expected):
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", *words)
    assert expected in sentence


def test_mesh_error_names_the_file(capsys):
    size = "trainer:\n  devices: 4\n  strategy:\n    init_args:\n      domain_parallel_size: 3\n"
    Path("x.yaml").write_text(size)
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", "--config", "x.yaml")
    assert sentence.startswith(f"{DOMAIN} 3 (at x.yaml:5) does not divide the 4 processes")


TORCHRUN = {
    "WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip


def test_torchrun_started_another_number(capsys, monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", "--trainer.devices", "8")
    assert sentence == (
        "trainer.devices asks for 8 processes (devices 8 x num_nodes 1) (on the command line) "
        "but torchrun started 4; use devices 2 and num_nodes 2, or start 8 with torchrun"
    )


def test_an_elastic_launcher_may_have_fewer_nodes(capsys, monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    words = ["--trainer.devices=2", "--trainer.num_nodes=3", "--trainer.default_root_dir=/proc/x"]
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", *words)
    assert "asks for 6 processes" in sentence
    words.append(f"--{DOMAIN}=auto")
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", *words)
    assert sentence.startswith("trainer.default_root_dir")


def test_mesh_is_checked_against_torchrun(capsys, monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", f"--{DOMAIN}", "3")
    assert "does not divide the 4 processes (WORLD_SIZE 4); use one of 1, 2, 4" in sentence


def test_mesh_is_checked_against_mpirun(capsys, monkeypatch):
    for name, value in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "0404", strict=True):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", f"--{DOMAIN}", "3")
    assert "does not divide the 4 processes (OMPI_COMM_WORLD_SIZE 4); use one of" in sentence
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", "--trainer.devices", "8")
    assert "but Open MPI started 4; use devices 4 and num_nodes 1, or start 8" in sentence


def test_mesh_is_checked_against_a_launcher_that_is_one_row(capsys, monkeypatch):
    monkeypatch.setattr(TABLE, (STARTER, *LAUNCHERS))
    for name, value in {"STARTER_RANK": "0", "STARTER_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", f"--{DOMAIN}", "3")
    assert "does not divide the 4 processes (STARTER_SIZE 4); use one of 1, 2, 4" in sentence
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml", "--trainer.devices", "8")
    assert "but starter run started 4; use devices 4 and num_nodes 1, or start 8 with" in sentence


def test_launcher_that_is_half_set(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    sentence, _ = error_of(capsys, "fit", "--config", "base.yaml")
    assert sentence.startswith("the variable WORLD_SIZE is '2', but RANK is not set")
