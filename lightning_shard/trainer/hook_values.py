"""Hands out whole values of split tensors in hooks and evaluation: arrays, lists and pictures.

A logger draws what lies on all ranks. So `x.numpy()`, `x.tolist()` and what calls them gather
there, on all ranks of a domain. In training steps they are refused: an array has no gradient.

Lightning gives the object that draws, `logger.experiment`, to the first rank alone, and an object
that does nothing to the others. So what a program gives to either of them is gathered on the way,
in every hook and step, and so are the arguments of `logger.log_image` and its like.
"""

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_shard.data.tree import map_leaves
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.domain.wire import BEFORE_EXCHANGE
from lightning_shard.fsdp.rank_barrier import wait_for_ranks
from lightning_shard.fsdp.refuse_shards import BEFORE_SHARD_EXCHANGE
from lightning_shard.fsdp.same_blocks import order_of
from lightning_shard.lightning import DummyLogger, LightningModule, rank_zero_warn
from lightning_shard.ops.elementwise.show import MAY_READ_VALUES
from lightning_shard.tensor.placement import gather
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.trainer.host import hook_of

_EVALUATION = ("validation_step", "test_step", "predict_step")
# run for each batch, on all ranks
_OF_BATCHES = ("on_before_batch_transfer", "on_after_batch_transfer")
_giving: set[Callable[..., Any]] = set()  # functions and classes that give what is whole
PROCESS_STATE = {"_giving": _giving}


class HookValues:
    """Lets hooks of one run read values, and counts the bytes that were gathered.

    Attributes:
        reads: The reads in each hook.
        gathered_bytes: The bytes that each rank has gathered in each hook.
    """

    def __init__(self, module: LightningModule) -> None:
        """Begin to count."""
        self._module = module
        self.reads: Counter[str] = Counter()
        self.gathered_bytes: Counter[str] = Counter()

    def begin(self, until_end: ExitStack) -> None:
        """Take part, until the stage ends, in what reads values and exchanges rows and shards."""
        waits = self.wait_in_hooks, self.wait_for_shards
        variables: Any = (MAY_READ_VALUES, BEFORE_EXCHANGE, BEFORE_SHARD_EXCHANGE)
        for variable, value in zip(variables, (self, *waits), strict=True):
            until_end.callback(variable.set, variable.get())  # perhaps in a thread
            variable.set(value)

    @property
    def _hook(self) -> str:
        """The hook or step that runs, as Lightning names it; "" for none."""
        return hook_of(self._module)

    def __call__(self, x: Subdomain) -> bool:
        """Return True in a hook, once all ranks of the domain have come to read the tensor."""
        hook = self._hook
        if not (hook.startswith("on_") or hook in _EVALUATION):
            return False
        self._read(x, hook, f"reads the values of {{}} in {hook}, as numpy() does", "")
        return True

    def for_logger(self, x: Any, method: str, names: str) -> Any:
        """Return the whole of a split tensor or of a shard; other arguments as they are.

        Args:
            x: An argument of the method.
            method: The method of a logger that all ranks call.
            names: The texts among its arguments, by which ranks tell tensors of one shape apart.
        """
        if not isinstance(x, DomainTensor | DTensor):
            return x
        hook = self._hook or "the step"
        part = x.subdomain if isinstance(x, DomainTensor) else x
        called = f" as {names}" if names else ""
        does = f"gives {{}}{called} to the logger's {method}() in {hook}"
        self._read(part, hook, does, method + called)
        with torch.no_grad():
            return x.full_tensor() if isinstance(x, DTensor) else gather(x)

    def _read(self, x: Subdomain | DTensor, hook: str, does: str, place: str) -> None:
        """Wait until all ranks have come to read a tensor, and count its bytes."""
        if isinstance(x, DTensor):
            ranks, kind = x.device_mesh.mesh.flatten().tolist(), "sharded"
        else:
            axes = tuple(range(x.domain.mesh.ndim))
            ranks, kind = dist.get_process_group_ranks(x.domain.group(axes)), "split"
        dtype = x.dtype if isinstance(x, DTensor) else x.local.dtype
        wait_for_ranks(
            tuple(ranks),
            f"values {hook} {place} {dtype} {tuple(x.shape)}",
            does.replace("{}", f"a {kind} tensor of shape {tuple(x.shape)}", 1),
            "all ranks must read them, since each holds a part; draw or log the array on one "
            "rank, and leave numpy() and the logger's call out of rank_zero_only",
        )
        size = math.prod(x.shape) * dtype.itemsize
        if not self.reads[hook]:
            rank_zero_warn(
                f"{hook} reads the values of a {kind} tensor, as numpy() and loggers do; it is "
                f"gathered, {size:,} bytes on every rank. The run's report counts all such bytes."
            )
        self.reads[hook] += 1
        self.gathered_bytes[hook] += size

    def wait_in_hooks(self, group: dist.ProcessGroup) -> None:
        """Let the ranks of a group meet before they exchange rows in a hook: one may be alone."""
        hook = self._hook
        if hook.startswith("on_") and hook not in _OF_BATCHES:
            wait_for_ranks(
                tuple(dist.get_process_group_ranks(group)),
                f"rows {hook}",
                f"uses a split tensor in {hook}, as x.mean() and lightning_shard.gather(x) do",
                "all ranks must do so, since each holds a part; print or log the result on one "
                "rank, and leave the split tensor out of rank_zero_only",
            )

    def wait_for_shards(self, ranks: tuple[int, ...]) -> None:
        """Let ranks notice in seconds that one exchanges shards alone in a hook."""
        hook = self._hook
        if hook.startswith("on_") and (order := order_of(ranks)) is not None:
            order.comes_to(
                f"reads a sharded parameter in {hook}, as p.full_tensor() and p.norm() do"
            )

    def __str__(self) -> str:
        return ", ".join(
            f"{hook}: {n} times, {self.gathered_bytes[hook]:,} bytes on every rank"
            for hook, n in self.reads.items()
        )


def give_whole_to(loggers: Sequence[Any]) -> None:
    """Let the methods of loggers and of their experiments take split tensors, on all ranks.

    Args:
        loggers: The loggers of a Trainer. The property `experiment` of their classes, their methods
            `log_...` and the experiments' public methods are replaced, once for each class.
            Nothing is replaced of the one that Lightning gives to a fast run: it writes nothing.
    """
    for kind in {type(logger) for logger in loggers} - {DummyLogger}:
        _take_whole(kind, "log_")
        made = inspect.getattr_static(kind, "experiment", None)
        if isinstance(made, property) and made.fget and made.fget not in _giving:
            getter = _whole_experiment(made.fget)
            _giving.add(getter)
            setattr(kind, "experiment", property(getter, made.fset, made.fdel))  # noqa: B010


def _whole_experiment(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(make)
    def experiment(logger: Any) -> Any:
        made = make(logger)
        if isinstance(made, type(DummyLogger().experiment)):  # the first rank has the real one
            return _Joins()
        if type(made) not in _giving:
            _giving.add(type(made))
            _take_whole(type(made), "")
        return made

    return experiment


def _take_whole(kind: type, prefix: str) -> None:
    """Let the public methods of a class whose names begin with `prefix` take whole tensors."""
    for name in dir(kind):
        method = inspect.getattr_static(kind, name, None)
        is_public = name.startswith(prefix) and name[0] != "_" and inspect.isfunction(method)
        if is_public and method not in _giving:
            given_whole = _given_whole(method, name)
            _giving.add(given_whole)
            setattr(kind, name, given_whole)


def _given_whole(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        reads = MAY_READ_VALUES.get()
        if isinstance(reads, HookValues):
            names = ", ".join(repr(x) for x in (*args, *kwargs.values()) if isinstance(x, str))
            args, kwargs = map_leaves(lambda x: reads.for_logger(x, name, names), (args, kwargs))
        return method(self, *args, **kwargs)

    return call


class _Joins:
    """Stands for the experiment on the other ranks: takes part in what the first rank reads."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return functools.partial(_given_whole(lambda *_, **__: None, name), self)

    def __getitem__(self, _: Any) -> "_Joins":
        return self

    def __setitem__(self, _: Any, value: Any) -> None:
        return None
