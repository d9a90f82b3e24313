"""The table that drives the conformance test: a row for every function that has a rule.

Most rows are torch's own database of operators (`op_db`, with which torch tests itself): each
function with its methods, in-place forms and aliases, and sample arguments that reach its corners
(extents of 0 and 1, scalars, negative dims, every option). `rows.py` adds what the database lacks.
"""

import functools
import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_map_only

from lightning_shard.ops.registry import functions_with_rules, name_of
from tests.ops.rows import ROWS, Row

# Their results are random, or memory as it was found: shape and type are compared.
RANDOM = frozenset(
    "bernoulli cauchy dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout "
    "feature_dropout exponential geometric log_normal normal uniform rand_like randn_like random "
    "randint_like rrelu empty_like new_empty poisson gumbel_softmax native_dropout "
    "multi_head_attention_forward".split()
)


@dataclass(frozen=True)
class Sample:
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        """The call's arguments on one line, a tensor by its type and shape."""
        args, kwargs = tree_map_only(
            Tensor, lambda t: f"{t.dtype}{tuple(t.shape)}", (self.args, self.kwargs)
        )
        return ", ".join([*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())])

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        return list(_tensors_in((self.args, self.kwargs)))

    @functools.cached_property
    def is_ordinary(self) -> bool:
        """Dense, and small enough that a sum over ranks does not overflow."""
        return all(map(_is_ordinary, self.tensors))


def _tensors_in(x: Any) -> Iterator[Tensor]:
    """As of `tree_leaves`, which took a fifth of the sweep."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for item in x:
            yield from _tensors_in(item)
    elif isinstance(x, dict):
        yield from _tensors_in(list(x.values()))


def names() -> list[str]:
    """The names of the rows."""
    return [*_database(), *ROWS]


@functools.cache
def functions() -> set[Callable[..., Any]]:
    """All functions of the rows, in all their forms."""
    return {function for name in names() for function in functions_of(name)}


def twice_differentiable() -> list[str]:
    """The rows of the database whose functions have a second derivative."""
    return [n for n, op in _database().items() if op.supports_gradgrad]


def in_groups(names: Sequence[str]) -> pytest.MarkDecorator:
    """Give a test `names`, 32 rows at a time: a test for each row took as long as the row.

    `-k NAME` runs the group with the row of this name (tests/conftest.py).
    """
    groups = [names[i : i + 32] for i in range(0, len(names), 32)]
    return pytest.mark.parametrize("names", groups, ids=[f"{g[0]} to {g[-1]}" for g in groups])


def functions_of(name: str) -> list[Callable[..., Any]]:
    """The forms of a row's function: torch's, the method, in place, under other names."""
    if name in ROWS:
        return list(ROWS[name].functions)
    forms = _forms_listed(name)
    for alias in _database()[name].aliases:
        forms += [alias.op, alias.method_variant, alias.inplace_variant]
    return [*dict.fromkeys(f for f in (*forms, *_twins().get(name, ())) if f is not None)]


def samples_of(name: str) -> list[Sample]:
    """Arguments in the widest real type that the function takes; the same on all ranks."""
    torch.manual_seed(0)
    if name in ROWS:
        row: Row = ROWS[name]
        return [Sample(args, kwargs) for args, kwargs in row.samples()]
    op = _database()[name]
    order = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)
    dtype = next((t for t in order if t in op.dtypes), None)
    if dtype is None:
        return []
    # in which torch looks for a test of its own: half of the time of the sweep
    with mock.patch.object(inspect, "stack", return_value=[]):
        made = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 200)
        samples = [Sample((s.input, *s.args), dict(s.kwargs)) for s in made]
    return [s for s in samples if s.tensors]


def _is_ordinary(x: Tensor) -> bool:
    huge = x.is_floating_point() and bool(((x.abs() > 1e100) & x.isfinite()).any())
    return x.layout == torch.strided and not huge


def is_random(name: str, sample: Sample) -> bool:
    """Whether two calls differ; such results have tests of their own."""
    if sample.kwargs.get("dropout_p"):
        return True
    return name.rpartition(".")[2].strip("_") in RANDOM or bool(RANDOM & set(name.split(".")))


def splits_of(sample: Sample) -> list[tuple[tuple[int, ...], int]]:
    """Which tensors to split along which dim: each of the first three, and all that are alike."""
    tensors = sample.tensors
    choices = [((i,), d) for i, t in enumerate(tensors[:3]) for d in range(t.ndim)]
    first = tensors[0]
    for d in range(first.ndim):
        alike = [i for i, t in enumerate(tensors) if t.shape[d : d + 1] == first.shape[d : d + 1]]
        alike = [i for i in alike if tensors[i].ndim == first.ndim]
        if len(alike) > 1:
            choices.append((tuple(alike), d))
    return choices


def cases_of(name: str, limit: int) -> Iterator[tuple[Callable[..., Any], Sample, Any]]:
    """`limit` of all (form, ordinary sample, split) of a row, drawn with a fixed seed."""
    functions = functions_of(name)
    every = [
        (function, sample, split)
        for sample in samples_of(name)
        for split in splits_of(sample)
        for function in functions
    ]
    random.Random(0).shuffle(every)
    yield from itertools.islice((case for case in every if case[1].is_ordinary), limit)


@functools.cache
def _database() -> dict[str, Any]:
    """The database's entries by name, those of functions with a rule."""
    ruled = functions_with_rules()
    dense = [op for op in op_db if not op.name.startswith("sparse")]
    by_name = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in dense}
    short = {name_of(f).rpartition(".")[2].strip("_") for f in ruled}
    return {n: op for n, op in by_name.items() if op.name.rpartition(".")[2].strip("_") in short}


@functools.cache
def _twins() -> dict[str, list[Callable[..., Any]]]:
    """Forms that the database does not name, by the row whose arguments they take.

    `torch.exp_`, `F.silu_` and `Tensor.__iadd__` take those of `exp`, `silu` and `add`.
    """
    listed = {f for name in _database() for f in _forms_listed(name)}
    also = {alias.name: name for name, op in _database().items() for alias in op.aliases}
    twins: dict[str, list[Callable[..., Any]]] = {}
    for function in functions_with_rules():
        bare = name_of(function).rpartition(".")[2]
        if function in listed or name_of(function).startswith(("object.", "getset_")):
            continue
        for stem in (bare, bare.strip("_"), bare.strip("_").removeprefix("i")):
            places = (stem, f"nn.functional.{stem}", f"linalg.{stem}")
            row = next((n for n in places if n in _database()), also.get(stem))
            if row:
                twins.setdefault(row, []).append(function)
                break
    return twins


def _forms_listed(name: str) -> list[Any]:
    op = _database()[name]
    return [op.op, op.method_variant, op.inplace_variant, op.operator_variant,
            op.inplace_operator_variant]  # fmt: skip
