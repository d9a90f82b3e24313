"""Split tensors of tensor subclasses of other packages behave as these do in one process."""

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

import lightning_shard
from lightning_shard import DomainTensor, UnsupportedOperationError
from tests.parity import assert_parity, assert_same, mesh_of


class Kept(Tensor):
    """The results of its functions are of its class, as those of any plain subclass."""


class Logged(Tensor):
    """Count the functions that are called."""

    calls: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Dispatching(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError


def wrapped(x: Tensor, w: Tensor) -> Tensor:
    image = tv_tensors.Image(x)
    assert isinstance(image, tv_tensors.Image)
    y = F.conv2d(image, w, padding=1)
    assert not isinstance(y, tv_tensors.Image)
    again = tv_tensors.wrap(y, like=image)
    assert isinstance(again.clone(), tv_tensors.Image)
    again = v2.functional.horizontal_flip(again)
    assert isinstance(again, tv_tensors.Image)
    return y.square() + again.as_subclass(Tensor).flip(-1)


def kept(x: Tensor, w: Tensor) -> Tensor:
    y = F.relu(x.as_subclass(Kept).clone(), inplace=True)
    assert isinstance(y, Kept)
    z = F.conv2d(y, w, padding=1).softmax(1)
    assert isinstance(z, Kept)
    return z.as_subclass(Tensor)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("function", [wrapped, kept])
def test_as_one_process(function):
    for dim in (2, 3):
        assert_parity(function, [(2, 3, 9, 8), (3, 3, 3, 3)], {0: [dim]}, mesh_of(2))


@pytest.mark.spmd(2)
def test_masks_stay_masks():
    """A transform takes the values of a mask that it resizes, and the means of an image."""
    mask = tv_tensors.Mask(torch.randint(0, 5, (1, 9, 8)))
    split = lightning_shard.shard(mask, mesh_of(2), 1)
    assert isinstance(split, DomainTensor)
    assert isinstance(split, tv_tensors.Mask)
    resize = v2.Compose([v2.Resize((18, 13)), v2.RandomVerticalFlip(1.0)])
    assert_same(lightning_shard.gather(resize(split)), resize(mask).as_subclass(Tensor))


@pytest.mark.spmd(2)
def test_copies_and_attributes():
    x = torch.randn(2, 3, 9, 8).as_subclass(Kept)
    x.note = "of the user"  # pyright: ignore[reportAttributeAccessIssue]
    split: Any = lightning_shard.shard(x, mesh_of(2), 2)
    for copied in (copy.copy(split), copy.deepcopy(split)):
        assert isinstance(copied, Kept)
        assert copied.note == "of the user"
        assert_same(lightning_shard.gather(copied), x.as_subclass(Tensor))
    total = split.sum()
    assert isinstance(total, Kept)
    assert not isinstance(total, DomainTensor)
    assert_same(total.as_subclass(Tensor), x.as_subclass(Tensor).sum())


@pytest.mark.spmd(2)
def test_the_strangers_function_is_called():
    split = lightning_shard.shard(torch.randn(2, 3, 9, 8), mesh_of(2), 2).as_subclass(Logged)
    Logged.calls.clear()
    _ = split * 2
    assert [f.__name__ for f in Logged.calls] == ["mul"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("monai") is None, reason="monai is an extra")
@pytest.mark.spmd(2)
def test_metatensors_are_split_as_plain_tensors():
    """MONAI's class copies the attributes of all arguments, and has another `new_empty`."""
    from monai import data

    image = data.MetaTensor(torch.randn(2, 1, 9, 8))
    split = lightning_shard.shard(image, mesh_of(2), 2)
    assert type(split) is DomainTensor
    assert type(split.subdomain.local) is Tensor
    # windows of rows that lie on one rank, so that the other sends nothing
    assert_same(lightning_shard.gather(split[:, :, :3]), image.as_tensor()[:, :, :3])


@pytest.mark.spmd(2)
def test_a_class_that_dispatches_is_refused():
    split = lightning_shard.shard(torch.randn(2, 3, 9, 8), mesh_of(2), 2)
    with pytest.raises(UnsupportedOperationError, match="dispatches"):
        split.as_subclass(Dispatching)
