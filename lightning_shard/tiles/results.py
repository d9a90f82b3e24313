"""Makes the caller's results of what the rules of all tiles gave."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.processes.torch_private.internals import storage_key
from lightning_shard.tensor.part import Part
from lightning_shard.tensor.rows import is_basic
from lightning_shard.tiles.call_inputs import Inputs
from lightning_shard.tiles.operation import Call
from lightning_shard.tiles.rows import Source, TileRows


class Results:
    """Makes the caller's results of what the rules of all tiles gave."""

    def __init__(self, call: Call, inputs: Inputs) -> None:
        self._call, self._inputs = call, inputs
        self._rows: list[Tensor] = []

    def of(self, results: Sequence[Any]) -> Any:
        """Return the caller's result."""
        first = results[0]
        if isinstance(first, Subdomain):
            target = self._inputs.target
            if target is not None and not target.is_lazy and _same(first, target.parts[0]):
                return target
            same = None if target is not None else self._inputs.given_back(first)
            if same is not None:
                return same
            if first.copied is not None and not first.layout.split_dims:
                made = self._call.plain([part.local for part in results])
                self._rows.append(made)
                return made
            return self._call.field(results)
        if isinstance(first, Tensor):
            if not self._is_new(first):
                return first
            made = self._call.plain(results)
            if self._shows_a_field(first):
                self._rows.append(made)
            return made
        if type(first) in (list, tuple) or type(first).__module__ == "torch.return_types":
            return type(first)([self.of(each) for each in zip(*results, strict=True)])
        if isinstance(first, Part):
            target = self._inputs.target
            if target is not None and first is target.parts[0]:
                return target
            return self._call.field(results)
        return first

    def with_rows(self, call: Any, made: Any) -> Any:
        """Return the caller's result, in which copied rows write what they are given back."""
        if not self._rows:
            return made
        if type(made) in (list, tuple):
            return type(made)([self.with_rows(call, each) for each in made])
        if any(made is rows for rows in self._rows):
            func, args = call[:2]
            index = args[1] if func is Tensor.__getitem__ and is_basic(args[1]) else None
            return TileRows.of(made, Source(self._inputs.fields[0], index, made))
        return made

    def _shows_a_field(self, tensor: Tensor) -> bool:
        """Return whether a plain tensor has memory of a field, as rows of one tile have."""
        fields = [x for x in self._inputs.fields if not x.is_lazy]
        return any(storage_key(tensor) == storage_key(x._part.local) for x in fields)

    def _is_new(self, tensor: Tensor) -> bool:
        return all(tensor is not x for x in self._inputs.given)


def _same(part: Subdomain, held: Any) -> bool:
    """Return whether a rule gave back the part that it wrote."""
    return storage_key(part.local) == storage_key(held.local) and part.layout == held.layout
