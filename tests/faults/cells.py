"""The fault matrix: which rank meets which fault in which phase of a run.

A cell is run by `tests.faults.run.run`. The columns of docs/reliability.md are made of all of them.
"""

from dataclasses import dataclass

BEFORE = ("setup", "sanity", "data")
STEP = ("forward", "backward", "step", "validation")
WRITE = ("gather", "write file", "write directory", "write async")
AFTER = ("end of fit", "predict")


@dataclass(frozen=True)
class Cell:
    """One fault.

    Attributes:
        fault: What happens: "exception", "kill", "segfault", "_exit", "exit", "sigterm", "sigint",
            or "sigint of all" (as by Ctrl-C).
        phase: Where it happens.
        rank: To which rank; with "sigint of all", to which one in the first place.
        ranks: Of how many.
        domain: The ranks of a domain; the others are data replicas.
    """

    fault: str
    phase: str
    rank: int
    ranks: int = 2
    domain: int = 2

    def __str__(self) -> str:
        mesh = ", replicas" if self.domain == 1 else ""
        return f"{self.fault}, {self.phase}, rank {self.rank} of {self.ranks}{mesh}"

    @property
    def kind(self) -> str:
        """The class of cells to which it is counted in the table of docs/reliability.md."""
        if self.phase in WRITE and self.fault in ("exception", "kill"):
            return f"{self.fault} while a checkpoint is written"
        return self.fault


FAST = [
    Cell("exception", "forward", 1),
    Cell("kill", "forward", 1),
    Cell("kill", "backward", 0),
    Cell("_exit", "validation", 1),
    Cell("sigterm", "forward", 1),
    Cell("exception", "write directory", 1),
    Cell("exception", "end of fit", 1),
]
SLOW = [
    *(Cell("exception", phase, 1) for phase in (*BEFORE, *STEP, *AFTER)),
    Cell("exception", "forward", 0),
    Cell("exception", "forward", 3, 4),
    *(Cell("kill", phase, 1) for phase in (*BEFORE, *STEP, *AFTER)),
    *(Cell("kill", phase, 0) for phase in ("setup", "forward", "validation", "end of fit")),
    Cell("kill", "backward", 3, 4),
    *(Cell(fault, "forward", 1) for fault in ("segfault", "_exit", "exit", "sigint")),
    *(Cell(fault, "forward", 0) for fault in ("segfault", "_exit", "exit", "sigint")),
    Cell("exit", "setup", 0),
    Cell("sigint", "setup", 0),
    *(Cell("sigint", phase, 1) for phase in ("write directory", "write async")),
    *(Cell("sigint of all", "forward", rank) for rank in (0, 1)),
    *(Cell("sigint of all", phase, 1) for phase in ("sanity", "write async")),
    *(Cell("sigterm", phase, 1) for phase in (*BEFORE, *STEP, *AFTER)),
    *(Cell("sigterm", phase, 1) for phase in ("gather", "write directory", "write async")),
    *(Cell("sigterm", phase, 0) for phase in ("forward", "write file")),
    Cell("sigterm", "forward", 3, 4),
    *(Cell(fault, "gather", 1) for fault in ("exception", "kill")),
    *(Cell(fault, "write file", 0) for fault in ("exception", "kill")),
    *(Cell(f, "write directory", rank) for f in ("exception", "kill") for rank in (0, 1)),
    *(Cell(f, "write async", rank) for f in ("exception", "kill") for rank in (0, 1)),
]
CELLS = list(dict.fromkeys([*FAST, *SLOW]))
# while rows are on their way; not among the cells that docs/reliability.md counts
IN_FLIGHT = [Cell("kill", "halo", 1), Cell("kill", "halo", 0), Cell("exception", "halo", 1)]
# the second Ctrl-C, after which nobody saves
TWICE = [Cell("sigint of all twice", "forward", 1), Cell("sigint of all twice", "gather", 0)]
REPLICAS = [
    *(Cell("kill", phase, 1, domain=1) for phase in ("forward", "step", "validation", "gather")),
    Cell("kill", "forward", 0, domain=1),
    *(Cell(fault, "forward", 1, domain=1) for fault in ("exception", "sigterm", "sigint")),
]
