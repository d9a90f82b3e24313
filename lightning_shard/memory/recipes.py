"""Tells how what was saved for backward is made again of what else was saved."""

import weakref
from collections.abc import Callable, Iterator
from itertools import islice

from torch import Tensor

from lightning_shard.memory.made_again import Made, Makers, Operand
from lightning_shard.memory.paging.pages import Page, Pages
from lightning_shard.memory.saved import Saved
from lightning_shard.processes.torch_private.internals import key_of_storage

LOOKED_AT = 8  # tensors that something else may still hold


class Recipe:
    """Makes the numbers of a page again.

    Attributes:
        page: The page.
    """

    def __init__(self, page: Page, made: Made) -> None:
        """Know no source yet."""
        self.page, self._made, self._sources = page, made, dict[Operand, Saved]()

    def add(self, operand: Operand, source: Saved) -> None:
        """Hold a source: it lives as long as the page."""
        self._sources[operand] = source

    def pages(self) -> list[Page]:
        """Return the pages of the sources."""
        return [*dict.fromkeys(source.page for source in self._sources.values())]

    def check(self) -> None:
        """Raise where a source was written."""
        for source in self._sources.values():
            source.check()

    def run(self) -> Tensor:
        """Make it; all sources are near."""
        return self._made.again(self._value)

    def _value(self, operand: Operand) -> Tensor:
        source = self._sources.get(operand)
        if source is not None:
            return operand.part_of(source.tensor())
        assert operand.made is not None
        return operand.part_of(operand.made.again(self._value))


class Recipes:
    """Holds the recipes of the pages of a mover, each of which is sought once.

    A page that is made again is no source of another one. So a page needs no more memory than its
    sources and the calls between.

    Args:
        makers: They know the calls.
        release: `Saved` calls it at its end.
    """

    def __init__(self, makers: Makers, release: Callable[[Page, Tensor], None]) -> None:
        """Know none."""
        self._makers, self._release = makers, release
        self._found = dict[Page, Recipe | None]()
        self._saved = dict[Page, weakref.ref[Saved] | None]()  # None: not of one dtype
        self._unsought = dict[Page, None]()  # their recipes were not sought yet

    def note(self, saved: Saved) -> None:
        """Know how the memory of a page is read."""
        page = saved.page
        if page not in self._saved:
            self._saved[page] = weakref.ref(saved) if saved.is_plain() else None
            self._unsought[page] = None
        elif (first := self._saved_of(page)) is None or (
            first.alias.dtype != saved.alias.dtype or not saved.is_plain()
        ):
            self._saved[page] = None

    def forget(self, page: Page) -> None:
        """Know nothing of a page, which nobody needs any more."""
        for table in (self._found, self._saved, self._unsought):
            table.pop(page, None)

    def of(self, page: Page) -> Recipe | None:
        """Return the recipe of a page that has no copy on the host."""
        return self._found.get(page) if page.host is None else None

    def seek(self, pages: Pages, is_only_ours: Callable[[Page], bool]) -> Iterator[Page]:
        """Give those that are made again of the pages that were noted since, a few at a time."""
        for page in [*islice(self._unsought, LOOKED_AT)]:
            del self._unsought[page]
            if not is_only_ours(page):
                self._unsought[page] = None
            elif self.sought(pages, page) is not None:
                yield page

    def sought(self, pages: Pages, page: Page) -> Recipe | None:
        """Return the recipe of a page, or None."""
        if page in self._found or page.host is not None:
            return self.of(page)
        self._found[page] = None
        self._unsought.pop(page, None)
        saved = self._saved_of(page)
        made = None if saved is None else self._makers.of(saved.alias)
        if made is not None:
            recipe = Recipe(page, made)
            if self._has_sources(pages, recipe, made):
                self._found[page] = recipe
        return self._found[page]

    def _has_sources(self, pages: Pages, recipe: Recipe, made: Made) -> bool:
        """Find each operand of a call, or what makes it again."""
        for operand in made.operands:
            saved, again = self._source(pages, operand), operand.made
            is_on_host = saved is not None and saved.page.host is not None
            if again is not None and not is_on_host and self._has_sources(pages, recipe, again):
                continue
            if saved is None or saved.page is recipe.page or self._found.get(saved.page):
                return False
            self._found[saved.page] = None  # it is kept
            recipe.add(operand, Saved(saved.alias, saved.page, self._release))
        return True

    def _source(self, pages: Pages, operand: Operand) -> Saved | None:
        """Return what is saved of an operand, with the numbers that it had."""
        storage = operand.storage()
        page = None if storage is None else pages.known.get(key_of_storage(storage))
        saved = None if page is None else self._saved_of(page)
        if saved is None or not saved.is_as_it_was():
            return None
        is_it = (saved.version, saved.alias.dtype) == (operand.version, operand.dtype)
        return saved if is_it else None

    def _saved_of(self, page: Page) -> Saved | None:
        found = self._saved.get(page)
        return None if found is None else found()
