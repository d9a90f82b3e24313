"""Moves what blocks keep for backward to the memory of the host, and fetches it ahead of backward.

Autograd saves aliases of tensors. A storage that nobody else holds any more may leave the device,
the one first that backward needs last, each one once however many operators keep it. What a frame
of Python or FSDP2 holds never leaves, so no code ever meets a tensor without memory.
`paging/pages.py` has the rule that orders the copies. What a cheap function made of saved tensors
is not copied: it is freed, and made again (`made_again.py`).

Parameters stay, since FSDP2 frees and gathers them itself. What lies on the CPU stays, too.
"""

import functools
import operator
import threading
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_shard.memory.free import free_bytes
from lightning_shard.memory.made_again import Makers, Noting
from lightning_shard.memory.paging.host_memory import Memory, MemoryInParts
from lightning_shard.memory.paging.pages import Driver, Page, Pages
from lightning_shard.memory.recipes import LOOKED_AT, Recipe, Recipes
from lightning_shard.memory.saved import Kept, Saved
from lightning_shard.processes.torch_private.internals import (
    base_of,
    key_of_storage,
    users_of_storage,
)
from lightning_shard.tensor.mixins import Mixin, mix_in

# At 25 GB/s a smaller tensor travels in 3 us, less than it takes to queue its copy and the waits.
SMALL_BYTES = 2**16

# On the device beside what computes: forward waits for the oldest copy where more is on its way,
# and backward fetches as much ahead. At 25 GB/s it travels in 10 ms.
AHEAD_BYTES = 2**28


_PLACE = operator.attrgetter("place")


def is_moved(tensor: Tensor) -> bool:
    """Return True for a saved tensor that an offloaded block moves: an activation."""
    source = base_of(tensor)
    is_leaf = source.requires_grad and source.grad_fn is None
    return (
        tensor.layout is torch.strided
        and tensor.untyped_storage().nbytes() >= SMALL_BYTES
        and not is_leaf
        and not isinstance(source, nn.Parameter)  # a frozen one, which FSDP2 frees, too
    )


class Mover:
    """Moves storages that autograd alone holds, and brings them back in the reverse order."""

    def __init__(self, driver: Driver, memory: Memory | None = None) -> None:
        """Nothing is moved yet."""
        self.driver = driver
        self._memory = memory  # by default chosen as the first tensor is saved
        self._pages: dict[torch.device, Pages] = {}
        self._near = OrderedDict[Page, None]()  # backward needs the first one last
        self._away = list[Page]()  # by their places
        self._places = 0  # saved tensors so far
        self._last = 0  # the place that backward asked for last
        self._numbers = dict[Page, int]()  # one for each page since this step began
        self._left, self._left_before = set[int](), set[int]()  # numbers, this step and the last
        self._budget: int | None = None  # the one that this step has
        self._early = dict[Page, None]()  # those that will leave if this step is as the last was
        self._lock = threading.RLock()  # backward may run in threads of its own
        self._is_at_work = False
        self._ended = deque[tuple[Page, Tensor]]()  # those of saved tensors that nobody needs
        self._makers = Makers(driver.holds, lambda: SMALL_BYTES)
        self._recipes = Recipes(self._makers, self.release)
        self._cheap = dict[Page, None]()  # near, and made again if they leave
        self._is_short = self._was_short = True  # room was short in this step, or in the one before

    def noting(self) -> AbstractContextManager[Any]:
        """Return a mode in which the calls of cheap functions are noted, where that may be of use.

        A step is taken to be as the one before: where all fits no call is noted.
        """
        return Noting(self._makers) if self._is_short or self._was_short else nullcontext()

    def pack(self, budget: int | None, tensor: Tensor) -> Kept:
        """Hook of autograd: what it keeps in the place of a tensor.

        Args:
            budget: Bytes of activations that may be on the device. None: all are copied to the
                host at once, and leave as soon as that is done.
            tensor: The tensor that an operator saves.
        """
        if not (self.driver.holds(tensor) and is_moved(tensor)):
            return Kept(tensor)
        with self._at_work():
            pages = self._pages_on(tensor.device)
            page = pages.known.get(key_of_storage(tensor.untyped_storage()))
            if not (self._near or self._away):
                self._begin_step(budget)
            if page is None:
                page = pages.note(tensor.untyped_storage())
                self._makers.see(tensor)
                number = self._numbers[page] = len(self._numbers)
                if number in self._left_before:
                    self._early[page] = None
            self._places += 1
            self._last = page.place = self._places
            self._near[page] = None
            self._near.move_to_end(page)
            saved = Saved(tensor, page, self.release, self._places)
            self._recipes.note(saved)
            self._send_early(pages)
            self._make_room(pages, budget, 0)
        return saved

    def unpack(self, budget: int | None, packed: Kept) -> Tensor:
        """Hook of autograd: the tensor, for the current stream."""
        if not isinstance(packed, Saved):
            packed.check()
            return packed.tensor()
        with self._at_work():
            packed.check()
            page, pages = packed.page, self._pages_on(packed.alias.device)
            is_next = packed.place < self._last  # node of the graph; those of one node come upwards
            self._last = packed.place
            if page.is_away:
                self._bring(pages, page, budget)
            tensor = packed.tensor()
            pages.take(page)
            if is_next:
                self._send_early(pages)
                self._fetch_ahead(pages, budget)
        return tensor

    def release(self, page: Page, alias: Tensor) -> None:
        """Forget a storage once no graph needs it.

        Python's garbage collector may call this anywhere, also while a table is read here; then it
        is forgotten at the end. The alias stays until then, since a page counts who holds it.
        """
        with self._lock:
            self._ended.append((page, alias))
            if not self._is_at_work:
                self._forget_ended()

    @contextmanager
    def _at_work(self) -> Generator[None]:
        """Keep other threads out while open, and forget nothing before the end."""
        with self._lock:
            before, self._is_at_work = self._is_at_work, True
            try:
                yield
            finally:
                self._is_at_work = before
                if not before:
                    self._forget_ended()

    def _forget_ended(self) -> None:
        while self._ended:
            page, _ = self._ended.popleft()
            page.held -= 1
            if not page.held:
                for kept in (self._near, self._early, self._cheap):
                    kept.pop(page, None)
                if page.is_away:
                    self._no_longer_away(page)
                self._recipes.forget(page)
                for pages in self._pages.values():
                    if pages.known.get(page.key) is page:
                        pages.forget(page)

    def _pages_on(self, device: torch.device) -> Pages:
        if device not in self._pages:
            if self._memory is None:
                self._memory = MemoryInParts(pinned=torch.accelerator.is_available())
            self._pages[device] = Pages(device, self._memory, self.driver)
        return self._pages[device]

    def _begin_step(self, budget: int | None) -> None:
        """Forget the pages of the step before, but for which of them had to leave."""
        self._left_before = self._left if budget == self._budget else set()
        self._left, self._budget = set(), budget
        self._is_short, self._was_short = False, self._is_short
        self._numbers.clear()
        self._early.clear()

    def _send_early(self, pages: Pages) -> None:
        """Start the copies of what had to leave in the step before.

        A copy that begins where there is no room left hides behind nothing.
        """
        ready = [page for page in islice(self._early, LOOKED_AT) if self._is_only_ours(page)]
        for page in ready:
            del self._early[page]
            pages.send(page)

    def _make_room(self, pages: Pages, budget: int | None, wanted: int) -> None:
        """Start copies of what is above the budget, and free as much as must be free now."""
        limit = AHEAD_BYTES if budget is None else budget
        start = 0 if budget is None else budget - min(AHEAD_BYTES, budget // 16)
        above, freed = pages.near + wanted - start, list[Page]()
        if above > 0:
            self._cheap |= dict.fromkeys(self._recipes.seek(pages, self._is_only_ours))
        for page in self._first_to_leave() if above > 0 else ():
            if above <= 0:
                break
            if self._is_only_ours(page):
                above -= page.count
                recipe = self._recipes.sought(pages, page)
                if recipe is None:
                    pages.send(page)
                # without a budget what is newest stays, however large it is
                newer = pages.near + wanted - (page.count if budget is None else 1)
                if newer >= limit:
                    pages.free(page)
                    if recipe is None:
                        self._left.add(self._numbers[page])
                    self._early.pop(page, None)
                    freed.append(page)
        self._is_short |= bool(freed)
        for page in freed:
            self._cheap.pop(page, None)
            del self._near[page]
            insort(self._away, page, key=_PLACE)

    def _first_to_leave(self) -> Iterator[Page]:
        """Give what is near: first what is made again, then what has to be copied."""
        yield from self._cheap
        yield from (page for page in self._needed_last_first() if page not in self._cheap)

    def _needed_last_first(self) -> Iterator[Page]:
        """Give what is near: first what backward has passed, then what it needs last."""
        yield from takewhile(lambda page: page.place > self._last, reversed(self._near))
        yield from takewhile(lambda page: page.place <= self._last, self._near)

    def _is_only_ours(self, page: Page) -> bool:
        if page.again is not None:
            return users_of_storage(page.memory()) == 2  # the tensor, and what the call gives
        storage = page.storage()
        return (
            storage is not None and users_of_storage(storage) == page.held + 1
        )  # and this variable

    def _bring(self, pages: Pages, page: Page, budget: int | None) -> None:
        """Have a page near that is away."""
        recipe = self._recipes.of(page)
        wanted = {page, *self._to_fetch(page, recipe)}
        self._make_room(pages, budget, sum(needed.count for needed in wanted))
        if recipe is not None:
            recipe.check()
        for needed in self._to_fetch(page, recipe):  # a source may have left for this room
            self._fetch(pages, needed)
        if recipe is not None:
            for source in recipe.pages():
                pages.take(source)
            pages.replace(page, recipe.run())
            self._is_near(page)
            self._cheap[page] = None

    def _to_fetch(self, page: Page, recipe: Recipe | None) -> list[Page]:
        """Return the pages that are copied back to have one near."""
        needed = [page] if recipe is None else recipe.pages()
        return [page for page in needed if page.is_away]

    def _fetch(self, pages: Pages, page: Page) -> None:
        pages.fetch(page)
        self._is_near(page)

    def _is_near(self, page: Page) -> None:
        """Put a page that was away into the order of need."""
        self._no_longer_away(page)
        is_first = not self._near or page.place < next(iter(self._near)).place
        self._near[page] = None
        self._near.move_to_end(page, last=not is_first)

    def _no_longer_away(self, page: Page) -> None:
        del self._away[bisect_left(self._away, page.place, key=_PLACE)]

    def _fetch_ahead(self, pages: Pages, budget: int | None) -> None:
        """Fetch what backward needs next, as much as there is room for."""
        taken = 0
        before = self._away[: bisect_left(self._away, self._last, key=_PLACE)]
        for page in reversed(before):
            recipe = self._recipes.of(page)
            needed = self._to_fetch(page, recipe)
            taken += 0 if recipe is None else page.count  # by what is made before the next one
            room = (AHEAD_BYTES if budget is None else budget) - pages.near - taken
            if room <= 0 or (budget is not None and room < sum(page.count for page in needed)):
                return
            for each in needed:
                self._fetch(pages, each)


class WhatFits:
    """A budget of a network, which is chosen when its first forward begins.

    It is half of what the device then has free beside the gradients and the states of Adam that are
    still to come. The other half is left to what operators make, and to gradients of activations.
    """

    def __init__(self, network: nn.Module) -> None:
        """Choose nothing yet."""
        self._network, self._bytes = network, -1

    def bytes(self) -> int | None:
        """Return the budget; None if nothing fits, or where the device does not tell."""
        if self._bytes < 0:
            parts = [*self._network.parameters()]
            device = parts[0].device if parts else torch.device("cpu")
            own = [p.to_local() if isinstance(p, DTensor) else p for p in parts if p.requires_grad]
            to_come = 3 * sum(part.nbytes for part in own)
            self._bytes = max(0, ((free_bytes(device) or 0) - to_come) // 2)
        return self._bytes or None


Budget = int | None | WhatFits


class OnHost(saved_tensors_hooks):
    """While open, what autograd saves may lie in the host's memory until backward needs it.

    What a cheap function made may be made again instead.
    """

    def __init__(self, budget: Budget = None) -> None:
        """Store with the `Mover` of this process.

        Args:
            budget: Bytes of activations that stay on the device; none by default.
        """
        budget = budget.bytes() if isinstance(budget, WhatFits) else budget
        unpack: Callable[[Any], Tensor] = functools.partial(MOVER.unpack, budget)
        super().__init__(functools.partial(MOVER.pack, budget), unpack)
        self._noting = MOVER.noting()

    @override
    def __enter__(self) -> None:
        self._noting.__enter__()
        super().__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._noting.__exit__(*error)


MOVER = Mover(Driver())  # one for the process


class _Offloaded(Mixin):
    """Mixin of a module whose activations lie on the host from forward to backward."""

    activation_budget: Budget

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, whose saved tensors go to the host."""
        run = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        with OnHost(self.activation_budget):
            return run(*args, **kwargs)


def offload(modules: Iterable[nn.Module], budget: Budget = None) -> None:
    """Keep the activations of these modules on the host.

    Args:
        modules: Blocks of a network.
        budget: Bytes of activations that stay on the device; none by default.
    """
    for module in modules:
        mix_in(module, _Offloaded)
        module.activation_budget = budget  # pyright: ignore[reportArgumentType]
