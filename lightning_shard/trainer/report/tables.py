"""Makes the tables and charts of a report: results, mesh, memory, versions."""

import importlib.metadata
import platform
import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from lightning_shard.fsdp.complex_pairs import pair_names
from lightning_shard.lightning import LightningModule, Trainer
from lightning_shard.tensor.mixins import own_class
from lightning_shard.trainer.report.chart import Points, chart, missing
from lightning_shard.trainer.report.page import paragraph, side_by_side, table
from lightning_shard.trainer.strategy import HybridShardStrategy

PACKAGES = "lightning-shard lightning numpy neuraloperator transformers torchvision".split()
STAGES = r"(?:train|training|val|valid|validation|test)[/_]"
MANY_RANKS = 32  # from which on the extremes are shown


def result_tables(metrics: Mapping[str, float]) -> list[str]:
    """Make tables of values; names that differ only by a number become rows of one table.

    Args:
        metrics: Such as `{"test/l2_32": 0.02, "test/l2_64": 0.01, "test/loss": 0.1}`.
    """
    by_number: dict[int, dict[str, float]] = {}
    others: dict[str, float] = {}
    for name in without_forks(metrics):
        value = metrics[name]
        bare = re.sub(r"/dataloader_idx_\d+$", "", name)
        if match := re.fullmatch(r"(.+?)_(\d+)(_[A-Za-z]\w*)?", bare):
            column = match[1] + (match[3] or "")
            by_number.setdefault(int(match[2]), {})[column] = value
        else:
            others[name] = value
    if len(by_number) == 1:
        by_number, others = {}, dict(metrics)
    columns = sorted({column for row in by_number.values() for column in row})
    rows = [[n, *(row.get(c, "") for c in columns)] for n, row in sorted(by_number.items())]
    return [table(["", *columns], rows), table(["metric", "value"], sorted(others.items()))]


def metric_charts(
    losses: Points, by_epoch: Mapping[str, Points], rates: Mapping[str, Points], window: int
) -> list[str]:
    """Draw one chart for each quantity; training and validation share it.

    Args:
        losses: The loss of the training steps.
        by_epoch: The metrics of the epochs.
        rates: Learning rates, which are shown if they change.
        window: Steps whose mean is one point of `losses`.
    """
    groups: dict[str, dict[str, Points]] = {"loss": {}}
    if losses:
        groups["loss"][f"loss of the steps, means over {window}"] = losses
    for name in without_forks(by_epoch):
        if name.startswith("lr-"):  # LearningRateMonitor's, which are in `rates`
            continue
        points = by_epoch[name]
        quantity = re.sub(rf"^{STAGES}|_\d+|_baseline$", "", name)
        groups.setdefault(quantity, {})[name] = points
    moving = {name: points for name, points in rates.items() if len({y for _, y in points}) > 1}
    groups["learning rate"] = moving
    if (sentence := missing()) and any(map(len, groups.values())):
        return [paragraph(sentence)]
    return [side_by_side(chart(lines, "optimizer steps", name) for name, lines in groups.items())]


def without_forks(names: Iterable[str]) -> list[str]:
    """Leave out the names with `_step` and `_epoch` of metrics that are there without them, too."""
    known = [*names]
    bases = {name: re.sub(r"_(?:step|epoch)$", "", name) for name in known}
    return [name for name in known if bases[name] == name or bases[name] not in known]


def mesh_table(trainer: Trainer, module: LightningModule, split: str) -> list[str]:
    """Make a table of the processes, the mesh, the module and its precision."""
    strategy = trainer.strategy
    tiles, count = vars(strategy).get("tiles"), trainer.world_size
    rows: list[tuple[str, object]] = [("processes", f"{count} ({_device(trainer)})")]
    if isinstance(strategy, HybridShardStrategy):
        sizes = " x ".join(map(str, strategy.processes.domain_sizes))
        replicas = count // strategy.domain_size
        if tiles:
            mesh = "tiles", " x ".join(map(str, tiles))
        else:
            mesh = "mesh", f"{replicas} data x {sizes} domain ranks"
        rows.append(mesh)
        rows += [("batch", split)] if strategy.domain_size > 1 and split else []
        if strategy.hook_values is not None and strategy.hook_values.reads:
            rows.append(("split tensors read as arrays", str(strategy.hook_values)))
        rows.append(("parameters", f"sharding {strategy.sharding_options.mode}"))
    rows += [
        ("strategy", type(strategy).__name__),
        ("precision", trainer.precision),
        ("module", f"{own_class(module).__module__}.{own_class(module).__qualname__}"),
        ("number of parameters", f"{_parameters(module):,}"),
        ("accumulated batches", trainer.accumulate_grad_batches),
    ]
    return [table([], rows, words=True)]


def _parameters(module: LightningModule) -> int:
    """Count the parameters, complex numbers once: sharded, they are pairs of real ones."""
    pairs = pair_names(module)
    return sum(p.numel() // (2 if name in pairs else 1) for name, p in module.named_parameters())


def _device(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    if device.type == "cpu":
        return f"cpu; torch threads of each: {torch.get_num_threads()}"
    return str(torch.get_device_module(device).get_device_name(device))


def memory_table(peaks_mib: Sequence[float], device: torch.device) -> list[str]:
    """Make a table of the peak memory of each rank in MiB; of many ranks the extremes."""
    if not peaks_mib:
        return [paragraph("Not measured: no epoch of training ended.")]
    rows: list[tuple[str, float]] = [(f"rank {n}", mib) for n, mib in enumerate(peaks_mib)]
    if len(rows) > MANY_RANKS:
        rows.sort(key=lambda row: row[1])
        mean = sum(peaks_mib) / len(peaks_mib)
        rows = [rows[0], (f"mean of {len(peaks_mib)} ranks", mean), rows[-1]]
    what = "of the process" if device.type == "cpu" else "of tensors on the device"
    return [table(["", f"peak memory {what} (MiB)"], [(n, f"{mib:.0f}") for n, mib in rows])]


def version_table() -> list[str]:
    """Make a table of the versions of the packages that can change numbers."""
    rows = [
        ("system", platform.platform()),
        ("Python", platform.python_version()),
        ("torch", torch.__version__),  # with the device that it is built for
    ]
    for name in PACKAGES:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return [table([], rows, words=True)]
