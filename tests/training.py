"""Models to train, the plain loop of one process, and the same training under the strategy."""

import math
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from neuralop.models import FNO
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_modules import MNISTModule, SimpleCNNModule, TFNODarcy
from lightning_shard import HybridShardStrategy, ShardingOptions
from lightning_shard.checkpoint.state import full_module_state
from tests.double_fno import to_double
from tests.reference import computed_once

STEPS = 2  # of the optimizer: the second takes what the first has left


class Fields(Dataset):
    """Random samples of a kind; the same for the same index."""

    def __init__(self, make: Callable[[int], Any], samples: int) -> None:
        self.make, self.samples = make, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def darcy_sample(index: int) -> dict[str, Tensor]:
    x, y = torch.randn(2, 1, 14, 11, generator=generator(index), dtype=torch.float64)
    return {"x": x, "y": y}


def image_sample(channels: int, extent: int) -> Callable[[int], tuple[Tensor, int]]:
    def sample(index: int) -> tuple[Tensor, int]:
        image = torch.randn(
            channels, extent, extent, generator=generator(index), dtype=torch.float64
        )
        return image, index % 10

    return sample


def tfno() -> LightningModule:
    return TFNODarcy(n_modes=(6, 6), hidden_channels=4, n_layers=2)


def _drop_metadata(_: Any, state: dict[str, Any], *__: Any) -> None:
    """neuraloperator's state_dict adds an entry that is no tensor."""
    state.pop("_metadata", None)


class DenseFNO(LightningModule):
    """An FNO with dense spectral weights, which are split by mode."""

    options: ClassVar[dict[str, Any]] = {"hidden_channels": 4, "n_layers": 2}

    def configure_model(self) -> None:
        if not hasattr(self, "network"):
            self.register_state_dict_post_hook(_drop_metadata)
            self.network = FNO((10, 6), 1, 1, **self.options)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (self.network(batch["x"]) - batch["y"]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def dense_fno() -> LightningModule:
    return DenseFNO()


class LargeTFNO(DenseFNO):
    """A TFNO whose cores count as large, so that they are split by terms (factorized.py)."""

    options: ClassVar[dict[str, Any]] = DenseFNO.options | {"factorization": "tucker", "rank": 0.6}


def large_tfno() -> LightningModule:
    return LargeTFNO()


def weights_count_as_large(name: str) -> AbstractContextManager[Any]:
    """While open, factorized weights are split by terms if the model of this name is so called."""
    large = name.startswith("large")
    return mock.patch("lightning_shard.fsdp.split_weights.travels_less", return_value=large)


def simple_cnn() -> LightningModule:
    return SimpleCNNModule()


def mnist() -> LightningModule:
    return MNISTModule(conv_dropout=0.0, linear_dropout=0.0)


MODELS: dict[str, tuple[Callable[[], LightningModule], Callable[[int], Any]]] = {
    "tfno": (tfno, darcy_sample),
    "dense_fno": (dense_fno, darcy_sample),
    "large_tfno": (large_tfno, darcy_sample),
    "simple_cnn": (simple_cnn, image_sample(3, 13)),
    "mnist": (mnist, image_sample(1, 28)),
}


def make(name: str, dtype: torch.dtype) -> LightningModule:
    torch.manual_seed(7)
    module = MODELS[name][0]()
    module.configure_model()
    if dtype == torch.float64:
        to_double(module)
    return module


def loader(name: str, dtype: torch.dtype, batch_size: int, samples: int) -> DataLoader:
    """Batches of the model's samples, in order."""

    def collate(items: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(items)
        if isinstance(batch, dict):
            return {key: value.to(dtype) for key, value in batch.items()}
        return [batch[0].to(dtype), batch[1]]

    data = Fields(MODELS[name][1], samples)
    return DataLoader(data, batch_size, collate_fn=collate)


def accelerator() -> str:
    """Of the ranks of this pool."""
    return "xpu" if torch.distributed.get_backend() == "xccl" else "cpu"


def shared_path(name: str) -> Path:
    """A new file that all ranks of the pool see."""
    folder: list[Any] = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    return Path(folder[0]) / name


class Losses(Callback):
    """The loss of each training step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.values.append(float(outputs["loss"]))


def steps_of(accumulate: int) -> int:
    """Batches of a run: whole steps of the optimizer."""
    return STEPS * accumulate


@computed_once
def train_alone(
    name: str,
    dtype: torch.dtype,
    batch_size: int,
    *,
    accumulate: int = 1,
    clip: float | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """A loop of one process, written by hand."""
    module = make(name, dtype)
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    losses = []
    for step, batch in enumerate(
        loader(name, dtype, batch_size, steps_of(accumulate) * batch_size)
    ):
        loss = module.training_step(batch, step)
        (loss / accumulate).backward()
        losses.append(loss.item() / accumulate)
        if (step + 1) % accumulate == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses, module.state_dict()


def strategy_of(domain: tuple[int, ...], options: Mapping[str, Any]) -> HybridShardStrategy:
    """A strategy with `options`: those of `ShardingOptions` by their own names, and others."""
    names = {field.name for field in fields(ShardingOptions)}
    nested = {name: value for name, value in options.items() if name in names}
    others = {name: value for name, value in options.items() if name not in names}
    if nested:
        others["sharding"] = ShardingOptions(others.pop("sharding", "full"), **nested)
    return HybridShardStrategy(domain_parallel_size=domain, **others)


def trainer(
    domain: tuple[int, ...],
    *,
    strategy: dict[str, Any] | None = None,
    plugins: Any = (),
    **options: Any,
) -> Trainer:
    """A trainer over all ranks of the pool; `strategy` are further arguments of the strategy."""
    world = torch.distributed.get_world_size()
    settings = {
        "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "accelerator": accelerator(),
    }  # fmt: skip
    return Trainer(
        devices=world,
        strategy=strategy_of(domain, strategy or {}),
        plugins=[TorchElasticEnvironment(), *plugins],
        **(settings | options),
    )


def train_sharded(
    name: str, dtype: torch.dtype, batch_size: int, domain: tuple[int, ...], **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The same training by the Trainer on all ranks; the losses are averaged over data replicas."""
    module, losses = make(name, dtype), Losses()
    world = torch.distributed.get_world_size()
    replicas = world // math.prod(domain)
    runner = trainer(domain, callbacks=[losses], **options)
    with weights_count_as_large(name):
        samples = steps_of(runner.accumulate_grad_batches) * batch_size
        runner.fit(module, loader(name, dtype, batch_size // replicas, samples))
    mean = torch.tensor(losses.values, dtype=torch.float64, device=accelerator())
    torch.distributed.all_reduce(mean)
    return (mean / world).tolist(), full_module_state(module)
