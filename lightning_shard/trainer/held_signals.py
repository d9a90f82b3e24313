"""Holds the signals that end a training, or queue its job again, until it can save.

Lightning 2.6 ends, saves or begins a broadcast wherever a signal finds a rank: perhaps within the
step of an optimizer, or while others are in another collective. What is saved there is no state of
the training, and ranks may wait for each other for ever.
"""

import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Collection
from signal import SIGINT, SIGTERM
from typing import Any, NoReturn

from lightning_shard.lightning import (
    SIGTERMException,
    SLURMEnvironment,
    Trainer,
    TrainerFn,
    package,
)
from lightning_shard.processes.failures.failure import SIGTERM_CODE
from lightning_shard.processes.failures.failure_watch import POLL_S
from lightning_shard.processes.failures.guard import Guard
from lightning_shard.trainer.peers import Peers

ONCE_S = 1.0  # some launchers and `timeout` send one Ctrl-C twice
LIMIT = "LIGHTNING_SHARD_SIGTERM_S"
LIMIT_S = "25"  # torchrun, Kubernetes and SLURM send SIGKILL 30 s after SIGTERM
HELD: dict[int, str] = {
    SIGINT: "\nCtrl-C: the training ends before the next batch, and saves. Press Ctrl-C again to "
    "end at once, without.\n",
    SIGTERM: "[rank {rank}] SIGTERM: the training ends before the next batch, and saves, if that "
    "takes less than {seconds:g} s.\n",
}
AT_ONCE = "[rank {rank}] SIGTERM: {stage} ends at once, and begins anew when it is run again.\n"


def limit_s() -> float:
    """Read the seconds that a process has after SIGTERM.

    Raises:
        ValueError: The variable is no number above 0.
    """
    text = os.environ.get(LIMIT) or LIMIT_S
    if not text.replace(".", "", 1).isdecimal() or float(text) == 0:
        raise ValueError(
            f"the variable {LIMIT} must be a number of seconds above 0, after which a process ends "
            f"that got SIGTERM; got {text!r}."
        )
    return float(text)


def exception_of(number: int) -> BaseException:
    """Return what ends a training for a signal."""
    return KeyboardInterrupt() if number == SIGINT else SIGTERMException(SIGTERM_CODE)


class HeldSignals:
    """Handles SIGINT, SIGTERM, and SLURM's signal before a job is queued again, in one stage.

    Attributes:
        requeue: SLURM's signal; 0: Lightning does not queue this job again.
        queue_again: Saves, and queues the job again, as Lightning's own handler.
        holds: The signals that wait for a place between two batches.
        asked: The signals that have come and wait, the first one first.
        asks: Asks all ranks to come to such a place for a signal; None: no others are asked.
        limit: Ends the process some time after SIGTERM; None: nothing is held.
    """

    def __init__(self, environment: Any, peers: Peers, trainer: Trainer, ranks: int) -> None:
        """Take the signals, but for those that the script handles by itself.

        Args:
            environment: That of the launcher.
            peers: The ranks that end together.
            trainer: The Trainer, in the stage that begins.
            ranks: Number of processes.

        Raises:
            ValueError: The variable with the limit is no number above 0.
        """
        is_queued = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        self.requeue: int = (is_queued and environment.requeue_signal) or 0
        self.queue_again: Any = None
        self.holds, self.asked = set[int](), list[int]()
        self.asks: Callable[[str], None] | None = None
        # Lightning restores these handlers after an error, and they would keep the Trainer alive
        self._peers = weakref.ref(peers)
        self._rank, self._process = trainer.global_rank, os.getpid()
        self._is_alone, self._has_ended = ranks == 1, False
        self.limit: Guard | None = None
        self._limit_s, self._asked_at = limit_s(), 0.0
        trains = trainer.state.fn == TrainerFn.FITTING
        self._stage = "" if trains or trainer.state.fn is None else trainer.state.fn.value
        numbers = {SIGTERM, SIGINT if trains else SIGTERM, self.requeue or SIGTERM}
        self._before = {number: _found(number) for number in numbers}
        self.take()

    def take(self) -> None:
        """Take from Lightning those signals, too, for which it has set handlers by now."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            found, is_free = _found(number), before in (None, _default(number))
            if str(type(found).__module__).startswith(f"{package()}."):
                self.queue_again = found if number == self.requeue else self.queue_again
                signal.signal(number, self if is_free else before)
            elif found == before and is_free and number != self.requeue:
                signal.signal(number, self)

    def hold(self, numbers: Collection[int]) -> None:
        """Hold these signals from here on: there are steps that could be lost."""
        self.holds = {*numbers}
        self.limit = Guard(self._rank, lambda: None, self._time_is_over, every_s=POLL_S)
        self.limit.code = SIGTERM_CODE
        self.limit.start()

    def ending(self) -> list[int]:
        """Return the signals by which a training ends now, the first one first."""
        if self._all_end_at_once():
            return [SIGTERM]
        return [number for number in self.asked if number != self.requeue]

    def end(self) -> None:
        """Hold nothing any more. Where SIGTERM has come, the process still ends in time.

        SIGTERM is given back where there are no other ranks, which must hear of it between stages.
        """
        self.holds, self.asks, self.queue_again = set(), None, None
        has_come = self.limit is not None and self.limit.counts_down
        self._has_ended = self._is_alone and not has_come
        for number in (SIGINT, SIGTERM) if self._has_ended else (SIGINT,):
            if signal.getsignal(number) is self:
                signal.signal(number, _default(number))
        if self.limit is not None and not has_come:
            self.limit.close()

    def __call__(self, number: int, frame: Any) -> None:
        """Hold the signal, or end at once, as without a handler."""
        if os.getpid() != self._process or self._has_ended or self._peers() is None:
            _as_by_default(number, frame)
            return
        at_once = self._all_end_at_once()
        if number == SIGTERM and self.limit and self.limit.counts_down and not at_once:
            return
        if number != self.requeue and (at_once or number not in self.holds):
            self._end_at_once(number, frame)
        now = time.monotonic()
        if number in self.asked:
            if number == SIGINT and now > self._asked_at + ONCE_S:
                self._end_at_once(number, frame)
            return
        self.asked.append(number)
        self._asked_at = now
        if self.asks is not None:
            self.asks(str(number))
        if number == SIGTERM and self.limit:
            self.limit.end_within(self._limit_s)
        if number in HELD and (number == SIGTERM or self._rank == 0):
            said = HELD[number].format(rank=self._rank, seconds=self._limit_s)
            os.write(2, said.encode())  # print may be what was interrupted

    def _end_at_once(self, number: int, frame: Any) -> NoReturn:
        if number == SIGINT:
            signal.default_int_handler(number, frame)
        if self._stage:  # a training says what it saves
            os.write(2, AT_ONCE.format(rank=self._rank, stage=self._stage).encode())
        self._end_all_at_once()
        raise SIGTERMException(SIGTERM_CODE)

    def _all_end_at_once(self) -> bool:
        peers = self._peers()
        return peers is not None and peers.all_end_at_once()

    def _end_all_at_once(self) -> None:
        if (peers := self._peers()) is not None:
            peers.end_all_at_once()

    def _time_is_over(self) -> str:
        self._end_all_at_once()
        return f"of SIGTERM on rank {self._rank}, {self._limit_s:g} s ago ({LIMIT})"


def _default(number: int) -> Any:
    return signal.default_int_handler if number == SIGINT else signal.SIG_DFL


def _found(number: int) -> Any:
    """Return the handler of a signal; one of this package, of a stage that has ended, is none."""
    handler = signal.getsignal(number)
    return _default(number) if isinstance(handler, HeldSignals) else handler


def _as_by_default(number: int, frame: Any) -> None:
    """Handle a signal in a fork of the process that holds it, or after the stage."""
    if number == SIGTERM:
        signal.signal(SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), SIGTERM)
    elif number == SIGINT and not multiprocessing.current_process().daemon:
        signal.default_int_handler(number, frame)


class OutlivesSignals:
    """Begins a data worker that signals to all processes do not end, since its rank may need it.

    It ends with its rank, or by SIGTERM of its rank.
    """

    def __init__(self, begins: Callable[[int], None] | None) -> None:
        """Take the function that begins the worker otherwise."""
        self.begins = begins

    def __call__(self, worker: int) -> None:
        """Begin in the process of the worker."""
        signal.signal(SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {SIGTERM})
        threading.Thread(target=_end_with_rank, daemon=True, name="ends-with-rank").start()
        if self.begins is not None:
            self.begins(worker)


def _end_with_rank() -> None:
    rank: Any = multiprocessing.parent_process()  # os.getppid() may be a server of forks
    while signal.sigwaitinfo({SIGTERM}).si_pid != rank.pid:
        pass
    os._exit(0)  # as torch's worker does, which would have an error raised otherwise
