"""An operation on tiles: one node of the caller's graph, and a small graph of each tile within.

A rule runs for each tile on tensors that hang on roots of their own. The caller's graph has one
node for all of it. Its backward pass differentiates the small graphs, tile by tile, as the rules'
adjoints say. So hooks, leaves, checkpoints and `torch.autograd.grad` of the caller see fields and
plain tensors, each once, with the gradients of one process.

What several tiles return becomes one tensor in one of three ways. The parts of a field stay parts.
A plain tensor is equal on all tiles; each of them is given an equal share of its gradient, for the
adjoints add them up (domain/comm.py). The gradients of a plain tensor are added up as tiles come.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from lightning_shard.domain.align import own_part
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.domain.half import HALF
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.strides import of_copy
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.processes.errors import StuckError
from lightning_shard.processes.torch_private.internals import in_transform, without_rules
from lightning_shard.tensor.met import SplitInTransform
from lightning_shard.tensor.part import Part
from lightning_shard.tiles.crew import TurnsNeededError
from lightning_shard.tiles.places import SEED, Begin, BeginHalf, Output, Place, Record, Root
from lightning_shard.tiles.small_graphs import Total, at_once, in_turn
from lightning_shard.tiles.tile_tensor import Tiles, TileTensor

T = TypeVar("T")
Compute = Callable[[int, list[Any]], Any]


class _Operation(Function):
    """The node of an operation in the caller's graph."""

    @staticmethod
    def forward(ctx: Any, record: Record, outputs: list[Tensor], writes: int, *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        if writes >= 0:
            ctx.mark_dirty(inputs[writes])
        held: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
        held.record = record  # autograd frees it as it frees what other nodes have saved
        ctx.save_for_backward(held)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if in_transform():
            raise SplitInTransform
        record = getattr(ctx.saved_tensors[0], "record", None)
        if record is None:
            raise RuntimeError(
                "saved_tensors_hooks that copy what is saved do not reach what tiles save; leave "
                "them out: tiles move their tensors themselves (tile_memory)."
            )
        return None, None, None, *_gradients(record, grads), *[None] * record.extra


class _Unread(Function):
    """The node of a spectrum that nobody has computed, which only a foreign Function goes on from.

    Without it torch would see no input that requires a gradient, and record nothing.
    """

    @staticmethod
    def forward(ctx: Any, spectra: list[Tensor], *_: Any) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(spectra)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise UnsupportedOperationError(
            "an autograd.Function was applied to a spectrum in tiles that nobody has computed, and "
            "has its gradient; apply it to spectrum.clone()"
        )


def mark_unread(spectrum: TileTensor) -> None:
    """Let torch see that a spectrum with roots requires a gradient."""
    if spectrum.roots and not spectrum.has_gradient:
        with torch.enable_grad(), without_rules():
            _Unread.apply([spectrum], *[root.input for root in spectrum.roots])


class Call:
    """Runs an operation on tiles.

    Args:
        tiles: The tiles.
        inputs: Fields and plain tensors, in the order in which `compute` is given their parts.
        records: True if gradients are wanted.
        target: The input that the operation writes.

    Raises:
        UnsupportedOperationError: In forward mode gradients are wanted, too.
    """

    def __init__(
        self,
        tiles: Tiles,
        inputs: Sequence[Tensor],
        *,
        records: bool,
        target: TileTensor | None = None,
    ) -> None:
        if records and in_forward_mode():
            raise UnsupportedOperationError(
                "in a dual_level in which torch records a graph too; call torch.func.jvp instead"
            )
        self.tiles, self.inputs, self.records, self.target = tiles, inputs, records, target
        self.roots: list[Root] = []
        self.outputs: list[Output] = []
        self._in_turns = False
        self._at_end: list[Callable[[], None]] = []
        roots = [self._begun(each) if records else None for each in inputs]
        self._starts = [
            None if root is None else self._start(tensor, root)
            for tensor, root in zip(inputs, roots, strict=True)
        ]

    def run(self, compute: Compute, *, joins: bool = False) -> list[Any]:
        """Return what `compute` gives for each tile.

        Args:
            compute: Takes the number of a tile, and the tile's parts of `inputs`.
            joins: True if the small graphs of the tiles may be one.
        """

        def job(tile: int) -> Any:
            with torch.set_grad_enabled(self.records):
                return compute(tile, self.locals_of(tile))

        is_lazy = any(isinstance(x, TileTensor) and x.is_lazy for x in self.inputs)
        given, has_met, self._in_turns = self.tiles.crew.run(
            job, joins=joins and not is_lazy, reads=self._reads()
        )
        self._at_end = self.tiles.crew.at_end
        for root in self.roots if has_met else ():
            root.crosses = True
        self._starts.clear()
        return given

    def run_for_all(self, compute: Callable[[list[list[Any]]], T]) -> T:
        """Return what `compute` gives for all tiles at once.

        Args:
            compute: Takes each tile's parts of `inputs`.

        Raises:
            TurnsNeededError: It exchanges something.
        """

        def job() -> T:
            with torch.set_grad_enabled(self.records):
                return compute([self.locals_of(tile) for tile in range(self.tiles.count)])

        return self.tiles.crew.run_for_all(job, self._reads())

    def _reads(self) -> int:
        """Count the bytes of the fields, of which an expanded one may have less memory."""
        if self.tiles.crew.mover is None:
            return 0
        parts: list[Any] = [x.parts for x in self.inputs if isinstance(x, TileTensor)]
        return sum(p[0].local.nbytes * len(p) for p in parts if p and not p[0].lazy)

    def field(self, parts: Sequence[Part]) -> TileTensor:
        """Return the field that tiles have given these parts of."""
        if any(part.lazy for part in parts):
            spectrum = TileTensor(self.tiles, parts, roots=tuple(self.roots))
            mark_unread(spectrum)
            return spectrum
        read: list[Any] = list(parts)
        mover = self.tiles.crew.mover
        if mover is not None:
            mover.note_made(read[0].local.nbytes * len(read))
        made = TileTensor(self.tiles, [without_graph(part) for part in read])
        self._add(made, [part.local for part in read], [part.layout for part in read])
        return made

    def plain(self, locals_: Sequence[Tensor]) -> Tensor:
        """Return the plain tensor that all tiles have given."""
        made = locals_[0].detach() if locals_[0].requires_grad else locals_[0]
        self.tiles.keep(made)
        self._add(made, locals_)
        return made

    def total(self, total: Total, dtype: torch.dtype) -> Tensor | None:
        """Return the sum of what tiles have given; None where none has given anything."""
        if total.sum is None:
            return None
        made = total.sum.to(dtype)
        self.tiles.keep(made)
        self._add(made, total.parts, is_partial=True)
        return made

    def whole(self, made: Tensor, parts: Sequence[Subdomain]) -> Tensor:
        """Return a plain tensor into which tiles have written their rows."""
        self._add(made, [part.local for part in parts], [part.layout for part in parts])
        return made

    def written(self, locals_: Sequence[Tensor]) -> None:
        """Note that the target was written; these tensors of small graphs have its memory."""
        assert self.target is not None
        self._add(self.target, locals_, [part.layout for part in self.target.parts])

    def enter(self) -> None:
        """Enter what the operation gave into the caller's graph, and write what it left."""
        if self.outputs:
            self._enter()
        for write in self._at_end:
            self.tiles.crew.run_for_all(write, 0)

    def _enter(self) -> None:
        tensors = [each.tensor for each in self.outputs]
        inputs, writes = [root.input for root in self.roots], -1
        target, extra = self.target, 0
        if target is not None and any(t is target for t in tensors):
            place = target.placed
            writes = next((n for n, x in enumerate(inputs) if x is place), len(inputs))
            extra = int(writes == len(inputs))
            inputs[writes : writes + 1] = [target]
        record = Record(self.tiles, self.roots, self.outputs, in_turns=self._in_turns, extra=extra)
        with torch.enable_grad(), without_rules():
            _Operation.apply(record, tensors, writes, *inputs)
        for output in self.outputs:
            del output.tensor  # the graph must not keep what it gave
        if writes >= 0 and target is not None:
            target.placed = None

    def _begun(self, tensor: Tensor) -> Root | None:
        """Return a root for a tensor that requires a gradient; a lazy one brings its own."""
        if not isinstance(tensor, TileTensor):
            root = Root(tensor, self.tiles.count) if tensor.requires_grad else None
        elif tensor.roots:
            self.roots += [r for r in tensor.roots if all(r is not own for own in self.roots)]
            return None
        elif tensor.is_lazy or not tensor.has_gradient:
            return None
        else:
            if tensor.placed is None:
                with torch.enable_grad(), without_rules():
                    tensor.placed = Place.apply(tensor)
            assert tensor.placed is not None
            root = Root(tensor.placed, self.tiles.count)
            root.layouts = [part.layout for part in tensor.parts]
        if root is not None:
            self.roots.append(root)
        return root

    def _start(self, tensor: Tensor, root: Root) -> list[Any]:
        """Return what each tile is given of an input, on a root."""
        if tensor.dtype in HALF and not isinstance(tensor, TileTensor):
            return self._start_of_half(tensor, root)
        given = [p.local for p in tensor.parts] if isinstance(tensor, TileTensor) else [tensor]
        if tensor is self.target:  # torch lets nobody write one of several views in place
            begun = [Begin.apply(SEED, x) for x in given]
        else:
            found: Any = Begin.apply(SEED, *given)
            begun = [*found] if isinstance(found, tuple) else [found]
        begun *= self.tiles.count // len(begun)
        root.edges = [get_gradient_edge(each) for each in begun]
        return begun

    def _start_of_half(self, tensor: Tensor, root: Root) -> list[Any]:
        """Return a plain tensor for each tile, on one root in float32, which has no memory."""
        place: Any = Begin.apply(SEED, tensor.new_empty((), dtype=torch.float32).expand_as(tensor))
        root.edges = [get_gradient_edge(place)] * self.tiles.count
        return [BeginHalf.apply(place, tensor) for _ in root.edges]

    def locals_of(self, tile: int) -> list[Any]:
        """Return a tile's parts of the inputs, on roots where gradients are wanted."""
        found: list[Any] = []
        for tensor, begun in zip(self.inputs, self._starts, strict=True):
            given: Any = tensor.parts[tile] if isinstance(tensor, TileTensor) else tensor
            if begun is not None:
                is_part = isinstance(given, Subdomain)
                given = replace(given, local=begun[tile]) if is_part else begun[tile]
            elif self.records and tensor is self.target and not given.lazy:
                # it is written with a graph, which the caller's own tensor must not have
                given = replace(given, local=given.local.detach())
            found.append(given)
        return found

    def _add(
        self,
        tensor: Tensor,
        locals_: Sequence[Tensor | None],
        layouts: list[Any] | None = None,
        *,
        is_partial: bool = False,
    ) -> None:
        if not self.records or not any(x is not None and x.requires_grad for x in locals_):
            return
        output = Output(tensor, self.tiles.count)
        output.layouts, output.is_partial = layouts, is_partial
        for tile, local in enumerate(locals_):
            if local is not None and local.requires_grad:
                output.edges[tile] = get_gradient_edge(local)
        self.outputs.append(output)


def without_graph(part: Any) -> Any:
    """Return a part whose rows have no graph."""
    return replace(part, local=part.local.detach()) if part.local.requires_grad else part


def _gradients(record: Record, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Differentiate the small graphs; with a graph of its own if the caller wants one."""
    tiles, creates = record.tiles, torch.is_grad_enabled()
    chosen = [n for n, grad in enumerate(grads) if grad is not None]
    if not chosen:
        return [None] * len(record.roots)
    fields = [as_field(tiles, grads[n], record.outputs[n].layouts) for n in chosen]
    outputs = [record.outputs[n] for n in chosen]
    call = Call(tiles, fields, records=creates)
    call.roots += record.roots  # to which the small graphs go on
    totals = [
        Total(tiles, records=creates) if root.layouts is None else None for root in record.roots
    ]
    rows: list[list[Tensor | None]] | None = None
    if not record.in_turns:
        try:
            rows = call.run_for_all(partial(at_once, record, outputs, totals))
        except TurnsNeededError as error:
            if record.crosses:
                raise StuckError(
                    "the tiles cannot go on: an operation whose gradients are computed for all "
                    "tiles at once exchanges in backward; please report it."
                ) from error
    if rows is None:
        rows = call.run(partial(in_turn, record, outputs, totals))
    each = zip(*rows, strict=True)
    made: list[Tensor | None] = []
    for root, total in zip(record.roots, totals, strict=True):
        if total is not None:
            made.append(call.total(total, root.input.dtype))
        else:
            assert root.layouts is not None
            made.append(_field_of(call, next(each), root.layouts))
    call.enter()
    return made


def _field_of(
    call: Call, locals_: Sequence[Tensor | None], layouts: Sequence[Layout]
) -> TileTensor | None:
    """Return the field of these rows; a tile that has none has zeros."""
    like = next((x for x in locals_ if x is not None), None)
    if like is None:
        return None
    filled = [
        like.new_zeros(layout.local_shape) if x is None else x
        for x, layout in zip(locals_, layouts, strict=True)
    ]
    each = zip(filled, layouts, call.tiles.domains, strict=True)
    return call.field([Subdomain(x, at, domain, None, at.strides) for x, at, domain in each])


def as_field(tiles: Tiles, grad: Any, layouts: Sequence[Layout] | None) -> Tensor:
    """Return the gradient of a field as a field: a plain one is cut."""
    if layouts is None or isinstance(grad, TileTensor):
        return grad
    return cut_as(grad, tiles, layouts)


def cut_as(tensor: Tensor, tiles: Tiles, layouts: Sequence[Layout]) -> TileTensor:
    """Cut a whole tensor into tiles, each of which gets a copy of its rows."""
    call = Call(tiles, [tensor], records=torch.is_grad_enabled() and tensor.requires_grad)
    strides = of_copy(tuple(tensor.shape), tensor.stride())

    def compute(tile: int, locals_: list[Any]) -> Subdomain:
        rows = own_part(locals_[0], layouts[tile])
        return Subdomain(rows, layouts[tile], tiles.domains[tile], None, strides)

    made = call.field(call.run(compute))
    call.enter()
    return made
