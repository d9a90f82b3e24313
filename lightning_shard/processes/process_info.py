"""Reads from the launcher's variables which of how many processes this is, and where they meet.

`LAUNCHERS` is all that this package knows of launchers. A new one is one more row. A process with a
sign of a launcher that no row completes is refused: it would train alone, as would all others, and
each would write the same checkpoint.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from lightning_shard.processes.variables import (
    Launcher,
    ProcessInfo,
    alone,
    joined,
    of_lightning,
    of_slurm,
    read_numbers,
    read_partly,
)

CHOICE = "LIGHTNING_SHARD_LAUNCHER"  # the variable that names the launcher to believe
_OWN = ("notebook", "lightning")  # by which `launch` and a Trainer start processes
NOTEBOOK = "lightning_shard.launch"  # TORCHELASTIC_RUN_ID of ranks that a notebook starts
# variables by which launchers tell a process its rank, also launchers that have no row
_SIGN = re.compile(r"([A-Z0-9]+_)+(RANKID|TASK_RANK|(COMM_WORLD|NAMESPACE)(_[A-Z]+)?_RANK)"
                   r"|(PMI|PMIX|MPI|HOROVOD)(_[A-Z]+)?_RANK|ALPS_APP_PE")  # fmt: skip


def process_info() -> ProcessInfo:
    """Find which of how many processes this is, from the variables of its launcher.

    mpi4py is asked only where a launcher tells the number of processes through MPI alone.

    Raises:
        ValueError: A variable is missing, is not a number, or contradicts another one, or
            MASTER_ADDR is missing where the launcher does not tell the address of rank 0.
    """
    found = launcher()
    info = found.read(found, os.environ)
    _check_numbers(found, info)
    if not os.environ.get(CHOICE):
        _check_outer_script(found, info)
    return info


def _check_numbers(found: Launcher, info: ProcessInfo) -> None:
    """Raise a ValueError if a rank is not below the number of processes."""
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


def _check_outer_script(found: Launcher, info: ProcessInfo) -> None:
    """Raise a ValueError if RANK and WORLD_SIZE contradict the launcher.

    A script around the launcher may have exported them, so that all processes have the same. Where
    each process of the launcher starts several, their number is larger than the launcher's.
    """
    env = os.environ
    if found.name != "environment":
        places = (("RANK", info.rank), ("WORLD_SIZE", info.world_size))
        differs = any(env.get(name, str(read)) != str(read) for name, read in places)
        if differs and found.starts_all and not found.marker:
            raise _contradiction(found, info)
        return
    for row in LAUNCHERS:
        if row.rank == found.rank or row.name in _OWN or not row.rank or row.rank not in env:
            continue
        complete = all(name in env for name in row.needed)
        if not row.marked(env) or (row.says_alone(env) and not complete):
            continue
        try:
            read = row.read(row, env)
        except ValueError:  # it tells no place among a known number
            if env[row.rank] != str(info.rank):
                raise _contradiction(row, None) from None
            continue
        if info.world_size < read.world_size or (
            info.world_size == read.world_size and info.rank != read.rank
        ):
            raise _contradiction(row, read)


def _contradiction(row: Launcher, read: ProcessInfo | None) -> ValueError:
    env, names = os.environ, [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    values = " and ".join(f"{name} is {env[name]}" for name in names)
    of = f" of {read.world_size}" if read is not None else ""
    believe = f", or set {CHOICE}=environment to believe them" if "RANK" in env else ""
    return ValueError(
        f"the variable {values}, but {row.title} says that this is rank {env[row.rank]}{of} "
        f"({row.rank}); unset {' and '.join(names)}, which a script around the launcher may have "
        f"set{believe}."
    )


def launcher() -> Launcher:
    """Find the launcher of this process; it is `ALONE` where no launcher has started it.

    Where the variables of several are there, the first of `LAUNCHERS` counts, or the one that
    `CHOICE` names. Processes that a Trainer or `launch` starts count in any case.

    Raises:
        ValueError: Only some of a launcher's variables are set, or `CHOICE` names none.
    """
    env = os.environ
    marked = [row for row in _choice(env) if row.marked(env)]
    by_trainer = {*_LIGHTNING.needed} <= {*env}
    complete = [row for row in marked if {*row.needed} <= {*env}]
    found = ALONE
    for row in complete:
        one = env.get(row.world_size) == "1" and row.starts_all and not row.marker
        if not (one and by_trainer):
            found = row
            break
    if not found.starts_all:
        _refuse_incomplete([row for row in marked if row not in complete], found, env)
        outside = any(row.starts_all for row in complete)
        if not outside and not env.get(CHOICE) and joined() is None:
            _refuse_signs(env)
    return found


def _refuse_incomplete(rows: list[Launcher], found: Launcher, env: Mapping[str, str]) -> None:
    """Raise a ValueError if variables of a row are set, but not all that it needs.

    Args:
        rows: The rows that lack a variable.
        found: The row that counts, whose own variables are no sign of another.
        env: The variables of the environment.
    """
    own = {*found.variables()}
    first = [(row, (*row.needed, row.local_rank)) for row in rows]  # tell launchers apart best
    more = [
        (row, (row.world_size, row.local_world_size, row.nodes, *row.node))
        for row in rows
        if row.starts_all
    ]
    for row, names in (*first, *more):
        there = [name for name in names if name in env and name not in own]
        if there and not row.says_alone(env):
            missing = [name for name in row.needed if name not in env]
            raise ValueError(
                f"the variable {there[0]} is {env[there[0]]!r}, but {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set, so it is unknown which process "
                f"this is; set {' and '.join(missing)} as {row.title} does, or unset {there[0]} to "
                "run one process."
            )


def _refuse_signs(env: Mapping[str, str]) -> None:
    """Raise a ValueError if a variable says that an unknown launcher has started this process."""
    if name := next((name for name in env if _SIGN.fullmatch(name)), None):
        raise ValueError(
            f"the variable {name} is {env[name]!r}, which is set for each of several processes, "
            "but nothing tells how many there are; set RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each, or "
            f"{CHOICE}=none to run this process alone."
        )


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
    return [name for name in dict.fromkeys(names) if name]


def _is_pmi_alone(env: Mapping[str, str]) -> bool:
    """Return whether a launcher of MPI sets no variables beside those of PMI."""
    by_hydra = {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"} & {*env}
    return not by_hydra and not _by_srun(env, "PMI_RANK")


def _by_srun(env: Mapping[str, str], rank: str) -> bool:
    """Return whether srun, by a plug-in for MPI, has set the variable `rank`, too."""
    return "SLURM_STEP_NUM_TASKS" in env and env.get("SLURM_PROCID") == env.get(rank)


ALONE = Launcher("none", "no launcher", alone, starts_all=False)
_ENVIRONMENT = Launcher(
    "environment", "the launcher", read_numbers,
    rank="RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE", node=("GROUP_RANK", "NODE_RANK"),
    needed=("RANK", "WORLD_SIZE"), needs_address=True,
    says_alone=lambda env: (
        env.get("WORLD_SIZE") == "1" == env.get("LOCAL_WORLD_SIZE", "1")
        and not {"RANK", "LOCAL_RANK", "GROUP_RANK"} & {*env}
    ),
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
        source="https://docs.pytorch.org/docs/stable/elastic/run.html",
    ),
    _ENVIRONMENT,
    Launcher(
        "openmpi", "Open MPI", read_numbers,
        rank="OMPI_COMM_WORLD_RANK", world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK", local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        needed=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE"),
        command="mpirun", address_option="mpirun -x MASTER_ADDR=<host of rank 0> ...",
        source="https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html",
    ),
    Launcher(
        "mvapich", "MVAPICH", read_numbers,
        rank="MV2_COMM_WORLD_RANK", world_size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK", local_world_size="MV2_COMM_WORLD_LOCAL_SIZE",
        needed=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
                "MV2_COMM_WORLD_LOCAL_SIZE"),
        command="mpirun_rsh", address_option="mpirun_rsh MASTER_ADDR=<host of rank 0> ...",
        source="https://mvapich.cse.ohio-state.edu/support/user_guide_mvapich2-1.9.html",
    ),
    Launcher(
        "hydra", "hydra's mpirun", read_numbers,
        rank="PMI_RANK", world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID", local_world_size="MPI_LOCALNRANKS",
        needed=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        command="mpiexec", address_option="mpirun -genv MASTER_ADDR <host of rank 0> ...",
        source="seen under Intel MPI and MPICH",
    ),
    Launcher(
        "pals", "PALS' mpiexec", read_partly,
        rank="PALS_RANKID", world_size="PMI_SIZE", sizes=("PMIX_SIZE",),
        local_rank="PALS_LOCAL_RANKID", local_world_size="PALS_LOCAL_SIZE", node=("PALS_NODEID",),
        needed=("PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
        applies=lambda env: "FLUX_TASK_RANK" not in env and not _by_srun(env, "PALS_RANKID"),
        command="mpiexec", address_option="mpiexec --env MASTER_ADDR=<host of rank 0> ...",
        source="the package lightning-sprite (0.1.3, measured on Aurora)",
    ),
    Launcher(
        "flux", "flux run", read_partly,
        rank="FLUX_TASK_RANK", world_size="FLUX_JOB_SIZE", local_rank="FLUX_TASK_LOCAL_ID",
        nodes="FLUX_JOB_NNODES",
        needed=("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES"),
        command="flux", address_option="flux run --env=MASTER_ADDR=<host of rank 0> ...",
        source="https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/"
               "flux-environment.html",
    ),
    Launcher(
        "jsrun", "jsrun", read_numbers,
        rank="JSM_NAMESPACE_RANK", world_size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK", local_world_size="JSM_NAMESPACE_LOCAL_SIZE",
        needed=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
        command="jsrun", address_option="jsrun -E MASTER_ADDR=<host of rank 0> ...",
        source="https://lightning.ai/docs/pytorch/stable/api/"
               "pytorch_lightning.plugins.environments.LSFEnvironment.html",
    ),
    Launcher(
        "pmi", "the launcher of MPI", read_partly,  # MPICH, Cray MPICH and MVAPICH without more
        rank="PMI_RANK", world_size="PMI_SIZE",
        local_rank="PMI_LOCAL_RANK", local_world_size="PMI_LOCAL_SIZE",
        needed=("PMI_RANK", "PMI_SIZE"), applies=_is_pmi_alone,
        command="mpiexec", address_option="mpiexec -env MASTER_ADDR <host of rank 0> ...",
        source="https://flux-framework.readthedocs.io/projects/flux-rfc/en/latest/spec_13.html",
    ),
    _LIGHTNING,
    Launcher(
        "slurm", "srun", of_slurm,
        rank="SLURM_PROCID", world_size="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID",
        local_world_size="SLURM_STEP_TASKS_PER_NODE", node=("SLURM_NODEID",),
        needed=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
        command="srun",
        says_alone=lambda env: "SLURM_JOB_ID" in env and env.get("SLURM_PROCID") == "0" and all(
            env.get(name, "0") == "0" for name in ("SLURM_LOCALID", "SLURM_NODEID")
        ),
        known_to_lightning=True, tells_nodes=True, source="https://slurm.schedmd.com/srun.html",
    ),
    Launcher(
        "alps", "aprun", read_partly,
        rank="ALPS_APP_PE", needed=("ALPS_APP_PE",),
        command="aprun", address_option="aprun -e MASTER_ADDR=<host of rank 0> ...",
        source="https://docs.cray.com/books/S-2496-4101/html-S-2496-4101/cnl_apps.html",
    ),
    Launcher(
        "pmix", "the launcher of MPI", read_partly,
        rank="PMIX_RANK", world_size="PMIX_SIZE", local_rank="PMIX_LOCAL_RANK",
        needed=("PMIX_RANK",),
        command="mpiexec", address_option="mpiexec --env MASTER_ADDR=<host of rank 0> ...",
        source="https://github.com/saforem2/ezpz/pull/187",
    ),
    replace(_LIGHTNING, needed=("NODE_RANK",)),  # a Trainer that will start the others of its node
)  # fmt: skip
