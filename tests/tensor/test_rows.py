"""Rows that every rank holds whole are plain tensors to all code, but writes into them are seen."""

import copy
import io
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_shard
from lightning_shard import DomainTensor, UnsupportedOperationError
from lightning_shard.tensor.rows import Rows
from tests.parity import mesh_of
from tests.tensor.test_escape import Cube

FIELD = torch.arange(21.0).view(7, 3) / 7


def split(*, grad: bool = False) -> Tensor:
    return lightning_shard.shard(FIELD.clone(), mesh_of(3), 0).clone().requires_grad_(grad)


def field_of(x: Tensor) -> Tensor:
    return lightning_shard.gather(x).detach()


NEW = {
    "arithmetic": lambda row: row * 2 + 1,
    "function": lambda row: F.layer_norm(row, (3,)),
    "stack": lambda row: torch.stack([row, row]),
    "mask": lambda row: row[row > 0.5],
    "type": lambda row: row.double(),
    "clone": lambda row: row.clone(),
    "copy": copy.deepcopy,
    "linear": lambda row: nn.Linear(3, 2)(row),
    "with split": lambda row: (split() + row).sum(),
}


@pytest.mark.spmd(3)
def test_what_is_new_is_plain():
    for name, function in NEW.items():
        assert type(function(split()[4])) is Tensor, name


@pytest.mark.spmd(3)
def test_code_that_looks_at_tensors_sees_a_tensor():
    row = split()[4]
    assert isinstance(row, Tensor)
    assert not isinstance(row, DomainTensor)
    assert (row.shape, row.dtype, row.device.type, len(row)) == ((3,), torch.float32, "cpu", 3)
    assert (row.is_leaf, row.requires_grad, row.grad_fn) == (True, False, None)
    assert repr(row) == repr(FIELD[4])
    assert row.tolist() == FIELD[4].tolist()
    assert float(row[1]) == float(FIELD[4, 1])
    assert row.equal(FIELD[4])
    torch.testing.assert_close(row, FIELD[4])
    buffer = io.BytesIO()
    torch.save({"row": row}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["row"]
    assert type(loaded) is Tensor
    assert loaded.equal(FIELD[4])
    assert lightning_shard.gather(row).equal(FIELD[4])


@pytest.mark.spmd(3)
def test_an_array_of_the_rows_cannot_be_written():
    row = split()[4]
    for array in (row.numpy(), np.asarray(row)):
        assert array.tolist() == FIELD[4].tolist()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


WRITES = {
    "method": lambda row: row.mul_(3),
    "operator": lambda row: row.__iadd__(1),
    "assign": lambda row: row.__setitem__(slice(1, None), 5.0),
    "view": lambda row: row.view(3, 1)[1:].neg_(),
    "view of view": lambda row: row[1:][:1].squeeze().fill_(7),
    "detach": lambda row: row.detach().zero_(),
    "data": lambda row: row.data.add_(4),
    "out": lambda row: torch.mul(row, 2, out=row),
    "several": lambda row: torch._foreach_add_([row, row[:2]], 1.5),
    "inplace": lambda row: F.relu(row.sub_(100), inplace=True),
    "init": nn.init.ones_,
    "copy": lambda row: row.copy_(torch.tensor([1.0, 2.0, 3.0])),
    "swap": lambda row: row.copy_(row.flip(0).clone()),
    "shallow copy": lambda row: copy.copy(row).add_(1),
    "iterate": lambda row: [number.mul_(2) for number in row],
    "augmented": lambda row: augmented(row),
}


def augmented(row: Tensor) -> None:
    row[1:] += 2
    row[0] *= 3


@pytest.mark.spmd(3)
def test_each_way_of_writing_is_seen():
    for name, write in WRITES.items():
        for grad in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with grad():
                x, whole = split(), FIELD.clone()
                write(x[4])
                write(whole[4])
                assert field_of(x * 1).equal(whole), (name, grad)


def traced(function) -> None:
    """Run under a tracer that holds every frame's variables, as a debugger does."""
    held: list[object] = []

    def trace(frame, event, arg):
        if event == "return" and len(held) < 5000:
            held.append(dict(frame.f_locals))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        held.clear()


def profiled(function) -> None:
    calls: list[object] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: calls.append((frame, arg)))
    try:
        function()
    finally:
        sys.setprofile(before)
        calls.clear()


@pytest.mark.spmd(3)
def test_debuggers_and_profilers_change_nothing():
    whole = FIELD.clone()

    def program() -> None:
        x = split()
        x[0].add_(1)
        row = x[2]
        row *= 2
        x[3] = row + x[4]
        x[1:][0] -= 1
        assert field_of(x * 1).equal(whole)

    whole[0] += 1
    whole[2] *= 2
    whole[3] = whole[2] + whole[4]
    whole[1] -= 1
    for run in (lambda f: f(), traced, profiled):
        run(program)


@pytest.mark.spmd(3)
def test_gradients():
    """Of a network that writes into rows, and of rows that are leaves of their own."""

    def program(x: Tensor) -> Tensor:
        x = x.sin()
        row = x[4]
        row.mul_(x[1].detach().clone())
        row[1:] += x[2, :2]
        return (x * x).sum() + checkpoint(torch.exp, row, use_reentrant=False).sum() + x[3, 1]

    x, whole = split(grad=True), FIELD.clone().requires_grad_()
    for each in (x, whole):
        program(each).backward()
    assert x.grad is not None
    torch.testing.assert_close(lightning_shard.gather(x.grad), whole.grad)
    leaf = split()[4].detach().requires_grad_()
    (leaf * split()).sum().backward()
    assert leaf.is_leaf
    assert leaf.grad is not None
    leaf.grad = None
    (2 * leaf).sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2]
    x = split(grad=True)
    x[2, 1].backward()
    assert x.grad is not None
    assert lightning_shard.gather(x.grad)[2].tolist() == [0, 1, 0]
    row = (x * 2)[3]
    (given,) = torch.autograd.grad(row.square().sum(), row)
    torch.testing.assert_close(given, 4 * FIELD[3])


@pytest.mark.spmd(3)
def test_gradients_of_rows_and_of_what_they_are_rows_of():
    x = split(grad=True)
    y = x * 2
    row = y[3]
    found = torch.autograd.grad(y.sin().sum() + row.cos().sum(), [row, y, x])
    whole = FIELD.clone().requires_grad_()
    double = whole * 2
    part = double[3]
    wanted = torch.autograd.grad(double.sin().sum() + part.cos().sum(), [part, double, whole])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(lightning_shard.gather(one), other)


@pytest.mark.spmd(3)
def test_an_autograd_function_takes_rows():
    x = split(grad=True)
    result = Cube.apply(x[4])
    assert type(result) is Tensor
    result.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(lightning_shard.gather(x.grad)[4], 3 * FIELD[4] ** 2)


@pytest.mark.spmd(3)
def test_rows_of_a_tensor_that_was_written_are_refused_when_they_are_used():
    x = split()
    row, view = x[4], x[4].view(3, 1)
    x.mul_(2)
    assert row.shape == (3,)
    for use in (lambda: row * 2, lambda: view.sum(), lambda: row.add_(1), lambda: x + row):
        with pytest.raises(UnsupportedOperationError, match="torch would show the new values"):
            use()
    assert field_of(x).equal(2 * FIELD)


@pytest.mark.spmd(3)
def test_a_write_that_no_call_makes_is_brought_back_by_the_next():
    """As by an extension in C++."""

    def write_unseen(row: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            row.mul_(2)

    x, whole = split(), FIELD.clone()
    row = x[4]
    write_unseen(row)
    row + 1
    whole[4] *= 2
    assert field_of(x * 1).equal(whole)


@pytest.mark.spmd(3)
def test_an_optimizer_of_rows():
    x, whole = split(), FIELD.clone()
    for each in (x, whole):
        rows = each[4].requires_grad_()
        optimizer = torch.optim.Adam([rows], lr=0.1)
        (rows**2).sum().backward()
        optimizer.step()
        (rows.detach() * 1).sum()
    torch.testing.assert_close(field_of(x.detach() * 1), whole.detach())


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_rows_in_what_torch_compiles():
    x, whole = split(), FIELD.clone()
    compiled = torch.compile(lambda row, scale: (row * scale).sin(), backend="eager")
    torch.testing.assert_close(compiled(x[4], 2.0), (whole[4] * 2).sin())

    def write(row: Tensor) -> Tensor:
        row.add_(1)
        return row * 2

    torch.testing.assert_close(
        torch.compile(write, backend="eager")(x[4]), write(whole[4]), check_layout=False
    )
    assert field_of(x * 1).equal(whole)


@pytest.mark.spmd(3)
def test_rows_are_rows():
    x = split()
    kinds = [x[4], x[4][1:], x[:, 0][2], x[4].view(1, 3), x.unbind(0)[2], x[1:3].select(0, 1)]
    assert {type(each) for each in kinds} == {Rows}
    assert type(x[:, 0]) is DomainTensor
