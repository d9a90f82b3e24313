"""Eighty-three mistakes as they are typed, in the shipped Darcy config and beside it.

Each is one sentence with exit status 2 that has the option, its place and, where one is near, the
right word. None is accepted.
"""

import re
from pathlib import Path

import pytest

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
    ("accelerator: auto", "accelerator: gpuu", "unknown accelerator", "gpu"),
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
    # YAML itself
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
]


@pytest.mark.parametrize(
    ("right", "typed", "option", "word"),
    IN_THE_FILE,
    ids=[typed.strip().replace("\n", " ") for _, typed, _, _ in IN_THE_FILE],
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


@pytest.mark.parametrize(("words", "option", "word"), ON_THE_COMMAND_LINE)
def test_on_the_command_line(capsys, words, option, word):
    Path("run.yaml").write_text(CONFIG)
    sentence, _ = error_of(capsys, "fit", "--config", "run.yaml", *words.split())
    assert option in sentence
    assert word in sentence


def test_there_are_sixty():
    assert len(IN_THE_FILE) + len(ON_THE_COMMAND_LINE) >= 60
