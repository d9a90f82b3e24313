"""Steps as `plan --cluster machine.json` predicts them, beside the same steps on this machine.

    python -m benchmarks.roofline --networks CNN U-Net --output outputs/roofline

`calibrate` measures one rank and two ranks of this machine, on one thread each, and what it wrote
predicts a step of each mesh from shapes alone. Then the Trainer runs the step. The quickest step is
taken, as `calibrate` takes the quickest of several calls: other work can only lengthen one.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.common import machine, table
from benchmarks.forecast_cases import MESHES, Mesh
from benchmarks.forecast_runs import MAKE, quickest, task_and_data
from lightning_shard import calibrate, launch, predict, read_cluster


def row(network: str, mesh: Mesh, ranks: int, steps: int, file: Path) -> list[str]:
    """What was measured and predicted of one case."""
    found = predict(*task_and_data(network, 1), mesh, read_cluster(str(file)))
    seconds = max(launch(quickest, network, mesh, steps, processes=ranks))
    error = found.seconds / seconds - 1
    times = (seconds, found.seconds, found.compute, found.exchange + found.parameters_traffic)
    return [network, "x".join(map(str, mesh)), *(f"{1e3 * t:.0f}" for t in times), f"{error:+.0%}"]


def main() -> None:
    """Measure, predict, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=["CNN", "U-Net"], choices=MAKE)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("outputs/roofline"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rows = []
    for ranks in (1, 2):
        file = options.output / f"machine_{ranks}.json"
        calibrate(ranks, "cpu").save(file)
        rows += [
            row(network, mesh, ranks, options.steps, file)
            for network in options.networks
            for mesh in MESHES[ranks]
        ]
    print(machine(), end="\n\n")
    table(["network", "mesh", "ms measured", "predicted", "compute", "waits", "error"], rows)


if __name__ == "__main__":
    main()
