"""Lets the loops of a resumed run do what was still due when the run was saved."""

from collections.abc import Callable
from typing import Any

from lightning_shard.lightning import Trainer


def end_saved_step(
    trainer: Trainer,
    is_known: Callable[[], bool],
    unfinished: Callable[[], str | None],
    validates: Callable[[int], None],
    had_ended: Callable[[], None],
) -> None:
    """Let a resumed run end the step after which it was saved, as the run without a break does.

    Lightning counts a step that was saved in `on_train_batch_end` as ended. So it leaves out the
    validation that is due, the end of the epoch, what schedulers do by a value, and the rest of a
    validation, which is run again as a whole here. An epoch that has begun, or ended, it takes for
    read. Between two batches nothing is due, and it lets schedulers follow a value once more.

    Args:
        trainer: The Trainer of the run.
        is_known: Returns True if the checkpoint says what was logged, which callbacks then read.
        unfinished: Returns within what it was saved, as `Saver.unfinished` does.
        validates: Called before each validation of a fit, with the number of the step before it.
        had_ended: Called in place of all steps where the run had none left when it was saved.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if "update_restart_stage" in vars(loop):
        return
    find_stage, advance, end_epoch = loop.update_restart_stage, loop.advance, fit.on_advance_end
    wind_on, validation = loop.val_loop.increment_progress_to_evaluation_end, loop.val_loop.run
    run, is_open, has_steps = fit.run, False, False

    def run_or_end() -> None:
        nonlocal has_steps
        has_steps = trainer.limit_train_batches == 0
        run()
        if is_known() and not has_steps:
            had_ended()

    def find_open_step() -> None:
        nonlocal is_open, has_steps
        has_steps = True
        count_left_out(loop.batch_progress)
        find_stage()
        if is_known() and fit.restarted_on_epoch_end:  # with `max_steps` it is taken for open
            plain: Any = super(type(fit), type(fit))  # its setter ignores `max_steps`
            plain.restarting.fset(fit, False)
            fit.update_restart_stage()
            return
        epoch: Any = fit.epoch_progress.current  # Lightning: its base class
        in_epoch = loop.batch_progress.total.ready and epoch.ready > epoch.completed
        if is_known() and (fit.restarted_on_epoch_start or not in_epoch):
            loop.restarting = False
        is_open = is_known() and (loop.restarted_on_train_batch_end or unfinished() == "validation")
        if is_open and loop.restarted_on_train_batch_end:
            loop.batch_progress.increment_completed()
            find_stage()  # as one that has ended, the loop does not count it as it begins

    def end_step_or_advance(data_fetcher: Any) -> None:
        nonlocal is_open
        if not is_open:
            if unfinished() == "nothing":
                loop.restarting = False
            advance(data_fetcher)
            return
        is_open = loop.val_loop.restarting = False
        loop.reset_restart_stage()

    def end_epoch_as_ever() -> None:
        if is_known():
            fit.on_iteration_done()  # else schedulers that follow a value are left out
        end_epoch()

    def wind_validation_on() -> None:
        if not is_known():  # else it is there; to begin its loaders draws random numbers
            wind_on()

    def validate() -> Any:
        validates(loop.batch_progress.total.ready)
        return validation()

    vars(loop.val_loop)["run"] = validate
    vars(loop.val_loop)["increment_progress_to_evaluation_end"] = wind_validation_on
    vars(loop).update(update_restart_stage=find_open_step, advance=end_step_or_advance)
    vars(fit).update(on_advance_end=end_epoch_as_ever, run=run_or_end)


def count_left_out(progress: Any) -> None:
    """Count as begun, in place, the batches at which a hook has left out the rest of an epoch.

    Lightning counts them as read only, and then takes a later epoch that is resumed for a new one.
    """
    total, current = progress.total, progress.current
    left_out = (total.ready - current.ready) - (total.started - current.started)
    total.started += left_out
    total.completed += left_out
