"""Notes which domains a function under a transform meets, or refuses the transform."""

from contextvars import ContextVar

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Domain

# where the domains are noted that functions meet; one list for each transform that is under way
domains_met: ContextVar[tuple[list[Domain], ...]] = ContextVar("domains_met", default=())


class SplitInTransform(UnsupportedOperationError):  # noqa: N818  it is a signal to our jvp
    """A split tensor was met inside a transform of torch.func, or of torch's own.

    Attributes:
        in_tiles: True if it was a field in tiles.
    """

    def __init__(self, *, in_tiles: bool = False) -> None:
        super().__init__(
            "a split tensor inside a function transform that maps over gradients, as torch.func's "
            "vmap, Jacobians and Hessians, is_grads_batched and vectorize do: call the function or "
            "torch.func.grad, vjp or jvp for each index or unit vector, and torch.stack what they "
            "return"
        )
        self.is_named, self.in_tiles = True, in_tiles


def note_domain(domain: Domain) -> None:
    """Note that a function met a split tensor of this domain."""
    for met in domains_met.get():
        met.append(domain)
