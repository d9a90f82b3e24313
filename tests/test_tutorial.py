"""docs/tutorial_300_lines.py gives what one process gives, and what lightning_shard gives."""

import contextlib
import importlib
import io
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lightning_shard
from tests.parity import assert_same, mesh_of

DOCS = Path(__file__).parents[1] / "docs"
SOURCE, PAGE = DOCS / "tutorial_300_lines.py", DOCS / "tutorial_300_lines.md"
on_two_and_three = pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.spmd(n)) for n in (2, 3)]
)


def tutorial():
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))
    return importlib.import_module("tutorial_300_lines")


@pytest.mark.slow_rows("13-2")
@on_two_and_three
@pytest.mark.parametrize("rows", [13, 4, 2])
def test_training_equals_one_process(ranks, rows):
    """Of fewer rows than ranks, too: of 4 rows two are left, and of 2 rows one."""
    found, parts = tutorial().train(parts=True, rows=rows)
    wanted, whole = tutorial().train(parts=False, rows=rows)
    assert found == pytest.approx(wanted, rel=1e-10)
    for name, value in whole.state_dict().items():
        assert_same(parts.state_dict()[name], value, name)


@on_two_and_three
def test_gradients_and_loss_are_those_of_lightning_shard(ranks):
    """The same network, unmodified, on a split tensor; the input's gradient as well."""
    here = tutorial()
    networks = [here.Network().double() for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    ((image, target),) = here.batches(1, 13, 9)
    images = [image.clone().requires_grad_() for _ in range(2)]

    loss = here.loss_on_parts(networks[0], images[0], target)
    split = lightning_shard.shard(images[1], mesh_of(ranks), 2)
    error = networks[1](split) - lightning_shard.shard(target, mesh_of(ranks), 2)
    theirs = error.square().mean()
    for value, network in ((loss, networks[0]), (theirs, networks[1])):
        value.backward()
        here.average_gradients(network)
    assert_same(loss.detach(), lightning_shard.gather(theirs).detach(), "loss")
    ours, others = (dict(network.named_parameters()) for network in networks)
    for name, p in others.items():
        assert_same(ours[name].grad, p.grad, name)
    assert_same(images[0].grad, images[1].grad, "image")


@on_two_and_three
def test_gradients_travel_back_by_the_adjoint(ranks):
    """<fetch(x), y> == <x, fetch'(y)>, summed over ranks, where spans overlap and are empty."""
    here, rank = tutorial(), dist.get_rank()
    torch.manual_seed(5 + rank)
    low, high = here.partition(7, ranks)[rank]
    x = torch.randn(2, 3, high - low, 4, dtype=torch.float64, requires_grad=True)
    needs = [(0, 7), (2, 5), (4, 4)][:ranks]
    found = here.fetch(here.Part(x, 7), needs)
    assert found.shape[2] == needs[rank][1] - needs[rank][0]
    y = torch.randn_like(found)
    found.backward(y)
    sides = torch.stack([(found * y).sum(), (x * x.grad).sum()]).detach()
    dist.all_reduce(sides)
    torch.testing.assert_close(sides[0], sides[1])


def test_its_partition_is_that_of_lightning_shard():
    from lightning_shard.domain.layout import partition

    for extent in range(9):
        for parts in range(1, 5):
            offsets = partition(extent, parts)
            assert tutorial().partition(extent, parts) == [*pairwise(offsets)]


@pytest.mark.spmd(2)
def test_it_runs_as_a_program():
    with contextlib.redirect_stdout(io.StringIO()) as text:
        tutorial().main()
    assert ("largest difference of a weight" in text.getvalue()) == (dist.get_rank() == 0)


def test_the_page_shows_lines_of_the_program():
    source, page = SOURCE.read_text(), PAGE.read_text()
    assert len(source.splitlines()) <= 300
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        for piece in block.split("    ...\n"):
            assert piece.strip("\n") in source, piece
