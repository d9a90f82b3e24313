"""Lets HDF5 write into a file on a full disk, where an error inside HDF5 ends the process."""

import io
from collections.abc import Iterable, Iterator
from typing import Any

from typing_extensions import override


class FailingLater(io.FileIO):
    """A file whose first error is raised when HDF5 is not writing: inside it ends the process."""

    error: OSError | None = None

    @override
    def write(self, data: Any, /) -> int:
        """Write the bytes, or nothing after an error; both are said to be written."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest and self.error is None:
            try:
                rest = rest[super().write(rest) :]
            except OSError as error:
                self.error = error
        return size

    @override
    def truncate(self, size: int | None = None, /) -> int:
        """Change the size of the file, if the disk has room."""
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = self.error or error
            return size or 0

    def watch(self, blocks: Iterable[Any]) -> Iterator[Any]:
        """Yield the blocks, and raise the first error before the next one is written."""
        for block in blocks:
            self.check()
            yield block

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self.error:
            raise self.error
