"""How many steps of a run are useful when ranks are killed, measured beside the bound of Daly.

torchrun restarts all ranks when one dies, and each attempt goes on from the last checkpoint. Time
is lost to checkpoints, to steps after the last checkpoint, and to starting again. Ranks are killed
while they train, after times that are exponentially distributed with mean M. Checkpoints of cost C
are written every T seconds of training, and a restart, during which nobody is killed, costs R. Then
the share of useful time is on average T / ((M + R) (e^((T + C)/M) - 1)), and the best T is about
sqrt(2 C M).

    python -m benchmarks.goodput --kill-every 40 --steps 3000 --save-every 40

Sources: Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974);
Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22
(2006), whose equation 20 has M e^(R/M) in the place of M + R, for failures during restarts, too.
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
from torch.utils.data import DataLoader, Dataset

from lightning_shard import HybridShardStrategy

LIMIT_S = 3600.0


class Fields(Dataset[list[torch.Tensor]]):
    """Fields that take no time to begin with."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return [torch.randn(1, 128, 128, generator=torch.Generator().manual_seed(index))]


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

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.began_s = time.time()

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.is_global_zero:
            row = {"step": trainer.global_step, "began_s": self.began_s, "ended_s": time.time()}
            with (self.folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


def train(folder: Path, steps: int, save_every: int) -> None:
    """What each rank runs."""
    if os.environ["RANK"] == "0":
        row = {"created_s": _created_s(), "imported_s": time.time()}
        with (folder / "starts.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
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
    data = DataLoader(Fields(4 * steps), 4)
    trainer.fit(Net(), data, ckpt_path=last if last.exists() else None)


def _created_s() -> float:
    """When this process began."""
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Run:
    """What one run under the killer took.

    Attributes:
        wall_s: Seconds from the first step to the last, since the bound knows no first start.
        kills: How many ranks were killed.
        step_s: The mean time from one step to the next where no checkpoint is between them.
        save_s: How much longer it is on average where one is.
        restart_s: The mean time from a kill to the first step after it.
        parts_s: Of that: until all processes have ended and new ones begin; their imports; the
            rest, until the first step.
        done: The last step.
        saves: How many checkpoints were written.
        twice: How many steps were done once more after a restart.
    """

    wall_s: float
    kills: int
    step_s: float
    save_s: float
    restart_s: float
    parts_s: tuple[float, ...]
    done: int
    saves: int
    twice: int

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the time: useful steps, checkpoints, steps done twice, restarts, and the rest.

        The rest are mainly steps that a kill has cut off.
        """
        spent = (
            self.done * self.step_s,
            self.saves * self.save_s,
            self.twice * self.step_s,
            self.kills * self.restart_s,
        )
        return *(s / self.wall_s for s in spent), 1 - sum(spent) / self.wall_s


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
                next_s = math.inf
                while job.poll() is None and time.time() - began_s < LIMIT_S:
                    time.sleep(0.02)
                    training = len(list(folder.glob("pid_*"))) == 2
                    if next_s == math.inf and training:
                        next_s = time.time() + chance.expovariate(1 / kill_every_s)
                    if time.time() > next_s and _kill(folder, chance.randrange(2)):
                        kills.append(time.time())
                        next_s = math.inf
            finally:
                job.terminate()
                job.wait()
        if not (folder / "steps.jsonl").exists():
            raise RuntimeError(f"no step ended:\n{(folder / 'log').read_text()[-3000:]}")
        return _measured(
            _read(folder / "steps.jsonl"), _read(folder / "starts.jsonl"), kills, save_every
        )


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _kill(folder: Path, rank: int) -> bool:
    """Kill a rank, if it runs; all will write anew which processes they are."""
    try:
        os.kill(int((folder / f"pid_{rank}").read_text()), signal.SIGKILL)
    except (ProcessLookupError, ValueError):  # the file may be empty: being written
        return False
    for file in folder.glob("pid_*"):
        file.unlink()
    return True


def _measured(
    rows: list[dict[str, Any]], begun: list[dict[str, Any]], kills: list[float], every: int
) -> Run:
    between: dict[bool, list[float]] = {True: [], False: []}
    for before, after in itertools.pairwise(rows):
        if after["step"] == before["step"] + 1 and not any(
            before["began_s"] < kill < after["began_s"] for kill in kills
        ):
            saved = before["step"] % every == 0
            between[saved].append(after["began_s"] - before["began_s"])
    step_s = statistics.mean(between[False])
    starts = [row["began_s"] for row in rows]
    restarts = [_restart(kill, begun, starts) for kill in kills if kill < starts[-1]]
    parts = [statistics.mean(times) for times in zip(*restarts, strict=True)] or [0.0] * 3
    return Run(
        wall_s=rows[-1]["ended_s"] - starts[0],
        kills=len(restarts),
        step_s=step_s,
        save_s=max(statistics.mean(between[True] or [step_s]) - step_s, 1e-4),
        restart_s=sum(parts),
        parts_s=tuple(parts),
        done=rows[-1]["step"],
        saves=sum(row["step"] % every == 0 for row in rows),
        twice=len(rows) - len({row["step"] for row in rows}),
    )


def _restart(kill: float, begun: list[dict[str, Any]], starts: list[float]) -> tuple[float, ...]:
    """The parts of the time from a kill to the first step after it."""
    first = next(s for s in starts if s > kill)
    start = [row for row in begun if kill < row["created_s"] < first][-1]
    return (
        start["created_s"] - kill,
        start["imported_s"] - start["created_s"],
        first - start["imported_s"],
    )


def bound(interval_s: float, save_s: float, restart_s: float, kill_every_s: float) -> float:
    """Daly's share of useful time, where no restart fails."""
    lost = math.expm1((interval_s + save_s) / kill_every_s)
    return interval_s / ((kill_every_s + restart_s) * lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kill-every", type=float, default=40.0, help="seconds of training")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--save-every", type=int, nargs="+", default=[40], help="steps")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(Path(options.train), options.steps, options.save_every[0])
        return
    print(f"{options.steps} steps on 2 ranks; killed after {options.kill_every:g} s of training")
    costs, shares = "kills | step | save | restart", "useful | saves | twice | restarts | rest"
    print(f"| save every | {costs} | bound | {shares} |\n|{' --- |' * 11}")
    for save_every in options.save_every:
        found = run(options.steps, save_every, options.kill_every, seed=save_every)
        trained_s = found.wall_s - found.kills * found.restart_s
        between_s = trained_s / max(1, found.kills)  # of the few that there were
        limit = bound(save_every * found.step_s, found.save_s, found.restart_s, between_s)
        shares = " | ".join(f"{share:.1%}" for share in found.shares)
        print(
            f"| {save_every} steps | {found.kills} in {found.wall_s:.0f} s "
            f"| {1000 * found.step_s:.0f} ms | {1000 * found.save_s:.0f} ms "
            f"| {found.restart_s:.1f} s | {limit:.1%} | {shares} |",
            flush=True,
        )
        best = math.sqrt(2 * found.save_s * between_s) / found.step_s
        old, imports, begin = found.parts_s
        print(
            f"A restart: {old:.1f} s until new processes begin, {imports:.1f} s for their imports, "
            f"{begin:.1f} s until their first step. Young's best interval: {best:.0f} steps.",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    main()
