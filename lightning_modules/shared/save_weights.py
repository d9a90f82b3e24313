"""Writes the weights of the trained network to one file: a Callback for every LightningModule."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_shard import save_weights


class SaveWeights(Callback):
    """Writes the state dict of a network when training ends, whole, however it is sharded.

    The names in the file are those of the network alone, so that
    `MNISTNet().load_state_dict(torch.load("mnist_cnn.pt"))` loads it without Lightning and without
    this package.

    Args:
        filename: The file in the trainer's log directory, or an absolute path. It ends with `.pt`,
            `.pth`, `.bin` or `.safetensors`.
        part: The attribute of the LightningModule that is saved; "" for all of it.
    """

    def __init__(self, filename: str = "weights.pt", part: str = "network") -> None:
        self.filename, self.part = filename, part

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # on every rank: log_dir is broadcast from rank 0, and each parameter is gathered in turn
        path = Path(trainer.log_dir or trainer.default_root_dir) / self.filename
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
        save_weights(pl_module.get_submodule(self.part), path)
        rank_zero_info(f"Weights of the network: {path}")
