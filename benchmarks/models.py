"""Unmodified models of other people, split over ranks, beside the same models in one process.

Each model of benchmarks/model_zoo runs forward and backward in train mode and float64: outputs,
gradients of inputs and of parameters, and buffers. `exact` gives the largest relative error; it is
below 1e-10, or below 1e-5 for models that compute in float32 themselves, which are marked. Or it is
within ten times the model's own rounding, which is given beside it: what the plain model's results
change by when each input changes by one unit in the last place. `refused` gives the operation and
its reason, `wrong` the worst tensor, `error` any other exception.

Run `python -m benchmarks.models`: half an hour on 2 cores; `--library timm` is one library. It
prints a table of each library. `--mesh 2 3 2x2` compares on three meshes, with a column for each.
On a mesh of several axes a sequence is split by all of them. A library that is not installed is
named and left out. A model for which some rank waits ten minutes ends the run, with the place where
each rank is. `--simulated` takes ranks of lightning_shard.simulate, all in one process, instead of
processes, and `--tiles` as many tiles of one process. `--record` writes what was found into
benchmarks/models.csv, over older results of the same model and mesh. `--page` runs nothing, and
writes the lists of docs/models.md from that file.
"""

import argparse
import contextlib
import faulthandler
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lightning_shard
from benchmarks.common import describe, read_rows, table, write_rows
from benchmarks.model_zoo import LIBRARIES, Case, cases
from benchmarks.model_zoo.comparison import differences, rounding
from lightning_shard import Tiles
from lightning_shard.domain.errors import UnsupportedOperationError

PACKAGES = {
    "anemoi": "anemoi-models",
    "aurora": "microsoft-aurora",
    "credit": "miles-credit",
    "neuralop": "neuraloperator",
    "nnunet": "dynamic-network-architectures",
    "physicsnemo": "nvidia-physicsnemo",
    "segment_anything": "segment-anything",
    "smp": "segmentation-models-pytorch",
    "the_well": "the-well",
    "torch_geometric": "torch-geometric",
    "torch_harmonics": "torch-harmonics",
    "vit_pytorch": "vit-pytorch",
    "x_transformers": "x-transformers",
}
FLOAT32 = 1e-5
TIMES = 10  # how much further than its own rounding a model may be off
WAIT_S = 600
RESULTS = Path(__file__).with_suffix(".csv")
PAGE = Path(__file__).parents[1] / "docs/models.md"
MESHES = ("2", "3", "2x2", "3 tiles")
COLUMNS: tuple[str, ...] = ("library", "version", "model", "split dims", *MESHES)
Row = tuple[str, str, str, str]


def main() -> None:
    """Print the tables of the libraries asked for."""
    parser = argparse.ArgumentParser(description="Unmodified models split over ranks.")
    parser.add_argument("--library", choices=LIBRARIES, action="append", help="default: all")
    parser.add_argument("--model", nargs="+", default=[""], help="parts of names; default: all")
    parser.add_argument("--mesh", nargs="+", default=["2"], help="such as 2 3 2x2")
    parser.add_argument("--simulated", action="store_true", help="the ranks of one process")
    parser.add_argument("--tiles", action="store_true", help="tiles of one process, not ranks")
    parser.add_argument("--record", action="store_true", help=f"into {RESULTS.name}")
    parser.add_argument("--page", action="store_true", help="write docs/models.md, and run nothing")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(with_lists(PAGE.read_text(), recorded()))
        return
    print("# Models\n")
    describe()
    for library in options.library or LIBRARIES:
        try:
            title = library
            if library != "handwritten":
                title = f"{library} {version(PACKAGES.get(library, library))}"
            cases(library)
        except ImportError as error:
            print(f"\n## {library}\n\nNot installed: {error}")
            continue
        print(f"\n## {title}\n")
        found: dict[str, dict[str, Row]] = {}
        for shape in options.mesh:
            sizes = tuple(map(int, shape.split("x")))
            ranks = lightning_shard.simulate if options.simulated else lightning_shard.launch
            given = library, options.model, sizes
            own = options.tiles
            if own:
                rows = compared(*given, Tiles(sizes))
            else:
                rows, *_ = ranks(run, *given, processes=math.prod(sizes))
            for row in rows:
                found.setdefault(row[0], {})[f"{shape} tiles" if own else shape] = row
        print_found(found)
        if options.record:
            record(library, title.removeprefix(library).strip(), found)


def recorded() -> list[dict[str, str]]:
    """Return the rows of benchmarks/models.csv, one for each model."""
    return read_rows(RESULTS)


def record(library: str, version: str, found: dict[str, dict[str, Row]]) -> None:
    """Write the results of a library into benchmarks/models.csv, over those of the same meshes."""
    rows = {(row["library"], row["model"]): row for row in recorded()}
    for model, by_mesh in found.items():
        row = rows.setdefault((library, model), {"library": library, "model": model})
        row["version"] = version
        for mesh, (_, dims, *result) in by_mesh.items():
            row["split dims"] = max(row.get("split dims", ""), dims, key=len)
            row[mesh] = result[0] + (" " if result[0].startswith("exact") else ": ") + result[1]
    in_order = sorted(rows, key=lambda key: (key[0].lower(), key))
    write_rows(RESULTS, COLUMNS, [rows[key] for key in in_order])


def with_lists(page: str, rows: Sequence[dict[str, str]]) -> str:
    """Return the page with a list for each library, of these rows, between its two marks."""
    lines = []
    for library, of_it in groupby(rows, lambda row: row["library"]):
        models = list(of_it)
        version = max(row["version"] for row in models)
        lines += [f"### {library} {version}".rstrip(), ""]
        by_meshes: dict[str, list[str]] = {}
        for row in models:
            exact = [mesh for mesh in MESHES if row[mesh].startswith("exact")]
            star = "*" if any("(float32)" in row[mesh] for mesh in exact) else ""
            if exact:
                by_meshes.setdefault(_in_words(exact), []).append(row["model"] + star)
        for meshes, names in by_meshes.items():
            lines += [f"Exact {meshes}, {len(names)}: {', '.join(names)}.", ""]
        for row in models:
            ends = [mesh for mesh in MESHES if row[mesh] and not row[mesh].startswith("exact")]
            if ends:
                kind, _, reason = row[ends[-1]].partition(": ")
                lines += [f"{kind.capitalize()} {_in_words(ends)}: {row['model']}, {reason}.", ""]
    head, _, rest = page.partition("<!-- lists -->\n")
    _, end, tail = rest.partition("<!-- end of the lists -->\n")
    return f"{head}<!-- lists -->\n\n" + "\n".join(lines) + f"\n{end}{tail}"


def _in_words(meshes: Sequence[str]) -> str:
    """Name meshes of ranks, and numbers of tiles: "on 2 and 2x2 ranks and in 3 tiles"."""
    ranks = [mesh for mesh in meshes if "tiles" not in mesh]
    tiles = [f"in {mesh}" for mesh in meshes if "tiles" in mesh]
    on = " and ".join(filter(None, (", ".join(ranks[:-1]), *ranks[-1:])))
    return " and ".join([f"on {on} ranks"] * bool(ranks) + tiles)


def print_found(found: dict[str, dict[str, Row]]) -> None:
    """Print the table of a library: rows by model and by shape of the mesh."""
    rows = []
    shapes = [*dict.fromkeys(shape for by_shape in found.values() for shape in by_shape)]
    for name, by_shape in found.items():
        longest = max(by_shape.values(), key=lambda row: len(row[1]))
        cells = [" ".join(by_shape[s][2:]) if s in by_shape else "" for s in shapes]
        if len({*cells}) == 1 and not cells[0].startswith("exact"):
            cells[1:] = ["the same"] * (len(cells) - 1)
        rows.append((name, longest[1], *(cell.removeprefix("exact ") for cell in cells)))
    table(("model", "split dims", *(s if "tiles" in s else f"{s} ranks" for s in shapes)), rows)
    counts = Counter(worst_of([row[2] for row in rows.values()]) for rows in found.values())
    print("\n" + ", ".join(f"{n} {result}" for result, n in counts.most_common()))


def worst_of(results: Sequence[str]) -> str:
    """The first word of the result on the mesh where a model does worst."""
    words = [result.split(" ")[0] for result in results]
    return max(words, key=["exact", "refused", "error", "wrong"].index)


def run(library: str, parts: Sequence[str], sizes: tuple[int, ...]) -> list[Row]:
    """Compare each model of a library on a mesh of all ranks; called on each rank."""
    names = tuple(f"domain_{axis}" for axis in range(len(sizes)))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return compared(library, parts, sizes, mesh)


def compared(
    library: str, parts: Sequence[str], sizes: tuple[int, ...], mesh: DeviceMesh | Tiles
) -> list[Row]:
    """Return model, split dims, result and its reason, of each model of a library.

    Models that a mesh of so many axes cannot split are left out.
    """
    rows: list[Row] = []
    for name, case in cases(library).items():
        if any(part in name for part in parts) and (dims := case.split_by(len(sizes))):
            faulthandler.dump_traceback_later(WAIT_S, exit=True)
            with contextlib.redirect_stdout(None):  # some models print
                rows.append((name, ", ".join(map(str, dims)), *outcome(case, mesh)))
            faulthandler.cancel_dump_traceback_later()
            if isinstance(mesh, Tiles) or dist.get_rank() == 0:
                print(*rows[-1], file=sys.stderr, flush=True)
    return rows


def outcome(case: Case, mesh: DeviceMesh | Tiles) -> tuple[str, str]:
    """The result, and its reason; called on each rank, equal on all."""
    try:
        errors = differences(case, mesh)
    except UnsupportedOperationError as error:
        found = ("refused", short(error))
    except Exception as error:
        found = ("error", f"{type(error).__name__}: {short(error)}")
    else:
        worst = max(errors, key=lambda name: errors[name])
        kind = " (float32)" if case.tolerance >= FLOAT32 else ""
        own = 0.0 if errors[worst] <= case.tolerance else rounding(case)
        if errors[worst] <= max(case.tolerance, TIMES * own):
            kind = "exact" + kind + (f" (rounding {own:.0e})" if own else "")
            found = (kind, f"{errors[worst]:.0e}")
        else:
            found = ("wrong" + kind, f"{errors[worst]:.0e} {worst}")
    if isinstance(mesh, Tiles):
        return found
    everyone = [found] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return min(everyone, key=lambda one: one[0].startswith("exact"))


def short(error: Exception) -> str:
    """The first line of a message without shapes, and without the advice that follows it."""
    text = str(error).split("\n")[0].replace("|", "/")
    refusal = re.match(r"cannot run (\S+) on a tensor split over ranks .*?\): (.*)", text)
    return f"`{refusal[1]}`: {re.split('[.;] ', refusal[2])[0]}"[:300] if refusal else text[:300]


if __name__ == "__main__":
    main()
