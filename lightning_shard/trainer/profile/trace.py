"""Reads the trace of one rank, and assigns each event to a module and a function.

Events of a thread nest. An event belongs to the innermost module around it. A node of the backward
graph belongs to the module of the operator that made it, which the profiler links to it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_shard.processes.device import COLLECTIVE_KERNELS
from lightning_shard.trainer.profile.labels import COLLECTIVE, FUNCTION, MODULE, WAIT

Event = dict[str, Any]
Place = tuple[Any, float]  # thread and time, in us
OUTSIDE, OPTIMIZER, LOADING, FSDP = "(outside)", "(optimizer)", "(loading data)", "(FSDP2)"
_PARTS = {"Optimizer.": OPTIMIZER, "enumerate(DataLoader)": LOADING, "FSDP::": FSDP}
_STEP = "ProfilerStep#"
_KINDS = {
    "all_gather": "gather of parameters",
    "reduce_scatter": "reduction of gradients",
    "all_reduce": "reduction",
}
_ALL_TO_ALL = {"window": "halo", "spectral": "transpose"}  # by theme of the rule; others: gather
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")


@dataclass
class Usage:
    """Counts what a module took in the recorded steps on one rank, without the modules in it.

    Attributes:
        compute_us: Time outside of collectives, of the device where there is one.
        waiting_us: Time in collectives.
        bytes: Bytes sent.
        calls: Number of collectives.
    """

    compute_us: float = 0.0
    waiting_us: float = 0.0
    bytes: float = 0
    calls: float = 0

    def add(self, other: "Usage") -> None:
        """Add the counts of another rank."""
        self.compute_us += other.compute_us
        self.waiting_us += other.waiting_us
        self.bytes += other.bytes
        self.calls += other.calls


@dataclass(frozen=True)
class Context:
    """Describes the place of an event in the program."""

    module: str = OUTSIDE
    function: str = ""
    theme: str = ""
    direction: str = "forward"
    waits: bool = False
    in_step: bool = False


@dataclass
class Trace:
    """Holds the events of one rank with their names, and the counts of each module."""

    events: list[Event] = field(default_factory=list[Event])
    usage: dict[str, Usage] = field(default_factory=dict[str, Usage])

    def of(self, module: str) -> Usage:
        """Return the counts of a module, to which more can be added."""
        return self.usage.setdefault(module, Usage())


def read_trace(recorded: Mapping[str, Any], steps: int) -> Trace:
    """Name the events of a Chrome trace of the profiler, recorded under `labels`.

    Args:
        recorded: The Chrome trace that the profiler has exported.
        steps: The steps that count; the profiler begins one more when training ends.
    """
    trace = Trace()
    threads: dict[Any, list[Event]] = {}
    begun = sorted((e for e in recorded["traceEvents"] if _is_step(e)), key=lambda e: e["ts"])
    unfinished = {id(event) for event in begun[steps:]}
    for event in recorded["traceEvents"]:
        if id(event) in unfinished:
            continue
        on_host = event.get("ph") == "X" and event.get("cat") not in _ON_DEVICE
        if on_host and event.get("cat") != "Trace":
            threads.setdefault(event["tid"], []).append(event)
        else:
            trace.events.append(event)
    reader = _Reader(trace, _links(recorded["traceEvents"]))
    # the thread of the steps first: others run the backward of its operators
    for events in sorted(threads.values(), key=lambda e: not any(_is_step(x) for x in e)):
        reader.read(events)
    _read_device(trace, reader.contexts)
    return trace


def _is_step(event: Event) -> bool:
    return event.get("name", "").startswith(_STEP) and event.get("cat") not in _ON_DEVICE


def _links(events: list[Event]) -> dict[Place, Place]:
    """Map the nodes of the backward graph to the operators that made them."""
    ends: dict[Any, dict[str, Place]] = {}
    for event in events:
        if event.get("cat") == "fwdbwd":
            ends.setdefault(event["id"], {})[event["ph"]] = (event["tid"], event["ts"])
    return {end["f"]: end["s"] for end in ends.values() if len(end) == 2}


class _Reader:
    """Goes through the events of one thread after the other."""

    def __init__(self, trace: Trace, links: Mapping[Place, Place]) -> None:
        self.trace, self.links = trace, links
        self.makers: dict[Place, Context] = dict.fromkeys(links.values(), Context())
        self.contexts: dict[Any, Context] = {}  # by External id, to which kernels refer

    def read(self, events: list[Event]) -> None:
        """Name the events of a thread, and share its time out."""
        stack: list[tuple[float, Context]] = []  # end and context of what is open
        now = 0.0
        backward: Event | None = None  # the range of the module whose nodes run
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            begin = event["ts"]
            while stack and stack[-1][0] <= begin:
                now = self._spend(now, *stack.pop())
            if stack:
                self._spend(now, begin, stack[-1][1])
            now = begin
            outer = stack[-1][1] if stack else Context()
            end = min(begin + event["dur"], stack[-1][0]) if stack else begin + event["dur"]
            own = self._enter(event, outer)
            backward = self._range(event, own, backward)
            self._count(event, own)
            self.trace.events.append(event)
            stack.append((end, own))
        while stack:
            now = self._spend(now, *stack.pop())

    def _spend(self, begin: float, end: float, context: Context) -> float:
        if context.in_step and end > begin:
            usage = self.trace.of(context.module)
            if context.waits:
                usage.waiting_us += end - begin
            else:
                usage.compute_us += end - begin
        return max(begin, end)

    def _enter(self, event: Event, outer: Context) -> Context:
        """Return the context of the events that lie within the event."""
        name, place = event["name"], (event["tid"], event["ts"])
        context = outer
        if place in self.links:
            made = self.makers[self.links[place]]
            context = replace(made, direction="backward", waits=False, in_step=outer.in_step)
        elif _is_step(event):
            context = Context(in_step=True)
        elif name.startswith(MODULE):
            context = replace(outer, module=name.removeprefix(MODULE), function="", theme="")
        elif name.startswith(FUNCTION):
            theme, _, function = name.removeprefix(FUNCTION).partition(" ")
            context = replace(outer, theme=theme, function=outer.function or function)
        elif name.startswith((COLLECTIVE, WAIT)):
            context = replace(outer, waits=True)
        else:
            context = _part(name, outer)
        if place in self.makers:
            self.makers[place] = context
        if "External id" in event.get("args", {}):
            self.contexts[event["args"]["External id"]] = context
        return context

    def _range(self, event: Event, own: Context, last: Event | None) -> Event | None:
        """Put one event around neighbouring nodes of the backward graph that a module made."""
        if (event["tid"], event["ts"]) not in self.links:
            return last
        name = f"backward of {own.module}"
        end = event["ts"] + event["dur"]
        if last is not None and (last["name"], last["tid"]) == (name, event["tid"]):
            last["dur"] = max(last["dur"], end - last["ts"])
            return last
        shared = {key: event[key] for key in ("ph", "pid", "tid", "ts", "dur")}
        made = {**shared, "name": name, "cat": "module", "args": {"module": own.module}}
        self.trace.events.append(made)
        return made

    def _count(self, event: Event, context: Context) -> None:
        """Give the event the name that is shown, and count what a collective sends."""
        name = event["name"]
        if name.startswith(MODULE):
            event["name"], event["cat"] = context.module, "module"
        elif name.startswith(FUNCTION):
            event["name"], event["cat"] = f"{name.split(' ', 2)[2]} of split tensors", "function"
        elif name.startswith(COLLECTIVE):
            _, collective, sent = name.split(" ")
            if context.in_step:
                usage = self.trace.of(context.module)
                usage.bytes += int(sent)
                usage.calls += 1
            facts = {"module": context.module, "function": context.function}
            facts |= {"direction": context.direction, "collective": collective}
            event["name"], event["cat"] = _title(collective, context), "communication"
            event["args"] = {**event.get("args", {}), **facts, "bytes": int(sent)}


def _part(name: str, outer: Context) -> Context:
    """Return the context of an event outside of modules: the optimizer, or FSDP2 for a block."""
    if match := re.match(r"FSDP::\w+ \((.+)\)", name):
        return replace(outer, module=match[1], function="", theme="")
    if not outer.module.startswith("("):
        return outer
    found = (part for start, part in _PARTS.items() if name.startswith(start))
    return replace(outer, module=next(found, outer.module))


def _title(collective: str, context: Context) -> str:
    kinds = (kind for start, kind in _KINDS.items() if collective.startswith(start))
    kind = next(kinds, "") or _ALL_TO_ALL.get(context.theme, "gather")
    of = f" of {context.function}" if context.function else ""
    return f"{kind}{of} in {context.module}, {context.direction}"


def _read_device(trace: Trace, contexts: Mapping[Any, Context]) -> None:
    """Replace times of this process by those of the device's kernels, where a device computes."""
    for event in (kernels := list(_kernels(trace.events))):
        context = contexts.get(event["args"].get("External id"), Context())
        event["args"]["module"] = context.module
    if not kernels:
        return
    communicates = any(_communicates(e) for e in kernels)
    for usage in trace.usage.values():
        usage.compute_us = 0.0
        usage.waiting_us *= not communicates
    for event in kernels:
        usage = trace.of(event["args"]["module"])
        if _communicates(event):
            usage.waiting_us += event["dur"]
        else:
            usage.compute_us += event["dur"]


def _kernels(events: list[Event]) -> Iterator[Event]:
    return (e for e in events if e.get("ph") == "X" and e.get("cat") in _ON_DEVICE[:3])


def _communicates(event: Event) -> bool:
    return event["name"].startswith(COLLECTIVE_KERNELS)
