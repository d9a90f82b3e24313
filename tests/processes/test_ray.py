"""Ray Train starts the ranks, and starts them again after one was killed."""

import os
from pathlib import Path

import pytest
import torch

import lightning_shard
from tests.processes.restarted import train

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray, about its own versions
def test_weights_of_a_run_that_ray_has_restarted(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[train]'")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    (tmp_path / "quiet").mkdir()
    lightning_shard.launch(train, {"folder": str(tmp_path / "quiet")}, processes=2)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")  # workers import torch
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=10**8)
    try:
        (tmp_path / "ray").mkdir()
        run = TorchTrainer(
            train,
            train_loop_config={"folder": str(tmp_path / "ray"), "dies": "kill"},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=str(tmp_path / "storage"),
                failure_config=FailureConfig(max_failures=1),
            ),
        )
        run.fit()
    finally:
        ray.shutdown()
    assert (tmp_path / "ray" / "died").exists()
    quiet, restarted = (torch.load(tmp_path / name / "weights.pt") for name in ("quiet", "ray"))
    assert quiet.keys() == restarted.keys()
    for name, value in quiet.items():
        assert value.equal(restarted[name]), name
