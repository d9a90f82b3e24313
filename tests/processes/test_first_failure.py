"""What ranks that fail agree on, in a store that ends with the process of rank 0."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from lightning_shard.processes.failures.failure import Failure, note_first
from lightning_shard.processes.failures.first_failure import FirstFailure


class Ending:
    """A store that answers until it has ended."""

    def __init__(self):
        self.store, self.is_gone = dist.HashStore(), False

    def __getattr__(self, name):
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")
        return getattr(self.store, name)


class Talk:
    """Asks the store; on a busy machine the next thing is asked later."""

    def __init__(self, pause_s):
        self.pause_s = pause_s

    def ask(self, operation, limit_s=None):
        answer = operation()
        time.sleep(self.pause_s)
        return answer


def test_rank_0_keeps_the_store_until_all_know_that_all_have_failed():
    """It had ended once all had failed, as after Ctrl-C; a slow rank then took itself for alone."""
    store = Ending()

    def fail(rank):
        found = FirstFailure(store, "run", rank, 3).some_go_on(Talk(0.2 * rank), 0)
        store.is_gone = store.is_gone or rank == 0
        return found

    with ThreadPoolExecutor(3) as ranks:
        assert [*ranks.map(fail, range(3))] == [False] * 3


def test_a_sentence_is_not_said_again_below_itself():
    mine, other = ValueError("it is no number."), OSError("no space")
    mine.add_note("Take another one.")
    text = Failure.of(0, mine).text
    for error in (mine, other):
        note_first(error, text)
    assert mine.__notes__[1:] == [
        "The run ends, because one rank failed first: rank 0, by this error"
    ]
    assert other.__notes__ == [f"The run ends, because one rank failed first: {text}"]
