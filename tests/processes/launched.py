"""What the tests of launchers start: a script that trains, and says which process it is."""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_modules import SimpleCNNModule
from lightning_shard import HybridShardStrategy, init_mesh, process_info, start_process_group
from lightning_shard.checkpoint.state import full_module_state


class Steps(Callback):
    """Writes files that tests wait for, and dies where it is told to."""

    def __init__(self, folder: Path, die: int, pause_s: float) -> None:
        self.folder, self.die, self.pause_s = folder, die, pause_s
        self.first: int | None = None

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        time.sleep(self.pause_s)
        self.first = trainer.global_step if self.first is None else self.first
        if trainer.global_step == 3:
            (self.folder / f"pid_{trainer.global_rank}").write_text(str(os.getpid()))
            trainer.strategy.barrier()
            if trainer.global_rank == self.die:
                (self.folder / "died").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int)  # for the Trainer's own processes
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--die", type=int, default=-1)
    parser.add_argument("--pause_s", type=float, default=0.0)
    parser.add_argument("--timeout_s", type=float, default=120.0)
    parser.add_argument("--save", action="store_true")  # as it ends, with data workers
    parser.add_argument("--start", action="store_true")  # before the Trainer does
    options = parser.parse_args()
    torch.set_num_threads(1)
    info = start_process_group("cpu") if options.start else process_info()
    torch.manual_seed(0)
    steps = Steps(options.folder, options.die, options.pause_s)
    saves = ModelCheckpoint(options.folder, save_last=True, every_n_epochs=1000)
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices or info.local_world_size,
        num_nodes=info.world_size // info.local_world_size,
        strategy=HybridShardStrategy(domain_parallel_size=2, timeout_s=options.timeout_s),
        max_steps=options.steps,
        callbacks=[steps, saves] if options.save else [steps],
        default_root_dir=options.folder,
        logger=False,
        enable_checkpointing=options.save,
        enable_progress_bar=False,
    )
    images = torch.randn(64, 3, 12, 10, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(64) % 10
    module = SimpleCNNModule()
    data = torch.utils.data.TensorDataset(images, labels)
    batch_size = 8 // (options.devices or info.world_size)
    workers = {"num_workers": 1, "persistent_workers": True} if options.save else {}
    trainer.fit(module, DataLoader(data, batch_size, **workers))
    info = process_info()
    mesh = init_mesh({"data": -1, "domain": 2})
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    found = vars(info) | {
        "domain": torch.distributed.get_process_group_ranks(mesh.get_group("domain")),
        "total": total.item(),
        "first": steps.first,
        "step": trainer.global_step,
        "weight": float(sum(v.sum() for v in full_module_state(module).values())),
    }
    file = options.folder / f"rank_{info.rank}.part"
    file.write_text(json.dumps(found))
    file.rename(file.with_suffix(".json"))


if __name__ == "__main__":
    main()
