"""The one walker of batches: every kind of container is opened, and built again as its own type."""

from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence
from transformers.modeling_outputs import BaseModelOutput

from lightning_shard import slab_of
from lightning_shard.data.local import LocalPart
from lightning_shard.data.split import shard_batch
from lightning_shard.data.tree import leaves_of, map_leaves, named_leaves
from tests.parity import mesh_of

Pair = namedtuple("Pair", ["a", "b"])


@dataclass
class Record:
    a: object
    b: object


class Samples(UserList):
    """A sequence of a user's own."""


CONTAINERS = [
    {"a": 1, "b": 2}, [1, 2], (1, 2), Pair(1, 2), OrderedDict(a=1, b=2), deque([1, 2]),
    MappingProxyType({"a": 1, "b": 2}), defaultdict(int, a=1, b=2), UserDict(a=1, b=2),
    Samples([1, 2]), Record(1, 2),
]  # fmt: skip


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda v: type(v).__name__)
def test_each_container_is_opened_and_built_again(value):
    assert leaves_of(value) == [1, 2]
    changed = map_leaves(lambda x: 10 * x, {"in": [value]})["in"][0]
    assert type(changed) is type(value)
    assert leaves_of(changed) == [10, 20]
    assert leaves_of(value) == [1, 2], "the value itself has changed"
    assert map_leaves(lambda x: x, value) is value
    assert [key for path, _ in named_leaves(value) for key in path] in ([0, 1], ["a", "b"])


def test_a_default_dict_keeps_its_default():
    assert map_leaves(str, defaultdict(list, a=1))["missing"] == []


def test_outputs_of_transformers_are_built_again():
    found = map_leaves(lambda x: x + 1, BaseModelOutput(last_hidden_state=torch.zeros(2)))
    assert type(found) is BaseModelOutput
    assert found.last_hidden_state.tolist() == [1, 1] == found["last_hidden_state"].tolist()


@pytest.mark.parametrize(
    "value",
    ["words", b"bytes", range(3), None, 1.5, Record, torch.zeros(2), torch.nn.Linear(1, 1), {1, 2},
     LocalPart(torch.zeros(2), (4,), (0,))],
    ids=lambda v: getattr(v, "__name__", type(v).__name__),
)  # fmt: skip
def test_all_else_is_a_leaf(value):
    assert leaves_of(value)[0] is value
    assert [path for path, _ in named_leaves(value)] == [()]


def test_packed_sequences_hold_tensors():
    packed = pack_padded_sequence(torch.ones(3, 2, 1), torch.tensor([3, 2]))
    doubled = map_leaves(lambda x: 2 * x if isinstance(x, Tensor) and x.ndim == 2 else x, packed)
    assert type(doubled) is type(packed)
    assert doubled.data.unique().tolist() == [2]


@pytest.mark.spmd(2)
def test_fields_in_all_of_them_are_split():
    for value in (
        UserDict(x=torch.zeros(1, 2, 5)),
        Samples([torch.zeros(1, 2, 5)]),
        deque([torch.zeros(1, 2, 5)]),
    ):
        split = shard_batch([value], mesh_of(2))[0]
        (x,) = leaves_of(split)
        assert (type(split), x.subdomain.layout.split_dims) == (type(value), (2,))


@pytest.mark.spmd(2)
def test_the_slab_of_a_mesh_in_a_loop_without_a_trainer():
    mesh, rank = mesh_of(2), torch.distributed.get_rank()
    slab = slab_of(mesh, "x", (3, 9, 4))
    assert slab.index == (slice(0, 3), [slice(0, 5), slice(5, 9)][rank], slice(0, 4))
    columns = slab_of(mesh, "x", (3, 9, 4), shard_dims={"x": -1, "y": None})
    assert columns.index[2] == [slice(0, 2), slice(2, 4)][rank]
    assert not slab_of(mesh, "y", (3, 9, 4), shard_dims={"x": -1, "y": None}).is_split
    assert not slab_of(mesh, "y", (3, 9, 4), torch.int64).is_split
    with pytest.raises(ValueError, match="splits dim 0, the samples"):
        slab_of(mesh, "x", (3, 9, 4), shard_dims=0)
