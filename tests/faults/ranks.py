"""What a rank of a cell does: it trains, and meets the fault."""

import atexit
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_modules import SimpleCNNModule
from lightning_shard import HybridShardStrategy
from lightning_shard.domain.halo import overlapping
from lightning_shard.ops.window import overlap
from lightning_shard.processes.failures import failure_watch
from lightning_shard.trainer.held_signals import ONCE_S
from tests import pool
from tests.faults.cells import Cell

TIMEOUT_S = 120.0
AT_STEP = 3  # when the fault happens, where steps are counted


def digest(path: Path) -> str:
    """Of a file, or of all files of a directory."""
    files = sorted(p for p in [path, *path.rglob("*")] if p.is_file())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class Fault:
    """Strikes this rank once, where its cell says."""

    def __init__(self, cell: Cell, rank: int, folder: Path) -> None:
        self.cell, self.mine, self.folder = cell, cell.rank == rank, folder
        self.struck = False

    def __call__(self, phase: str) -> None:
        if not self.mine or phase != self.cell.phase or self.struck:
            return
        self.struck = True
        kept = {str(p): digest(p) for p in self.folder.glob("*.ckpt")}
        (self.folder / "struck.json").write_text(json.dumps({"at": time.time(), "kept": kept}))
        getattr(self, f"_{self.cell.fault.strip('_').replace(' ', '_')}")()
        if self.cell.fault == "_exit":
            os._exit(0)

    def _exception(self) -> None:
        raise ArithmeticError("the fault of the test")

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _segfault(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def _exit(self) -> None:
        if self.cell.fault == "exit":
            sys.exit(0)

    def _sigterm(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def _sigterm_in_a_step_that_does_not_end(self) -> None:
        self._sigterm()
        time.sleep(TIMEOUT_S)

    def _sigint(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def _sigint_of_all(self) -> None:
        """As Ctrl-C; this rank is not in a collective, and the others wait for it in one."""
        others = [p for p in self.folder.glob("pid_*") if int(p.read_text()) != os.getpid()]
        time.sleep(1.0)  # until they do
        for process in others:
            os.kill(int(process.read_text()), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    def _sigint_of_all_twice(self) -> None:
        self._sigint_of_all()
        time.sleep(ONCE_S + 0.2)
        self._sigint_of_all()


class Images(Dataset):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index > 20:
            self.fault("data")
        noise = torch.Generator().manual_seed(index)
        return torch.randn(3, 12, 10, generator=noise), index % 10


class Module(SimpleCNNModule):
    fault: Fault

    def setup(self, stage):
        self.fault("setup")

    def training_step(self, batch, index):
        now = self.global_step == AT_STEP
        if now:
            self.fault("forward")
        loss = super().training_step(batch, index)
        if now:
            loss.register_hook(lambda _: self.fault("backward"))
        return loss

    def validation_step(self, batch, index):
        if self.trainer.sanity_checking:
            self.fault("sanity")
        if self.global_step >= AT_STEP:
            self.fault("validation")
        return super().validation_step(batch, index)

    def predict_step(self, batch, index):
        self.fault("predict")
        return self(batch[0])


class Strike(Callback):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == AT_STEP:
            self.fault("step")

    def on_save_checkpoint(self, trainer, module, checkpoint):
        if trainer.global_step >= AT_STEP:
            self.fault("gather")

    def on_fit_end(self, trainer, module):
        self.fault("end of fit")


def train(cell: Cell, rank: int, folder: Path) -> None:
    fault = Fault(cell, rank, folder)
    formats = {"write directory": "sharded", "write async": "async"}
    Module.fault = fault
    save = torch.save

    def strike_and_save(*args, **kwargs):
        if len(list(folder.glob("*.ckpt"))) > 0:  # there is one to be kept
            fault(cell.phase if cell.phase in formats else "write file")
        save(*args, **kwargs)

    trainer = Trainer(
        accelerator="cpu",
        devices=cell.ranks,
        strategy=HybridShardStrategy(
            domain_parallel_size=cell.domain,
            timeout_s=TIMEOUT_S,
            checkpoint_format=formats.get(cell.phase, "single"),  # pyright: ignore
        ),
        max_steps=8,
        val_check_interval=2,
        limit_val_batches=1,
        num_sanity_val_steps=int(cell.phase == "sanity"),
        callbacks=[
            Strike(fault),
            ModelCheckpoint(
                folder,
                "{step}",
                every_n_train_steps=2,
                save_top_k=-1,
                save_on_exception="sigint of all" in cell.fault,
            ),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Images(fault), 4)
    module = Module()
    sent = overlap.send_halo

    def send_and_strike(*args):
        wait = sent(*args)
        if trainer.global_step == AT_STEP:
            fault("halo")
        return wait

    with (
        mock.patch("torch.save", strike_and_save),
        mock.patch.object(overlap, "send_halo", send_and_strike),
        overlapping("always" if cell.phase == "halo" else "auto"),
    ):
        trainer.fit(module, loader, DataLoader(Images(fault), 4))
    trainer.predict(module, DataLoader(Images(fault), 4))


def main(cell: Cell, rank: int, port: int, folder: Path, late_s: float) -> None:
    """Run a rank in this process and end it as an interpreter ends."""
    failure_watch.POLL_S = late_s or failure_watch.POLL_S
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    output = (folder / f"output_{rank}").open("w")
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    pool.begin(rank, cell.ranks, port)
    del os.environ["TORCHELASTIC_RUN_ID"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 0
    try:
        train(cell, rank, folder)
    except SystemExit as err:
        code = err.code if isinstance(err.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
