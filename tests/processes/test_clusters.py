"""Variables of SLURM, PALS and Kubernetes for the scripts in configs/cluster, as a rank reads them.

Sources: https://slurm.schedmd.com/srun.html, the sections on output environment variables;
https://www.kubeflow.org/docs/components/trainer/ for PET_*, which torchrun reads.
"""

import os
import re
from pathlib import Path
from unittest import mock

import pytest
import yaml
from torch.distributed.run import config_from_args, get_args_parser

from lightning_shard import process_info

FOLDER = Path(__file__).parents[2] / "configs" / "cluster"


def of_slurm(node: int, local_rank: int) -> dict[str, str]:
    """The variables of a task that the batch script starts."""
    options = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", (FOLDER / "slurm.sbatch").read_text()))
    nodes, tasks = int(options["nodes"]), int(options["ntasks-per-node"])
    assert options["signal"] == "SIGUSR1@90"
    return {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks), "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x2)",
        "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_NODELIST": "gpu[07-08]",
        "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local_rank),
        "SLURM_PROCID": str(node * tasks + local_rank),
    }  # fmt: skip


def of_a_pod(manifest: Path, node: int) -> tuple[dict[str, str], list[str]]:
    """What the operator sets in a pod, and the pod's command."""
    spec = yaml.safe_load(manifest.read_text())["spec"]
    name, pods = "lightning-shard", 2
    if "trainer" in spec:
        own = spec["trainer"]
        pods, processes, address = own["numNodes"], own["numProcPerNode"], f"{name}-node-0-0.{name}"
        command, beside = own["command"], {}
    else:
        replicas = spec["pytorchReplicaSpecs"]
        pods = sum(each["replicas"] for each in replicas.values())
        processes, address = spec["nprocPerNode"], f"{name}-master-0"
        (container,) = replicas["Worker"]["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the name that the operator looks for
        command = container["command"]
        # the pod's own, which torchrun replaces for its children
        beside = {"RANK": str(node), "WORLD_SIZE": str(pods), "MASTER_ADDR": address}
    return beside | {
        "PET_NNODES": str(pods), "PET_NPROC_PER_NODE": str(processes),
        "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": address, "PET_MASTER_PORT": "29500",
    }, command  # fmt: skip


def of_torchrun(pod: dict[str, str], command: list[str], local_rank: int) -> dict[str, str]:
    """The variables of a child of torchrun, which reads those of the pod."""
    assert command[0] == "torchrun"
    with mock.patch.dict(os.environ, pod, clear=True):
        args = get_args_parser().parse_args(command[1:])
        config, _, _ = config_from_args(args)
    assert config.max_restarts == 3
    processes, nodes, node = config.nproc_per_node, config.max_nodes, int(pod["PET_NODE_RANK"])
    address, port = config.rdzv_endpoint.split(":")
    return pod | {
        "RANK": str(node * processes + local_rank), "WORLD_SIZE": str(nodes * processes),
        "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": str(node), "MASTER_ADDR": address, "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": config.run_id, "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip


def test_a_rank_under_pals_knows_itself(tmp_path):
    script = (FOLDER / "aurora.pbs").read_text()
    nodes = int(re.findall(r"#PBS -l select=(\d+)", script)[0])
    per_node = int(re.findall(r"PER_NODE=(\d+)", script)[0])
    file = tmp_path / "nodes"
    file.write_text("".join(f"x{node}\n" for node in range(nodes)))
    for node, local_rank in ((0, 0), (0, 11), (1, 2)):
        rank = str(node * per_node + local_rank)
        variables = {
            "PALS_RANKID": rank, "PALS_LOCAL_RANKID": str(local_rank), "PMIX_RANK": rank,
            "PALS_LOCAL_SIZE": str(per_node), "PALS_NODEID": str(node), "PALS_APID": "5f2",
            "PBS_NODEFILE": str(file), "PBS_JOBID": "17.aurora",
        }  # fmt: skip
        for told in ({}, {"WORLD_SIZE": str(nodes * per_node)}):  # as the script gives it
            with mock.patch.dict(os.environ, variables | told, clear=True):
                info = process_info()
            assert (info.launcher, info.rank, info.local_rank) == ("pals", int(rank), local_rank)
            assert (info.world_size, info.local_world_size, info.node) == (24, 12, node)
            assert info.address == "x0"


@pytest.mark.parametrize("name", ["slurm", "kubernetes_pytorchjob", "kubernetes_trainjob"])
def test_a_rank_knows_itself(name):
    for node, local_rank in ((0, 0), (0, 7), (1, 2)):
        if name == "slurm":
            variables, launcher, address = of_slurm(node, local_rank), "slurm", "gpu07"
        else:
            pod, command = of_a_pod(FOLDER / f"{name}.yaml", node)
            variables = of_torchrun(pod, command, local_rank)
            launcher, address = "torchrun", pod["PET_MASTER_ADDR"]
        with mock.patch.dict(os.environ, variables, clear=True):
            info = process_info()
        assert (info.launcher, info.rank, info.local_rank) == (
            launcher, 8 * node + local_rank, local_rank,
        )  # fmt: skip
        assert (info.world_size, info.local_world_size, info.node) == (16, 8, node)
        assert info.address == address
        assert info.port > 0


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_the_command_asks_for_what_is_started(path):
    text = path.read_text()
    files = re.findall(r"--config[= ](\S+)", text)
    assert files
    trainer = {}
    for file in files:  # later ones win
        trainer |= yaml.safe_load((FOLDER.parents[1] / file).read_text()).get("trainer", {})
    assert trainer["devices"] == (12 if path.suffix == ".pbs" else 8)
    assert trainer["num_nodes"] == 2
