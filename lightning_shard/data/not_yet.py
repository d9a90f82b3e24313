"""Says what to do with an entry of a batch that is no tensor yet, where it is used as one."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn


class NotYetATensor:
    """Refuses what tensors can do: the entry becomes one once the hooks of its batch have run.

    Attributes:
        shape: The shape of the whole tensor.
    """

    shape: Any

    @property
    def ndim(self) -> int:
        """The number of dims of the whole tensor."""
        return len(self.shape)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # protocols of Python
            raise AttributeError(name)
        raise AttributeError(_refusal(self.shape, f"has no .{name}"))

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(_refusal(self.shape, "cannot be indexed"))

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> NoReturn:
        raise TypeError(_refusal(None, f"is no argument of {getattr(function, '__name__', '')}()"))


def _refusal(shape: Sequence[int] | None, cannot: str) -> str:
    extents = "" if shape is None else f" of shape {tuple(shape)}"
    return (
        f"a batch entry{extents} is not whole on any rank or tile until the batch has been split, "
        f"so it {cannot}; compute with it in the step, where it is a tensor, or with the rows that "
        "__getitem__ of the dataset reads."
    )
