"""How many steps of a run are useful when ranks are killed: measured beside the bound of Daly.

torchrun restarts all ranks when one dies, and each attempt goes on from the last checkpoint. Time
is lost to checkpoints, to steps after the last checkpoint, and to starting again. With failures
that are exponentially distributed with mean M, checkpoints of cost C every T seconds of training,
and a restart of cost R, the share of useful time is at most T / (M e^(R/M) (e^((T + C)/M) - 1)),
and the best T is about sqrt(2 C M).

    python -m benchmarks.goodput --kill-every 60 --steps 400 --save-every 10 40

Sources: Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974);
Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22
(2006), equation 20.
"""

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import HybridShardStrategy

LIMIT_S = 3600.0


class Net(LightningModule):
    """A step of some hundredths of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 1, 3, padding=1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (self.network(batch[0]) - batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Journal(Callback):
    """Writes the time of each step of rank 0, and each rank's process, where the killer reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (self.folder / f"pid_{trainer.global_rank}").write_text(str(os.getpid()))

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.began_s = time.time()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            row = {"step": trainer.global_step, "began_s": self.began_s, "ended_s": time.time()}
            with (self.folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


def train(folder: Path, steps: int, save_every: int) -> None:
    """What each rank runs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the ranks share each sample
    last = folder / "last.ckpt"
    saving = ModelCheckpoint(folder, save_top_k=0, save_last=True, every_n_train_steps=save_every)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=steps,
        strategy=HybridShardStrategy(domain_parallel_size=2, timeout_s=60),
        callbacks=[Journal(folder), saving],  # in this order: a save is not a part of its step
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.randn(4 * steps, 1, 128, 128)), 4)
    trainer.fit(Net(), data, ckpt_path=last if last.exists() else None)


@dataclass(frozen=True)
class Run:
    """What one run under the killer took.

    Attributes:
        wall_s: Seconds from the first step to the last, since the bound knows no first start.
        kills: How many ranks were killed.
        step_s: The median duration of a step.
        save_s: The median pause between two steps at a save, less that at other steps.
        restart_s: The mean time from a kill to the first step after it.
        done: The last step.
    """

    wall_s: float
    kills: int
    step_s: float
    save_s: float
    restart_s: float
    done: int


def run(steps: int, save_every: int, kill_every_s: float, seed: int) -> Run:
    """Train under torchrun, and kill a rank at times with this mean distance."""
    chance, kills = random.Random(seed), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["--train", name, "--steps", str(steps), "--save-every", str(save_every)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        torchrun += ["--max-restarts=100", "--monitor-interval=0.2", "--standalone"]
        began_s = time.time()
        with (folder / "log").open("w") as log:
            job = subprocess.Popen(
                [*torchrun, "-m", "benchmarks.goodput", *words], stdout=log, stderr=log
            )
            try:
                next_s = began_s + chance.expovariate(1 / kill_every_s)
                while job.poll() is None and time.time() - began_s < LIMIT_S:
                    time.sleep(0.1)
                    if time.time() > next_s and _kill(folder / f"pid_{chance.randrange(2)}"):
                        kills.append(time.time())
                        next_s = time.time() + chance.expovariate(1 / kill_every_s)
            finally:
                job.terminate()
                job.wait()
        if not (folder / "steps.jsonl").exists():
            raise RuntimeError(f"no step ended:\n{(folder / 'log').read_text()[-3000:]}")
        rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return _measured(rows, kills, save_every)


def _kill(file: Path) -> bool:
    """Kill the process that `file` names, if there is one now."""
    try:
        os.kill(int(file.read_text()), signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError, ValueError):  # it may be empty: being written
        return False
    file.unlink()
    return True


def _measured(rows: list[dict[str, Any]], kills: list[float], every: int) -> Run:
    pauses: dict[bool, list[float]] = {True: [], False: [0.0]}
    for before, after in itertools.pairwise(rows):
        if after["step"] == before["step"] + 1:
            pauses[before["step"] % every == 0].append(after["began_s"] - before["ended_s"])
    starts = [row["began_s"] for row in rows]
    restarts = [next((s for s in starts if s > kill), kill) - kill for kill in kills]
    save_s = statistics.median(pauses[True] or [0.0]) - statistics.median(pauses[False])
    return Run(
        rows[-1]["ended_s"] - starts[0],
        len(kills),
        statistics.median(row["ended_s"] - row["began_s"] for row in rows),
        max(save_s, 1e-4),
        statistics.mean(restarts) if restarts else 0.0,
        rows[-1]["step"],
    )


def bound(interval_s: float, save_s: float, restart_s: float, kill_every_s: float) -> float:
    """Daly's share of useful time."""
    lost = math.exp(restart_s / kill_every_s) * math.expm1((interval_s + save_s) / kill_every_s)
    return interval_s / (kill_every_s * lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds, on average")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, nargs="+", default=[10, 40], help="steps")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(Path(options.train), options.steps, options.save_every[0])
        return
    print(f"{options.steps} steps on 2 ranks; mean time between kills {options.kill_every:g} s")
    print("| save every | kills | step | save | restart | useful | bound | best interval |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for save_every in options.save_every:
        found = run(options.steps, save_every, options.kill_every, seed=save_every)
        useful = found.done * found.step_s / found.wall_s
        between_s = found.wall_s / max(1, found.kills)  # of the few that there were
        limit = bound(save_every * found.step_s, found.save_s, found.restart_s, between_s)
        best = math.sqrt(2 * found.save_s * between_s) / found.step_s
        print(
            f"| {save_every} steps | {found.kills} in {found.wall_s:.0f} s "
            f"| {1000 * found.step_s:.0f} ms | {1000 * found.save_s:.0f} ms "
            f"| {found.restart_s:.1f} s | {useful:.1%} | {limit:.1%} | {best:.0f} steps |",
            flush=True,
        )


if __name__ == "__main__":
    main()
