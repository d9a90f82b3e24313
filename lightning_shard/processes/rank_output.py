"""Shows what ranks print, line by line, in the process that started them."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from select import select

NAMES = ("stdout", "stderr")
Writers = tuple[Connection, ...]  # one rank's, for each of NAMES


class Stream:
    """Shows the standard output or error of one rank."""

    def __init__(self, rank: int, name: str, reader: Connection) -> None:
        self._reader, self._name = reader, name
        self._prefix = f"[rank {rank}] " if rank else ""
        self._rest = b""

    def fileno(self) -> int:
        """Give the number that `multiprocessing.connection.wait` watches."""
        return self._reader.fileno()

    def show(self) -> None:
        """Show the lines that are there; the stream is not empty."""
        data = self._rest + os.read(self.fileno(), 2**16)
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1  # \r ends a line of a progress bar
        self._rest = data[end:]
        self._write(data[:end])

    def show_all(self) -> None:
        """Show all that is there, also a line without an end."""
        while select([self], [], [], 0)[0]:
            self.show()
        if self._rest:
            self._write(self._rest + b"\n")
            self._rest = b""

    def _write(self, data: bytes) -> None:
        lines = data.decode(errors="replace").splitlines(keepends=True)
        target = getattr(sys, self._name)
        text = "".join(self._prefix + line for line in lines)
        letters = target.encoding or "utf-8"  # a terminal of ASCII has no others
        target.write(text.encode(letters, "backslashreplace").decode(letters))
        target.flush()


@contextmanager
def streams(ranks: int) -> Generator[tuple[list[Stream], list[Writers]]]:
    """Open what each rank writes to, and what shows it here, until the ranks have ended."""
    pipes = [[Pipe(duplex=False) for _ in NAMES] for _ in range(ranks)]
    shown = [
        Stream(rank, name, reader)
        for rank, of_rank in enumerate(pipes)
        for name, (reader, _) in zip(NAMES, of_rank, strict=True)
    ]
    try:
        yield shown, [tuple(writer for _, writer in of_rank) for of_rank in pipes]
        for stream in shown:
            stream.show_all()
    finally:
        for reader, writer in (pipe for of_rank in pipes for pipe in of_rank):
            reader.close()
            writer.close()


def write_to(writers: Writers) -> None:
    """Let this process, a rank, print to its streams."""
    for descriptor, (name, writer) in enumerate(zip(NAMES, writers, strict=True), start=1):
        os.dup2(writer.fileno(), descriptor)
        sent = os.fdopen(
            descriptor, "w", buffering=1, closefd=False, encoding="utf-8", errors="surrogateescape"
        )
        setattr(sys, name, sent)
