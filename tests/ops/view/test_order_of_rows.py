"""A reshaped tensor is a view where torch gives one, also where a rank has one row.

The strides of one row do not tell in which order the whole tensor lies in memory.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

import lightning_shard
from lightning_shard import DomainTensor, UnsupportedOperationError
from tests.ops.families import FAMILIES
from tests.pairs import choose
from tests.parity import mesh_of

ORDERS = {
    "rows": lambda x: x.clone(),
    "turned": lambda x: x.clone().transpose(0, -1),
    "turned and computed": lambda x: x.transpose(0, -1).sin(),
    "turned and dense": lambda x: x.transpose(0, -1).contiguous(),
    "turned, cloned into rows": lambda x: x.t().clone(memory_format=torch.contiguous_format),
    "turned twice": lambda x: x.transpose(0, -1).clone().transpose(0, -1),
    "sorted and turned": lambda x: x.sort(0)[0].mT,
    "a softmax of turned": lambda x: x.t().softmax(0),
    "a sum with turned": lambda x: x.clone().t() + x.t().contiguous(),
}  # fmt: skip
WRITES = {
    "flatten": lambda x: x.flatten(),
    "reshape": lambda x: x.reshape(-1),
    "another axis": lambda x: x.reshape(1, -1),
    "split": lambda x: x.reshape(2, -1),
}


def whole(x: torch.Tensor) -> torch.Tensor:
    return lightning_shard.gather(x) if isinstance(x, DomainTensor) else x


def written(x, made, seen):
    y = made(x)
    rows = seen(y)
    rows[..., ::2] = 0.25
    return whole(y), whole(rows), whole(y + rows.reshape(y.shape))


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("order", "extent"), choose(ORDERS, [3, 4, 5, 6]))
def test_a_write_into_a_reshaped_tensor(order, extent):
    torch.manual_seed(0)
    x = torch.randn(extent, 4, dtype=torch.float64)
    served, refusals = 0, list[str]()
    for dim, (name, seen) in itertools.product((0, 1), WRITES.items()):
        split = lightning_shard.shard(x, mesh_of(3), dim)
        expected = written(x, ORDERS[order], seen)
        try:
            found = written(split, ORDERS[order], seen)
        except UnsupportedOperationError as error:
            refusals.append(str(error))
            continue
        served += 1
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, n=name, d=dim: f"{n}, dim {d}: {m}")
    assert all("would write into a copy" in refusal for refusal in refusals)
    assert served >= (0 if order == "a sum with turned" else 4)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_turned_tensor_is_split(dim):
    """Its parts of one row have the strides of rows."""
    x = torch.randn(4, 4, dtype=torch.float64).t()
    split = lightning_shard.shard(x, mesh_of(3), dim)
    found, expected = (written(t, lambda x: x, WRITES["flatten"]) for t in (split, x.clone()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.spmd(3)
def test_an_old_view_of_unknown_order_is_refused():
    """The second summand may decide how the sum lies, so nobody knows whether rows are copied."""
    x = lightning_shard.shard(torch.randn(4, 4), mesh_of(3), 0)
    y = x.t() + x.clone()
    rows = y.flatten()
    torch.testing.assert_close(whole(rows), whole(y).flatten())
    y.add_(1)
    with pytest.raises(UnsupportedOperationError, match="rows of other ranks are a copy"):
        rows.sum()


# their results are whole on every rank, and do not lie in memory as torch's
PLAIN = {"einsum_dots", "einsum_implicit", "select"}


def unless_refused(step):
    """What a step gives; None where it is refused, on all ranks alike."""
    try:
        found = step()
    except UnsupportedOperationError:
        found = None
    refused = torch.tensor(int(found is None))
    dist.all_reduce(refused)
    assert refused in (0, dist.get_world_size()), "refused on some ranks only"
    return found


def write_flat(y):
    flat = y.flatten()
    flat[::2] = 0.25
    return whole(y), whole(flat)


@pytest.mark.quick_rows("norm", "reshape")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, on memory and deprecated words
@pytest.mark.spmd(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_write_into_a_flat_result(family):
    """It reaches the result where torch's is a view."""
    for name, dim in itertools.product(FAMILIES[family].cases, (2, 3)):
        function, (first, *others) = FAMILIES[family].case(name)
        if len(first) != 4 or name in PLAIN:
            continue
        torch.manual_seed(0)
        x, *plain = (torch.randn(s, dtype=torch.float64) for s in (first, *others))
        expected = function(x, *plain)
        split = lightning_shard.shard(x, mesh_of(2), dim)
        found = unless_refused(lambda f=function, args=(split, *plain): f(*args))
        if not isinstance(found, torch.Tensor) or expected.ndim < 2:
            continue
        written = unless_refused(lambda y=found: write_flat(y.detach()))
        if written is not None:
            for a, b in zip(written, write_flat(expected.detach()), strict=True):
                torch.testing.assert_close(a, b, msg=lambda m, n=name, d=dim: f"{n}, {d}: {m}")
