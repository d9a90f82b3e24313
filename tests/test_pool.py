"""The pool of ranks with which the other tests run."""

import pytest
import torch
import torch.distributed as dist

from tests import pool


def multiply(number, refused=None):
    assert number != refused, f"{number} is refused"
    total = torch.ones(1) * number
    dist.all_reduce(total)
    assert total == 2 * number


def test_bodies_that_were_sent_ahead_are_answered_in_turn():
    ranks = pool.pool_of(2)
    for number in range(4):
        ranks.send((multiply, {"number": number, "refused": 2}))
    ranks.wait()
    ranks.wait()
    with pytest.raises(pytest.fail.Exception, match=r"\[rank 1\](.|\n)*2 is refused"):
        ranks.wait()
    assert not pool.is_open(ranks)
    again = pool.pool_of(2)
    assert again is not ranks
    again.run(multiply, {"number": 3})


def refuse_on_the_first(number):
    if dist.get_rank() == 0 and number == 1:
        raise ValueError("only here")
    dist.barrier()


def test_a_failure_of_one_rank_ends_the_wait_for_the_others():
    ranks = pool.pool_of(2)
    for number in range(2):
        ranks.send((refuse_on_the_first, {"number": number}))
    ranks.wait()
    with pytest.raises(pytest.fail.Exception, match=r"only here(.|\n)*no answer from ranks \[1\]"):
        ranks.wait()
