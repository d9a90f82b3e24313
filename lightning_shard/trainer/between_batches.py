"""Serves signals between two batches of a training, on all ranks at the same ones, and saves there.

Ctrl-C and SIGTERM end the training. After SLURM's signal its job is queued again, and goes on.
"""

from collections.abc import Callable
from signal import SIGINT, SIGTERM, Signals
from typing import TYPE_CHECKING, Any

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
from lightning_shard.trainer.held_signals import HeldSignals, exception_of
from lightning_shard.trainer.host import callbacks_of, save_last
from lightning_shard.trainer.peers import Peers
from lightning_shard.trainer.saving import Saver

if TYPE_CHECKING:
    from lightning_shard.processes.failures.common_place import CommonPlace


def follow_batches(trainer: Trainer, begins: Callable[[], None]) -> None:
    """Let a Trainer call `begins`, once, before each batch of training."""
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


def _is_of_another(error: Exception) -> bool:
    """Return whether an error may come of a signal that ended another process at once."""
    worker = isinstance(error, RuntimeError) and "DataLoader worker" in str(error)
    return worker or isinstance(error, RankFailedError) or is_lost_connection(error)


class EndBetweenBatches(Callback):
    """Ends a training after a signal before its next batch, also of a validation.

    It does so where some ModelCheckpoint saves whole checkpoints: one with `save_last` writes its
    last checkpoint; without, the first one does. Those with `save_on_exception` save by themselves.
    A validation with averaged weights goes on until its end, since its weights are not those of
    the training.

    Attributes:
        signals: Handles the signals of this stage.
    """

    def __init__(self, trainer: Trainer, peers: Peers, saver: Saver) -> None:
        """Follow the batches of a Trainer, whose ranks are `peers` and save by `saver`."""
        self._trainer, self._peers, self._saver = trainer, peers, saver
        self._place: CommonPlace | None = None  # None: one process
        self._first_step = 0
        follow_batches(trainer, self._before_batch)
        fit = trainer.fit_loop
        train, end_epoch = fit.advance, fit.on_advance_end

        def train_or_end() -> None:
            try:
                train()
            except Exception as error:
                signals = self.signals.ending()
                if signals and _is_of_another(error):
                    raise exception_of(signals[0]) from error
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

    def begin_stage(self, environment: Any) -> None:
        """Begin to handle signals, in the environment of a launcher."""
        self._saver.is_between_batches = False
        strategy: Any = self._trainer.strategy
        self.signals = HeldSignals(environment, self._peers, self._trainer, strategy.world_size)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hold signals from here on: there are steps that could be lost."""
        self._first_step = trainer.global_step
        ending = (SIGINT, SIGTERM) if self._savers() else ()
        # SIGTERM comes as the job is queued again, while what was saved may still be written
        queued = (SIGTERM, self.signals.requeue) if self.signals.requeue else ()
        self.signals.hold((*ending, *queued))
        self._begin_places()

    def _begin_places(self) -> None:
        signals = self.signals
        self._place = self._peers.common_place() if signals.holds else None
        signals.asks = None if self._place is None else self._place.ask
        if signals.asks is not None and signals.asked:  # before there were places
            signals.asks(str(signals.asked[0]))

    def _before_batch(self) -> None:
        """End here if a signal has asked for it, but not before the first batch of an epoch.

        There the epoch has begun, and its order of samples is not drawn.
        """
        batches: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        if batches.ready and batches.ready % self._trainer.accumulate_grad_batches == 0:
            self._come()

    def before_validation_batch(self) -> None:
        """End here if a signal has asked for it; the resumed run repeats the validation."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        current: Any = progress.current  # Lightning: its base class
        accumulated = current.ready % self._trainer.accumulate_grad_batches
        averaged = any(isinstance(c, WeightAveraging) for c in callbacks_of(self._trainer))
        if not averaged and (progress.is_last_batch or not accumulated):
            self._come()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End here if a signal came with the last batch: the script may go on with a test.

        Raises:
            KeyboardInterrupt: Ctrl-C came, on any rank.
            SystemExit: SIGTERM came, on any rank.
        """
        if not self.signals.holds:
            return
        asked: Any = torch.tensor(float(max(self.signals.asked, default=0)), device="cpu")
        if self._place is not None:  # all ranks are here
            device = trainer.strategy.root_device
            asked = self._peers.reduce(asked.to(device), device, group=None, reduce_op="max")
        if asked:
            self._serve(int(asked))
        self.signals.end()

    def _come(self) -> None:
        # the search of a learning rate has a training of its own within this one
        if self.signals.holds and self in callbacks_of(self._trainer):
            if self._place is not None and self._place.comes():
                self._serve(int(self._place.why))
            elif self._place is None and self.signals.asked:
                self._serve(self.signals.asked[0])

    def _serve(self, number: int) -> None:
        """Queue the job again, or save and end."""
        saver, signals = self._saver, self.signals
        saver.is_between_batches = True  # also while callbacks save on exception
        if number != signals.requeue:
            if self._trainer.global_step != self._first_step:
                self._save(f"after {Signals(number).name}")
            raise exception_of(number)
        signals.queue_again(number, None)
        saver.finish()
        saver.is_between_batches = False
        if number in signals.asked:
            signals.asked.remove(number)
        self._begin_places()

    def _save(self, why: str) -> None:
        for callback in self._savers():
            if isinstance(callback, ModelCheckpoint) and not callback.save_on_exception:
                wanted, callback.save_last = callback.save_last, True  # no link to an old one
                try:
                    save_last(self._trainer, callback)
                finally:
                    callback.save_last = wanted
                step = self._trainer.global_step
                rank_zero_info(f"Saved '{callback.last_model_path}' at step {step}, {why}.")
        self._saver.finish()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Hold nothing any more."""
        self.signals.end()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the signals back once more: Lightning has restored what it found."""
        self.signals.end()


def end_between_batches(
    trainer: Trainer, peers: Peers, saver: Saver, environment: Any
) -> EndBetweenBatches:
    """Add the callback to a Trainer, once, begin a stage, and return it."""
    found = [c for c in callbacks_of(trainer) if isinstance(c, EndBetweenBatches)]
    ends = found[0] if found else EndBetweenBatches(trainer, peers, saver)
    ends.begin_stage(environment)
    if not found:
        callbacks_of(trainer).append(ends)
    return ends
