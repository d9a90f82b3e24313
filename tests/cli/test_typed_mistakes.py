"""Mistakes as they are typed, in the shipped Darcy config and beside it.

Each is one sentence with exit status 2 that has the option, its place and, where one is near, the
right word. None is accepted.
"""

import re
import sys
from pathlib import Path

import pytest

import lightning_modules
from lightning_shard.cli import messages
from tests.cli.test_errors import error_of
from tests.cli.test_errors import one_quiet_process as one_quiet_process

CONFIG = (Path(__file__).parents[2] / "configs/tfno_darcy.yaml").read_text()
STRATEGY, MODEL, DATA = "trainer.strategy.init_args", "model.init_args", "data.init_args"
CALLBACK = "trainer.callbacks.{}"
ADAM, COSINE = f"{MODEL}.optimizer", f"{MODEL}.lr_scheduler"

# what stands in the file, what was typed, the option that the sentence names, and the right word
IN_THE_FILE = [
    # names of options
    ("max_epochs:", "max_epoch:", "trainer.max_epoch", "max_epochs"),
    ("accelerator:", "acelerator:", "trainer.acelerator", "accelerator"),
    ("devices:", "device:", "trainer.device", "devices"),
    ("strategy:", "stratgy:", "trainer.stratgy", "strategy"),
    ("check_val_every_n_epoch:", "check_val_every_n_epochs:", "trainer.check_val_every_n_epochs",
     "check_val_every_n_epoch"),
    ("log_every_n_steps:", "log_every_n_step:", "trainer.log_every_n_step", "log_every_n_steps"),
    ("default_root_dir:", "default_rot_dir:", "trainer.default_rot_dir", "default_root_dir"),
    ("callbacks:", "callback:", "trainer.callback", "callbacks"),
    ("domain_parallel_size:", "domain_paralel_size:", f"{STRATEGY}.domain_paralel_size",
     "domain_parallel_size"),
    ("data_parallel_size:", "data_parallel:", f"{STRATEGY}.data_parallel", "data_parallel_size"),
    ("monitor:", "monitr:", CALLBACK.format("2.init_args.monitr"), "monitor"),
    ("save_last:", "save_lst:", CALLBACK.format("2.init_args.save_lst"), "save_last"),
    ("  every_n_epochs:", "  every_n_epoch:", CALLBACK.format("4.init_args.every_n_epoch"),
     "every_n_epochs"),
    ("num_samples:", "num_sample:", CALLBACK.format("4.init_args.num_sample"), "num_samples"),
    ("n_modes:", "modes:", f"{MODEL}.modes", "n_modes"),
    ("hidden_channels:", "hidden_chanels:", f"{MODEL}.hidden_chanels", "hidden_channels"),
    ("n_layers:", "n_layer:", f"{MODEL}.n_layer", "n_layers"),
    ("optimizer:", "optimiser:", f"{MODEL}.optimiser", "optimizer"),
    ("lr_scheduler:", "lr_schedular:", f"{MODEL}.lr_schedular", "lr_scheduler"),
    ("weight_decay:", "weight_decy:", f"{ADAM}.init_args.weight_decy", "weight_decay"),
    ("lr:", "learning_rate:", f"{ADAM}.init_args.learning_rate", "accepted here: amsgrad, betas"),
    ("T_max:", "t_max:", f"{COSINE}.init_args.t_max", "T_max"),
    ("train_resolution:", "train_res:", f"{DATA}.train_res", "train_resolution"),
    ("test_resolutions:", "test_resolution:", f"{DATA}.test_resolution", "test_resolutions"),
    ("num_train:", "num_trian:", f"{DATA}.num_trian", "num_train"),
    ("num_val:", "num_vals:", f"{DATA}.num_vals", "num_val"),
    ("batch_size:", "batchsize:", f"{DATA}.batchsize", "batch_size"),
    ("trainer:", "trianer:", "trianer", "trainer"),
    ("model:", "modle:", "modle", "model"),
    ("data:", "dta:", "dta", "data"),
    ("test_after_fit:", "test_after_fits:", "test_after_fits", "test_after_fit"),
    ("seed_everything:", "seed_everthing:", "seed_everthing", "seed_everything"),
    ("    init_args:\n      data_p", "    init_arg:\n      data_p", "trainer.strategy.init_arg",
     "init_args"),
    ("class_path: lightning_modules.TFNODarcy", "classpath: lightning_modules.TFNODarcy",
     "model.classpath", "class_path"),
    # names of classes
    ("lightning_shard.EpochReport", "lightning_shard.EpochReprt",
     CALLBACK.format("0.class_path"), "EpochReport"),
    ("lightning_shard.StopOnNonFinite", "lightning_shards.StopOnNonFinite",
     CALLBACK.format("1.class_path"), "StopOnNonFinite"),
    ("callbacks.ModelCheckpoint", "callbacks.ModelChekpoint", CALLBACK.format("2.class_path"),
     "ModelCheckpoint"),
    ("PredictionGallery", "PredictionGalery", CALLBACK.format("4.class_path"),
     "PredictionGallery"),
    ("HybridShardStrategy", "HybridShardStategy", "trainer.strategy.class_path",
     "HybridShardStrategy"),
    ("TFNODarcy", "TFNODarc", "model.class_path", "TFNODarcy"),
    ("DarcyDataModule", "DarcyDataModul", "data.class_path", "DarcyDataModule"),
    ("torch.optim.Adam", "torch.optim.Adamm", f"{ADAM}.class_path", "Adam"),
    ("CosineAnnealingLR", "CosineAnealingLR", f"{COSINE}.class_path", "CosineAnnealingLR"),
    # values
    ("max_epochs: 12", "max_epochs: twelve", "trainer.max_epochs", "an integer or null"),
    ("devices: auto", "devices: two", "trainer.devices", "auto"),
    ("domain_parallel_size: 1", "domain_parallel_size: two",
     "trainer.strategy.init_args.domain_parallel_size", "auto"),
    ("hidden_channels: 16", "hidden_channels: sixteen", f"{MODEL}.hidden_channels", "an integer"),
    ("loss: h1", "loss: h3", f"{MODEL}.loss", "h1"),
    ("lr: 5.0e-3", "lr: fast", f"{ADAM}.init_args.lr", "a number"),
    ("num_train: 800", "num_train: many", f"{DATA}.num_train", "an integer"),
    ("test_resolutions: [64, 32, 128]", "test_resolutions: [64, x]", f"{DATA}.test_resolutions",
     "a list of integers"),
    ("test_after_fit: true", "test_after_fit: yess", "test_after_fit", "true or false"),
    ("max_epochs: 12", "max_epochs: -3", "trainer.max_epochs", "-1 or more"),
    ("max_epochs: 12", "accumulate_grad_batches: 0", "trainer.accumulate_grad_batches",
     "1 or more"),
    ("domain_parallel_size: 1", "domain_parallel_size: 0", "trainer.strategy.domain_parallel_size",
     "1 or more"),
    ("domain_parallel_size: 1", "domain_parallel_size: 2.0",
     f"{STRATEGY}.domain_parallel_size", "a list of integers; got '2.0'"),
    ("data_parallel_size: auto", "data_parallel_size: 0", "trainer.strategy.data_parallel_size",
     "1 or more"),
    ("domain_parallel_size: 1", "sharding: ful", f"{STRATEGY}.sharding", "full"),
    ("domain_parallel_size: 1", "sharding: {mod: full}", f"{STRATEGY}.sharding.mod", "mode"),
    ("domain_parallel_size: 1", "sharding: {mode: full, warp: [A]}", f"{STRATEGY}.sharding.warp",
     "wrap"),
    ("domain_parallel_size: 1", "sharding: {mode: ful}", f"{STRATEGY}.sharding.mode", "full"),
    ("seed_everything: ", "seed_everything: abc #", "seed_everything", "true or false"),
    ("seed_everything: ", "seed_everything: -1 #", "seed_everything", "0 or more"),
    ("lightning_shard.HybridShardStrategy", "lightning_shard.parallelize",
     "trainer.strategy.class_path", "it is not a subclass of Strategy"),
    ("num_samples:", "num_samples: x #", CALLBACK.format("4.init_args.num_samples"), "got 'x'"),
    ("  every_n_epochs:", "  every_n_epochs: often #",
     CALLBACK.format("4.init_args.every_n_epochs"), "an integer; got 'often'"),
    ("test_resolutions: [64, 32, 128]", "test_resolutions: 64", f"{DATA}.test_resolutions",
     "a list of integers or null; got '64'"),
    ("n_modes: [16, 16]", "n_modes: sixteen", f"{MODEL}.n_modes",
     "a list of integers; got 'sixteen'"),
    ("n_modes: [16, 16]", "n_modes: [16, x]", f"{MODEL}.n_modes", "a list of integers"),
    ("T_max: 12", "T_max: twelve", f"{COSINE}.init_args.T_max", "an integer; got 'twelve'"),
    ("lr: 5.0e-3", "betas: 3", f"{ADAM}.init_args.betas", "got '3'"),
    ("weight_decay:", "weight_decay: lots #", f"{ADAM}.init_args.weight_decay", "got 'lots'"),
    ("max_epochs: 12", "limit_train_batches: many", "trainer.limit_train_batches",
     "an integer or a number or null; got 'many'"),
    ("max_epochs: 12", "enable_progress_bar: perhaps", "trainer.enable_progress_bar",
     "true or false or null; got 'perhaps'"),
    ("max_epochs: 12", "precision: 17", "trainer.precision", "bf16-mixed, 32-true"),
    ("max_epochs: 12", "val_check_interval: [1]", "trainer.val_check_interval",
     "an integer or a number or a string or a mapping or null"),
    ("max_epochs: 12", "num_nodes: 1.5", "trainer.num_nodes", "an integer; got '1.5'"),
    ("max_epochs: 12", "fast_dev_run: sometimes", "trainer.fast_dev_run",
     "an integer or true or false; got 'sometimes'"),
    ("max_epochs: 12", "reload_dataloaders_every_n_epochs: x",
     "trainer.reload_dataloaders_every_n_epochs", "an integer; got 'x'"),
    ("devices: auto", "devices: [a, b]", "trainer.devices",
     "a list of integers or a string or an integer"),
    ("domain_parallel_size: 1", "domain_parallel_size: {a: 1}", f"{STRATEGY}.domain_parallel_size",
     "auto or an integer or a list of integers"),
    ("domain_parallel_size: 1", "shard_dims: {y: two}", f"{STRATEGY}.shard_dims",
     "an integer or a list of integers or a mapping or null; got 'two'"),
    ("domain_parallel_size: 1", "sharding: {mode: full, cpu_offload: perhaps}",
     f"{STRATEGY}.sharding.cpu_offload", "true or false; got 'perhaps'"),
    ("domain_parallel_size: 1", "sharding: {mode: full, wrap: 3}", f"{STRATEGY}.sharding.wrap",
     "got '3'"),
    ("seed_everything: ", "seed_everything: 1.5 #", "seed_everything",
     "true or false or an integer; got '1.5'"),
    ("test_after_fit: true", "ckpt_path: 3", "ckpt_path", "a string or a path or null; got '3'"),
    # options in the wrong place
    ("hidden_channels: 16", "hidden_channels: 16\n    batch_size: 4", f"{MODEL}.batch_size",
     "hidden_channels, lifting_channel_ratio"),
    ("max_epochs: 12", "max_epochs: 12\n  domain_parallel_size: 2", "trainer.domain_parallel_size",
     "unknown option"),
    ("test_after_fit: true", "optimizer: Adam", "'optimizer'", "did you mean 'model.optimizer'?"),
    ("test_after_fit: true", "lr: 0.1", "'lr'", "did you mean 'model.optimizer.lr'?"),
    ("init_args:\n    n_modes", "init_argz:\n    n_modes", "model.init_argz", "'init_args'?"),
    # classes
    ("lightning_shard.HybridShardStrategy", "lightning_shard.EpochReport",
     "trainer.strategy.class_path", "it is not a subclass of Strategy"),
    ("lightning_shard.HybridShardStrategy", "HybridShardStrategy", "trainer.strategy.class_path",
     "Give the full class path to avoid ambiguity"),
    ("lightning_modules.TFNODarcy", "lightning_modules.DarcyDataModule", "model.class_path",
     "it is not a subclass of LightningModule"),
    ("lightning_modules.TFNODarcy", "TFNODracy", "model.class_path", "TFNODarcy"),
    ("lightning_modules.TFNODarcy", "Zzzzzz", "model.class_path", "unknown class 'Zzzzzz'"),
    ("torch.optim.Adam", "Adm", f"{ADAM}.class_path", "did you mean 'Adam'?"),
    ("torch.optim.Adam", "torch.relu", f"{ADAM}.class_path", "it is not a class"),
    ("torch.optim.Adam", "torch.nn.Linear", f"{ADAM}.class_path",
     "it is not a subclass of Optimizer"),
    ("max_epochs: 12", "logger: {class_path: CSVLoger, init_args: {save_dir: x}}",
     "trainer.logger.class_path", "CSVLogger"),
    ("max_epochs: 12", "logger: {class_path: CSVLogger, init_args: {save_dirr: x}}",
     "trainer.logger.init_args.save_dirr", "did you mean 'save_dir'?"),
    ("max_epochs: 12", "logger: {class_path: CSVLogger}", "trainer.logger.init_args.save_dir",
     "is missing: the class needs it"),
    ("max_epochs: 12", "plugins: [zzz]", "trainer.plugins.0", "unknown class 'zzz'"),
    ("model:\n  class_path: lightning_modules.TFNODarcy", "model:", "the option 'model.class_path'",
     "is missing"),
    # YAML itself
    ("max_epochs: 12", "max_epochs: 12: 3", "is not valid YAML", "mapping values are not allowed"),
    ("  max_epochs: 12", "\tmax_epochs: 12", "is not valid YAML", "cannot start any token"),
    ("max_epochs: 12", "max_epochs: !!python/name:os.system", "'!!python/name:os.system'",
     "names an object of Python; give its value"),
    ("max_epochs: 12", "max_epochs 12", "is not valid YAML", "expected ':'"),
    ("  max_epochs: 12", "   max_epochs: 12", "", "is not valid YAML"),
    ("num_val: 32", "num_train: 32", f"{DATA}.num_train", "a second time"),
]  # fmt: skip

# words after `fit --config run.yaml`, what the sentence names, and the right word
ON_THE_COMMAND_LINE = [
    ("--trainer.max_epoch 3", "trainer.max_epoch", "max_epochs"),
    ("--model.hidden_chanels 4", "model.hidden_chanels", "hidden_channels"),
    ("--data.num_trian 4", "data.num_trian", "num_train"),
    ("--trainer.precision bf16-mixd", "trainer.precision", "bf16-mixed"),
    ("--max_epochs 3", "max_epochs", "trainer.max_epochs"),
    ("--domain_parallel_size 2", "domain_parallel_size", "trainer.strategy.domain_parallel_size"),
    ("--confg other.yaml", "confg", "config"),
    ("--config runn.yaml", "runn.yaml", "run.yaml"),
    ("--ckpt_path runn.yaml", "ckpt_path", "run.yaml"),
    ("--trainer.devices", "trainer.devices", "has no value"),
    ("--config", "config", "has no value"),
    ("--model lightning_modules/darcy/tfno.py", "model", "as an import does"),
    ("--trainer.devices 0", "trainer.devices", "1 or more"),
    ("--trainer.default_root_dir /proc/nowhere", "trainer.default_root_dir", "cannot be made"),
    ("--trainer.strategy.shard_dims {y:2}", "trainer.strategy.shard_dims", "got '{y:2}'"),
    ("-trainer.max_epochs 3", "-trainer.max_epochs", "--trainer.max_epochs"),
    ("--model.hidden_channels x", "model.hidden_channels", "an integer; got 'x'"),
    ("--model.optimizer Adm", "model.optimizer", "did you mean 'Adam'?"),
    ("--model.optimizer torch.optim.SGDD", "model.optimizer", "did you mean 'SGD'?"),
    ("--model.optimizer.lr fast", "model.optimizer.lr", "a number; got 'fast'"),
    ("--model.optimizer.momentun 1", "model.optimizer.momentun", "accepted here: amsgrad, betas"),
    ("--model.lr_scheduler StepLRR", "model.lr_scheduler", "did you mean 'StepLR'?"),
    ("--model.init_args.foo 1", "model.init_args.foo", "hidden_channels, lifting_channel_ratio"),
    ("--model.layers 3", "model.layers", "did you mean 'n_layers'?"),
    ("--model.n_modes [1,x]", "model.n_modes", "a list of integers; got '[1,x]'"),
    ("--model {class_path:Foo}", "model.class_path:Foo", "did you mean 'class_path'?"),
    ("--data zzz", "unknown class 'zzz'", "for data"),
    ("--data lightning_modules.Zzz", "data", "module 'lightning_modules' has no attribute 'Zzz'"),
    ("--data.batch_size four", "data.batch_size", "an integer; got 'four'"),
    ("--data.batch_size=", "data.batch_size", "an integer; got ''"),
    ("--data.init_args.num_trian 3", "data.init_args.num_trian", "did you mean 'num_train'?"),
    ("--optimizer SGD", "'optimizer'", "did you mean 'model.optimizer'?"),
    ("--lr 0.1", "'lr'", "did you mean 'model.optimizer.lr'?"),
    ("--batch_size 4", "'batch_size'", "did you mean 'data.batch_size'?"),
    ("--hidden_channels 3", "'hidden_channels'", "did you mean 'model.hidden_channels'?"),
    ("--print_confg", "'print_confg'", "did you mean 'print_config'?"),
    ("--seed_everything x", "seed_everything", "true or false or an integer; got 'x'"),
    ("--test_after_fit maybe", "test_after_fit", "true or false; got 'maybe'"),
    ("--report=2", "report", "true or false; got '2'"),
    ("--trainer=3", "trainer", "a mapping; got '3'"),
    ("--trainer.foo.bar 1", "trainer.foo.bar", "unknown option"),
    ("--trainer.max_epochs=1.5", "trainer.max_epochs", "an integer or null; got '1.5'"),
    ("--trainer.max_epochs 3 4", "unexpected '4'", "options are --key value"),
    ("--trainer.limit_train_batches=x", "trainer.limit_train_batches", "a number or null; got 'x'"),
    ("--trainer.fast_dev_run=maybe", "trainer.fast_dev_run", "true or false; got 'maybe'"),
    ("--trainer.gradient_clip_val x", "trainer.gradient_clip_val", "a number or null; got 'x'"),
    ("--trainer.precision 17", "trainer.precision", "one of 64, 32, 16"),
    ("--trainer.devices=a,b", "trainer.devices", "a number, auto, or a list such as 0,1"),
    ("--trainer.callbacks ModelChekpoint", "trainer.callbacks", "did you mean 'ModelCheckpoint'?"),
    ("--trainer.callbacks+=ModelChekpoint", "trainer.callbacks", "'ModelCheckpoint'?"),
    ("--trainer.callbacks+=ModelCheckpoint --trainer.callbacks.monitr=x",
     "trainer.callbacks.monitr", "did you mean 'monitor'?"),
    ("--trainer.callbacks.foo 1", "trainer.callbacks.foo", "accepted here: num_samples"),
    ("--trainer.logger CSVLoger", "trainer.logger", "did you mean 'CSVLogger'?"),
    ("--trainer.logger CSVLogger --trainer.logger.save_dirr x", "trainer.logger.save_dirr",
     "did you mean 'save_dir'?"),
    ("--trainer.strategy.domain_parallel_size two", "trainer.strategy.domain_parallel_size",
     "auto or an integer or a list of integers; got 'two'"),
    ("--trainer.strategy.shard_dims x", "trainer.strategy.shard_dims", "or null; got 'x'"),
    ("--trainer.strategy.sharding.mode ful", "trainer.strategy.sharding.mode", "'full'?"),
    ("--trainer.strategy.sharding.mod full", "trainer.strategy.sharding.mod", "'mode'?"),
    ("-x 3", "'-x'", "unknown option"),
]  # fmt: skip


def every_fourth(rows):
    """The rows of a table, of which the first of each four runs by default."""
    return [pytest.param(*row, marks=[pytest.mark.slow] * (i % 4)) for i, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("right", "typed", "option", "word"),
    every_fourth(IN_THE_FILE),
    ids=[typed.replace("\n", " ").replace("\t", "tab ") for _, typed, _, _ in IN_THE_FILE],
)
def test_in_the_file(capsys, right, typed, option, word):
    assert right in CONFIG
    before, after = CONFIG.split(right, 1)
    Path("run.yaml").write_text(before + typed + after)
    sentence, _ = error_of(capsys, "fit", "--config", "run.yaml")
    line = before.count("\n") + 1
    assert option in sentence
    assert re.search(rf"run\.yaml:({line}|{line + 1})\b", sentence)  # YAML names where it stopped
    assert word in sentence


@pytest.mark.parametrize(("words", "option", "word"), every_fourth(ON_THE_COMMAND_LINE))
def test_on_the_command_line(capsys, words, option, word):
    Path("run.yaml").write_text(CONFIG)
    sentence, _ = error_of(capsys, "fit", "--config", "run.yaml", *words.split())
    assert option in sentence
    assert word in sentence


BROKEN = {
    "import no_such_thing": "ModuleNotFoundError: No module named 'no_such_thing'",
    "class Net(: pass": "SyntaxError: invalid syntax (broken",
    "1 / 0": "ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize("place", ["model", "optimizer", "callback"])
@pytest.mark.parametrize(("number", "code"), [*enumerate(BROKEN)])
def test_a_module_that_fails_while_it_is_imported(capsys, monkeypatch, number, code, place):
    monkeypatch.syspath_prepend(Path.cwd())
    Path(f"broken{number}.py").write_text(code)
    right = {"model": "lightning_modules.TFNODarcy", "optimizer": "torch.optim.Adam"}
    before, after = CONFIG.split(right.get(place, "lightning_shard.EpochReport"), 1)
    Path("run.yaml").write_text(f"{before}broken{number}.Net{after}")
    sentence, _ = error_of(capsys, "fit", "--config", "run.yaml")
    assert sentence.startswith(f"unknown class 'broken{number}.Net' for ")
    assert f" at run.yaml:{before.count(chr(10)) + 1}: importing 'broken{number}' " in sentence
    assert f" failed: {BROKEN[code]}" in sentence


# each regular expression by which `messages` reads what jsonargparse says, and words that need it
EXPRESSIONS = {
    "KEY": "--config run.yaml --trainer.max_epochs x",
    "VALUE": "--config run.yaml --trainer.max_epochs x",
    "UNKNOWN": "--config run.yaml --test_after_fits true",
    "NO_VALUE": "--config run.yaml --trainer.devices",
    "REQUIRED": "",
    "NO_PATH": "--config run.yaml --data zzz",
    "CLASS 0": "--config run.yaml --data lightning_modules.Zzz",
    "CLASS 1": "--config run.yaml --model.optimizer torch.nn.Linear",
    "CLASS 2": "--config run.yaml --trainer.strategy.class_path HybridShardStrategy",
    "CLASS 3": "--config run.yaml --trainer.strategy.class_path lightning_shard.parallelize",
}


class Recorded:
    """A regular expression that remembers whether it was found."""

    def __init__(self, pattern):
        self.pattern, self.was_found = pattern, False

    def __getattr__(self, name):
        def find(text):
            found = getattr(self.pattern, name)(text)
            self.was_found |= found is not None
            return found

        return find


def test_a_class_whose_extra_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    for module in [name for name in sys.modules if name.startswith("lightning_modules.darcy")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(vars(lightning_modules), "TFNODarcy", raising=False)
    sentence, _ = error_of(capsys, "fit", "--model", "lightning_modules.TFNODarcy")
    assert sentence == (
        "model on the command line: lightning_modules.TFNODarcy needs the package "
        "'threadpoolctl', which is not installed; pip install 'lightning-shard[workloads]' "
        "installs it"
    )


def test_every_expression_has_words():
    patterns = {name for name, value in vars(messages).items() if isinstance(value, re.Pattern)}
    patterns |= {f"CLASS {index}" for index in range(len(messages.CLASS))}
    assert patterns == {*EXPRESSIONS}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_expression_is_found(capsys, monkeypatch, name):
    """A version of jsonargparse with other words is noticed here."""
    Path("run.yaml").write_text(CONFIG)
    kind, _, index = name.partition(" ")
    old = getattr(messages, kind)
    seen = [Recorded(pattern) for pattern in (old if index else [old])]
    monkeypatch.setattr(messages, kind, seen if index else seen[0])
    error_of(capsys, "fit", *EXPRESSIONS[name].split())
    assert seen[int(index or 0)].was_found
