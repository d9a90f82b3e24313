"""Why a run ends: which rank failed first, and how all ranks say so."""

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lightning_shard.processes.device import DEVICES
from lightning_shard.processes.errors import LightningShardError

SIGTERM, SIGTERM_CODE = "SIGTERM", 128 + signal.SIGTERM
ENDED = "ended without a word (it was killed, or called exit), or is not reached any more"
LEFT = "has come to the end of its program, or was killed"
# words of torch's store and of collectives, whose errors are plain RuntimeErrors in some releases
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    *(words for row in DEVICES for words in row.lost),
)


@dataclass(frozen=True)
class Failure:
    """Why a run ends.

    Attributes:
        rank: The rank that failed.
        text: "rank 1: ValueError: ...".
        at_once: True if all ranks end wherever they are, and none waits to see who fails.
    """

    rank: int
    text: str
    at_once: bool = False

    @property
    def code(self) -> int:
        """The exit status of all ranks."""
        return SIGTERM_CODE if self.text == f"rank {self.rank}: {SIGTERM}" else 1

    @classmethod
    def of(cls, rank: int, error: BaseException | None) -> "Failure":
        """Describe the error of a rank, with the notes that say what to do."""
        if isinstance(error, SystemExit) and error.code == SIGTERM_CODE:
            return cls(rank, f"rank {rank}: {SIGTERM}")
        text = f"rank {rank}: {type(error).__name__}: {error}".removesuffix(": ")
        return cls(rank, " ".join([text, *getattr(error, "__notes__", ())]))

    def reason_for(self, rank: int) -> str:
        """Return the rest of the sentence "[rank 0] ended, because" for this `rank`."""
        if self.code == SIGTERM_CODE:
            return f"of SIGTERM on rank {self.rank}"
        if self.text.endswith(": KeyboardInterrupt"):
            return f"of Ctrl-C on rank {self.rank}"
        return f"{'it' if self.rank == rank else 'another rank'} failed first: {self.text}"

    def packed(self) -> str:
        """Return the failure as text, for the store in which the ranks meet."""
        return json.dumps([self.rank, self.text, self.at_once])


STORE_GONE = Failure(0, "rank 0: ended, or is not reached any more: its store does not answer")


class RankFailedError(LightningShardError, RuntimeError):
    """A rank that this one waits for does not come: it failed, or has ended."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"waited for another rank in vain: {failure.text}")
        self.failure = failure


def is_lost_connection(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, says no more than that another rank is not reached."""
    while error is not None:
        lost = isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST)
        if lost or isinstance(error, dist.DistError):
            return True
        error = error.__cause__
    return False


def unpacked(packed: bytes) -> Failure:
    """Return the failure that a rank has packed."""
    return Failure(*json.loads(packed))


def ended(ranks: Sequence[int], words: str = ENDED) -> Failure:
    """Return the failure of ranks that ended without a word."""
    return Failure(ranks[0], f"rank {' and '.join(map(str, ranks))}: {words}")


def note_first(error: BaseException, text: str) -> None:
    """Add to an error, once, which rank failed first, and by which error if it is another one."""
    if str(error) and f": {error}" in text:
        text = f"{text.partition(':')[0]}, by this error"
    note = f"The run ends, because one rank failed first: {text}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
