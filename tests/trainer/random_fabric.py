"""Programs of Fabric that are drawn from a seed, and the network that they train."""

import random
from typing import Any

import torch
from torch import Tensor, nn

from tests.trainer.random_module import Events
from tests.trainer.random_network import Mixed, norm_of

Program = dict[str, Any]

# the first value of each is what most programs do, so a failure can be told without it
CHOICES: dict[str, list[Any]] = {
    # the modules
    "model": ["conv", "conv", "fft", "attention", "pooled"],
    "norm": ["group", "none", "batch", "instance"],
    "dropout": [0.0, 0.0, 0.3],
    "buffer": [False, False, True],
    "frozen": ["none", "none", "first", "thaws"],
    "init_module": [False, False, True],
    "called_by": ["forward", "forward", "marked", "part"],
    # the loop
    "optimizer": ["sgd", "adamw", "adam", "foreach", "fused", "lbfgs", "two", "groups", "gan"],
    "setup": ["together", "apart", "after", "scheduler"],
    "schedule": ["none", "epoch", "step", "plateau"],
    "accumulate": [1, 1, 2, 3],
    "no_sync": ["none", "both", "backward"],
    "passes": ["one", "one", "two losses", "two forwards", "penalty", "decay", "autograd"],
    "clip": [None, None, ("norm", 0.05), ("value", 0.01), ("inf", 0.02)],
    "zero_grad": ["none", "zeros", "module"],
    "evaluates": ["epoch", "none", "steps"],
    "notes": ["loss", "in place", "gradients", "gathered", "sum"],
    "epochs": [2, 1, 3],
    # data
    "samples": [16, 12, 20, 10, 8],
    "drop_last": [False, False, True],
    "workers": [0],  # ranks of the pool start no processes
    "batch": ["dict", "tuple", "tensor", "nested", "dataclass"],
    "training_data": [
        "plain", "shuffle", "weighted", "batch_sampler", "random_sampler", "stream",
        "whole", "two", "epochs", "first",
    ],
    # the strategy
    "sharding": ["auto", "auto", "full", "gradients", "none"],
    "precision": ["64", "64", "64", "64-true", "32-true", "bf16-mixed"],
    # what follows an epoch
    "resume": ["none", "none", "all", "states", "filter", "raw"],
}  # fmt: skip


def draw(seed: int, replicas: int) -> Program:
    """One value of each choice, without what docs/trainer.md says differs from one process."""
    numbers = random.Random(seed)
    program = {name: numbers.choice(values) for name, values in CHOICES.items()}
    if replicas > 1:
        program["dropout"], program["buffer"] = 0.0, False
        if program["norm"] == "batch":
            program["norm"] = "group"
    if program["optimizer"] == "lbfgs":
        program |= {"sharding": "none", "accumulate": 1, "setup": "together"}
        program["precision"] = "64"
    if program["optimizer"] in ("lbfgs", "gan"):
        program |= {"passes": "one", "frozen": "none"}
    if program["passes"] in ("penalty", "autograd"):
        program["precision"] = "64"  # Lightning itself refuses such gradients of mixed precision
    if program["frozen"] == "thaws":
        program["resume"] = "none"  # the optimizer has another group of parameters by then
    if program["passes"] == "penalty" and program["model"] == "attention":
        program["passes"] = "one"  # kernels of attention have no second derivative
    if program["passes"] in ("autograd", "decay") or program["called_by"] == "part":
        program["sharding"] = "none"  # shards are no operands of whole tensors
    if program["training_data"] == "whole":
        program["samples"] = 16
    if program["training_data"] == "first":
        program["epochs"] = 3
    return program


class Network(nn.Module):
    """A network whose parts are called alone by some programs."""

    mean: Tensor

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.body = nn.Sequential(
            # a norm takes the mean away, so the bias has a gradient of rounding errors
            nn.Conv2d(1, 4, 3, padding=1, bias=program["norm"] in ("none", "group")),
            norm_of(program["norm"], 4),
            nn.GELU(),
            nn.Dropout(program["dropout"]),
        )
        self.mixed = Mixed(program["model"])
        self.head = nn.Conv2d(4, 1, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(1, 1, 7, 1))

    def encode(self, x: Tensor) -> Tensor:
        if self.program["buffer"] and self.training:
            with torch.no_grad():
                mean = x.mean((0, 1, 3), keepdim=True)
                self.mean.lerp_(mean.to(self.mean.dtype), 0.1)
            x = x - self.mean.to(x.dtype)
        return self.body(x)

    def decode(self, hidden: Tensor) -> Tensor:
        return self.head(self.mixed(hidden)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class Hears:
    """A callback of `fabric.call`."""

    def __init__(self, events: Events) -> None:
        self.events = events

    def on_epoch(self, number: int) -> None:
        self.events.append(("called", number))


def whole(gradient: Tensor) -> Tensor:
    full: Any = getattr(gradient, "full_tensor", None)
    return gradient if full is None else full()
