"""Ctrl-C or SIGTERM ends a training between two batches; a resumed run goes on exactly there."""

import gc
import math
import os
import signal
import time
import weakref
from signal import SIGINT, SIGTERM

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from lightning_shard import HybridShardStrategy, TiledStrategy
from lightning_shard.processes.failures.failure import SIGTERM_CODE
from lightning_shard.trainer.held_signals import LIMIT, ONCE_S, HeldSignals, limit_s
from tests.checkpoint.test_resume_after_a_step import BATCHES, run
from tests.checkpoint.tiny import leave_group
from tests.training import Losses, loader, make, shared_path

EVERY = 2  # batches until a validation, which has two
RANKS = {"both": (0, 1), "second": (1,)}
MOMENTS = {
    "before a step": ("on_train_batch_start", 1),
    "in a step": ("on_before_optimizer_step", 3),
    "before validation": ("on_train_batch_end", 2),
    "in validation": ("on_validation_batch_start", 2),
    "after validation": ("on_validation_batch_end", 4),
    "last step of an epoch": ("on_train_batch_end", 5),
    "end of an epoch": ("on_train_epoch_end", 1),
    "begin of an epoch": ("on_train_epoch_start", 2),
    "last step of all": ("on_train_batch_end", 15),
    "while saving": ("on_save_checkpoint", 2),
}


class Interrupt(Callback):
    """Lets signals come to some ranks at the n-th call of a hook."""

    def __init__(self, hook, count, ranks=(0, 1), numbers=(signal.SIGINT,)):
        self.left, self.numbers = count if dist.get_rank() in ranks else 0, numbers
        setattr(self, hook, self._strike)

    def _strike(self, *_):
        self.left -= 1
        for number in self.numbers if self.left == 0 else ():
            os.kill(os.getpid(), number)


class Interruptible:
    def __enter__(self):
        self.before = {number: signal.getsignal(number) for number in (SIGINT, SIGTERM)}
        signal.signal(SIGINT, signal.default_int_handler)
        signal.signal(SIGTERM, signal.SIG_DFL)

    def __exit__(self, *_):
        with pytest.raises(KeyboardInterrupt):  # Ctrl-C is what it was
            os.kill(os.getpid(), SIGINT)
        let_live()
        for number, handler in self.before.items():
            signal.signal(number, handler)


def let_live():
    """Forget that SIGTERM came, after which this process would end."""
    found = signal.getsignal(SIGTERM)
    if isinstance(found, HeldSignals) and found.limit is not None:
        found.limit.close()


def last(folder):
    return ModelCheckpoint(folder, save_last=True, every_n_epochs=100)


def often(folder):
    return ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)


def seldom(folder):
    return ModelCheckpoint(folder, every_n_epochs=100)


def link(folder):
    return ModelCheckpoint(folder, save_last="link", every_n_train_steps=2)


def on_exception(folder):
    return ModelCheckpoint(folder, "stopped", save_on_exception=True, every_n_epochs=100)


def interrupted(domain, *callbacks, saver, code, **options):
    """What the module noted in a run that a signal has ended with this exit status."""
    noted = []

    class Notes(Callback):
        def on_exception(self, trainer, module, exception):
            noted.extend(module.noted)

    with Interruptible(), pytest.raises(SystemExit) as ended:
        run(domain, [Notes(), *callbacks, saver], EVERY, enable_checkpointing=True, **options)
    assert ended.value.code == code
    dist.barrier()
    return noted


def assert_goes_on(
    domain, moment, ranks=(0, 1), saver=last, file="last.ckpt", more=Callback,
    signals=(SIGINT,), **options,
):  # fmt: skip
    """Interrupt a run, resume it, and compare both parts with the whole."""
    whole, state, numbers = run(domain, [more()], EVERY, **options)
    folder = shared_path("")
    strike = Interrupt(*moment, ranks=ranks, numbers=signals)
    code = 1 if signals[0] == SIGINT else SIGTERM_CODE
    noted = interrupted(domain, strike, more(), saver=saver(folder), code=code, **options)
    assert noted == whole[: len(noted)]
    steps = sum(event[0] == "train" for event in noted)
    if (folder / file).is_file():
        saved = torch.load(folder / file, weights_only=True)["global_step"]
        epochs, batches = divmod(steps, BATCHES)  # the last batch of an epoch ends a step
        size = options.get("accumulate_grad_batches", 1)
        assert saved == epochs * math.ceil(BATCHES / size) + batches / size
    while noted and noted[-1][0] == "validation":  # it is run again from its first batch
        noted.pop()
    again, resumed, resumed_numbers = run(domain, [more()], EVERY, path=folder / file, **options)
    assert again == whole[len(noted) :]
    assert resumed_numbers == numbers or not again  # nothing was left to train
    for key, value in state.items():
        assert torch.equal(resumed[key], value), key


SIGNALS = {"Ctrl-C": [SIGINT], "SIGTERM": [SIGTERM], "SIGTERM twice": [SIGTERM, SIGTERM]}


@pytest.mark.quick_rows("Ctrl-C-both-2-in validation")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("domain", [2, 1])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("signals", SIGNALS)
def test_goes_on_where_it_stopped(domain, moment, ranks, signals):
    saver = often if moment == "while saving" else last
    assert_goes_on((domain,), MOMENTS[moment], RANKS[ranks], saver, signals=SIGNALS[signals])


WAYS = {
    "sharded": {"strategy": {"checkpoint_format": "sharded"}},
    "async": {"strategy": {"checkpoint_format": "async"}},
    "full": {"strategy": {"sharding": "full"}},
    "full and async": {"strategy": {"sharding": "full", "checkpoint_format": "async"}},
    "no last one": {"saver": seldom},
    "on exception": {"saver": on_exception, "file": "stopped.ckpt"},
    "link": {"saver": link},
    "accumulated": {"accumulate_grad_batches": 2},
    "averaged": {"more": lambda: EMAWeightAveraging(decay=0.8)},
    "a validation of three samples": {"validated": 3},
}


@pytest.mark.quick_rows("async-in a step-2-SIGTERM")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("signals", ["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("domain", [2, 1])
@pytest.mark.parametrize("moment", ["in a step", "in validation"])
@pytest.mark.parametrize("way", WAYS)
def test_whatever_saves(way, moment, domain, signals):
    assert_goes_on((domain,), MOMENTS[moment], signals=SIGNALS[signals], **WAYS[way])


QUIET = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning", "ignore:You defined a .validation_step"
)


class InterruptAt(Losses):
    """Lets a signal come in a step, twice where it is held."""

    def __init__(self, step=0, then=(), number=SIGINT):
        super().__init__()
        self.step, self.then, self.number = step, then, number

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step + 1 == self.step:
            for wait_s in (0, *self.then):
                time.sleep(wait_s)
                os.kill(os.getpid(), self.number)


def train_alone(strategy, folder, callback, path=None, **options):
    module = make("simple_cnn", torch.float64)
    runner = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, logger=False,
        callbacks=[callback, last(folder)], enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    try:
        runner.fit(module, loader("simple_cnn", torch.float64, 2, 10), ckpt_path=path)
    finally:
        leave_group()
    return callback.values, module.state_dict()


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@QUIET
@pytest.mark.filterwarnings("ignore:.*exists and is not empty:UserWarning")
@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
@pytest.mark.parametrize("make_strategy", [HybridShardStrategy, lambda: TiledStrategy(2)])
def test_one_process(make_strategy, number, tmp_path):
    losses, state = train_alone(make_strategy(), tmp_path / "whole", InterruptAt())
    # `timeout` sends it twice
    folder, stopped = tmp_path / "stopped", InterruptAt(3, then=[0.1], number=number)
    with pytest.raises(SystemExit) as ended:
        train_alone(make_strategy(), folder, stopped)
    let_live()
    assert ended.value.code == (1 if number == SIGINT else SIGTERM_CODE)
    assert stopped.values == losses[:3]
    resumed, found = train_alone(make_strategy(), folder, InterruptAt(), folder / "last.ckpt")
    assert resumed == losses[3:]
    for key, value in state.items():
        assert torch.equal(found[key], value), key


@QUIET
@pytest.mark.usefixtures("interruptible")
def test_one_process_gives_signals_back(tmp_path):
    train_alone(HybridShardStrategy(), tmp_path, InterruptAt(), max_steps=1)
    assert signal.getsignal(SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(SIGINT) is signal.default_int_handler


class FailAt(Callback):
    """Fails after the n-th step, as a search does that ends a trial early."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            raise ValueError("this trial ends")


@QUIET
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("make_strategy", [HybridShardStrategy, lambda: TiledStrategy(2)])
def test_a_training_that_failed_is_not_kept(make_strategy, tmp_path):
    """Lightning restores after an error what handled the signals while the stage began."""
    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    kept = []
    try:
        for _ in range(3):
            module = make("simple_cnn", torch.float64)
            trainer = Trainer(
                accelerator="cpu", devices=1, strategy=make_strategy(), callbacks=[FailAt()],
                max_epochs=1, default_root_dir=tmp_path, **options,
            )  # fmt: skip
            with pytest.raises(ValueError, match="this trial ends"):
                trainer.fit(module, loader("simple_cnn", torch.float64, 2, 4))
            kept += [weakref.ref(module), weakref.ref(trainer)]
            del module, trainer
    finally:
        leave_group()
    while gc.collect():
        pass
    assert not [x for x in kept if x() is not None]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), SIGINT)


@pytest.mark.parametrize("text", ["soon", "0", "-3"])
def test_a_limit_that_is_no_number_of_seconds(text, monkeypatch):
    monkeypatch.setenv(LIMIT, text)
    with pytest.raises(ValueError, match=f"must be a number of seconds above 0.*{text}"):
        limit_s()


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@QUIET
@pytest.mark.parametrize("options", [{"then": [ONCE_S + 0.1]}, {"fast_dev_run": True}], ids=str)
def test_the_end_at_once(options, tmp_path):
    """By a second Ctrl-C, or where nothing would be saved."""
    stopped = InterruptAt(1, then=options.pop("then", ()))
    with pytest.raises(SystemExit):
        train_alone(HybridShardStrategy(), tmp_path, stopped, **options)
    assert not stopped.values
    assert not [*tmp_path.iterdir()]
