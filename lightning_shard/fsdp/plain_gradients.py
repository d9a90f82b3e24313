"""Averages gradients of parameters that every rank keeps whole, while backward still computes.

In sharding "none" these are all parameters; in the other modes those that FSDP2 leaves alone.
Gradients leave in buckets, the last layers' first, in one order on all ranks. A bucket leaves once
all its parameters have their gradients, so it travels while backward goes on; what is left leaves
when backward ends.

What travels is `.grad` itself, with all that earlier backward passes have added to it. A part of it
that was averaged before is equal on all ranks, so another mean leaves it as it is. A parameter that
a rank has not used counts as zeros there; one that no rank has used keeps no gradient.
"""

import weakref
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.domain.comm import all_mean
from lightning_shard.domain.half import HALF
from lightning_shard.domain.wire import wait_for
from lightning_shard.fsdp.same_blocks import LOOKED_AT, SameBlocks
from lightning_shard.fsdp.sparse_gradients import may_be_sparse, mean_of_sparse
from lightning_shard.fsdp.unreduced import Unreduced
from lightning_shard.processes.errors_together import copy_from_first
from lightning_shard.processes.torch_private.internals import (
    after_backward,
    backward_pass,
    hooks_of,
)

BUCKET_BYTES = 25 * 2**20  # as in DDP: large enough for the link, small enough to leave early
IN_FLIGHT = 2  # buckets; each is a copy of its gradients


class _Bucket:
    """Parameters of one dtype whose gradients travel together.

    Attributes:
        trained: The parameters whose gradients travel.
        waits_for: The parameters whose gradients this backward pass has not made yet.
        flat: The gradients on their way, with a number for each that says whether it is there.
        is_late: True if a parameter got more after the bucket had left.
    """

    def __init__(self, number: int, parameters: Sequence[nn.Parameter]) -> None:
        self.number, self.parameters = number, parameters
        self.begin()

    def begin(self) -> None:
        # a parameter with hooks that look at the mean has got it already, and they may take it away
        self.trained = [p for p in self.parameters if p.requires_grad and len(hooks_of(p)[1]) < 2]
        self.waits_for = {*self.trained}
        self.flat: Tensor | None = None
        self.work: Any = None
        self.is_late = False

    @property
    def is_ready(self) -> bool:
        return not self.waits_for and not self._keep_graph()

    def _keep_graph(self) -> bool:
        return any(p.grad is not None and p.grad.requires_grad for p in self.trained)

    @torch.no_grad()
    def leave(self, group: dist.ProcessGroup) -> None:
        """Begin the sum over the ranks."""
        self.is_late = False
        if not self.trained:
            return
        for p in self.trained:
            if p.grad is not None and p.grad.is_conj():  # a mean could not be written into it
                p.grad = p.grad.resolve_conj()
        grads = [_real(torch.zeros_like(p) if p.grad is None else p.grad) for p in self.trained]
        is_there = grads[0].new_ones(len(grads))
        for i, p in enumerate(self.trained):
            if p.grad is None:
                is_there[i] = 0
        self.flat = torch.cat([*(g.reshape(-1) for g in grads), is_there])
        if self.flat.dtype in HALF:  # the sum may not fit, though the mean does
            self.flat /= dist.get_world_size(group)
        self.work = begin_sum(self.flat, group)

    @torch.no_grad()
    def arrive(self, group: dist.ProcessGroup) -> None:
        """Wait for the sum, and put the mean into the gradients."""
        assert self.flat is not None
        wait_for(self.work)
        ranks = 1 if self.flat.dtype in HALF else dist.get_world_size(group)
        sizes = [_real(p).numel() for p in self.trained]
        *sums, is_there = self.flat.split_with_sizes([*sizes, len(sizes)])
        has = None  # reading it waits for the device
        for i, (p, total) in enumerate(zip(self.trained, sums, strict=True)):
            if p.grad is None:
                has = has_gradient(is_there, self.trained) if has is None else has
                if not has[i]:
                    continue
                p.grad = torch.zeros_like(p)
            _real(p.grad).copy_((total / ranks).view_as(_real(p)))
        self.flat = self.work = None

    def average_with_graph(self, group: dist.ProcessGroup) -> None:
        """Average gradients that can be differentiated again (`create_graph=True`)."""
        device = self.trained[0].device
        has = torch.tensor(
            [p.grad is not None for p in self.trained], dtype=torch.int32, device=device
        )
        dist.all_reduce(has, group=group)
        with torch.enable_grad():
            for p, is_there in zip(self.trained, has.tolist(), strict=True):
                if is_there:
                    p.grad = _mean(torch.zeros_like(p) if p.grad is None else p.grad, group)

    def finish(self, group: dist.ProcessGroup) -> None:
        """Average whatever is not averaged yet."""
        if not self.trained:
            return
        if self._keep_graph():
            self.average_with_graph(group)
            return
        if self.is_late and self.work is not None:
            wait_for(self.work)
        if self.flat is None or self.is_late:
            self.leave(group)
        self.arrive(group)


def _may_have_gradients(p: Tensor) -> bool:
    """Return False for integers and masks, of which torch takes no hooks."""
    return p.is_floating_point() or p.is_complex()


class PlainGradients:
    """Averages over the ranks of `group` in each backward pass, unless `enabled` is False.

    A hook that looks at the gradient of a parameter (`register_hook`,
    `register_post_accumulate_grad_hook`) is given the mean, in every backward pass.

    Attributes:
        unreduced: The parameters whose gradients are left on each rank.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        order: SameBlocks | None = None,
        sparse: Iterable[Tensor] = (),
        module: nn.Module | None = None,
    ) -> None:
        """Follow parameters.

        Args:
            parameters: Parameters that are whole, and equal, on each rank.
            group: The ranks that average.
            order: The common order of what the ranks do; a rank that differs is named.
            sparse: Parameters whose gradients may be sparse, as of `nn.Embedding(sparse=True)`.
            module: The module whose parameters are all followed, also those that come later.
        """
        self.group, self.enabled = group, True
        self.unreduced = Unreduced()
        self._module = None if module is None else weakref.ref(module)
        self._order = order
        self._backward = -1
        self._has_begun = self._has_averaged = False
        self._handles: list[Any] = []
        self._averaged: dict[nn.Parameter, Any] = {}  # a weak reference to the mean
        self.watches_assigned = False
        self.parameters: list[nn.Parameter] = []
        self._sparse: set[Tensor] = {*sparse}
        self.follow(parameters)

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average these, too."""
        for p in parameters:
            self.parameters.append(p)
            self._hook(len(self.parameters) - 1)
        dense = [p for p in reversed(self.parameters) if p not in self._sparse]
        self._buckets = [_Bucket(i, each) for i, each in enumerate(_in_buckets(dense))]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._next = 0

    def _hook(self, number: int) -> None:
        p = self.parameters[number]
        if not _may_have_gradients(p):
            return
        wanted = p.requires_grad
        p.requires_grad_()  # torch takes hooks of frozen parameters when they are not
        self._handles += [
            p.register_hook(partial(self._seen_by_hooks, number)),
            p.register_post_accumulate_grad_hook(self._accumulated),
        ]
        p.requires_grad_(wanted)
        for hooks in hooks_of(p):  # ours come before those that look at the mean
            *others, own = hooks.items()
            hooks.clear()
            hooks.update([own, *others])

    def take_new(self) -> None:
        """Follow parameters that are new since the last step, with the values of the first rank.

        A parameter is new, too, once `torch.utils.swap_tensors` has put another in its place.
        """
        module = None if self._module is None else self._module()
        parameters = () if module is None else module.parameters()
        numbers = {p: i for i, p in enumerate(self.parameters)}
        new = [
            p for p in parameters
            if p not in numbers or (_may_have_gradients(p) and not any(hooks_of(p)))
        ]  # fmt: skip
        if not new:
            return
        if self._order is not None:
            self._order.comes_to(f"has {len(new)} new parameters")
        for p in new:
            copy_from_first(p, self.group)
            if p in numbers:
                self._hook(numbers[p])
        self.follow(p for p in new if p not in numbers)

    def close(self) -> None:
        """Leave the parameters, and what `until_closed` was given, alone from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def until_closed(self, *handles: Any) -> None:
        """Remove these handles of hooks, too, when this is closed."""
        self._handles += handles

    @contextmanager
    def one_backward(self) -> Generator[None]:
        """Average in a backward pass inside, also where it makes no gradient on this rank."""
        if not self.enabled:
            yield
            return
        self._has_averaged = False
        yield
        if not self._has_averaged:
            self._begin("waits for the others' gradients: its loss reaches no parameter")
            self._finish()

    def average_assigned(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average gradients that no backward pass has made, as of `p.grad = value`."""
        for p in parameters:
            last = self._averaged.get(p)
            if p in self._bucket_of and p.grad is not None and (not last or last() is not p.grad):
                p.grad = _mean(p.grad, self.group)

    def _seen_by_hooks(self, number: int, gradient: Tensor) -> Tensor | None:
        """Give the mean to hooks of a parameter, which come after this one."""
        if len(hooks_of(self.parameters[number])[0]) == 1:
            return None
        return self._mean_for_hooks(gradient)

    def _mean_for_hooks(self, gradient: Tensor) -> Tensor:
        self._comes_to(LOOKED_AT)
        return _mean(gradient, self.group)

    def _comes_to(self, event: str, words: str = "") -> None:
        """Compare with the other ranks what this one does in its backward pass."""
        if self._order is not None:
            self._order.comes_to(event, words, in_backward=True)

    def _accumulated(self, p: Tensor) -> None:
        assert isinstance(p, nn.Parameter)
        has_mean = len(hooks_of(p)[1]) > 1
        if has_mean and p.grad is not None:
            p.grad = self._mean_for_hooks(p.grad)
        if not self.enabled:
            if not has_mean:
                self.unreduced.note(p)
            return
        if not self._has_begun or self._backward != backward_pass():
            self._begin()
            after_backward(self._finish)
        bucket = self._bucket_of.get(p)
        if bucket is None:
            return
        bucket.waits_for.discard(p)
        bucket.is_late = bucket.is_late or bucket.number < self._next
        while self._next < len(self._buckets) and self._buckets[self._next].is_ready:
            self._buckets[self._next].leave(self.group)
            self._next += 1
            if self._next > IN_FLIGHT:
                before = self._buckets[self._next - 1 - IN_FLIGHT]
                if not before.is_late and before.flat is not None:
                    before.arrive(self.group)

    def _begin(self, words: str = "") -> None:
        self.take_new()
        for bucket in self._buckets:
            if bucket.work is not None:  # an error has ended the pass before this one
                wait_for(bucket.work)
            bucket.begin()
        self._has_begun, self._next, self._backward = True, 0, backward_pass()
        if self._order is not None:
            self._comes_to(
                f"averages the gradients of {_which_are_trained(self.parameters)}", words
            )

    def _finish(self) -> None:
        for i, bucket in enumerate(self._buckets):
            if i >= self._next or bucket.is_late or bucket.flat is not None:
                bucket.finish(self.group)
        for p in self.parameters:
            if p in self._sparse and p.requires_grad:
                p.grad = mean_of_sparse(p, self.group)
        self._has_begun, self._has_averaged = False, True
        self.unreduced.forget()
        if self.watches_assigned:
            grads = ((p, p.grad) for p in self.parameters)
            self._averaged = {p: weakref.ref(g) for p, g in grads if g is not None}


def begin_sum(flat: Tensor, group: dist.ProcessGroup) -> Any:
    """Begin to add `flat` up over the ranks, in place; a prediction counts it as of parameters."""
    return dist.all_reduce(flat, group=group, async_op=True)


def has_gradient(is_there: Tensor, trained: list[nn.Parameter]) -> list[bool]:
    """Return of each parameter whether any rank has its gradient; a prediction asks this rank."""
    return [count > 0 for count in is_there.tolist()]


def _which_are_trained(parameters: Sequence[nn.Parameter]) -> str:
    """Word how many parameters are trained; a checksum tells which, where some are frozen."""
    trained = [p.requires_grad for p in parameters]
    which = "" if all(trained) else f" (checksum {zlib.crc32(bytes(trained)):08x} of which)"
    return f"{sum(trained)} parameters{which}"


def _mean(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    return all_mean(gradient, dist.get_world_size(group), group)


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _in_buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Give parameters of one dtype and device, together not much more than `BUCKET_BYTES`."""
    by_kind: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        by_kind.setdefault((p.dtype.to_real(), p.device), []).append(p)
    for alike in by_kind.values():
        bucket: list[nn.Parameter] = []
        size = 0
        for p in alike:
            bucket.append(p)
            size += p.numel() * p.element_size()
            if size >= BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


# by module; not an attribute of it, which a copy of the module would take over
_followed: weakref.WeakKeyDictionary[nn.Module, PlainGradients] = weakref.WeakKeyDictionary()


def average_plain_gradients(
    module: nn.Module,
    parameters: Iterable[nn.Parameter],
    group: dist.ProcessGroup,
    order: SameBlocks | None = None,
    *,
    all_of_module: bool = False,
) -> PlainGradients:
    """Average the gradients of `parameters` of `module` over the ranks of `group`, from now on."""
    leave_plain_gradients(module)
    followed = PlainGradients(
        parameters, group, order=order, sparse={*may_be_sparse(module)},
        module=module if all_of_module else None,
    )  # fmt: skip
    _followed[module] = followed
    return followed


def plain_gradients_of(module: nn.Module) -> PlainGradients | None:
    """Return what averages gradients of `module`; None if nothing does."""
    return _followed.get(module)


def leave_plain_gradients(module: nn.Module) -> None:
    """Average the gradients of `module` no more."""
    if (before := _followed.pop(module, None)) is not None:
        before.close()
