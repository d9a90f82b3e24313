"""The base of the package's own errors."""


class LightningShardError(Exception):
    """Base class of all errors that this package defines.

    Each of them is also an error of Python's own kind, such as a ValueError, by which programs that
    do not know this package may catch it.
    """


class StuckError(LightningShardError, RuntimeError):
    """No simulated rank, or no tile, can go on; the message names what they wait for."""
