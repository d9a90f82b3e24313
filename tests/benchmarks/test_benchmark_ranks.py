"""Ranks that benchmarks start by themselves."""

import pytest
import torch.distributed as dist

from benchmarks.common import start


def many(size):
    return dist.get_world_size(), "x" * size


@pytest.mark.slow
def test_an_answer_larger_than_a_pipe_holds():
    assert start(2, many, 10**6) == (2, "x" * 10**6)
