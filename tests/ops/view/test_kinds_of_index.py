"""Every kind of index in six uses, with gradients, against torch."""

import copy

import numpy as np
import pytest
import torch

from lightning_shard import DomainTensor, UnsupportedOperationError, gather, shard
from tests.pairs import choose
from tests.parity import mesh_of

E, N = ..., None
KINDS = {
    "int": 1, "negative": -1, "slice": slice(1, 5), "step": slice(0, 7, 3), "none": N, "dots": E,
    "two dots": (E, E), "dots, int, dots": (E, 0, E), "tuple": (2, 1),
    "int, slice": (2, slice(0, 2)), "list": [0, 3, 1], "list of one": [4], "empty list": [],
    "tuple of lists": ([0, 3], [1, 2]), "nested lists": [[0, 1], [1, 0]], "nested of one": [[0, 1]],
    "deep": [[[0, 1], [1, 0]]], "list, int": [[0, 1], 2], "list of ranges": [range(2), range(2)],
    "list of tuples": [(0, 1), (1, 2)], "list of slices": [slice(0, 2), slice(0, 1)],
    "list with none": [N, 0], "list with dots": [E, 0],
    "list of tensors": [torch.tensor([0, 1]), torch.tensor([1, 2])],
    "list of arrays": [np.array([0, 1]), np.array([1, 2])],
    "tuple of ranges": (range(2), range(1, 3)), "range": range(1, 4), "empty range": range(0),
    "array": np.array([2, 0]), "array of two dims": np.array([[0, 1], [1, 0]]),
    "np.int64": np.int64(3), "tensor": torch.tensor([5, 0, 5]),
    "tensor of two dims": torch.tensor([[0, 1], [2, 3]]), "tensor without dims": torch.tensor(2),
    "tuple with a tensor": (slice(N), torch.tensor([0, 2])),
    "tensors": (torch.tensor([0, 6]), torch.tensor([1, 2])),
    "int32": torch.tensor([1, 2], dtype=torch.int32), "mask of rows": torch.arange(7) % 2 == 0,
    "mask of both": torch.arange(21).view(7, 3) % 4 == 0,
    "list of truths": [True, False, True, False, True, False, False],
    "list of lists of truths": [[True, False, True, *[False] * 4], [True, True, False]],
    "33 lists": [[0]] * 33, "list of 33": [1] * 33,
}  # fmt: skip


def read(x, index):
    return x[index] * 1.0


def write(x, index):
    y = x * 1.0
    y[index] = 9.0
    return y


def add(x, index):
    y = x * 1.0
    y[index] += 0.5
    return y


def of_result(x, index):
    return (x * 2).tanh()[index].square()


def write_values(x, index):
    y = x * 1.0
    y[index] = y[index].detach() * 0.25
    return y


def data(x, index):
    y = (x * 1.0).detach()
    y[index].sum()
    return y[index] + x.mean()


WITH_NEW_DIMS = ("none", "list with none")
REFUSED = {"write": WITH_NEW_DIMS, "add": WITH_NEW_DIMS, "write_values": WITH_NEW_DIMS}
USES = (read, write, add, of_result, write_values, data)


@pytest.mark.spmd(2)
@pytest.mark.parametrize(("kind", "dim"), choose(KINDS, [0, 1], every=2))
def test_index(kind, dim):
    torch.manual_seed(0)
    field, mesh, index = torch.randn(7, 3, dtype=torch.float64), mesh_of(2), KINDS[kind]
    for use in USES:
        whole = field.clone().requires_grad_()
        split = shard(field, mesh, dim).requires_grad_()
        expected, found = attempt_of(use, whole, index), attempt_of(use, split, index)
        if isinstance(expected, type):
            assert isinstance(found, type), (use.__name__, expected, found)
            continue
        if isinstance(found, type):  # what is not served is refused by name
            assert issubclass(found, UnsupportedOperationError), (
                use.__name__,
                found,
            )
            assert kind in REFUSED.get(use.__name__, ()), use.__name__
            continue
        value = gather(found) if isinstance(found, DomainTensor) else found
        torch.testing.assert_close(value, expected, msg=lambda m, u=use: f"{u.__name__}: {m}")
        weights = torch.arange(1.0, 1 + expected.numel(), dtype=torch.float64).view(expected.shape)
        (expected * weights).sum().backward()
        (found * weights).sum().backward()
        gradient = gather(split.grad)
        torch.testing.assert_close(gradient, whole.grad, msg=lambda m, u=use: f"{u.__name__}: {m}")


def attempt_of(use, x, index):
    try:
        return use(x, copy.deepcopy(index))
    except (IndexError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return type(error)
