"""The operator database in forward mode: a row is exact, or refused by name; nothing else passes.

`python -m pytest -s -m slow tests/ops/test_forward_mode.py` prints the table of docs/engine.md. It
grows from one group of rows to the next, and stands whole in the last two lines.
"""

import random
import zlib
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.ops import database
from tests.parity import assert_same, mesh_of

DIFFERENTIABLE = (torch.float64, torch.float32, torch.complex128)
TABLE = {"jvp": Counter(), "vmap": Counter()}  # of the rows that a rank has run


def transformed(kind, function, sample, split, mesh):
    """The result of a jvp by all tensors, or of a vmap over a new dim; split where `mesh` is."""
    chosen, dim = split or ((), 0)
    torch.manual_seed(5)

    def prepared(x):
        if kind == "vmap":
            return torch.stack([x, x.flip(0) if x.ndim else x])
        return x.clone()

    tensors = [prepared(x) for x in sample.tensors]
    moving = [i for i, x in enumerate(tensors) if x.dtype in DIFFERENTIABLE]
    if kind == "jvp" and not moving:
        return None
    tangents = [torch.randn_like(tensors[i]) for i in moving]
    if mesh is not None:
        own = dim + (kind == "vmap")
        shard = lightning_shard.shard
        tangents = [
            shard(t, mesh, own) if i in chosen else t for i, t in zip(moving, tangents, strict=True)
        ]
        tensors = [shard(x, mesh, own) if i in chosen else x for i, x in enumerate(tensors)]

    def called(*given):
        waiting = iter(given)
        args, kwargs = tree_map_only(Tensor, lambda _: next(waiting), (sample.args, sample.kwargs))
        return outputs_of(function(*args, **kwargs))

    if kind == "vmap":
        return torch.func.vmap(called)(*tensors)

    def of_moving(*values):
        given = list(tensors)
        for i, value in zip(moving, values, strict=True):
            given[i] = value * 1  # not the input itself: it may be written to
        return called(*given)

    primals = tuple(tensors[i] for i in moving)
    with sdpa_kernel(SDPBackend.MATH):  # torch's only kernel with a forward mode
        return torch.func.jvp(of_moving, primals, tuple(tangents))


def outputs_of(result):
    """Tensors that have tangents."""
    results = result if isinstance(result, tuple | list) else [result]
    found = tuple(r for r in results if isinstance(r, Tensor) and r.dtype in DIFFERENTIABLE)
    assert found
    return found


def check(kind, name, limit, mesh):
    """Count the cases of a row by what came out: exact, refused, or of no meaning in torch."""
    counts = Counter()
    # else all that follows would count as what torch has no derivative of
    assert (torch.ones((), requires_grad=True) * 1).requires_grad, f"no graph before {name}"
    for function, sample, split in database.cases_of(name, limit):
        if database.is_random(name, sample):
            continue
        try:
            expected = transformed(kind, function, sample, None, None)
        except Exception:  # torch itself has no such derivative, or takes other arguments
            expected = None
        if expected is None:
            counts["none"] += 1
            continue
        call = f"{kind} of {name}: {sample}, split {split}"
        try:
            found = transformed(kind, function, sample, split, mesh)
        except UnsupportedOperationError:
            counts["refused"] += 1
            continue
        except Exception as error:
            raise AssertionError(f"{call}: {type(error).__name__}: {error}") from error
        if any(e.isnan().any() for e in flat(expected)):
            continue  # a tangent through NaN
        # that of torch's own logcumsumexp is exact to five digits only
        tolerance = 1e-5 if name == "logcumsumexp" else None
        for f, e in zip(flat(found), flat(expected), strict=True):
            assert_same(lightning_shard.gather(f).detach(), e.detach(), call, tolerance)
        counts["exact"] += 1
    return counts


def flat(result):
    values, tangents = result if isinstance(result[0], tuple) else (result, ())
    return [*values, *tangents]


def sweep(names, limit, table):
    mesh, wrong = mesh_of(2), []
    for kind, rows in table.items():
        for name in names:
            try:
                counts = check(kind, name, limit, mesh)
            except AssertionError as error:
                wrong.append(str(error))
                rows["wrong"] += 1
                continue
            rows["exact" if counts["exact"] else "refused" if counts["refused"] else "none"] += 1
    assert not wrong, f"{len(wrong)} rows: " + "\n\n".join(wrong)


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.filterwarnings("ignore")
def test_a_sample_of_rows():
    names = sorted(database.names(), key=lambda n: zlib.crc32(n.encode()))
    sweep(random.Random(0).sample(names, 30), 1, {"jvp": Counter(), "vmap": Counter()})


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.filterwarnings("ignore")
@database.in_groups(database.names())
def test_every_row(names):
    """A rank that is silent for two minutes fails, so no group may take as long."""
    sweep(names, 3, TABLE)
    if torch.distributed.get_rank() == 0:
        print(*(f"{kind} {dict(rows)}" for kind, rows in TABLE.items()), sep="\n", flush=True)
