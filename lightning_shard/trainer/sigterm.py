"""Ends all ranks with exit status 143 when one of them gets SIGTERM.

Lightning 2.6 begins a broadcast in the signal's handler. The other ranks do not take part in it, so
all would wait for the timeout of their collectives.
"""

import os
import signal
import threading
import time
from typing import Any, NoReturn

from lightning_shard.lightning import ClusterEnvironment, SLURMEnvironment, Trainer
from lightning_shard.processes.failures.failure import SIGTERM_CODE
from lightning_shard.processes.failures.failure_watch import POLL_S
from lightning_shard.trainer.host import take_sigterm
from lightning_shard.trainer.peers import Peers


class LeaveTogether:
    """Handles SIGTERM while a run has several processes."""

    def __init__(self, peers: Peers, rank: int) -> None:
        """End the ranks of `peers`, of which this process is number `rank`."""
        self._peers, self._rank, self._process = peers, rank, os.getpid()

    def __call__(self, *_: Any) -> NoReturn:
        """End all ranks, and exit; without a run, die as a process without a handler does."""
        failure = None
        if os.getpid() == self._process:  # and not a process that was forked of it
            failure = self._peers.end_all_ranks("SIGTERM", SIGTERM_CODE)
        if failure is None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * POLL_S)  # so that all have heard of it before the first connection is lost
        raise SystemExit(SIGTERM_CODE)


def leave_together_on_sigterm(
    trainer: Trainer, environment: ClusterEnvironment, peers: Peers, rank: int
) -> None:
    """Take SIGTERM, unless the script has a handler of its own, or SLURM queues the job again.

    Lightning then neither broadcasts nor ends the processes that it started.
    """
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        take_sigterm(trainer, _leave_it_to_others)
        return
    now = signal.getsignal(signal.SIGTERM)
    if now not in (None, signal.SIG_DFL) and not isinstance(now, LeaveTogether):
        take_sigterm(trainer, _leave_it_to_others)
        return
    handler = LeaveTogether(peers, rank)
    take_sigterm(trainer, handler)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _leave_it_to_others(*_: Any) -> None:
    """Do nothing: another handler follows."""
