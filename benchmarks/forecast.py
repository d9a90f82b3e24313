"""Steps of training as predicted, beside the same steps measured on this machine.

    python -m benchmarks.forecast --networks CNN U-Net TFNO ViT --ranks 1 2 4 --gigabits 0.1 1 10

The runs are those of the Trainer with HybridShardStrategy, one sample for each data replica, on
processes whose links are unthrottled or carry as many bits a second as one says (slow_links.py).
The prediction runs each rank alone, and replays it on links whose collectives were measured.
What is found is added to `forecast.json` in the folder of --output, so that networks may be
measured one after another; --only does one part: links, runs, predictions, or the report of all
that is in the file. Where ranks are more than cores, they share them, measured and predicted alike.
"""

import argparse
import json
import os
import pickle
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import slow_links
from benchmarks.common import MIB, Case, Mesh, machine

NETWORKS = ("CNN", "U-Net", "TFNO", "ViT")
MESHES: dict[int, tuple[Mesh, ...]] = {
    1: ((1, 1),),
    2: ((2, 1), (1, 2)),
    4: ((4, 1), (2, 2), (1, 4), (1, 2, 2)),
}
BAR = 0.15  # the error of a step's time that the prediction aims at
FILE = "forecast.json"
TIMED = "timelines.pickle"  # what ranks did alone
HEAD = (
    "network", "mesh", "Gb/s", "ms measured", "predicted", "error", "MiB measured", "predicted",
    "error",
)  # fmt: skip
HEAD_OF_NETWORKS = (
    "network", "ranks", "cases", "error of the time", "error of the memory",
    "choices within 10 % of the best", "largest regret",
)  # fmt: skip


def key(case: Case) -> tuple[Any, ...]:
    """What tells one case from another."""
    return case["network"], case["ranks"], tuple(case["mesh"]), case["gigabits"]


def merged(before: Iterable[Case], new: Iterable[Case]) -> list[Case]:
    """All cases; new ones replace those that were there."""
    found = {key(case): case for case in (*before, *new)}
    order = list(NETWORKS)
    return sorted(
        found.values(), key=lambda c: (order.index(c["network"]), c["ranks"], str(key(c)))
    )


def choices(cases: Iterable[Case]) -> Iterator[tuple[tuple[Any, ...], list[Case]]]:
    """The cases among which somebody chooses: meshes of as many ranks, on the same links."""
    groups: dict[tuple[Any, ...], list[Case]] = defaultdict(list)
    for case in cases:
        if "predicted" in case:
            groups[case["network"], case["ranks"], case["gigabits"]].append(case)
    return ((name, group) for name, group in groups.items() if len(group) > 1)


def regret(group: Sequence[Case]) -> float:
    """How much slower the mesh is that is predicted best than the one that is."""
    chosen = max(group, key=lambda c: c["mesh"][0] / c["predicted"]["seconds"])
    rates = [c["mesh"][0] / c["seconds"] for c in group]
    return max(rates) * chosen["seconds"] / chosen["mesh"][0] - 1


def summary(cases: Sequence[Case]) -> dict[str, float]:
    """The errors of all cases, and what came of the choices."""
    known = [case for case in cases if "predicted" in case]
    if not known:
        return {}
    errors = [abs(c["predicted"]["seconds"] / c["seconds"] - 1) for c in known]
    bytes_ = [c for c in known if "memory" in c["predicted"]]
    groups = [group for _, group in choices(cases)]
    regrets = [regret(group) for group in groups]
    return {
        "cases": len(known),
        "median error of the time": statistics.median(errors),
        "within 15 %": sum(e <= BAR for e in errors) / len(known),
        "median error of the memory": statistics.median(
            [abs(c["predicted"]["memory"] / c["memory"] - 1) for c in bytes_] or [0.0]
        ),
        "choices": len(groups),
        "choices within 10 % of the best": sum(r <= 0.1 for r in regrets) / max(len(groups), 1),
        "largest regret": max(regrets, default=0.0),
    }


def by_network(cases: Sequence[Case]) -> list[list[str]]:
    """Rows of what came of each network on each number of ranks."""
    found = []
    for network, ranks in dict.fromkeys((c["network"], c["ranks"]) for c in cases):
        mine = [c for c in cases if (c["network"], c["ranks"]) == (network, ranks)]
        if came := summary(mine):
            chosen = "" if not came["choices"] else f"{came['choices within 10 % of the best']:.0%}"
            found.append([
                network, str(ranks), f"{came['cases']}", f"{came['median error of the time']:.0%}",
                f"{came['median error of the memory']:.1%}", chosen,
                f"{came['largest regret']:.0%}" if chosen else "",
            ])  # fmt: skip
    return found


def rows(cases: Iterable[Case]) -> list[list[str]]:
    """Of the table."""
    found = []
    for case in cases:
        row = [case["network"], "x".join(map(str, case["mesh"])), _link(case)]
        for what, unit in (("seconds", 1e-3), ("memory", MIB)):
            row.append(f"{case[what] / unit:.0f}")
            value = case.get("predicted", {}).get(what)
            if value is not None:
                row += [f"{value / unit:.0f}", f"{value / case[what] - 1:+.0%}"]
            else:
                row += ["", ""]
        found.append(row)
    return found


def _link(case: Case) -> str:
    if case["ranks"] == 1:
        return ""
    return "unthrottled" if case["gigabits"] is None else f"{case['gigabits']:g}"


def _links(options: argparse.Namespace, stored: dict[str, Any]) -> None:
    from benchmarks.forecast_runs import links

    for ranks in options.ranks:
        if ranks > 1:
            found = slow_links.start(ranks, links, [None, *options.gigabits], method="fork")
            stored["links"] = stored.get("links", {}) | found


def _runs(options: argparse.Namespace, stored: dict[str, Any]) -> None:
    from benchmarks.forecast_runs import measured  # takes seconds, in each process

    timed = _timed(options.output)
    for ranks in options.ranks:
        rates = [None, *options.gigabits] if ranks > 1 else [None]
        asked = options.networks, MESHES[ranks], rates, options.rounds, options.steps
        cases, alone = slow_links.start(ranks, measured, *asked, method="fork")
        stored["cases"] = merged(stored["cases"], cases)
        timed |= alone
        (options.output / TIMED).write_bytes(pickle.dumps(timed))
        _store(options, stored)


def _store(options: argparse.Namespace, stored: dict[str, Any]) -> None:
    stored |= {"machine": machine(), "cores": os.cpu_count()}
    text = json.dumps(stored, indent=1)
    (options.output / FILE).write_text(f"{text}\n", encoding="utf-8")


def _timed(folder: Path) -> dict[Any, Any]:
    file = folder / TIMED
    return pickle.loads(file.read_bytes()) if file.exists() else {}


def _predictions(options: argparse.Namespace, stored: dict[str, Any]) -> None:
    from benchmarks.forecast_runs import predicted

    new = predicted(stored["cases"], stored.get("links", {}), _timed(options.output))
    stored["cases"] = merged(stored["cases"], new)


PARTS = {"links": _links, "runs": _runs, "predictions": _predictions}


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]


def report(found: dict[str, Any], folder: Path) -> None:
    """Print the table, and write it."""
    lines = [found["machine"], "", *_table(HEAD, rows(found["cases"])), ""]
    lines += _table(HEAD_OF_NETWORKS, by_network(found["cases"]))
    lines += ["", *(f"{name}: {value:.3g}" for name, value in summary(found["cases"]).items())]
    (folder / "forecast.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def main() -> None:
    """Measure, predict, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=NETWORKS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=MESHES)
    parser.add_argument("--gigabits", type=float, nargs="*", default=[0.1, 1, 10])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--output", type=Path, default=Path("outputs/forecast"))
    parser.add_argument("--only", choices=[*PARTS, "report"])
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.only != "report":
        if lack := slow_links.missing():
            sys.exit(lack)
        slow_links.inside("benchmarks.forecast")
    file = options.output / FILE
    stored: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"cases": []}
    for name, part in PARTS.items():
        if options.only in (None, name):
            part(options, stored)
            _store(options, stored)
    report(stored, options.output)


if __name__ == "__main__":
    main()
