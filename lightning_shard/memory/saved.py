"""Tensors that autograd has saved, and whose memory may be away."""

from collections.abc import Callable

from torch import Tensor
from typing_extensions import override

from lightning_shard.memory.paging.pages import Page
from lightning_shard.processes.torch_private.internals import version_of


class Kept:
    """Holds a saved tensor that stays where it is.

    Torch compares versions only of what no hook has packed, so we do.

    Attributes:
        alias: The tensor, in any layout.
        version: The version of its numbers.
    """

    __slots__ = ("alias", "version")

    def __init__(self, tensor: Tensor) -> None:
        """Hold the tensor without its node of the graph, which would hold us."""
        self.alias = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = version_of(tensor)

    def tensor(self) -> Tensor:
        """Return the tensor."""
        return self.alias

    def is_as_it_was(self) -> bool:
        """Return True unless it was written."""
        return version_of(self.alias) == self.version

    def check(self) -> None:
        """Raise where the tensor no longer has the numbers that were saved."""
        if not self.is_as_it_was():
            raise RuntimeError(
                f"a tensor {tuple(self.alias.shape)} that backward needs was written in place, or "
                "its memory was freed, after an offloaded block had saved it; leave it as it is "
                "until backward, or take the block out of activation_offload."
            )


class Saved(Kept):
    """Holds a saved tensor whose memory may be away.

    Attributes:
        page: Its memory.
        place: The number of tensors that were saved before it, and 1.
    """

    __slots__ = ("__weakref__", "_release", "page", "place")

    def __init__(
        self, tensor: Tensor, page: Page, release: Callable[[Page, Tensor], None], place: int = 0
    ) -> None:
        """Hold the memory until nobody needs this."""
        super().__init__(tensor.detach())
        self.page, self.place, self._release = page, place, release
        page.held += 1

    def __del__(self) -> None:
        """Leave the storage to those who still hold it."""
        self._release(self.page, self.alias)

    @override
    def tensor(self) -> Tensor:
        """Return the tensor, whose memory is near; nobody frees what it holds, too."""
        again, alias = self.page.again, self.alias
        if again is None:
            return alias.detach()
        return again.as_strided(alias.shape, alias.stride(), alias.storage_offset())

    def is_plain(self) -> bool:
        """Return True where its memory holds its numbers, and not their conjugates or negatives."""
        return not (self.alias.is_conj() or self.alias.is_neg())

    @override
    def is_as_it_was(self) -> bool:
        """Return True unless it was written, or its memory was freed."""
        is_here = not self.page.is_away and self.page.again is None
        freed = is_here and not self.alias.untyped_storage().nbytes()
        return not freed and super().is_as_it_was()
