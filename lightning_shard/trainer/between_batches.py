"""Ends a training after Ctrl-C between two batches, on all ranks, and saves before it ends.

Lightning ends wherever Ctrl-C finds a rank: perhaps within the step of an optimizer, or in a
collective for which others do not wait any more. What is saved there is no state of the training.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from typing_extensions import override

from lightning_shard.lightning import (
    Callback,
    Checkpoint,
    LightningModule,
    ModelCheckpoint,
    Trainer,
    WeightAveraging,
    rank_zero_info,
)
from lightning_shard.processes.failures.failure import RankFailedError, is_lost_connection
from lightning_shard.trainer.host import callbacks_of, save_last
from lightning_shard.trainer.peers import Peers
from lightning_shard.trainer.saving import Saver

if TYPE_CHECKING:
    from lightning_shard.processes.failures.common_place import CommonPlace

ONCE_S = 1.0  # some launchers and `timeout` send one Ctrl-C twice
HELD = (
    "\nCtrl-C: the training ends before the next batch, and saves. Press Ctrl-C again to end at "
    "once, without.\n"
)


def follow_batches(trainer: Trainer, begins: Callable[[], None]) -> None:
    """Let a Trainer call `begins`, once, before each batch of training and its own broadcast."""
    loop = trainer.fit_loop.epoch_loop
    followers: list[Callable[[], None]] = vars(loop).setdefault("followers", [])
    if not followers:
        plain = loop.advance

        def advance(data_fetcher: Any) -> None:
            for follower in followers:
                follower()
            plain(data_fetcher)

        vars(loop)["advance"] = advance
    if begins not in followers:
        followers.append(begins)


def _is_of_another_interrupt(error: Exception) -> bool:
    """Return whether an error may come of Ctrl-C that ended another process at once."""
    worker = isinstance(error, RuntimeError) and "DataLoader worker" in str(error)
    return worker or isinstance(error, RankFailedError) or is_lost_connection(error)


class HeldInterrupt:
    """Handles SIGINT: holds the first one while a training can end by itself.

    Attributes:
        holds: True while it can.
        was_asked: True once it was asked to end.
    """

    def __init__(self, rank: int) -> None:
        """Hold nothing yet, in this process and in data workers that are forked of it."""
        self.holds = self.was_asked = False
        self.asks: Callable[[], None] | None = None  # the other ranks
        self._rank, self._process, self._asked_at = rank, os.getpid(), 0.0

    def __call__(self, *args: Any) -> None:
        """Ask for the end, or end at once, as without a handler."""
        if os.getpid() != self._process and multiprocessing.current_process().daemon:
            return  # a data worker: it ends with its process, which may need it until then
        now = time.monotonic()
        if not self.holds or (self.was_asked and now > self._asked_at + ONCE_S):
            signal.default_int_handler(*args)
        if self.was_asked:
            return
        self.was_asked, self._asked_at = True, now
        if self.asks is not None:
            self.asks()
        if self._rank == 0:
            os.write(2, HELD.encode())  # print may be what was interrupted

    def install(self) -> None:
        """Take SIGINT, unless the script has a handler of its own or ignores it."""
        before = signal.getsignal(signal.SIGINT)
        is_free = before is signal.default_int_handler or isinstance(before, HeldInterrupt)
        if is_free and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self)

    def end(self) -> None:
        """Hold nothing any more, and give SIGINT back."""
        self.holds, self.asks = False, None
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class EndBetweenBatches(Callback):
    """Ends a training that was interrupted before its next batch, also of a validation.

    It does so where some ModelCheckpoint saves whole checkpoints: one with `save_last` writes its
    last checkpoint; without, the first one does. Those with `save_on_exception` save by themselves.
    A validation with averaged weights goes on until its end, since its weights are not those of
    the training.
    """

    def __init__(self, trainer: Trainer, peers: Peers, saver: Saver) -> None:
        """Follow the batches of a Trainer, whose ranks are `peers` and save by `saver`."""
        self._trainer, self._peers, self._saver = trainer, peers, saver
        self._place: CommonPlace | None = None  # None: one process
        self._first_step = 0
        self._signal = HeldInterrupt(trainer.global_rank)
        follow_batches(trainer, self._before_batch)
        fit = trainer.fit_loop
        train, end_epoch = fit.advance, fit.on_advance_end

        def train_or_end() -> None:
            try:
                train()
            except Exception as error:
                if self._signal.was_asked and _is_of_another_interrupt(error):
                    raise KeyboardInterrupt from error
                raise

        def end_epoch_and_come() -> None:
            end_epoch()
            self._come()

        vars(fit).update(advance=train_or_end, on_advance_end=end_epoch_and_come)

    def _savers(self) -> list[Checkpoint]:
        """Find what saves as the training ends here; nothing does in a trial run."""
        is_trial = vars(self._trainer)["fast_dev_run"]
        found = [] if is_trial else self._trainer.checkpoint_callbacks
        kept = [c for c in found if isinstance(c, ModelCheckpoint)]
        others = [c for c in found if c not in kept]  # such as OnExceptionCheckpoint
        asked = [c for c in kept if c.save_last or c.save_on_exception]
        whole = [c for c in kept if c.save_top_k and not c.save_weights_only]
        return others + (asked or whole[: not others])

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signal before data workers are forked, which then have the handler, too."""
        self._signal, self._saver.is_between_batches = HeldInterrupt(trainer.global_rank), False
        if self._savers():
            self._signal.install()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hold the signal from here on: there are steps that could be lost."""
        self._first_step = trainer.global_step
        self._place = self._peers.common_place() if self._savers() else None
        self._signal.asks = None if self._place is None else self._place.ask
        self._signal.holds = bool(self._savers())

    def _before_batch(self) -> None:
        """End here if Ctrl-C has asked for it, but not before the first batch of an epoch.

        There the epoch has begun, and its order of samples is not drawn.
        """
        batches: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        if batches.ready and batches.ready % self._trainer.accumulate_grad_batches == 0:
            self._come()

    def before_validation_batch(self) -> None:
        """End here if Ctrl-C has asked for it; the resumed run repeats the validation."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        current: Any = progress.current  # Lightning: its base class
        accumulated = current.ready % self._trainer.accumulate_grad_batches
        averaged = any(isinstance(c, WeightAveraging) for c in callbacks_of(self._trainer))
        if not averaged and (progress.is_last_batch or not accumulated):
            self._come()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End here if Ctrl-C came with the last batch: the script may go on with a test.

        Raises:
            KeyboardInterrupt: It was asked for, on any rank.
        """
        if not self._signal.holds:
            return
        asked: Any = torch.tensor(float(self._signal.was_asked))
        if self._place is not None:  # all ranks are here
            device = trainer.strategy.root_device
            asked = self._peers.reduce(asked.to(device), device, group=None, reduce_op="max")
        if asked:
            self._end()
        self._signal.end()

    def _come(self) -> None:
        # the search of a learning rate has a training of its own within this one
        if self._signal.holds and self in callbacks_of(self._trainer):
            asked = self._signal.was_asked
            if asked if self._place is None else self._place.comes():
                self._end()

    def _end(self) -> NoReturn:
        saver = self._saver
        saver.is_between_batches = True  # also while callbacks save on exception
        if self._trainer.global_step != self._first_step:
            for callback in self._savers():
                if isinstance(callback, ModelCheckpoint) and not callback.save_on_exception:
                    wanted, callback.save_last = callback.save_last, True  # no link to an old one
                    try:
                        save_last(self._trainer, callback)
                    finally:
                        callback.save_last = wanted
                    step = self._trainer.global_step
                    rank_zero_info(f"Saved '{callback.last_model_path}' at step {step}.")
            saver.finish()
        raise KeyboardInterrupt

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Hold nothing any more."""
        self._signal.end()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the signal back once more: Lightning has restored what it found."""
        self._signal.end()


def end_between_batches(trainer: Trainer, peers: Peers, saver: Saver) -> EndBetweenBatches:
    """Add the callback to a Trainer, once, and return it."""
    found = [c for c in callbacks_of(trainer) if isinstance(c, EndBetweenBatches)]
    if not found:
        found = [EndBetweenBatches(trainer, peers, saver)]
        callbacks_of(trainer).extend(found)
    return found[0]
