"""A launcher may show each process one device only: it is taken, and a mixture is refused."""

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning_utilities.core import rank_zero

from lightning_shard import HybridShardStrategy
from lightning_shard.processes.device import sees_own_device_only
from lightning_shard.trainer.asked_devices import names_all
from lightning_shard.trainer.xpu.accelerator import XPUAccelerator
from tests.fake_xpu.build import CannotBuildError, library
from tests.pool import free_port
from tests.processes.test_group import agreed
from tests.processes.test_process_info import HYDRA
from tests.processes.test_process_info import environment as environment

SCRIPT = """
import sys

from tests import fake_xpu

fake_xpu.install(devices=int(sys.argv[2]))

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_shard import HybridShardStrategy


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(1, 1, 3, padding=1)

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


devices = sys.argv[1] if sys.argv[1] == "auto" else int(sys.argv[1])
trainer = Trainer(
    accelerator="xpu", devices=devices, max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, strategy=HybridShardStrategy(domain_parallel_size=2),
)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(2, 1, 4, 4), batch_size=1))
ranks = torch.distributed.get_world_size()  # trainer.world_size counts replicas
print("TRAINED", trainer.strategy.global_rank, ranks, trainer.strategy.root_device)
"""


def started(folder, devices: str, seen: tuple[int, int]) -> list[str]:
    """What two processes print that hydra has started, where each sees so many devices."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    clean = {k: v for k, v in os.environ.items() if "RANK" not in k and "WORLD_SIZE" not in k}
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), devices, str(number)],
            env=clean | HYDRA | {
                "PMI_RANK": rank, "MPI_LOCALRANKID": rank, "ZE_AFFINITY_MASK": rank,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, number in zip("01", seen, strict=True)
    ]  # fmt: skip
    return [process.communicate(timeout=110)[0] for process in processes]


@pytest.fixture
def _fake_xpu():
    try:
        library()
    except CannotBuildError as err:
        pytest.skip(str(err))


@pytest.mark.slow
@pytest.mark.usefixtures("_fake_xpu")
@pytest.mark.parametrize("devices", ["2", "auto"])
def test_intel_gpus_with_a_mask_for_each_rank(tmp_path, devices):
    for rank, text in enumerate(started(tmp_path, devices, (1, 1))):
        assert f"TRAINED {rank} 2 xpu:0" in text, text


@pytest.mark.slow
@pytest.mark.usefixtures("_fake_xpu")
def test_intel_gpus_of_which_one_rank_sees_more(tmp_path):
    for text in started(tmp_path, "2", (1, 2)):
        assert "TRAINED" not in text
        assert "rank 0 sees 1 of the devices of" in text, text


def test_ranks_that_see_other_numbers_of_devices():
    node = [("a", 1), ("a", 1), ("a", 4)]
    raised, _ = agreed([{}] * 3, devices_seen=node)
    assert len(raised) == 3
    assert all("rank 0 sees 1 of the devices of a and rank 2 sees 4" in t for t in raised.values())
    assert agreed([{}] * 3, devices_seen=[("a", 1), ("a", 1), ("b", 4)])[0] == {}


@pytest.fixture
def _one_cuda_device(environment):
    environment(HYDRA)
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=1),
        # a strategy tells them its rank, and tests after this one are of rank 0 again
        mock.patch.object(rank_zero_only, "rank", 0),
        mock.patch.object(rank_zero.rank_zero_only, "rank", 0),
    ):
        yield


@pytest.mark.usefixtures("_one_cuda_device")
def test_cuda_device_of_each_process():
    """As `srun --gpus-per-task=1` and a CUDA_VISIBLE_DEVICES for each rank show them."""
    assert sees_own_device_only("cuda", 2)
    assert not sees_own_device_only("cuda", 1)
    assert not sees_own_device_only("cpu", 2)
    strategy = HybridShardStrategy(domain_parallel_size=2)
    strategy.cluster_environment = LightningEnvironment()
    strategy.parallel_devices = [torch.device("cuda", 0)]
    assert (strategy.num_processes, strategy.local_rank) == (2, 1)
    assert strategy.root_device == torch.device("cuda", 0)
    strategy.set_world_ranks()
    strategy._configure_launcher()  # which compares the number of processes
    assert strategy.launcher is None
    with mock.patch("torch.cuda.device_count", return_value=2):
        assert strategy.num_processes == 1


@pytest.mark.usefixtures("_one_cuda_device")
@pytest.mark.parametrize("devices", [2, 1, "auto"])
def test_cuda_device_of_each_process_on_the_command_line(devices):
    assert names_all("gpu", devices) == (devices == 2)


def test_intel_gpu_of_each_process(environment):
    with mock.patch("torch.xpu.device_count", return_value=1):
        environment(HYDRA)
        assert XPUAccelerator.parse_devices(2) == [0]
        with pytest.raises(Exception, match="asks for Intel GPUs"):
            XPUAccelerator.parse_devices(3)
