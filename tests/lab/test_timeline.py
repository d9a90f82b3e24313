"""Steps of ranks that run alone are recorded, and replayed on links."""

import math

import pytest
import torch

from lightning_shard.lab.batches import first_batches
from lightning_shard.lab.fake_trainer import train
from lightning_shard.lab.machine import Collective, Cost, MeasuredLinks
from lightning_shard.lab.replay import Replay
from lightning_shard.lab.run import Task
from lightning_shard.lab.simulate import alone
from lightning_shard.lab.timeline import Event, Recorder, Timeline
from tests.lab.test_check import Net, data

PAIR = (0, 1)


def step(rank, *events, rest=0.0, sent=100, members=PAIR):
    """Of pairs of computed seconds and a number; a number that comes again is waited for."""
    begun, found = set(), []
    for computed, number in events:
        found.append(Event(computed, number, begins=number not in begun))
        begun.add(number)
    return Timeline(rank, [Collective("all_reduce", members, sent) for _ in begun], found, rest)


def replayed(*steps, busy=0.0, link=0.0):
    return Replay(steps, lambda _: Cost(busy, link)).run()


def test_computation_alone():
    (found,) = replayed(Timeline(0, rest=3.0))
    assert (found.seconds, found.computed, found.busy) == (3, 3, 0)


def test_a_rank_waits_for_the_one_that_comes_later():
    quick, slow = replayed(
        step(0, (1, 0), (0, 0), rest=2), step(1, (4, 0), (0, 0), rest=1), link=0.5
    )
    assert (quick.seconds, slow.seconds) == (6.5, 5.5)
    assert dict(quick.waited) == {("all_reduce", 2): 3.5}
    assert dict(slow.waited) == {("all_reduce", 2): 0.5}


def test_what_travels_while_a_rank_computes_is_hidden():
    for found in replayed(*(step(rank, (1, 0), (3, 0)) for rank in PAIR), link=2):
        assert (found.seconds, found.hidden) == (4, 2)
        assert sum(found.waited.values()) == 0
    for found in replayed(*(step(rank, (1, 0), (3, 0)) for rank in PAIR), busy=0.5, link=5):
        assert (found.seconds, found.hidden) == (6.5, 3)


def test_a_link_carries_one_collective_after_another():
    ranks = (step(rank, (1, 0), (0, 1), (0, 0), (0, 1)) for rank in PAIR)
    assert [found.seconds for found in replayed(*ranks, link=2)] == [5, 5]


def test_ranks_that_are_not_known_come_as_the_known_one():
    (found,) = replayed(step(5, (1, 0), (0, 0), members=(4, 5, 6, 7)), link=2)
    assert found.seconds == 3


def test_ranks_that_call_other_collectives_are_told():
    with pytest.raises(RuntimeError, match="different collectives"):
        replayed(step(0, (1, 0), (0, 0)), Timeline(1, rest=1.0))


@pytest.mark.quick_rows("mesh0")
@pytest.mark.parametrize("mesh", [(2, 3), (1, 2, 2)])
def test_the_events_of_each_step_are_the_same(mesh):
    task = Task(Net(), None, first_batches(Net(), data(), "fit"), mesh)
    recorder = Recorder(1)

    class Body:
        def __deepcopy__(self, _):
            return self

        def __call__(self):
            train(task, 3, recorder.cut, warm_up=2)

    alone(Body(), processes=math.prod(mesh), rank=1, listener=recorder)
    assert len(recorder.steps) == 6  # what comes before, two that warm up, and three
    *_, first, second, _ = recorder.steps
    assert first.collectives
    assert [(e.number, e.begins) for e in first.events] == [
        (e.number, e.begins) for e in second.events
    ]
    assert first.collectives == second.collectives
    assert all(1 in c.members for c in first.collectives)
    assert sum(c.sent for c in first.collectives) > 0
    assert {e.number for e in first.events if not e.begins} == {*range(len(first.collectives))}


def test_costs_lie_between_the_sizes_that_were_measured():
    links = MeasuredLinks({("all_reduce", 2): [(0, Cost(1, 0)), (100, Cost(3, 4))]})
    assert links.cost(Collective("all_reduce", PAIR, 50)) == Cost(2, 2)
    assert links.cost(Collective("broadcast", (0, 1, 2), 200)) == Cost(5, 8)
    assert links.cost(Collective("all_reduce", (0,), 200)) == Cost(0, 0)
    assert torch.tensor(links.cost(Collective("all_reduce", PAIR, 0)).link) == 0
