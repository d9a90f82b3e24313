"""Trainings that are drawn from a seed: a module, its data, and options of the Trainer."""

import random
from typing import Any

Training = dict[str, Any]

# the first value of each is what most programs do, so a failure can be told without it
CHOICES: dict[str, list[Any]] = {
    # the module
    "model": ["conv", "conv", "fft", "attention", "pooled"],
    "part": [
        "none", "none", "weight_norm", "spectral_norm", "list", "embedding", "complex", "unused",
        "buffers", "tied", "checkpointed",
    ],
    "made_in": ["init", "init", "configure_model", "setup"],
    "norm": ["group", "none", "batch", "instance"],
    "dropout": [0.0, 0.0, 0.0, 0.3],
    "buffer": [False, False, True],
    "frozen": [False, False, False, True],
    "optimizer": ["sgd", "adamw", "adam", "lbfgs", "manual", "two", "groups"],
    "schedule": ["none", "epoch", "step", "plateau", "own", "cycle"],
    "clip": [None, None, ("norm", 0.05), ("value", 0.01), "own"],
    "step_returns": ["loss", "dict", "more"],
    "after_backward": [False, False, True],
    "before_step": [False, False, True],
    "own_optimizer_step": [False, False, False, True],
    "toggles": [False, False, True],
    "own_backward": [False, False, False, True],
    "zeroes": [False, False, True],
    "transfer": ["none", "none", "before", "after", "device"],
    "skips_rest": [False, False, False, False, True],
    # what is logged
    "log_training": ["step", "epoch", "both", "none", "sum", "max"],
    "log_validation": ["mean", "metric", "collection", "min", "none", "dict"],
    "gathers": [False, False, True],
    "log_in_callback": [False, False, True],
    "log_hook": [
        "none", "none", "on_train_start", "on_train_epoch_start", "on_train_batch_start",
        "on_before_zero_grad", "on_validation_batch_end", "on_validation_epoch_end",
        "on_train_epoch_end",
    ],
    "shown": [(True, True), (False, True), (True, False)],  # in the progress bar, by the logger
    "logger_every": [1, 2, 3],
    # data
    "samples": [16, 12, 20, 8, 14, 18],
    "drop_last": [False, False, True],
    "workers": [0, 0, 0, 0, 0, 0, 1],
    "validation_samples": [8, 8, 9, 7],
    "test_samples": [8, 5],
    "batch": ["dict", "tuple", "tensor", "nested", "dataclass"],
    "training_data": [
        "plain", "shuffle", "weighted", "batch_sampler", "random_sampler", "stream",
        "sized_stream", "whole", "distributed", "dict", "list", "min_size", "max_size",
    ],
    "validation_data": [
        "plain", "none", "two", "stream", "whole", "dict", "shuffle", "distributed",
    ],
    "test_data": ["plain", "two"],
    "given_by": ["loaders", "datamodule", "module"],
    # the Trainer
    "length": [("epochs", 2), ("epochs", 3), ("steps", 5), ("steps", 3), ("epochs", 1)],
    "accumulate": [1, 1, 2, 3],
    "scheduled": [False, False, False, True],
    "sanity": [0, 2, -1],
    "validate_every": [1.0, 1.0, 0.5, 2, 3],
    "validate_epochs": [1, 1, 2, None],
    "limit_training": [1.0, 1.0, 3, 0.5],
    "limit_validation": [1.0, 1.0, 1, 0],
    "overfit": [0, 0, 0, 0, 0, 0, 0, 2],
    "reload": [0, 0, 0, 1, 2],
    "averaging": ["none", "none", "none", "ema", "swa", "each step"],
    "finetuning": [False, False, False, False, True],
    "precision": [None, None, "64-true"],
    "inference_mode": [True, True, False],
    "detect_anomaly": [False, False, False, True],
    "fast_dev_run": [False, False, False, False, False, False, 2],
    "min_epochs": [None, None, None, 2],
    "saves_weights": [False, False, True],
    "configures_callbacks": [False, False, True],
    "stopping": [False, False, True],
    "checkpoint": ["none", "none", "best", "steps", "epoch"],
    "rates": [False, False, True],
    "sharding": ["auto", "auto", "full", "gradients", "none"],
    "tiles": [3, 2, 5],
    # what follows
    "stages": [(), ("validate",), ("test",), ("predict",), ("fit",), ("test", "predict")],
    "tests_best": [False, True],
    "resume": [0, 0, 0, 0, 1, 2, 3, 5],  # after so many batches
}  # fmt: skip

SEVERAL = ("dict", "list", "min_size", "max_size")  # training data of two loaders


def draw(seed: int, replicas: int) -> Training:
    """One value of each choice, without what docs/trainer.md says differs from one process."""
    numbers = random.Random(seed)
    training = {name: numbers.choice(values) for name, values in CHOICES.items()}
    training |= _possible(training)
    if training["fast_dev_run"]:  # saves nothing
        training |= {"resume": 0, "checkpoint": "none"}
    if training["resume"]:
        training |= _resumable(training)
    if replicas > 1:
        training |= _alike_on_replicas(training)
    if training["optimizer"] == "lbfgs" or training["averaging"] != "none":
        training["sharding"] = "none"  # shards refuse LBFGS and copies of the module
    if training["after_backward"]:
        training["sharding"] = "none"  # and that a number of them is read
    return training


def _possible(training: Training) -> Training:
    """What takes the place of choices that Lightning itself refuses together."""
    changed: Training = {}
    monitors = training["log_validation"] != "none" and training["limit_validation"] != 0
    monitors = monitors and training["validation_data"] != "none" and not training["overfit"]
    monitors = monitors and (training["validate_epochs"], training["validate_every"]) == (1, 1.0)
    if training["checkpoint"] == "best" and not monitors:
        changed["checkpoint"] = "steps"
    if training["training_data"] in ("stream", "sized_stream", *SEVERAL):
        changed["overfit"] = 0
    is_short = training["samples"] < 16 or training["limit_training"] == 0.5 or training["overfit"]
    if is_short or training["training_data"] in ("min_size", "random_sampler"):
        changed["validate_every"] = 1.0  # else after more batches than an epoch has
    if training["training_data"] == "stream":
        changed |= {"limit_training": 3, "validate_every": 2}
    if training["part"] == "complex" and isinstance(training["clip"], tuple):
        changed["clip"] = None  # torch clips no complex gradients by value; ranks do
    if training["averaging"] == "swa" or training["schedule"] == "cycle":
        changed["finetuning"] = False  # the group that it adds has no rate of theirs
    if training["finetuning"] or training["averaging"] in ("ema", "each step"):
        changed["made_in"] = "init"  # the callback is set up before the network is made
    if training["optimizer"] == "lbfgs":  # takes one group of parameters
        changed["finetuning"] = False
    if training["optimizer"] in ("manual", "two"):
        changed |= {"accumulate": 1, "averaging": "none", "scheduled": False, "finetuning": False}
    elif training["scheduled"]:
        changed["accumulate"] = 1
    if training["stages"] == ("fit",):  # a second fit finds what the scheduler has set
        changed["scheduled"] = False
    return changed


def _resumable(training: Training) -> Training:
    """What takes the place of choices after which a resumed run differs (docs/checkpoints.md).

    Gradients that were accumulated are not in a checkpoint, nor is the epoch in which Lightning
    has last asked for loaders, nor the dtype that torchmetrics takes from its first evaluation.
    """
    changed: Training = {"accumulate": 1, "scheduled": False, "precision": None}
    changed["reload"] = min(training["reload"], 1)
    if training["log_hook"] == "on_train_start":
        changed["log_hook"] = "none"
    kind, batches = training["length"]
    if kind == "steps" and training["optimizer"] == "two":  # each counts
        changed["length"] = (kind, 2 * batches)
    if kind == "steps" and training["resume"] >= batches:
        changed["resume"] = 2
    return changed


def _alike_on_replicas(training: Training) -> Training:
    """What takes the place of choices whose numbers are those of a replica's own samples."""
    changed: Training = {"dropout": 0.0, "buffer": False}
    for name, value, instead in (
        ("norm", "batch", "group"),
        ("log_training", "sum", "epoch"),
        ("log_training", "max", "epoch"),
        ("log_validation", "min", "mean"),
        ("validation_data", "shuffle", "plain"),
    ):
        if training[name] == value:
            changed[name] = instead
    return changed
