"""One device that ranks in turns share: what a waiting rank holds lies in the host's memory."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_shard.fsdp.paging.memory import FileMemory
from lightning_shard.fsdp.paging.pager import Pager, with_index
from lightning_shard.lab.simulated.group import OpenCollectives
from lightning_shard.lab.simulated.replicas import Replicas
from lightning_shard.lab.simulated.state import State
from lightning_shard.lab.simulated.turns import Ready, Turns


class OneDevice:
    """The device of all ranks, and the pager that keeps there what the running rank reads.

    Attributes:
        device: The device.
        pager: None on a CPU without files, where nothing is moved.
        replicas: The processes with ranks of the same world; None: this is the only one.
        wait: Lets other ranks run until something is there; set by `turns`.
    """

    def __init__(
        self,
        device: torch.device,
        budget: int | None = None,
        folder: str | Path | None = None,
        *,
        replicas: Replicas | None = None,
    ) -> None:
        """Move nothing yet.

        Args:
            device: The device of all ranks.
            budget: Bytes of tensors that may stay there beside those of before; None: only what
                the running rank reads.
            folder: A directory in whose files waits what is not there; None: the host's memory.
            replicas: The processes with ranks of the same world; None: this is the only one.

        Raises:
            ValueError: There is no such directory.
        """
        self.device = device = with_index(device)
        self.replicas = replicas
        self.wait: Callable[[int, Ready, str], None]
        memory = None if folder is None else FileMemory(folder)
        pages = device.type != "cpu" or folder is not None
        self.pager = Pager(device, budget, memory) if pages else None

    @property
    def first_rank(self) -> int:
        """The first rank of this process."""
        return 0 if self.replicas is None else self.replicas.first

    def turns(self, bodies: Sequence[Callable[[], Any]]) -> tuple[Turns, OpenCollectives]:
        """Return the ranks that run `bodies`, and their collectives.

        What crosses between ranks is computed in the host's memory, so that what several ranks
        bring to a collective never meets on the device.
        """
        pager, cores = self.pager, torch.get_num_threads()
        paged = [partial(self._paged, body) for body in bodies]
        meet = None if self.replicas is None else self.replicas.meet
        if pager is None:
            turns = Turns(paged, cores=cores, meet=meet)
            open_ones = OpenCollectives(turns, replicas=self.replicas)
        else:
            pager.ranks = len(bodies)
            turns = Turns(paged, pager.hand_over, cores=cores, meet=meet)
            open_ones = OpenCollectives(turns, pager.on_host, self.replicas)
        self.wait = turns.wait
        return turns, open_ones

    def _paged(self, body: Callable[[], Any]) -> Any:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_device(self.device)  # of this thread
        paging: AbstractContextManager[Any] = (
            nullcontext() if self.pager is None else self.pager.paging()
        )
        with paging:
            return body()

    @contextmanager
    def shared(self) -> Generator[None]:
        """Give each rank random numbers of the device of its own, while open."""
        before = State.device
        State.device = None if self.device.type == "cpu" else self.device
        try:
            yield
        finally:
            State.device = before
