"""Reads from the launcher's variables which of how many processes this is, and where they meet.

`LAUNCHERS` is all that this package knows of launchers. A new one is one more row.

Sources: https://docs.pytorch.org/docs/stable/elastic/run.html (torchrun),
https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html (Open MPI),
https://slurm.schedmd.com/srun.html (SLURM). The variables of hydra, which Intel MPI and MPICH
share, are those that it was seen to set.
"""

import os
from collections.abc import Mapping
from dataclasses import replace

from lightning_shard.processes.variables import (
    Launcher,
    ProcessInfo,
    alone,
    of_lightning,
    of_slurm,
    read_numbers,
)

CHOICE = "LIGHTNING_SHARD_LAUNCHER"  # the variable that names the launcher to believe
_OWN = ("notebook", "lightning")  # by which `launch` and a Trainer start processes
NOTEBOOK = "lightning_shard.launch"  # TORCHELASTIC_RUN_ID of ranks that a notebook starts


def process_info() -> ProcessInfo:
    """Find what the launcher of this process says; it needs no mpi4py, and starts nothing.

    Raises:
        ValueError: A variable is missing, is not a number, or contradicts another one, or
            MASTER_ADDR is missing where the launcher does not tell the address of rank 0.
    """
    found = launcher()
    info = found.read(found, os.environ)
    for name, value, of, limit in (
        (found.rank, info.rank, found.world_size, info.world_size),
        (found.local_rank, info.local_rank, found.local_world_size, info.local_world_size),
        (next(iter(found.node), ""), info.node, found.world_size, info.world_size),
        (found.local_world_size, info.local_world_size - 1, found.world_size, info.world_size),
    ):
        if value >= limit:
            raise ValueError(
                f"the variable {name} is {os.environ.get(name, value)}, but {of or name} is "
                f"{os.environ.get(of, limit)}: that is rank {info.rank} of {info.world_size}, with "
                f"local rank {info.local_rank} of {info.local_world_size}; a rank is at least 0 "
                "and below the number of processes."
            )
    return info


def launcher() -> Launcher:
    """Find the launcher of this process; it is `ALONE` where no launcher has started it.

    Where the variables of several are there, the first of `LAUNCHERS` counts, or the one that
    `CHOICE` names. Processes that a Trainer or `launch` starts count in any case.

    Raises:
        ValueError: Only some of a launcher's variables are set, or `CHOICE` names none.
    """
    env = os.environ
    marked = [row for row in _choice(env) if row.marked(env)]
    for row in marked:
        if all(name in env for name in row.needed):
            return row
    for row in marked:
        there = [name for name in (*row.needed, row.local_rank) if name in env]
        if there and not row.says_alone(env):
            missing = [name for name in row.needed if name not in env]
            raise ValueError(
                f"the variable {there[0]} is {env[there[0]]!r}, but {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set, so it is unknown which process "
                f"this is; set {' and '.join(missing)} as {row.title} does, or unset {there[0]} to "
                "run one process."
            )
    return ALONE


def _choice(env: Mapping[str, str]) -> list[Launcher]:
    """The launchers to look for."""
    chosen, own = env.get(CHOICE, ""), [row for row in LAUNCHERS if row.name in _OWN]
    if not chosen:
        return [*LAUNCHERS]
    if chosen in ("none", "lightning"):
        return own
    named = [row for row in LAUNCHERS if row.name == chosen]
    if not named:
        names = dict.fromkeys(row.name for row in LAUNCHERS if row not in own)
        raise ValueError(
            f"the variable {CHOICE} must be one of {', '.join(names)} and none; got {chosen!r}."
        )
    missing = [name for row in named for name in row.needed if name not in env]
    if missing and not any(row.marked(env) and {*row.needed} <= {*env} for row in own):
        raise ValueError(
            f"the variable {CHOICE} is {chosen!r}, but {missing[0]}, which {named[0].title} sets, "
            f"is not set; start the processes by {named[0].title}, or unset {CHOICE}."
        )
    return [*own[:1], *named, *own[1:]]


def rank_variables() -> list[str]:
    """Name the variables that are 0, or not set, on the first rank of any launcher."""
    alone = os.environ.get(CHOICE) in ("none", "lightning")
    rows = [row for row in LAUNCHERS if not alone or row.name in _OWN]
    names = [name for row in rows for name in (row.rank, row.local_rank, *row.node)]
    return list(dict.fromkeys(names))


ALONE = Launcher("none", "no launcher", alone, starts_all=False)
_ENVIRONMENT = Launcher(
    "environment", "the launcher", read_numbers,
    rank="RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE", node=("GROUP_RANK", "NODE_RANK"),
    needed=("RANK", "WORLD_SIZE"), needs_address=True,
    says_alone=lambda env: env.get("WORLD_SIZE") == "1" and not {"RANK", "LOCAL_RANK"} & {*env},
)  # fmt: skip
_LIGHTNING = Launcher(
    "lightning", "Lightning", of_lightning,
    rank="LOCAL_RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK", node=("NODE_RANK",),
    needed=("LOCAL_RANK", "NODE_RANK"),
    known_to_lightning=True, starts_all=False, tells_nodes=True,
)  # fmt: skip

# A launcher that runs inside another comes first.
LAUNCHERS: tuple[Launcher, ...] = (
    replace(
        _ENVIRONMENT, name="notebook", title="launch",
        marker=f"TORCHELASTIC_RUN_ID={NOTEBOOK}", known_to_lightning=True,
    ),
    replace(
        _ENVIRONMENT, name="torchrun", title="torchrun",
        marker="TORCHELASTIC_RUN_ID", command="torchrun", known_to_lightning=True, tells_nodes=True,
    ),
    _ENVIRONMENT,
    Launcher(
        "openmpi", "Open MPI", read_numbers,
        rank="OMPI_COMM_WORLD_RANK", world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK", local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        needed=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE"),
        command="mpirun", address_option="mpirun -x MASTER_ADDR=<host of rank 0> ...",
    ),
    Launcher(
        "hydra", "hydra's mpirun", read_numbers,
        rank="PMI_RANK", world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID", local_world_size="MPI_LOCALNRANKS",
        needed=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        command="mpiexec", address_option="mpirun -genv MASTER_ADDR <host of rank 0> ...",
    ),
    _LIGHTNING,
    Launcher(
        "slurm", "srun", of_slurm,
        rank="SLURM_PROCID", world_size="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID",
        local_world_size="SLURM_STEP_TASKS_PER_NODE", node=("SLURM_NODEID",),
        needed=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
        command="srun",
        says_alone=lambda env: "SLURM_JOB_ID" in env and env.get("SLURM_PROCID") == "0",
        known_to_lightning=True, tells_nodes=True,
    ),
    replace(_LIGHTNING, needed=("NODE_RANK",)),  # a Trainer that will start the others of its node
)  # fmt: skip
