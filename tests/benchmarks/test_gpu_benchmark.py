"""The command that measures a GPU: its plumbing, on a machine that has none."""

import json
import sys
from unittest import mock

import pytest
import torch

from benchmarks import gpu, gpu_parts, gpu_speed
from tests.gpu_autocast import as_on_gpu

PART = gpu.Part(1, "nccl", gpu_parts.collective, (64,))
no_gpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="sizes are those of a CPU")


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_split_fields_are_exact():
    rows = [*gpu_parts.exactness(["U-Net"], 32)]
    assert [row["precision"] for row in rows] == list(gpu_parts.PRECISIONS)
    assert all(row["ranks"] == 2 and row["equal"] for row in rows), [r["error"] for r in rows]


@pytest.mark.spmd(2)
@pytest.mark.slow
def test_whole_and_sharded_parameters_train_alike():
    rows = [*gpu_parts.parameters(["U-Net"], 32)]
    assert [(row["mesh"], row["sharding"]) for row in rows[1:]] == [
        (mesh, mode) for mesh in ("1x2", "2x1") for mode in ("none", "full")
    ]
    assert all(row["error"] < 1e-10 for row in rows[1:]), rows


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_what_one_process_refuses_is_a_row():
    """As on a GPU, where autocast casts no Fourier transform."""
    with as_on_gpu():
        rows = [*gpu_parts.exactness(["U-Net", "ViT", "TFNO"], 32)]
    refused = {row["network"]: row for row in rows if "of one process: refused" in row}
    assert [*refused] == ["TFNO"]
    assert refused["TFNO"]["precision"] == "bfloat16"
    assert "Unsupported dtype BFloat16" in refused["TFNO"]["of one process: refused"]
    assert refused["TFNO"]["error"] < 0.05
    assert all(row["equal"] for row in rows if row is not refused["TFNO"]), rows


@pytest.mark.slow
@pytest.mark.spmd(1)
def test_spectral_convolution_and_steps_as_they_are():
    (row,) = gpu_speed.spectral([(16, 16)], modes=4, width=2)
    for name in ("one device", "split"):
        assert row[f"{name} kernels"] > 0
        assert row[f"{name} host ms"] > 0
        faster = row["neuraloperator ms"] / row[f"{name} ms"]
        assert row[f"{name}, times the speed"] == pytest.approx(faster)
    rows = [*gpu_speed.captured(32)]
    assert [(row["network"], row["way"]) for row in rows] == [
        (network, way) for network in ("README", "U-Net", "TFNO") for way in ("plain", "split")
    ]
    assert all(row["ms of a step"] > 0 and row["error"] < 1e-4 for row in rows), rows


@pytest.mark.spmd(1)
def test_launches_of_a_step():
    (row,) = gpu_speed.launches(["U-Net"], 32)
    assert row["kernels to plain"] == row["split kernels"] / row["plain kernels"]


@pytest.mark.slow
@pytest.mark.spmd(1)
def test_activations_on_the_host():
    """On a CPU nothing is on a device, so nothing moves but by torch's own copies."""
    rows = [*gpu_parts.offloaded(64)]
    assert [row["error"] for row in rows] == [0, 0, 0]
    assert [row["way"] for row in rows][1:] == [
        "on the host, copied in line", "on the host, fetched ahead",
    ]  # fmt: skip
    assert all(row["ms of a step"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.spmd(1)
def test_budgets_of_memory():
    rows = [*gpu_parts.paged(32)]
    assert [row["error"] for row in rows] == [0] * 5
    assert [row["way"] for row in rows] == ["kept", "saved", "saved", "paged", "paged"]
    assert all(row["ms of a step"] > 0 for row in rows)


@pytest.mark.slow
def test_tiles():
    rows = [*gpu_parts.tiled(32, steps=1)]
    ways = ("whole", "8 tiles", "8 tiles, budget 0")
    tasks = [(way, task) for way in ways for task in ("inference", "training")]
    assert [(row["way"], row["task"]) for row in rows] == tasks
    assert all(row["error"] < 1e-5 for row in rows), rows
    assert all(row["ms"] > 0 for row in rows)


def test_a_part_that_fails_or_hangs_is_a_row():
    context = mock.Mock(
        join=mock.Mock(side_effect=RuntimeError("on rank 0:\n\nno NCCL")), processes=[]
    )
    with mock.patch.object(gpu, "start_processes", return_value=context):
        assert gpu.run_part(PART, 9) == [{"failed": "no NCCL"}]
    context = mock.Mock(join=mock.Mock(return_value=False), processes=[mock.Mock()])
    with mock.patch.object(gpu, "start_processes", return_value=context):
        rows = gpu.run_part(PART, 0)
    assert rows == [{"failed": "no end after 0 s"}]
    assert context.processes[0].kill.called


def fails_later():
    yield {"way": "first"}
    raise RuntimeError("no memory")


@pytest.mark.slow
def test_a_part_that_fails_keeps_its_rows():
    rows = gpu.run_part(gpu.Part(0, "", fails_later, ()), 120)
    assert rows == [{"way": "first"}, {"failed": "RuntimeError: no memory"}]


@no_gpu
def test_the_command_writes_both_files(tmp_path, capsys):
    rows = [{"way": "ours", "ms of a step": 1.23456, "peak MiB": None}]
    with (
        mock.patch.object(sys, "argv", ["gpu", "--out", str(tmp_path / "out")]),
        mock.patch.object(gpu, "run_tests", return_value=[{"status": 0}]),
        mock.patch.object(gpu, "run_part", return_value=rows) as run,
    ):
        gpu.main()
    assert run.call_count == 15
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert found["machine"]["device"] == "no GPU: the CPU, small fields"
    assert found["found"]["gloo, 1 ranks"] == rows
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert "### compiled\n\n| way | ms of a step | peak MiB |\n| --- | --- | --- |\n" in text
    assert "| ours | 1.23 |  |" in text
    assert text in capsys.readouterr().out
