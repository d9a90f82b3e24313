"""Steps of training as `plan` predicts them, beside the same steps on one device of this machine.

    python -m benchmarks.plan --measure --machine machine.json --out outputs/plan

The file is that of `calibrate --processes 1`; without one it is made first. Each network trains by
the strategy in float32, by `bf16-mixed` and in float64; the quickest step and the peak of the
memory are taken. On the CPU a step's time is its processor time, and the networks are small.
"""

import argparse
import gc
import json
import statistics
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torchvision.models as vision
from lightning.pytorch import LightningModule, Trainer
from neuralop.models import FNO, TFNO
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_shard
from benchmarks.forecast_runs import peak_of
from benchmarks.gpu_parts import Clock
from benchmarks.gpu_speed import Rows, device, peak, reset_peak
from benchmarks.networks import UNet, ViT
from lightning_modules.cnn.simple_cnn import SimpleCNN
from lightning_shard.lab.calibrate import calibrate
from lightning_shard.lab.machine import Cluster
from lightning_shard.lab.run import quiet

PRECISIONS = ("32-true", "bf16-mixed", "64-true")
STEPS, WARM_UP = 8, 3
BAR, MEMORY_BAR = 0.10, 0.05  # the errors of time and memory that a prediction aims at
_Make = Callable[[], nn.Module]


def networks(small: bool) -> dict[str, tuple[_Make, tuple[int, ...]]]:
    """Networks by name, with the shape of a sample."""

    def of(large: int, little: int) -> int:
        return little if small else large

    picture = (3, of(1024, 160), of(1024, 160))
    return {
        "U-Net": (lambda: UNet(of(32, 16)), (3, of(1024, 192), of(1024, 192))),
        "U-Net, 3-D": (lambda: UNet(16, 1, nn.Conv3d), (1, *[of(128, 32)] * 3)),
        "CNN": (lambda: SimpleCNN(hidden_channels=32), (3, of(2048, 256), of(2048, 256))),
        "TFNO": (
            lambda: TFNO((of(64, 16),) * 2, 1, 1, of(64, 32), factorization="tucker", rank=0.1),
            (1, of(1024, 192), of(1024, 192)),
        ),
        "FNO, 3-D": (lambda: FNO((8, 8, 8), 1, 1, 16), (1, *[of(96, 32)] * 3)),
        "ViT": (ViT, (3, of(1024, 256), of(1024, 256))),
        "ViT-B/16": (
            lambda: vision.vit_b_16(image_size=of(512, 64), num_classes=10),
            (3, of(512, 64), of(512, 64)),
        ),
        "ResNet-50": (lambda: vision.resnet50(num_classes=10), picture),
        "ConvNeXt": (lambda: vision.convnext_tiny(num_classes=10), picture),
        "Swin": (lambda: vision.swin_t(num_classes=10), (3, of(1024, 128), of(1024, 128))),
        "MobileNet": (lambda: vision.mobilenet_v3_large(num_classes=10), picture),
        "DenseNet": (lambda: vision.densenet121(num_classes=10), picture),
    }  # fmt: skip


class _Task(LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(batch).add(1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)


def _fit(make: _Make, shape: Sequence[int], precision: Any, steps: int, clock: Any) -> None:
    torch.manual_seed(0)
    samples: Any = [torch.randn(2, *shape)] * steps  # batch norm needs two
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        Trainer(
            accelerator=device().type, devices=1, strategy="hybrid_shard", max_steps=steps,
            precision=precision, callbacks=[clock], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(_Task(make()), DataLoader(samples, batch_size=None))  # fmt: skip


def in_its_process(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the first line of its error.

    On the CPU a process of its own makes it, as for a user: memory that something earlier has left
    would make steps quicker.
    """
    if device().type != "cpu":
        return tried(call)
    context = get_context("fork")
    mine, other = context.Pipe(duplex=False)
    process = context.Process(target=lambda: other.send(tried(call)))
    process.start()
    other.close()
    found = mine.recv()
    process.join()
    return found


def tried(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the first line of its error."""
    try:
        return call()
    except (RuntimeError, TypeError) as error:  # such as no kernel of bfloat16
        return str(error).splitlines()[0]


def measured(make: _Make, shape: Sequence[int], precision: str) -> tuple[float, float]:
    """Seconds of the quickest step, and the peak of bytes in tensors."""
    gc.collect()
    clock = Clock()
    reset_peak()
    _fit(make, shape, precision, WARM_UP + STEPS, clock)
    ends = clock.ends[WARM_UP - 1 :]
    held = peak()  # MiB; None on the CPU, where torch's profiler tells
    if held is None:
        held = peak_of(lambda named: _fit(make, shape, precision, 3, named)) / 2**20
    return min(b - a for a, b in pairwise(ends)), held * 2**20


Case = tuple[str, _Make, tuple[int, ...], str]  # a network, the shape of a sample, a precision


def cases(
    small: bool, names: Sequence[str] | None = None, precisions: Sequence[str] = PRECISIONS
) -> list[Case]:
    """The networks of these names, each in all precisions."""
    asked = [each for each in networks(small).items() if names is None or each[0] in names]
    return [(name, *given, precision) for precision in precisions for name, given in asked]


def planned(case: Case, machine: Cluster, measure: bool) -> tuple[float, int]:
    """Seconds of a step, and the peak of bytes."""
    _, make, shape, precision = case
    samples: Any = [torch.zeros(()).expand(2, *shape)]
    found = lightning_shard.plan(
        _Task(make()), DataLoader(samples, batch_size=None), (1, 1), cluster=machine,
        precision=precision, measure=measure,
    )  # fmt: skip
    return found.seconds, found.memory


def row(case: Case, machine: Cluster, measure: bool, turns: int = 1) -> dict[str, Any]:
    """What was planned, beside what was measured: the quickest of as many turns of both."""
    found: dict[str, Any] = {"network": case[0], "precision": case[3]}
    trained, known = [], []
    for _ in range(turns):
        trained.append(in_its_process(lambda: measured(*case[1:])))
        known.append(in_its_process(lambda: planned(case, machine, measure)))
        for each in (trained[-1], known[-1]):
            if isinstance(each, str):
                return found | {"failed": each}
    (seconds, held), (foreseen, memory) = min(trained), min(known)
    return found | {
        "ms": 1e3 * seconds, "planned ms": 1e3 * foreseen, "ratio": foreseen / seconds,
        "MiB": held / 2**20, "planned MiB": memory / 2**20, "ratio of MiB": memory / held,
    }  # fmt: skip


def summary(found: Rows) -> str:
    """One sentence on how often the bars are met."""
    known = [row for row in found if "ratio" in row]
    times = sum(abs(row["ratio"] - 1) <= BAR for row in known)
    sizes = sum(abs(row["ratio of MiB"] - 1) <= MEMORY_BAR for row in known)
    middle = statistics.median(abs(row["ratio"] - 1) for row in known)
    return (
        f"of {len(known)} steps {times} are planned within {BAR:.0%} of their time (median error "
        f"{middle:.0%}), and {sizes} within {MEMORY_BAR:.0%} of their memory"
    )


def main() -> None:
    """Calibrate if need be, measure, plan and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", help="the file of calibrate; None: measure this machine")
    parser.add_argument("--networks", nargs="+", choices=networks(small=True))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--measure", action="store_true", help="run the kernels of each step")
    parser.add_argument("--turns", type=int, default=1, help="for machines whose speed changes")
    parser.add_argument("--out", type=Path, default=Path("outputs/plan"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    small = device().type == "cpu"
    if small:
        torch.set_num_threads(1)
    if options.machine is None:
        options.machine = str(options.out / "machine.json")
        in_its_process(lambda: calibrate(1).save(options.machine))
    machine = lightning_shard.read_cluster(options.machine)
    found: Rows = []
    for case in cases(small, options.networks, options.precisions):
        found.append(row(case, machine, options.measure, options.turns))
        print(json.dumps(found[-1]), flush=True)
        (options.out / "plan.json").write_text(json.dumps(found, indent=1) + "\n")
    print(summary(found))


if __name__ == "__main__":
    main()
