"""Programs that touch parameters, gradients, buffers, optimizers, metrics and hooks.

Each entry of `PROGRAMS` changes one module in one way, by the methods that it adds. `REFUSED` has
those that end in a sentence, with words of the sentence.
"""
# ruff: noqa: E501 - a table, one program in a line or two

import copy
import io
import math
import types
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import save_image

from lightning_shard import DomainTensor, whole_parameters
from tests.trainer.refused_of_shards import REFUSED_OF_SHARDS

DTYPE = torch.float64


class Block(nn.Module):
    """FSDP2 gathers its parameters when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.f(x))


class Program(LightningModule):
    """A network with parameters in blocks, in the root, frozen, shared, and without dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Conv2d(4, 1, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.offset = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.teacher = copy.deepcopy(nn.Sequential(self.stem, Block())).requires_grad_(False)
        self.noted: list[float] = []
        self.start()
        self.to(DTYPE)

    def start(self) -> None:
        """Add to `__init__`."""

    def note(self, *values: Any) -> None:
        """Remember numbers that must be those of one process."""
        self.noted += [float(v) for v in values]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x) * self.scale)) + self.offset

    def loss(self, batch: Any) -> Tensor:
        return (self(batch["x"]) - batch["y"]).square().mean()

    def step(self, batch: Any, loss: Tensor) -> Any:
        """Change the loss."""
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch_idx = batch_idx
        return self.step(batch, self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05, 0.9)


PROGRAMS: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, str] = {}
PER_REPLICA: set[str] = set()  # as under DDP, a replica sees its own samples


def program(name: str, *, refused: str = "", per_replica: bool = False, **methods: Any) -> None:
    """Add a program."""
    assert name not in PROGRAMS, name
    PROGRAMS[name] = methods
    if refused:
        REFUSED[name] = refused
    if per_replica:
        PER_REPLICA.add(name)


def make(name: str) -> Program:
    """The module that runs the program."""
    kind: Any = type("Program", (Program,), dict(PROGRAMS[name]))
    return kind()


def squares(parameters: Iterable[Tensor]) -> Any:
    return sum(p.square().sum() for p in parameters)


def root(m: Any) -> list[Any]:
    """The parameters of no block, that are whole in a step."""
    return [*m.stem.parameters(), *m.head.parameters(), m.scale]


# 1. parameters that somebody remembers since __init__


def keep(m: Any, value: Any) -> None:
    object.__setattr__(m, "kept", value)


def penalty(read: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda m, batch, loss: loss + 0.01 * squares(read(m.kept))


class Holder:
    def __init__(self, p: Any) -> None:
        self.p = p


class Slotted:
    __slots__ = ("p",)

    def __init__(self, p: Any) -> None:
        self.p = p


Pair = namedtuple("Pair", "a b")

for name, holds, read in (
    ("a list", lambda m: root(m), list),
    ("a list of one", lambda m: [m.scale], list),
    ("a tuple", lambda m: tuple(root(m)), list),
    ("a named tuple", lambda m: Pair(m.scale, m.stem.weight), list),
    ("a tuple in a list", lambda m: [("a", m.scale), ("b", m.stem.weight)], lambda k: [p for _, p in k]),
    ("a dict", lambda m: {"a": m.scale, "b": m.head.weight}, dict.values),
    ("a dict of named_parameters", lambda m: dict(m.stem.named_parameters()), dict.values),
    ("a list of named_parameters", lambda m: list(m.stem.named_parameters()), lambda k: [p for _, p in k]),
    ("a deque", lambda m: deque(root(m)), list),
    ("an attribute of an object", lambda m: Holder(m.scale), lambda k: [k.p]),
    ("a slot of an object", lambda m: Slotted(m.scale), lambda k: [k.p]),
    ("nested lists", lambda m: [[m.scale], [[m.head.weight]]], lambda k: [k[0][0], k[1][0][0]]),
    ("a namespace", lambda m: types.SimpleNamespace(p=m.scale), lambda k: [k.p]),
    ("a partial", lambda m: partial(squares, [m.scale]), lambda k: k.args[0]),
    ("a module outside", lambda m: [m.stem], lambda k: k[0].parameters()),
):  # fmt: skip
    program(
        f"{name} made in __init__, in the loss",
        start=lambda m, holds=holds: keep(m, holds(m)),
        step=penalty(read),
    )


def cell(p: Any) -> Callable[[], Any]:
    return lambda: [p]


program(
    "a closure made in __init__, in the loss",
    start=lambda m: keep(m, cell(m.scale)),
    step=penalty(lambda k: k()),
)
program(
    "keys of a dict made in __init__, in a hook",
    start=lambda m: keep(m, {m.scale: 2.0, m.head.bias: 3.0}),
    on_train_batch_end=lambda m, *_: m.note(*(c * p.sum() for p, c in m.kept.items())),
)
program(
    "a set made in __init__, in a hook",
    start=lambda m: keep(m, {m.scale}),
    on_train_batch_end=lambda m, *_: m.note(*(p.sum() for p in m.kept)),
)
program(
    "a list of all parameters made in __init__, read in a hook",
    start=lambda m: keep(m, list(m.parameters())),
    on_train_batch_end=lambda m, *_: m.note(*(p.abs().sum() for p in m.kept)),
)
program(
    "a list of all parameters made in __init__, written in a hook",
    start=lambda m: keep(m, list(m.parameters())),
    on_train_batch_end=lambda m, *_: [p.data.mul_(0.9) for p in m.kept],
)
program(
    "a list of all parameters made in __init__, in the loss",
    start=lambda m: keep(m, list(m.blocks.parameters())),
    step=penalty(list),
)


class Shadow:
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.followed = list(parameters)
        self.shadow = [p.detach().clone().to(DTYPE) for p in self.followed]

    @torch.no_grad()
    def update(self) -> None:
        for s, p in zip(self.shadow, self.followed, strict=True):
            s.mul_(0.5).add_(p, alpha=0.5)


def update_in(module: Any) -> None:
    with whole_parameters(module):
        module.kept.update()
    module.note(*(s.abs().sum() for s in module.kept.shadow))


program(
    "an average that keeps parameters(), in a hook",
    start=lambda m: keep(m, Shadow(m.stem.parameters())),
    on_train_batch_end=lambda m, *_: m.kept.update(),
)
program(
    "an average that keeps parameters(), in a hook within whole_parameters",
    start=lambda m: keep(m, Shadow([*m.stem.parameters(), *m.blocks.parameters()])),
    on_train_batch_end=lambda m, *_: update_in(m),
)
program(
    "an average that keeps parameters(), in the step",
    start=lambda m: keep(m, Shadow(root(m))),
    step=lambda m, batch, loss: (m.kept.update(), loss)[1],
    on_train_batch_end=lambda m, *_: m.note(*(s.abs().sum() for s in m.kept.shadow)),
)
program(
    "an optimizer made in __init__",
    start=lambda m: keep(m, torch.optim.Adam(m.parameters(), 1e-2)),
    configure_optimizers=lambda m: m.kept,
)
program(
    "groups of an optimizer made in __init__",
    start=lambda m: keep(m, [{"params": list(m.stem.parameters()), "lr": 0.1},
                             {"params": [*m.blocks.parameters(), m.scale], "lr": 0.01}]),
    configure_optimizers=lambda m: torch.optim.SGD(m.kept),
)  # fmt: skip
program(
    "a loss that holds a parameter",
    start=lambda m: keep(m, Holder(m.scale)),
    step=lambda m, batch, loss: loss * m.kept.p.square().mean(),
)
program(
    "a tied attribute",
    start=lambda m: setattr(m, "tied", m.scale),
    step=lambda m, batch, loss: loss + m.tied.square().mean(),
)
program(
    "tied layers of two parents",
    start=lambda m: setattr(m, "again", nn.Sequential(m.stem, nn.GELU())),
    step=lambda m, batch, loss: loss + m.again(batch["x"]).square().mean(),
)
program(
    "a tied block",
    start=lambda m: setattr(m, "again", nn.Sequential(m.stem, m.blocks[0])),
    step=lambda m, batch, loss: loss + m.again(batch["x"]).square().mean(),
)
program(
    "a weakref made in __init__",
    start=lambda m: keep(m, weakref.ref(m)),
    step=lambda m, batch, loss: loss + m.kept().scale.square().mean(),
)
program(
    "attributes of parameters choose the learning rate",
    start=lambda m: [setattr(p, "_rate", 0.1) for p in (m.scale, m.blocks[0].f.weight)],
    configure_optimizers=lambda m: torch.optim.SGD(
        [{"params": [p], "lr": getattr(p, "_rate", 0.01)} for p in m.parameters()]
    ),
)
program(
    "attributes of parameters are read in the step",
    start=lambda m: setattr(m.scale, "_weight", 0.5),
    step=lambda m, batch, loss: (
        loss + sum(getattr(p, "_weight", 0.0) * p.square().sum() for p in root(m))
    ),
)


# 2. writes into parameters, in the step and in hooks


def no_grad(function: Callable[..., None]) -> Callable[..., None]:
    return torch.no_grad()(function)


def set_data(p: Any) -> None:
    p.data = p.data * 0.9


def set_data_zeros(p: Any) -> None:
    p.data = torch.full(p.shape, 0.01, dtype=DTYPE)


def swap(p: Any) -> None:
    torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.9, requires_grad=p.requires_grad))


WRITES: dict[str, Callable[[Any], Any]] = {
    "p.data = value": set_data,
    "p.data = a plain value": set_data_zeros,
    "p.data.mul_": lambda p: p.data.mul_(0.9),
    "p.data.copy_": lambda p: p.data.copy_(p.data * 0.9),
    "p.data.fill_": lambda p: p.data.fill_(0.02),
    "p.data *=": lambda p: p.data.__imul__(0.9),
    "p.detach().mul_": lambda p: p.detach().mul_(0.9),
    "p.mul_": no_grad(lambda p: p.mul_(0.9)),
    "p.add_ of another": no_grad(lambda p: p.add_(p.sign(), alpha=-0.01)),
    "p.copy_": no_grad(lambda p: p.copy_(p * 0.9)),
    "p.lerp_": no_grad(lambda p: p.lerp_(p * 0.5, 0.1)),
    "p.clamp_": no_grad(lambda p: p.clamp_(-0.1, 0.1)),
    "p.zero_": no_grad(lambda p: p.zero_()),
    "p.sub_ of its mean": no_grad(lambda p: p.sub_(0.1 * p.mean())),
    "p.div_ by its norm": no_grad(lambda p: p.div_(p.norm() + 1.0)),
    "nn.init.constant_": lambda p: nn.init.constant_(p, 0.3),
    "nn.init.zeros_": lambda p: nn.init.zeros_(p),
    "_foreach_mul_": no_grad(lambda p: torch._foreach_mul_([p], 0.9)),
    "_foreach_lerp_": no_grad(lambda p: torch._foreach_lerp_([p], [p * 0.5], 0.1)),
    "_foreach_copy_": no_grad(lambda p: torch._foreach_copy_([p], [p * 0.9])),
    "clip of its values": lambda p: p.data.clamp_(min=-0.05),
    "swap_tensors": swap,
}
ROWS = {"p.set_": no_grad(lambda p: p.set_((p * 0.9).contiguous()))}

GROUPS: dict[str, Callable[[Any], Any]] = {
    "the root": root,
    "blocks": lambda m: list(m.blocks.parameters()),
    "a frozen teacher": lambda m: list(m.teacher.parameters()),
}
WHEN = {
    "training_step": "the step",
    "on_train_batch_start": "on_train_batch_start",
    "on_train_batch_end": "on_train_batch_end",
}


def writing(group: Callable[[Any], Any], write: Callable[[Any], Any], method: str) -> Any:
    """Write at the beginning of the method: torch refuses most writes behind a forward pass."""

    def does(m: Any, *args: Any) -> Any:
        for p in group(m):
            write(p)
        return m.loss(args[0]) if method == "training_step" else None

    return does


def writing_after(group: Callable[[Any], Any], write: Callable[[Any], Any]) -> Any:
    def step(m: Any, batch: Any, loss: Tensor) -> Tensor:
        for p in group(m):
            write(p)
        return loss

    return step


for group_name, group in GROUPS.items():
    for number, (way, write) in enumerate(WRITES.items()):
        for order, (method, place) in enumerate(WHEN.items()):
            # each way at each place, of the groups in turn
            if (number + order) % 3 != list(GROUPS).index(group_name) and way not in (
                "p.data = value", "_foreach_mul_", "p.data.mul_",
            ):  # fmt: skip
                continue
            program(f"{way} of {group_name} in {place}", **{method: writing(group, write, method)})

for way, write in ROWS.items():
    program(f"{way} of the root in the step", training_step=writing(root, write, "training_step"))
    program(
        f"{way} of blocks in a hook",
        refused="set_",
        on_train_batch_end=writing(GROUPS["blocks"], write, "on_train_batch_end"),
    )


for group_name, group in GROUPS.items():
    for way in ("p.data.mul_", "p.data.copy_", "p.data = value", "p.data = a plain value"):
        program(
            f"{way} of {group_name} after the forward pass",
            step=writing_after(group, WRITES[way]),
        )


def write_groups(write: Callable[[Any], Any]) -> Callable[..., Any]:
    """Write into the optimizer's parameters, by operators that are seldom used."""

    def step(m: Any, batch: Any, _: int) -> Any:
        with torch.no_grad():
            for p in m.optimizers().param_groups[0]["params"]:
                write(p)
        return m.loss(batch)

    return step


for way, write in (
    ("sigmoid_", lambda p: p.sigmoid_()),
    ("p.data.tanh_", lambda p: p.data.tanh_()),
    ("out=", lambda p: torch.mul(p, 0.5, out=p)),
    ("_foreach_clamp_max_", lambda p: torch._foreach_clamp_max_([p], 0.01)),
    ("to_local()", lambda p: getattr(p, "to_local", lambda p=p: p)().mul_(0.5)),
):
    program(f"{way} of param_groups in the step", place="training_step",
            training_step=write_groups(write))  # fmt: skip


def follow(m: Any, how: str) -> None:
    student = [*m.stem.parameters(), *m.blocks[0].parameters()]
    teacher = list(m.teacher.parameters())
    if how == "foreach":
        torch._foreach_mul_(teacher, 0.9)
        torch._foreach_add_(teacher, student, alpha=0.1)
    elif how == "lerp":
        torch._foreach_lerp_(teacher, student, 0.1)
    elif how == "load_state_dict":
        m.teacher[0].load_state_dict(m.stem.state_dict())
    for t, s in zip(teacher, student, strict=True):
        if how == "data":
            t.data = 0.9 * t.data + 0.1 * s.data
        elif how == "data copy":
            t.data.copy_(0.9 * t.data + 0.1 * s.data)
        elif how == "in place":
            with torch.no_grad():
                t.mul_(0.9).add_(s, alpha=0.1)


for how in ("foreach", "lerp", "load_state_dict", "data", "data copy", "in place"):
    for method, place in WHEN.items():
        program(
            f"a teacher follows its student by {how} in {place}",
            **{method: lambda m, *args, how=how: (
                torch.no_grad()(follow)(m, how), m.loss(args[0]) if "training" in m.place else None
            )[1]}, place=method,
        )  # fmt: skip


def by_vector(m: Any, *args: Any) -> Any:
    ps = root(m)
    with torch.no_grad():
        vector_to_parameters(parameters_to_vector(ps) * 0.9, ps)
    return m.loss(args[0]) if m.place == "training_step" else None


def by_plain_vector(m: Any, *_: Any) -> None:
    ps = list(m.blocks.parameters())
    vector_to_parameters(torch.full((sum(p.numel() for p in ps),), 0.01, dtype=DTYPE), ps)


def load_part(assign: bool, part: str) -> Callable[..., Any]:
    def hook(m: Any, *_: Any) -> None:
        module = m.get_submodule(part)
        state = {
            k: torch.full(v.shape, 0.01 * (1 + i), dtype=DTYPE)
            for i, (k, v) in enumerate(module.state_dict().items())
        }
        module.load_state_dict(state, assign=assign)

    return hook


program("vector_to_parameters in the step", training_step=by_vector, place="training_step")
program("vector_to_parameters of a plain vector in a hook", on_train_batch_end=by_plain_vector)
program(
    "parameters_to_vector in a hook",
    # torch 2.11 can reshape and join such shards
    refused="" if torch.__version__.startswith("2.11.") else "would remove or reshape|mixed",
    on_train_batch_end=by_vector,
    place="on_train_batch_end",
)
for part in ("stem", "blocks", "blocks.0", "blocks.1.f", "teacher"):
    for hook in ("on_fit_start", "on_train_start", "on_train_batch_start"):
        if hook == "on_fit_start" or part in ("stem", "blocks.0"):
            program(f"load_state_dict of {part} in {hook}", **{hook: load_part(False, part)})
program("load_state_dict of everything in on_train_start", on_train_start=lambda m: m.load_state_dict(
    {k: torch.full(v.shape, 0.02, dtype=v.dtype) for k, v in m.state_dict().items()}))  # fmt: skip


def load_optimizer(m: Any, *_: Any) -> None:
    """Load the state of one process, into momenta that others have made or not."""
    optimizer = m.optimizers().optimizer
    (group,) = optimizer.param_groups
    momenta = {
        i: {"momentum_buffer": torch.full(p.shape, 0.01 * (1 + i), dtype=DTYPE)}
        for i, p in enumerate(group["params"])
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": momenta})


program("load_state_dict of the optimizer in on_train_start", on_train_start=load_optimizer)
program("load_state_dict of the optimizer in a hook", on_train_batch_end=load_optimizer)
program("load_state_dict of the optimizer in the step",
        step=lambda m, batch, loss: (load_optimizer(m), loss)[1])  # fmt: skip
program("load_state_dict with assign of a frozen part", on_train_start=load_part(True, "teacher"))


def average(m: Any) -> None:
    m.average = AveragedModel(m.blocks, avg_fn=lambda a, p, _: 0.9 * a + 0.1 * p)


def use_average(m: Any, batch: Any, loss: Any) -> Any:
    with torch.no_grad():
        m.note(m.average(m.stem(torch.ones_like(batch["x"]))).square().mean())
    return loss


program("an AveragedModel of a part, made in __init__", start=average, step=use_average,
        on_train_batch_end=lambda m, *_: m.average.update_parameters(m.blocks))  # fmt: skip
for part in ("", "blocks", "teacher"):
    program(f"an AveragedModel of {part or 'everything'} in a hook", refused="FSDP does not support deepcopy",
            on_train_batch_end=lambda m, *_, part=part: AveragedModel(m.get_submodule(part)))  # fmt: skip


def load_in_step(part: str, late: bool, dtype: Any = DTYPE) -> Callable[..., Any]:
    """Load with assign=True before the loss is computed, or after."""

    def step(m: Any, batch: Any, _: int) -> Any:
        loss = m.loss(batch) if late else None
        module = m.get_submodule(part)
        state = {k: torch.full_like(v, 0.01, dtype=dtype) for k, v in module.state_dict().items()}
        module.load_state_dict(state, assign=True)
        return loss if late else m.loss(batch)

    return step


for late in (False, True):
    when = "the end" if late else "the begin"
    program(f"load_state_dict with assign of a frozen part at {when} of the step",
            training_step=load_in_step("teacher", late), place="training_step")  # fmt: skip
    for part in ("stem", "blocks.0"):
        program(f"load_state_dict with assign of {part} at {when} of the step",
                training_step=load_in_step(part, late), place="training_step")  # fmt: skip
program("load_state_dict with assign of another dtype in the step",
        training_step=load_in_step("teacher", True, torch.float32), place="training_step")  # fmt: skip


def in_whole(m: Any, *_: Any) -> None:
    with torch.no_grad(), whole_parameters(m):
        for i, p in enumerate(m.parameters()):
            p.mul_(0.9 + 0.001 * i)
        m.stem.load_state_dict({k: v * 0.5 for k, v in m.stem.state_dict().items()})


def load_in_whole(m: Any, *_: Any) -> None:
    with torch.no_grad(), whole_parameters(m):
        m.scale.mul_(0.5)
        load_part(False, "stem")(m)
        load_part(False, "blocks.1")(m)


program("load_state_dict within whole_parameters", on_train_start=load_in_whole)
program(
    "p.set_ of blocks within whole_parameters in a hook",
    on_train_batch_end=lambda m, *_: within(
        m, lambda: [ROWS["p.set_"](p) for p in m.blocks.parameters()]
    ),
)
program("writes within whole_parameters", on_train_batch_end=in_whole)
program(
    "p.data = value within whole_parameters",
    on_train_batch_end=lambda m, *_: within(m, lambda: [set_data(p) for p in m.parameters()]),
)


def within(m: Any, do: Callable[[], Any]) -> None:
    with whole_parameters(m):
        do()


def replace_parameter(m: Any, *_: Any) -> None:
    m.scale = nn.Parameter(torch.full((4, 1, 1), 0.5, dtype=DTYPE))


program(
    "a parameter is replaced by a new one in on_train_batch_end",
    refused="scale of Program was replaced",
    on_train_batch_end=replace_parameter,
)
program(
    "a layer is added in on_train_start",
    refused="late.weight was made after",
    on_train_start=lambda m: setattr(m, "late", nn.Linear(2, 2, dtype=DTYPE)),
)
program(
    "requires_grad_ is switched in the step",
    step=lambda m, batch, loss: (m.head.requires_grad_(m.batch_idx != 1), loss)[1],
)
program(
    "requires_grad_ of a block is switched in a hook",
    on_train_batch_start=lambda m, *_: (
        m.blocks[0].requires_grad_(m.trainer.global_step < 1) and None
    ),
)


# 3. gradients


def in_step(gradient: Callable[..., Any]) -> Callable[..., Any]:
    return lambda m, batch, loss: gradient(m, batch, loss)


def penalise(m: Any, batch: Any, loss: Tensor, wrt: Callable[[Any], Any] = root) -> Tensor:
    found = torch.autograd.grad(loss, wrt(m), create_graph=True)
    return loss + 0.1 * sum(g.square().sum() for g in found)


def grad_norm_balance(m: Any, batch: Any, loss: Tensor) -> Tensor:
    other = m(batch["x"]).abs().mean()
    norms = [torch.autograd.grad(v, m.scale, retain_graph=True)[0].norm() for v in (loss, other)]
    m.note(
        *norms
    ) if m.trainer.world_size == 1 or m.trainer.strategy.data_group.size() == 1 else None
    return loss + (norms[0] / norms[1]).detach() * other


def maml(m: Any, batch: Any, loss: Tensor) -> Tensor:
    names, values = zip(*m.head.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, values, create_graph=True)
    fast = {n: v - 0.1 * g for n, v, g in zip(names, values, found, strict=True)}
    hidden = m.blocks(m.stem(batch["x"]) * m.scale)
    inner = (torch.func.functional_call(m.head, fast, (hidden,)) - batch["y"]).square().mean()
    again = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
    fast = {n: v - 0.1 * g for (n, v), g in zip(fast.items(), again, strict=True)}
    return (torch.func.functional_call(m.head, fast, (hidden,)) - batch["y"]).square().mean()


def to_input(m: Any, batch: Any, loss: Tensor) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    (g,) = torch.autograd.grad(m(x).square().mean(), x, create_graph=True)
    return loss + g.square().sum()


def to_time(m: Any, batch: Any, loss: Tensor) -> Tensor:
    t = torch.full((1, 1, 1, 1), 0.3, dtype=DTYPE, requires_grad=True)
    (g,) = torch.autograd.grad(m(batch["x"] * t).square().mean(), t, create_graph=True)
    return loss + g.square().sum()


def hessian_vector(m: Any, batch: Any, loss: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(loss, m.scale, create_graph=True)
    (h,) = torch.autograd.grad((g * torch.ones_like(g)).sum(), m.scale, create_graph=True)
    return loss + 0.01 * h.square().sum()


def unused(m: Any, batch: Any, loss: Tensor) -> Tensor:
    a, b = torch.autograd.grad(
        loss, [m.scale, m.teacher[0].weight.requires_grad_()], create_graph=True, allow_unused=True
    )
    assert b is None
    return loss + a.square().sum()


program("a penalty on gradients of parameters", step=in_step(penalise), per_replica=True)
program(
    "a penalty on the gradient of one parameter",
    step=lambda m, batch, loss: penalise(m, batch, loss, lambda m: m.scale),
    per_replica=True,
)
program(
    "a penalty on gradients of a list made in __init__",
    start=lambda m: keep(m, root(m)),
    step=lambda m, batch, loss: penalise(m, batch, loss, lambda m: m.kept),
    per_replica=True,
)
program(
    "a penalty on gradients of parameters of blocks",
    refused="not.* used in the graph|shard",
    per_replica=True,
    step=lambda m, batch, loss: penalise(m, batch, loss, lambda m: list(m.blocks.parameters())),
)
program("GradNorm", step=grad_norm_balance, per_replica=True)
program("MAML with two inner steps", step=maml, per_replica=True)
program("a penalty on the gradient of the input", step=to_input, per_replica=True)
program("a gradient with respect to a plain tensor", step=to_time, per_replica=True)
program("a product with the Hessian", step=hessian_vector, per_replica=True)
program("a gradient with allow_unused", step=unused, per_replica=True)
program(
    "torch.func.grad over parameters",
    per_replica=True,
    step=lambda m, batch, loss: (
        loss
        + sum(
            g.square().sum()
            for g in torch.func.grad(
                lambda p: torch.func.functional_call(m.stem, p, (batch["x"],)).square().mean()
            )(dict(m.stem.named_parameters())).values()
        )
    ),
)
program(
    "functional_call with parameters",
    step=lambda m, batch, loss: (
        loss
        + torch.func.functional_call(m.stem, dict(m.stem.named_parameters()), (batch["x"],))
        .square()
        .mean()
    ),
)


def called_with(part: str, value: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Call a part of the module with other tensors than its parameters."""

    def step(m: Any, batch: Any, loss: Tensor) -> Tensor:
        module = m.get_submodule(part)
        given = {n: value(p) for n, p in module.named_parameters()}
        out = torch.func.functional_call(module, given, (m.stem(batch["x"]),))
        return loss + out.square().mean()

    return step


for part in ("blocks", "blocks.0", "blocks.0.f"):
    program(f"functional_call of {part} with other tensors", refused="functional_call gave",
        step=called_with(part, lambda p: torch.full(p.shape, 0.05, dtype=DTYPE)))  # fmt: skip
program("functional_call of blocks with tensors made of parameters", refused="functional_call gave",
        step=called_with("blocks", lambda p: p * 0.9))  # fmt: skip
program("functional_call of blocks with new parameters", refused="functional_call gave",
        step=called_with("blocks", lambda p: nn.Parameter(torch.full(p.shape, 0.05, dtype=DTYPE))))  # fmt: skip
program(
    "a penalty over the root's parameters", step=lambda m, b, loss: loss + 0.01 * squares(root(m))
)
program(
    "a penalty over parameters of blocks",
    refused="computed from shards",
    step=lambda m, b, loss: loss + 0.01 * squares(m.blocks.parameters()),
)
program(
    "an L1 penalty over named_parameters of the root",
    step=lambda m, b, loss: (
        loss + sum(p.abs().sum() for n, p in m.named_parameters() if n.startswith(("stem", "head")))
    ),
)
program("norms of gradients are logged", on_after_backward=lambda m: m.note(
    *(p.grad.norm() for p in m.parameters() if p.grad is not None)))  # fmt: skip
program("the norm of all gradients is logged", on_before_optimizer_step=lambda m, _: m.note(
    torch.stack([p.grad.norm() for p in [*m.stem.parameters(), *m.blocks.parameters()]]).norm()))  # fmt: skip
program("gradients are scaled in place", on_after_backward=lambda m: [
    p.grad.mul_(0.5) for p in m.parameters() if p.grad is not None] and None)  # fmt: skip
program("gradients are clamped", on_before_optimizer_step=lambda m, _: [
    p.grad.clamp_(-0.01, 0.01) for p in m.parameters() if p.grad is not None] and None)  # fmt: skip


def replace_gradients(m: Any, *_: Any) -> None:
    for p in m.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5 + 0.01 * p.detach()


program("gradients are replaced", on_before_optimizer_step=replace_gradients)
program(
    "some gradients are dropped",
    on_before_optimizer_step=lambda m, _: setattr(m.scale, "grad", None),
)
program(
    "gradients of a layer are zeroed",
    on_after_backward=lambda m: m.head.zero_grad(set_to_none=False),
)
program("clip_grad_norm_ of torch", on_before_optimizer_step=lambda m, _: m.note(
    nn.utils.clip_grad_norm_([*m.stem.parameters(), *m.blocks.parameters()], 0.01)))  # fmt: skip
program("clip_grad_value_ of torch", on_before_optimizer_step=lambda m, _: nn.utils.clip_grad_value_(
    [*m.stem.parameters(), *m.blocks.parameters()], 0.001))  # fmt: skip
program("clip_gradients of Lightning", configure_gradient_clipping=lambda m, o, **_: m.clip_gradients(
    o, gradient_clip_val=0.01, gradient_clip_algorithm="norm"))  # fmt: skip
program("gradients that are not finite skip a step", on_before_optimizer_step=lambda m, _: m.note(
    all(bool(p.grad.isfinite().all()) for p in m.parameters() if p.grad is not None)))  # fmt: skip
program("the largest gradient is logged", on_after_backward=lambda m: m.note(
    max(float(p.grad.abs().max()) for p in m.blocks.parameters())))  # fmt: skip
program(
    "a hook of a parameter",
    refused="has a hook",
    start=lambda m: m.scale.register_hook(lambda g: g * 2) and None,
)
program(
    "a hook of an output", step=lambda m, b, loss: (loss.register_hook(lambda g: g * 2), loss)[1]
)
program("full backward hooks of modules", start=lambda m: m.blocks[0].f.register_full_backward_hook(
    lambda _, inputs, outputs: None) and None)  # fmt: skip
program("retain_grad of an output", step=lambda m, b, loss: (loss.retain_grad(), loss)[1])
program("a detached copy of the loss", step=lambda m, b, loss: loss + loss.detach())


def train_a_part(m: Any, batch: Any, loss: Tensor) -> Tensor:
    m.own.zero_grad()
    m.head(batch["x"].expand(-1, 4, -1, -1)).square().mean().backward()
    m.own.step()
    return m.loss(batch)


def own_optimizer(m: Any) -> None:
    m.own = torch.optim.SGD(m.head.parameters(), 0.1)


def train_a_latent(m: Any, batch: Any, loss: Tensor) -> Tensor:
    latent = torch.zeros_like(batch["x"]).requires_grad_()
    m.head((batch["x"] + latent).expand(-1, 4, -1, -1)).square().sum().backward()
    return m.loss({"x": batch["x"] - 0.1 * latent.grad, "y": batch["y"]})


program("an optimizer of one's own in the step", step=train_a_part, on_train_start=own_optimizer)
program("a latent is trained by backward() in the step", step=train_a_latent)
program("torch.no_grad in the step", step=lambda m, b, loss: (
    m.note_alone(torch.no_grad()(m.loss)(b)), loss)[1],
    note_alone=lambda m, v: None)  # fmt: skip


# 4. manual optimization


def manual(training_step: Callable[..., Any]) -> dict[str, Any]:
    return {
        "start": lambda m: setattr(m, "automatic_optimization", False),
        "training_step": training_step,
    }


def by_hand(after: Callable[[Any], Any] = lambda m: None) -> Callable[..., Any]:
    def training_step(m: Any, batch: Any, batch_idx: int) -> None:
        optimizer = m.optimizers()
        optimizer.zero_grad()
        m.manual_backward(m.loss(batch))
        after(m)
        optimizer.step()

    return training_step


def dropped(m: Any, batch: Any, batch_idx: int) -> None:
    by_hand()(m, batch, batch_idx)
    m.zero_grad()


def scaled(m: Any, batch: Any, batch_idx: int) -> None:
    m.manual_backward(m.loss(batch))
    for p in trained(m):
        p.grad = p.grad * 0.5
    if batch_idx:
        m.optimizers().step()


def trained(m: Any) -> list[Any]:
    return [p for p in m.parameters() if p.requires_grad]


def note_gradients(m: Any, *_: Any) -> None:
    kept = [p.grad for p in trained(m) if p.grad is not None]
    m.note(len(kept), *(getattr(g, "full_tensor", lambda g=g: g)().norm() for g in kept))


def twice(m: Any, batch: Any, batch_idx: int) -> None:
    optimizer = m.optimizers()
    for factor in (1.0, 0.5):
        m.manual_backward(factor * m.loss(batch))
    optimizer.step()
    optimizer.zero_grad()
    m.manual_backward(m.loss({"x": batch["x"].flip(-1), "y": batch["y"]}))
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def climb(m: Any) -> None:
    for p in root(m):
        p.add_(p.grad, alpha=0.05)


@torch.no_grad()
def climb_whole(m: Any) -> None:
    for p in root(m):
        g = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        p.add_(g, alpha=0.05)


program("manual optimization", **manual(by_hand()))
program("manual optimization with three backward passes", **manual(twice))
program("manual optimization, gradients clipped", **manual(by_hand(
    lambda m: m.clip_gradients(m.optimizers(), 0.01, "norm"))))  # fmt: skip
program("manual optimization, gradients scaled", **manual(by_hand(
    lambda m: [p.grad.mul_(0.5) for p in m.parameters() if p.grad is not None])))  # fmt: skip
program(
    "manual optimization, p.grad in arithmetic",
    refused=r"full_tensor\(\)",
    **manual(by_hand(climb)),
)
program("manual optimization, p.grad.full_tensor() in arithmetic", **manual(by_hand(climb_whole)))
program("manual optimization, p.data written in the step", **manual(by_hand(
    lambda m: [p.data.mul_(0.9) for p in root(m)])))  # fmt: skip


def assigned(m: Any, batch: Any, batch_idx: int) -> None:
    optimizer, wrt = m.optimizers(), [p for p in m.parameters() if p.requires_grad]
    for p, g in zip(wrt, torch.autograd.grad(m.loss(batch), wrt, allow_unused=True), strict=True):
        p.grad = g
    optimizer.step()
    optimizer.zero_grad()


def steps_in_backward(m: Any) -> None:
    def hook(p: Tensor, optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for p in m.parameters():
        if p.requires_grad:
            own = torch.optim.SGD([p], 0.02)
            p.register_post_accumulate_grad_hook(partial(hook, optimizer=own))


def optimizer_state_by_name(m: Any, *_: Any) -> None:
    optimizer = m.optimizers().optimizer
    state = get_optimizer_state_dict(m, optimizer)
    for values in state["state"].values():
        values["momentum_buffer"].mul_(0.5)
    set_optimizer_state_dict(m, optimizer, state)


program("manual optimization, torch.autograd.grad of all parameters is assigned",
    refused="has found no gradient", per_replica=True, **manual(assigned))  # fmt: skip
program("manual optimization, each parameter steps in backward", on_fit_start=steps_in_backward,
    **manual(lambda m, batch, _: m.manual_backward(m.loss(batch))))  # fmt: skip
program("manual optimization, clip_grad_norm_ in on_before_optimizer_step", **manual(by_hand()),
    on_before_optimizer_step=lambda m, _: nn.utils.clip_grad_norm_(
        [p for p in m.parameters() if p.requires_grad], 0.01))  # fmt: skip
program("manual optimization, gradients dropped in on_before_optimizer_step", **manual(by_hand()),
    on_before_optimizer_step=lambda m, _: setattr(m.stem.weight, "grad", None))  # fmt: skip
program("manual optimization, the module drops its gradients as a step ends", **manual(dropped),
    on_train_batch_end=note_gradients)  # fmt: skip
program("manual optimization, gradients replaced as a step ends", **manual(scaled),
    on_train_batch_end=note_gradients)  # fmt: skip
program("torch's set_optimizer_state_dict in a hook", on_train_batch_end=optimizer_state_by_name)
for method, place in list(WHEN.items())[1:]:
    program(
        f"manual optimization, p.data written in {place}",
        **manual(by_hand()),
        **{method: writing(lambda m: list(m.parameters()), lambda p: p.data.mul_(0.9), method)},
    )
    program(
        f"manual optimization, p.data = value in {place}",
        **manual(by_hand()),
        **{method: writing(lambda m: list(m.parameters()), set_data, method)},
    )


def two_optimizers(m: Any) -> Any:
    return [
        torch.optim.SGD(m.stem.parameters(), 0.05),
        torch.optim.Adam(m.blocks.parameters(), 1e-3),
    ]


def in_turns(m: Any, batch: Any, batch_idx: int) -> None:
    for optimizer in m.optimizers():
        m.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        m.manual_backward(m.loss(batch))
        optimizer.step()
        m.untoggle_optimizer(optimizer)


def in_turns_of_two_batches(m: Any, batch: Any, batch_idx: int) -> None:
    """Gradients of each turn wait on their rank until the second batch."""
    ends = batch_idx % 2 == 1
    for optimizer in m.optimizers():
        with optimizer.toggle_model(sync_grad=ends):
            m.manual_backward(m.loss(batch) / 2)
            if ends:
                optimizer.step()
                optimizer.zero_grad()


def both(m: Any, batch: Any, batch_idx: int) -> None:
    """Two losses of two parts, whose gradients lie beside each other, and then two steps."""
    one, two = m.optimizers()
    hidden = m.stem(batch["x"])
    first, second = hidden.square().mean(), m.blocks(hidden.detach()).square().mean()
    one.zero_grad()
    m.manual_backward(first)
    two.zero_grad()
    m.manual_backward(second)
    m.manual_backward(m.head(batch["x"].expand(-1, 4, -1, -1)).square().mean())
    one.step()
    two.step()


def frozen_in_turns(m: Any, batch: Any, batch_idx: int) -> None:
    """A GAN's step that freezes the other part by hand."""
    for optimizer, other in zip(m.optimizers(), (m.blocks, m.stem), strict=True):
        other.requires_grad_(False)
        optimizer.zero_grad()
        m.manual_backward(m.loss(batch))
        optimizer.step()
        other.requires_grad_(True)


program("two optimizers after two losses", configure_optimizers=two_optimizers, **manual(both))
program("two optimizers, the other part frozen by hand", configure_optimizers=two_optimizers,
    **manual(frozen_in_turns))  # fmt: skip
program("two optimizers in turns", configure_optimizers=two_optimizers, **manual(in_turns))
program("two optimizers in turns, each with gradients of two batches",
    configure_optimizers=two_optimizers, **manual(in_turns_of_two_batches))  # fmt: skip
program(
    "an optimizer of a part", configure_optimizers=lambda m: torch.optim.Adam(m.blocks.parameters())
)


# 5. optimizers and schedulers

for kind in (
    "Adam",
    "AdamW",
    "Adagrad",
    "RMSprop",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adadelta",
    "ASGD",
    "Rprop",
):
    program(f"torch.optim.{kind}", configure_optimizers=lambda m, kind=kind: getattr(torch.optim, kind)(
        [p for p in m.parameters() if p.requires_grad], 1e-2))  # fmt: skip
program("torch.optim.LBFGS with a line search", refused="LBFGS|remove or reshape",
    configure_optimizers=lambda m: torch.optim.LBFGS([p for p in m.parameters() if p.requires_grad],
        1, max_iter=4, line_search_fn="strong_wolfe"))  # fmt: skip
program("torch.optim.Adam with foreach", configure_optimizers=lambda m: torch.optim.Adam(
    [p for p in m.parameters() if p.requires_grad], 1e-2, foreach=True))  # fmt: skip
program("decay by name", configure_optimizers=lambda m: torch.optim.AdamW([
    {"params": [p for n, p in m.named_parameters() if "bias" in n and p.requires_grad], "weight_decay": 0.0},
    {"params": [p for n, p in m.named_parameters() if "bias" not in n and p.requires_grad], "weight_decay": 0.1},
], 1e-2))  # fmt: skip
program("decay by the number of dims", configure_optimizers=lambda m: torch.optim.AdamW([
    {"params": [p for p in m.parameters() if p.ndim > 1 and p.requires_grad], "weight_decay": 0.1},
    {"params": [p for p in m.parameters() if p.ndim <= 1 and p.requires_grad]}], 1e-2))  # fmt: skip
program("a group is added in on_train_start", start=lambda m: m.teacher.requires_grad_(False) and None,
    on_train_start=lambda m: m.optimizers().add_param_group({"params": list(m.teacher.parameters())}))  # fmt: skip
program("learning rates are set in a hook", on_train_batch_start=lambda m, *_: [
    g.__setitem__("lr", 0.01) for g in m.optimizers().param_groups] and None)  # fmt: skip
program("a scheduler of steps", configure_optimizers=lambda m: (lambda o: {
    "optimizer": o, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.5**s),
    "interval": "step"}})(torch.optim.SGD(m.parameters(), 0.1)))  # fmt: skip
program("momentum is cleared in a hook", on_train_batch_end=lambda m, *_: [
    s["momentum_buffer"].zero_() for s in m.optimizers().state.values() if s.get("momentum_buffer") is not None]
    and None)  # fmt: skip
program("the state of the optimizer is read", on_train_batch_end=lambda m, *_: m.note(*(
    s["momentum_buffer"].norm() for s in m.optimizers().state.values() if s.get("momentum_buffer") is not None)))  # fmt: skip
program("parameters of the optimizer are written in a hook", on_train_batch_end=lambda m, *_: [
    p.data.mul_(0.9) for g in m.optimizers().param_groups for p in g["params"]] and None)  # fmt: skip
program(
    "parameters of the optimizer are written in the step",
    training_step=lambda m, b, i: (
        [torch.no_grad()(p.mul_)(0.9) for p in m.optimizers().param_groups[0]["params"]],
        m.loss(b),
    )[1],
)
program(
    "p.data of the optimizer is written in the step",
    training_step=lambda m, b, i: (
        [p.data.mul_(0.9) for p in m.optimizers().param_groups[0]["params"]],
        m.loss(b),
    )[1],
)
program(
    "p.data of the optimizer is written after the forward pass",
    step=lambda m, b, loss: (
        [p.data.mul_(0.9) for p in m.optimizers().param_groups[0]["params"] if p.ndim],
        loss,
    )[1],
)


class Sharpness(torch.optim.Optimizer):
    """Climbs along the gradient, and steps from where it came, as SAM does by hand."""

    def __init__(self, parameters: Any, way: str) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, 0.05, 0.9)
        self.param_groups, self.way = self.base.param_groups, way

    @torch.no_grad()
    def climb(self) -> None:
        held = [p for g in self.param_groups for p in g["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        self.moved = [p.grad * (0.05 / (norm + 1e-12)) for p in held]
        if self.way == "foreach":
            torch._foreach_add_(held, self.moved)
        for p, e in zip(held, self.moved, strict=True):
            if self.way != "foreach":
                (p.data if self.way == "data" else p).add_(e)
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, e in zip(
            (p for g in self.param_groups for p in g["params"]), self.moved, strict=True
        ):
            p.sub_(e)
        self.base.step()
        self.zero_grad()


def climbs(m: Any, batch: Any, i: int) -> None:
    optimizer = m.optimizers()
    m.manual_backward(m.loss(batch))
    optimizer.optimizer.climb()
    m.manual_backward(m.loss(batch))
    optimizer.step()


for way in ("p.add_", "foreach", "data"):
    program(f"SAM over optimizer.param_groups by {way}", training_step=climbs,
        start=lambda m: setattr(m, "automatic_optimization", False),
        configure_optimizers=lambda m, way=way: Sharpness(
            [p for p in m.parameters() if p.requires_grad and p.ndim], way))  # fmt: skip


# 6. numbers of parameters, buffers, metrics, outputs

program(
    "numel of all parameters",
    on_train_start=lambda m: m.note(sum(p.numel() for p in m.parameters())),
)
program("numel of all parameters in the step", step=lambda m, b, loss: (
    m.note(sum(p.numel() for p in m.parameters())), loss)[1])  # fmt: skip
program(
    "shapes of parameters",
    on_train_start=lambda m: m.note(*(n for p in m.parameters() for n in p.shape)),
)
program(
    "the mean of each parameter",
    on_train_batch_end=lambda m, *_: m.note(*(p.mean() for p in m.parameters())),
)
program(
    "the standard deviation of a weight",
    on_train_batch_end=lambda m, *_: m.note(m.blocks[0].f.weight.std()),
)
program(
    "the largest weight",
    on_train_batch_end=lambda m, *_: m.note(*(p.max() for p in m.blocks.parameters())),
)
program(
    "one element of a weight",
    refused="",
    on_train_batch_end=lambda m, *_: m.note(m.stem.weight[0, 0, 0, 0]),
)
program("weights within whole_parameters", on_train_batch_end=lambda m, *_: within(
    m, lambda: m.note(*(w for p in m.parameters() for w in p.flatten().tolist()))))  # fmt: skip
program("state_dict of the module is summed", on_train_batch_end=lambda m, *_: m.note(
    *(v.double().sum() for v in m.state_dict().values())))  # fmt: skip
program(
    "FLOPs are counted in the step",
    refused="FlopCounterMode",
    step=lambda m, b, loss: (counted(m, b), loss)[1],
)


def counted(m: Any, batch: Any) -> None:
    with FlopCounterMode(display=False) as counter:
        m.loss(batch)
    m.note(counter.get_total_flops())


program("a buffer of statistics, in place", step=lambda m, b, loss: (
    m.mean.mul_(0.9).add_(0.1 * m.stem(b["x"]).detach().mean((0, 2, 3))), loss)[1], per_replica=True)  # fmt: skip
program("a buffer of statistics, set", step=lambda m, b, loss: (
    setattr(m, "mean", 0.9 * m.mean + 0.1 * m.stem(b["x"]).detach().mean((0, 2, 3))), loss)[1],
    per_replica=True)  # fmt: skip
program(
    "a buffer is written in a hook", on_train_batch_end=lambda m, *_: (m.mean.add_(1.0), None)[1]
)
program(
    "a buffer in the loss",
    step=lambda m, b, loss: (m.mean.add_(0.1), loss + m.mean.sum() * m.scale.sum())[1],
)
program("batch norm", start=lambda m: setattr(m, "norm", nn.BatchNorm2d(4)), step=lambda m, b, loss: (
    loss + m.norm(m.stem(b["x"])).square().mean()), per_replica=True)  # fmt: skip
program("spectral norm", start=lambda m: setattr(m, "extra", nn.utils.parametrizations.spectral_norm(
    nn.Conv2d(1, 2, 3, padding=1))), step=lambda m, b, loss: loss + m.extra(b["x"]).square().mean())  # fmt: skip
program("weight norm", start=lambda m: setattr(m, "extra", nn.utils.parametrizations.weight_norm(
    nn.Conv2d(1, 2, 3, padding=1))), step=lambda m, b, loss: loss + m.extra(b["x"]).square().mean())  # fmt: skip
program("weight norm of before", start=lambda m: setattr(m, "extra", nn.utils.weight_norm(
    nn.Conv2d(1, 2, 3, padding=1))), step=lambda m, b, loss: loss + m.extra(b["x"]).square().mean())  # fmt: skip
program("a parametrisation of one's own", start=lambda m: nn.utils.parametrize.register_parametrization(
    m.head, "weight", nn.Tanh()) and None)  # fmt: skip
program("channels_last", start=lambda m: m.to(memory_format=torch.channels_last) and None)
program("a transposed parameter", start=lambda m: setattr(m, "turned", nn.Parameter(torch.ones(2, 4).t())),
    step=lambda m, b, loss: loss + (m.turned[:, 0] * m.stem(b["x"]).mean((0, 2, 3))).sum())  # fmt: skip
program("an expanded parameter", start=lambda m: setattr(m, "wide", nn.Parameter(torch.ones(1, 4).expand(3, 4).clone())),
    step=lambda m, b, loss: loss + (m.wide.mean(0) * m.stem(b["x"]).mean((0, 2, 3))).sum())  # fmt: skip
program("a metric of means", start=lambda m: setattr(m, "metric", torchmetrics.MeanSquaredError(sync_on_compute=False)),
    step=lambda m, b, loss: (m.metric.update(m(b["x"]).detach(), b["y"]), loss)[1],
    on_train_epoch_end=lambda m: m.note(m.metric.compute()), per_replica=True)  # fmt: skip
program("a step returns a dict with a detached output", step=lambda m, b, loss: {
    "loss": loss, "pred": m(b["x"]).detach()})  # fmt: skip
program(
    "a step returns an output with its graph",
    step=lambda m, b, loss: {"loss": loss, "pred": m(b["x"])},
)
program(
    "a step returns a list of outputs",
    step=lambda m, b, loss: {"loss": loss, "all": [m(b["x"]), {"a": b["x"]}]},
)
program("a step returns a view", step=lambda m, b, loss: loss.reshape(1)[0])
program("outputs are kept over the epoch", start=lambda m: setattr(m, "outs", []), step=lambda m, b, loss: (
    m.outs.append(m(b["x"]).detach()), loss)[1], on_train_epoch_end=lambda m: m.outs.clear())  # fmt: skip
program("the loss is logged as a number", step=lambda m, b, loss: (float(loss), loss)[1])
program(
    "the module is called twice", step=lambda m, b, loss: loss + m(b["x"].flip(-1)).square().mean()
)
program(
    "a part is called alone",
    step=lambda m, b, loss: loss + m.blocks(m.stem(b["x"])).square().mean(),
)
program(
    "a block is called alone",
    step=lambda m, b, loss: loss + m.blocks[1](m.stem(b["x"])).square().mean(),
)
program("a conv of a block is called past it", step=lambda m, b, loss: (
    loss + m.blocks[0].f(m.stem(b["x"])).square().mean()))  # fmt: skip
program(
    "blocks in another order",
    step=lambda m, b, loss: loss + m.blocks[0](m.blocks[1](m.stem(b["x"]))).mean(),
)
program("a block is left out of some steps", step=lambda m, b, loss: loss
    + (m.blocks[0] if m.batch_idx % 2 else m.blocks[1])(m.stem(b["x"])).square().mean())  # fmt: skip
program("dropped blocks (stochastic depth)", loss=lambda m, b: (
    m.head(m.blocks[0](m.stem(b["x"]) * m.scale)) - b["y"]).square().mean())  # fmt: skip
program("the module runs on a constant in a hook", on_train_batch_end=lambda m, *_: m.note(
    torch.no_grad()(m)(torch.ones(1, 1, 9, 7, dtype=DTYPE)).sum()))  # fmt: skip
program("a block runs on a constant in a hook", on_train_epoch_end=lambda m: m.note(
    torch.no_grad()(m.blocks[0])(torch.ones(1, 4, 9, 7, dtype=DTYPE)).sum()))  # fmt: skip
program("a layer runs on a constant in a hook", refused="got mixed", on_train_epoch_end=lambda m: m.note(
    torch.no_grad()(m.stem)(torch.ones(1, 1, 9, 7, dtype=DTYPE)).sum()))  # fmt: skip
program("eval and train in a hook", on_train_batch_end=lambda m, *_: m.eval().train() and None)
program("apply resets weights in on_fit_start", on_fit_start=lambda m: m.apply(
    lambda part: nn.init.constant_(part.weight, 0.02) if isinstance(part, nn.Conv2d) else None) and None)  # fmt: skip
program(
    "weights are averaged over two layers in a hook",
    on_train_batch_end=lambda m, *_: average_layers(m),
)


@torch.no_grad()
def average_layers(m: Any) -> None:
    a, b = m.blocks[0].f.weight, m.blocks[1].f.weight
    mean = (a + b) / 2
    a.copy_(mean)
    b.copy_(mean)


program("log of a scalar parameter", step=lambda m, b, loss: loss * torch.exp(-m.offset) + m.offset)
program(
    "a temperature without dims is clamped",
    step=lambda m, b, loss: (m.offset.data.clamp_(-0.01, 0.01), loss)[1],
)
program(
    "a parameter without dims is written in a hook",
    on_train_batch_end=lambda m, *_: m.offset.data.fill_(0.1) and None,
)
program(
    "math on a number of a parameter",
    step=lambda m, b, loss: loss * math.exp(float(m.scale.mean())),
)

# values of split tensors on their way to a logger


def logged(hook: str, read: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Methods that read values of the last field in a hook, which may not write into them."""
    return {
        "step": lambda m, b, loss: (setattr(m, "last", (m(b["x"]) - b["y"]).detach()), loss)[1],
        hook: lambda m, *_: m.note(*np.ravel(read(m.last))[:90]),
    }


def drawn(x: Tensor) -> Any:
    """The pixels of a figure of the first sample."""
    figure = Figure(figsize=(2, 2), dpi=40)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(x[0, 0].cpu())
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return np.asarray(PIL.Image.open(file)).mean((0, 1))


def saved(x: Tensor) -> Any:
    file = io.BytesIO()
    save_image(x, file, format="png")
    return np.asarray(PIL.Image.open(file)).mean((0, 1))


class Pictures(Callback):
    """As loggers do that take pictures."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.note(np.asarray(pl_module.last.cpu()).std())


def not_writable(x: Tensor) -> Any:
    array = x.numpy()
    if isinstance(x, DomainTensor):
        with pytest.raises(ValueError, match="read-only"):
            array -= array.min()
    return array


for name, hook, read in (
    ("numpy()", "on_train_batch_end", lambda x: x.cpu().numpy()),
    ("tolist()", "on_train_epoch_end", lambda x: x.mean((0, 1)).tolist()),
    ("np.asarray", "on_after_backward", np.asarray),
    ("a figure of matplotlib", "on_train_epoch_end", drawn),
    (
        "to_pil_image",
        "on_train_batch_end",
        lambda x: np.asarray(to_pil_image(x[0].float().sigmoid())),
    ),
    ("save_image", "on_train_epoch_end", saved),
    ("an array that is written", "on_before_zero_grad", not_writable),
):
    program(f"{name} of a split field in {hook}", per_replica=True, **logged(hook, read))
program("an array of a split field in a callback", per_replica=True, **logged("unused", len)
    | {"configure_callbacks": lambda m: [Pictures()]})  # fmt: skip
program("numpy() of a split field in the step", refused="cannot run Tensor.numpy",
    step=lambda m, b, loss: (b["x"].numpy(), loss)[1])  # fmt: skip


REFUSED |= {name: words for words, names in REFUSED_OF_SHARDS.items() for name in names}
assert REFUSED.keys() <= PROGRAMS.keys(), REFUSED.keys() - PROGRAMS.keys()
# split fields are the reason, not parameters
ALWAYS_REFUSED = {"FLOPs are counted in the step", "numpy() of a split field in the step"}


THEMES = {
    "Parameters that are remembered since `__init__`": "a list made in __init__, in the loss",
    "Writes into parameters": "p.data = value of the root in the step",
    "Gradients": "a penalty on gradients of parameters",
    "Manual optimization": "manual optimization",
    "Optimizers and schedulers": "torch.optim.Adam",
    "Numbers, buffers, metrics, outputs, hooks": "numel of all parameters",
    "Values of split fields on their way to a logger": "numpy() of a split field in on_train_batch_end",
}


def page() -> str:
    """The table of docs/programs.md."""
    names = list(PROGRAMS)
    firsts = {first: theme for theme, first in THEMES.items()}
    lines = [
        "# What programs may do",
        "",
        f"Each of these {len(names)} programs does one thing to parameters, gradients, buffers, "
        "optimizers, metrics or hooks. The same module is",
        "trained in one process and on meshes of 1 x 2, 2 x 1 and 2 x 2 data replicas and domain "
        "ranks, in float64. Weights and the numbers that the",
        "program reads are compared. This is done with whole parameters "
        '(`sharding="none"`), and with shards of FSDP2 (`"full"`). `"auto"` takes whole',
        "parameters where they are small beside the device. Some parameters lie in blocks, which "
        "FSDP2 gathers when they run, others in the root,",
        "which is whole in a step.",
        "",
        "- **equal**: as in one process.",
        "- **equal by replica**: as in one process, of the samples of each data replica, as under DDP.",
        "- **refused**: all ranks end with one sentence. Where shards are the reason it names "
        '`sharding="none"`.',
        "",
        "The programs are in `tests/trainer/programs.py`. `python -m tests.trainer.programs` writes "
        "this page.",
    ]
    for name in names:
        if name in firsts:
            head = "| program | whole parameters | shards |"
            lines += ["", f"## {firsts[name]}", "", head, "| --- | --- | --- |"]
        equal = "equal by replica" if name in PER_REPLICA else "equal"
        whole = "refused" if name in ALWAYS_REFUSED else equal
        shards = "refused" if name in REFUSED else equal
        lines.append(
            f"| {name.replace('_', chr(92) + '_').replace('*', chr(92) + '*')} | {whole} | {shards} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
