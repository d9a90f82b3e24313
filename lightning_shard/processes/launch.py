"""Runs one function on several processes of this machine, from a notebook or a script.

A rank is a fork of this process where that is possible, so that functions of a notebook's cells
run in it; where an accelerator has been initialised, or torch has started threads for backward
passes, it is a new interpreter. The process that launches holds the store in which the ranks meet,
as torchrun does, so no free port is guessed.

torch's `elastic_launch` was tried instead (torch 2.15). Its agent runs a thread before it forks,
and two ranks that it forked had not returned after four minutes. New interpreters, its other way,
know no function of a notebook's cells.
"""

import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from lightning_shard.processes.arguments import check_timeout, is_whole
from lightning_shard.processes.cpu_settings import share_cores
from lightning_shard.processes.forking import (
    Forks,
    become_rank,
    begin_forked_rank,
    belongs_to_a_group,
    forking,
    store_of_ranks,
    what_no_fork_has,
)
from lightning_shard.processes.rank_output import Stream, Writers, streams, write_to
from lightning_shard.processes.start import start_process_group

FAIL_S = 1.0  # for the others to fail, too: a rank that dumps its core ends after those it leaves
END_S = 5.0  # for a rank to end once it is told to
_ABORTED = (  # by gloo, which says no more than "op.preamble.length <= op.nbytes"
    " So gloo ends a rank to which another sends more than it expects: their tensors differ in "
    "shape or dtype, or one has called another function. Let all call the same with like tensors."
)


def launch(
    function: Callable[..., Any],
    *args: Any,
    processes: int = 2,
    device_type: str = "cpu",
    timeout_s: float = 1800.0,
) -> list[Any]:
    """Run `function(*args)` in several processes that form a process group.

    In a rank `torch.distributed` is initialised, the device is set, and the environment is that of
    torchrun, so that meshes and a Trainer work in it. What rank 0 prints is shown as it is, lines
    of the others begin with their rank. A forked rank computes with one thread.

    Args:
        function: May be defined in a notebook's cell. Where this process has initialised an
            accelerator, or compiled, it must be importable instead.
        args: Its arguments, on each rank the same.
        processes: Number of ranks.
        device_type: "cpu", or "cuda" or "xpu" with one device for each rank.
        timeout_s: Seconds after which a collective that does not end fails.

    Returns:
        What each rank returned, in the order of the ranks; tensors on the CPU.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank failed; with its traceback. All ranks
            have been ended, as they are for the next two.
        torch.multiprocessing.ProcessExitedException: A rank died.
        KeyboardInterrupt: Ctrl-C, or the notebook's button.
        RuntimeError: Ranks cannot be started from here.
        ValueError: `processes` is no whole number from 1 on, or `timeout_s` no positive number.
    """
    if not is_whole(processes):
        raise ValueError(f"processes must be 1 or more; got {processes!r}.")
    check_timeout(timeout_s)
    if belongs_to_a_group():
        raise RuntimeError(
            "launch starts the processes of a group, but this process already belongs to one of "
            "several; call the function itself, or launch from a process that no launcher started."
        )
    method = "fork"
    if begun := what_no_fork_has():
        method = "spawn"
        if function.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
            raise RuntimeError(
                f"{begun} in this process, which therefore cannot be forked, and the function "
                f"{function.__name__} exists only in it; restart the kernel and launch before "
                "anything uses a device or compiles, or import the function from a file."
            )
    with tempfile.TemporaryDirectory() as folder:
        with store_of_ranks() as port, streams(processes) as (shown, writers):
            with forking(processes) as here:
                forks = here if method == "fork" else None
                task = _Task(processes, device_type, timeout_s, port, Path(folder), forks)
                given = task, writers, function, args
                ranks = start_processes(_run, given, processes, join=False, start_method=method)
            assert ranks is not None
            try:
                failure = _first_failure(ranks, task, shown)
            finally:
                _end(ranks)
        if failure:
            raise failure
        files = [task.result(rank) for rank in range(processes)]
        return [torch.load(file, map_location="cpu", weights_only=False) for file in files]


@dataclass(frozen=True)
class _Task:
    """The arguments of a rank beside its number."""

    processes: int
    device_type: str
    timeout_s: float
    port: int  # the store's port
    folder: Path
    forks: Forks | None  # None where ranks are new interpreters

    def result(self, rank: int) -> Path:
        """Return the file of what the function returned on this rank."""
        return self.folder / str(rank)


def _run(
    rank: int,
    task: _Task,
    writers: list[Writers],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    if task.forks is not None:
        begin_forked_rank(task.forks)
    else:
        share_cores(task.processes)
    write_to(writers[rank])
    become_rank(rank, task.processes, task.port)
    start_process_group(task.device_type, timeout_s=task.timeout_s)
    dist.barrier()  # so that none ends before all have met
    value = function(*args)
    try:
        torch.save(value, task.result(rank))
    except (pickle.PicklingError, TypeError, AttributeError) as err:
        raise TypeError(
            f"{function.__name__} returned {type(value).__name__}, which cannot be sent to the "
            f"process that launched it ({err}); return tensors, numbers and collections of them."
        ) from err
    dist.destroy_process_group()


def _first_failure(ranks: ProcessContext, task: _Task, shown: list[Stream]) -> Exception | None:
    """Show what the ranks print until one of them fails or all have ended."""
    processes = _processes(ranks)
    running: dict[Any, int] = {p.sentinel: rank for rank, p in enumerate(processes)}
    by_file: dict[Any, Stream] = {stream.fileno(): stream for stream in shown}
    while running:
        for ready in wait([*running, *by_file]):
            if ready in by_file:
                by_file[ready].show()
                continue
            rank = running.pop(ready)
            processes[rank].join()
            if not task.result(rank).exists() or processes[rank].exitcode:
                return _failure(ranks, rank, task)
    return None


def _failure(ranks: ProcessContext, rank: int, task: _Task) -> Exception:
    """Make the error of the rank that failed first: ranks that lose a peer fail in turn."""
    _join(ranks, FAIL_S)
    processes, files, pids = _processes(ranks), _error_files(ranks), ranks.pids()
    failed = {r for r, process in enumerate(processes) if process.exitcode} | {rank}
    if died := [r for r in failed if not files[r].exists()]:
        code = processes[died[0]].exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        text = f"rank {died[0]} ended with {how} and no result, so all ranks were ended."
        text += _ABORTED if code == -signal.SIGABRT else ""
        if left := sorted(failed.difference(died)):
            text += f" Rank {left[0]} has lost it:\n\n{pickle.loads(files[left[0]].read_bytes())}"
        return ProcessExitedException(text, died[0], pids[died[0]], code)
    first = min(failed, key=lambda r: files[r].stat().st_mtime_ns)
    traceback = pickle.loads(files[first].read_bytes())
    returned = [rank for rank in range(task.processes) if task.result(rank).exists()]
    left = f" (ranks {returned} had returned by then)" if returned else ""
    text = f"rank {first} failed, so all ranks were ended{left}:\n\n{traceback}"
    return ProcessRaisedException(text, first, pids[first])


def _end(ranks: ProcessContext) -> None:
    for process in _processes(ranks):
        process.terminate()
    _join(ranks, END_S)
    for process in _processes(ranks):
        process.kill()
        process.join()
    for file in _error_files(ranks):
        file.unlink(missing_ok=True)


def _join(ranks: ProcessContext, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in _processes(ranks):
        process.join(max(0.0, deadline - time.monotonic()))


def _processes(ranks: ProcessContext) -> list[BaseProcess]:
    return ranks.processes


def _error_files(ranks: ProcessContext) -> list[Path]:
    """Return the files into which torch writes the traceback of each rank's error."""
    return [Path(file) for file in ranks.error_files]
