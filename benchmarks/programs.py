"""Training programs of other people, unmodified, on ranks and in one process.

Each program of benchmarks/program_zoo is built small, on random data, and trained by its Trainer
for some steps: in one process with Lightning's own strategy, and on meshes of data replicas and
domain ranks with `HybridShardStrategy`, under `exact_random`, with a seed for each batch. The
losses of the steps, what is logged, and all weights at the end are compared. A program that has a
test_step or a predict_step of its own is tested and predicts, too. Predictions are compared number
by number, but not counts of FLOPs, which are those of one rank. They are exact if the largest
relative differences are below 1e-6, since Lightning logs and transformers computes losses in
float32; of programs in float32 below 1e-5, 1e-4 and 1e-3. A weight's difference is relative to the
largest number of its tensor, but to no less than a thousandth of the largest weight.

`python -m benchmarks.programs` runs all, and takes an hour on 2 cores. `--package torchgeo` runs
those of a package, `--name unet` those with a word in their name, `--name smp_unet` one program,
`--mesh 1x2` those of a mesh. `--record` writes the results into benchmarks/programs.csv, `--page`
the table of docs/gallery.md from that file. `--memory` trains those with larger inputs, and prints
by how much one process grew, and each of two domain ranks. A program whose package is not installed
is named and left out: `pip install -r benchmarks/program_zoo/requirements.txt` brings all.
"""

import argparse
import importlib
import math
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lightning_shard
from benchmarks.common import QUIET, map_blocks_from, memory, read_rows, reset_peak, write_rows
from benchmarks.model_zoo.comparison import relative_errors
from benchmarks.program_zoo import Parts, Program, programs
from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.data.tree import map_leaves
from lightning_shard.lightning import package as taken_package

RESULTS = Path(__file__).with_suffix(".csv")
PAGE = Path(__file__).parents[1] / "docs/gallery.md"
MESHES = ("1x2", "2x1", "2x2")
COLUMNS: tuple[str, ...] = ("package", "version", "program", "split", "changed", *MESHES)
BOUNDS = {False: (1e-6, 1e-6, 1e-6), True: (1e-5, 1e-4, 1e-3)}  # by float32
WAIT_S = 150.0


def main() -> None:
    """Run what is asked for, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--package", nargs="+", help="packages on PyPI; default: all")
    parser.add_argument("--name", nargs="+", default=[""], help="parts of names; default: all")
    parser.add_argument("--mesh", nargs="+", default=[*MESHES], choices=MESHES)
    parser.add_argument("--record", action="store_true", help=f"into {RESULTS.name}")
    parser.add_argument(
        "--page", action="store_true", help="write docs/gallery.md, and run nothing"
    )
    parser.add_argument(
        "--memory", action="store_true", help="weigh the ranks, and compare nothing"
    )
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(with_table(PAGE.read_text(), recorded()))
        return
    for program in chosen(options.name):
        if options.package and program.package not in options.package:
            continue
        if program.missing:
            print(f"{program.name}: left out, since {program.missing} is not installed", flush=True)
            continue
        if (host := program.host.partition(".")[0]) != taken_package():  # another name of Lightning
            first = f"import {host}; from benchmarks.programs import main; main()"
            again = [*sys.argv[1:], "--name", program.name]
            subprocess.run([sys.executable, "-c", first, *again], check=True)
            continue
        if options.memory:
            if program.large:
                print(f"{program.package} {program.name}: {weighed(program)}", flush=True)
            continue
        row = results(program, [m for m in program.meshes if m in options.mesh])
        for mesh in program.meshes:
            if mesh in row:
                print(f"{program.package} {program.name} {mesh}: {row[mesh]}", flush=True)
        if options.record and "does not run" not in str(row):
            record(program, row)


def chosen(names: Sequence[str]) -> list[Program]:
    """Return the programs of these names; a word that is no whole name chooses all that have it."""
    known = programs()
    parts = [name for name in names if name not in known]
    return [
        program
        for name, program in known.items()
        if name in names or any(part in name for part in parts)
    ]


def results(program: Program, meshes: Sequence[str]) -> dict[str, str]:
    """Run a program in one process and on meshes; the words of the table by mesh."""
    warm(program)
    try:
        (alone,) = lightning_shard.launch(run, program.name, "", processes=1, timeout_s=WAIT_S)
        stages = alone["stages"]
    except Exception as error:
        return dict.fromkeys(meshes, f"does not run in one process: {_sentence(error)}")
    row: dict[str, str] = {}
    for mesh in meshes:
        ranks = math.prod(map(int, mesh.split("x")))
        try:
            found, *_ = lightning_shard.launch(
                run, program.name, mesh, False, stages, processes=ranks, timeout_s=WAIT_S
            )
        except Exception as error:
            row[mesh] = _ending(error, program.refused)
            continue
        row["split"] = max(row.get("split", ""), found["split"], key=len)
        row[mesh] = compared(alone, found, program.float32)
    return row


def weighed(program: Program) -> str:
    """Train with larger inputs; word by how much one process grew, and each of two ranks."""
    warm(program)
    grown = [
        [
            r["grown"] >> 20
            for r in lightning_shard.launch(
                run, program.name, mesh, True, processes=ranks, timeout_s=WAIT_S
            )
        ]
        for mesh, ranks in (("", 1), ("1x2", 2))
    ]
    (alone,), each = grown
    return f"{alone} -> {', '.join(map(str, each))} MiB, {max(each) / max(alone, 1):.2f}"


def warm(program: Program) -> None:
    """Import here what the processes would each import."""
    for name in (*program.imports, program.host):
        importlib.import_module(name)


def run(
    name: str, mesh: str, large: bool = False, stages: Sequence[str] | None = None
) -> dict[str, Any]:
    """Train in this process, or on this rank: its losses, what it logs, and its weights.

    Args:
        name: The program.
        mesh: The mesh, such as "1x2"; "" for one process.
        large: Whether to weigh it.
        stages: What runs; None for the stages of the program, and those of the evaluation for which
            it has a step and which run in one process.
    """
    program = programs()[name]
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float32 if program.float32 else torch.float64)
    torch.manual_seed(5)
    parts = program.make(**program.large if large else {})
    pl = importlib.import_module(program.host)
    losses = _Losses()
    keeping = {
        "on_train_batch_start": lambda _, t, m, batch, index: (
            torch.manual_seed(100 + index) and None
        ),
        "on_train_batch_end": lambda _, *given: losses.keep(*given),
    }
    kept = type("Losses", (pl.Callback,), keeping)()
    replicas, _, domain = mesh.partition("x")
    settings = {
        "accelerator": "cpu", "max_epochs": 1, "num_sanity_val_steps": 0, **QUIET, **parts.trainer,
    }  # fmt: skip
    if mesh:
        strategy = {"domain_parallel_size": int(domain), "exact_random": True, **parts.strategy}
        settings |= {
            "devices": dist.get_world_size(),
            "strategy": lightning_shard.HybridShardStrategy(**strategy),
        }
    else:
        alone = importlib.import_module(f"{program.host}.plugins.environments")
        settings |= {"devices": 1, "plugins": alone.LightningEnvironment()}
    trainer = (parts.engine or pl.Trainer)(**settings, callbacks=[kept, *parts.callbacks])
    data = parts.loader(parts.batch // int(replicas or 1))
    torch.manual_seed(6)
    logged: dict[str, float] = {}
    if large:
        map_blocks_from(2**20)  # holes between kept blocks would count as memory in use
    before = reset_peak()
    tried = () if stages is not None or large else _evaluations(parts, pl)
    ran, predicted = list[str](), list[torch.Tensor]()
    for stage in [*(parts.stages if stages is None else stages), *tried]:
        given = (data, data) if stage == "fit" and parts.validates else (data,)
        try:
            returned = getattr(trainer, stage)(parts.module, *given)
        except Exception:
            if stage not in tried:
                raise
            continue
        ran.append(stage)
        predicted += _tensors(returned) if stage == "predict" else []
        logged |= {
            f"{stage} {k}": float(v)
            for k, v in _trainer(trainer).callback_metrics.items()
            if not k.endswith("flops")  # of one rank's rows, as a warning says
        }
    grown = memory("VmHWM") - before
    if large:
        return {"grown": grown}
    logged = dict(zip(logged, _over_ranks([*logged.values()]), strict=True))
    return {
        "losses": _over_ranks(losses.values), "logged": logged, "stages": ran,
        "predicted": predicted if int(replicas or 1) == 1 else None,
        "weights": _weights(parts.module, bool(mesh)),
        "split": _split(_trainer(trainer)) if mesh else "",
    }  # fmt: skip


def _evaluations(parts: Parts, pl: Any) -> list[str]:
    """Return the stages for which the module has a step, beside those that run anyway."""
    has = [
        stage
        for stage in ("test", "predict")
        if getattr(type(parts.module), f"{stage}_step")
        is not getattr(pl.LightningModule, f"{stage}_step")
    ]
    return [stage for stage in has if stage not in parts.stages]


def _tensors(predictions: Any) -> list[torch.Tensor]:
    """Return the whole tensors of what `predict` has returned."""
    found = list[torch.Tensor]()

    def note(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.numel():
            found.append(lightning_shard.gather(value).detach())
        return value

    map_leaves(note, predictions)
    return found


def _trainer(engine: Any) -> Any:
    return getattr(engine, "trainer", engine)


class _Losses:
    def __init__(self) -> None:
        self.values: list[float] = []

    def keep(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            self.values.append(float(outputs["loss"]))


def _over_ranks(given: Sequence[float]) -> list[float]:
    """Average over the ranks, since replicas log their own values; those of a domain are equal."""
    values = torch.tensor(given, dtype=torch.float64)
    if dist.is_initialized() and len(values):
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values.tolist()


def _weights(module: Any, is_sharded: bool) -> dict[str, torch.Tensor]:
    state = full_module_state(module) if is_sharded else module.state_dict()
    return {
        name: value.detach().clone()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    }


def _split(trainer: Any) -> str:
    """Read what the run has said of its batches in training, or in its first stage."""
    said = sorted({words for _, words in trainer.strategy.announced._said}, key=len)
    words = said[0].removeprefix("split over the domain: ") if said else ""
    split, _, whole = words.partition("; whole: ")
    first, *others = whole.split(", ")
    return f"{split}; whole: {first} and {len(others)} others" if len(others) > 3 else words


def compared(alone: dict[str, Any], found: dict[str, Any], float32: bool) -> str:
    """Word the differences of a run on ranks from the run of one process."""
    losses = _relative(dict(enumerate(alone["losses"])), dict(enumerate(found["losses"])))
    logged = _relative(alone["logged"], found["logged"])
    weights, worst = _of_weights(alone["weights"], found["weights"])
    values = {"losses": losses, "logged": logged, "weights": weights}
    bounds = [*BOUNDS[float32], BOUNDS[float32][-1]]
    if found["predicted"]:
        values["predicted"] = _of_predictions(alone["predicted"], found["predicted"])
    is_exact = all(v <= bound for v, bound in zip(values.values(), bounds, strict=False))
    words = ", ".join(f"{what} {v:.0e}" if v else f"{what} 0" for what, v in values.items())
    words += "; tested" if "test" in found["stages"] else ""
    return f"exact: {words}" if is_exact else f"DIFFERS: {words} ({worst})"


def _relative(expected: dict[Any, float], found: dict[Any, float]) -> float:
    if expected.keys() != found.keys():
        return math.inf
    largest = max((abs(v) for v in expected.values() if math.isfinite(v)), default=0.0)
    differences = [_difference(v, found[k]) for k, v in expected.items()]
    return max(differences, default=0.0) / (largest or 1.0)


def _difference(a: float, b: float) -> float:
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b)


def _of_weights(expected: dict[str, Any], found: dict[str, Any]) -> tuple[float, str]:
    """Return the largest difference, and the name of its tensor."""
    if expected.keys() != found.keys():
        return math.inf, "other names"
    named = [(key, found[key].to(value), value) for key, value in expected.items()]
    errors = relative_errors([each for each in named if each[-1].numel()])
    worst = max(errors, key=lambda name: errors[name], default="")
    return errors.get(worst, 0.0), worst


def _of_predictions(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """Return the largest difference of a tensor, relative to its largest number."""
    if [value.shape for value in expected] != [value.shape for value in found]:
        return math.inf
    worst = 0.0
    for value, other in zip(expected, found, strict=True):
        a, b = value.to(torch.complex128), other.to(torch.complex128)
        is_alike = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(is_alike, 0, (a - b).abs()).nan_to_num(nan=math.inf)
        scale = float(a[a.isfinite()].abs().max()) if a.isfinite().any() else 1.0
        worst = max(worst, float(difference.max()) / (scale or 1.0))
    return worst


def _ending(error: BaseException, refused: str) -> str:
    """Word the end of a run: a refusal, if these words are in its error or in a note below it."""
    sentence = _sentence(error)
    known = re.search(f".*{refused}.*", str(error)) if refused else None
    if known is None:
        return f"ERROR: {sentence}"
    told = known[0].partition("Error: ")[2] or known[0]
    return f"refused: {sentence if re.search(refused, sentence) else told.strip()}"


def _sentence(error: BaseException) -> str:
    """Find the line of the error that a rank ended with, which may follow from another error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [
        n for n, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)
    ]
    last = raised[0] if raised else len(lines) - 1
    for n in raised[1:]:
        between = lines[last:n]
        if not any(re.search("direct cause of|During handling of", line) for line in between):
            break
        last = n
    line = lines[last] if lines else type(error).__name__
    text = re.sub(r"\s+", " ", line.partition(": ")[2] or line)
    return re.sub(r" object at 0x\w+", "", text.split(". ")[0])[:400]


def recorded() -> list[dict[str, str]]:
    """Return the rows of benchmarks/programs.csv, one for each program."""
    return read_rows(RESULTS)


def record(program: Program, row: dict[str, str]) -> None:
    """Write the results of a program into benchmarks/programs.csv, over older ones."""
    rows = {each["program"]: each for each in recorded()}
    mine = rows.setdefault(program.name, {})
    mine |= {"package": program.package, "version": program.version, "program": program.name}
    mine |= {"changed": program.changed, **row}
    write_rows(RESULTS, COLUMNS, sorted(rows.values(), key=itemgetter("package", "program")))


def with_table(page: str, rows: Sequence[dict[str, str]]) -> str:
    """Return the page with the table of `rows` after its mark."""
    head, _, _ = page.partition("<!-- table -->")
    return head + "<!-- table -->\n" + "\n".join(_table(rows)) + "\n"


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    lines = []
    for package in dict.fromkeys(row["package"] for row in rows):
        mine = [row for row in rows if row["package"] == package]
        lines += ["", f"## {package} {mine[0]['version']}", ""]
        lines += [
            "| program | split | changed | 1 x 2 | 2 x 1 | 2 x 2 |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in mine:
            cells = [row["program"], row["split"], row["changed"], *(row[m] for m in MESHES)]
            lines.append("| " + " | ".join(_escaped(cell) for cell in cells) + " |")
    return lines


def _escaped(cell: str) -> str:
    return re.sub(r"([_*|<>])", r"\\\1", cell)


if __name__ == "__main__":
    sys.exit(main())
