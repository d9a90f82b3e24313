"""Those who remember a parameter find the one that replaces it."""

import gc

from torch import nn

from lightning_shard.fsdp import remembered
from lightning_shard.fsdp.remembered import replace_remembered


def test_what_the_collector_was_told_to_leave_alone():
    """As of programs that call `gc.freeze` once they have built all."""
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    kept = list(old.parameters())
    count = gc.get_freeze_count()
    gc.freeze()
    moved = dict(zip(old.parameters(), new.parameters(), strict=True))
    replace_remembered(moved, old)
    assert all(p is q for p, q in zip(kept, new.parameters(), strict=True))
    assert gc.get_freeze_count() > count


def test_all_objects_are_asked_once_for_a_list(monkeypatch):
    """Whether an optimizer holds it is no question for each parameter in it."""
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    kept, asked = list(old.parameters()), list[object]()
    monkeypatch.setattr(remembered, "_is_of_an_optimizer", asked.append)
    replace_remembered(dict(zip(old.parameters(), new.parameters(), strict=True)), old)
    assert len([holder for holder in asked if holder is kept]) == 1
