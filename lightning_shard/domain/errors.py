"""Defines the error of operations that cannot run on split tensors."""


class UnsupportedOperationError(NotImplementedError):
    """An operation, or this use of it, has no rule for tensors split over a domain mesh."""

    is_named = False  # whether the message names the function that was called
