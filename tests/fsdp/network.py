"""A network with every kind of parameter, and its training on one process and on a mesh."""

import math
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.checkpoint.state import full_module_state
from tests.reference import computed_once
from tests.training import STEPS, Fields, Losses, accelerator, generator, steps_of, trainer

BATCH = 8


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.conv(x)))


class Net(LightningModule):
    """Blocks in a list, tied convolutions, scalar, complex and bare parameters."""

    def __init__(self, width: int = 6, depth: int = 3, *, phase: bool = True) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, 1, 1))  # on the LightningModule itself
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Conv2d(width, 1, 1)
        self.again = nn.Conv2d(width, 1, 1)
        self.again.weight = self.head.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        start = torch.randn(2, dtype=torch.complex64)
        self.phase = nn.Parameter(start if phase else start.abs())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.gain * self.phase.abs().sum() * (self.head(x) + self.again(x)) + self.shift

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch[:, :1]) - batch[:, 1:]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def net(dtype: torch.dtype = torch.float64, seed: int = 3) -> Net:
    torch.manual_seed(seed)
    module = Net()
    if dtype == torch.float64:
        module.double()
        module.phase.data = module.phase.data.to(torch.complex128)
    return module


def sample(index: int) -> Tensor:
    return torch.randn(2, 9, 7, generator=generator(index), dtype=torch.float64)


def loader(
    batch_size: int, dtype: torch.dtype = torch.float64, *, steps: int = STEPS
) -> DataLoader:
    order = torch.randperm(steps * BATCH, generator=generator(0)).tolist()
    data = Fields(lambda i: sample(order[i]).to(dtype), steps * BATCH)
    return DataLoader(data, batch_size)


@computed_once
def train_alone(
    *,
    accumulate: int = 1,
    clip: float | None = None,
    value: bool = False,
) -> tuple[list[float], dict[str, Tensor]]:
    """A loop written by hand: losses, and the state at the end."""
    module = net()
    optimizer, losses = module.configure_optimizers(), []
    for step, batch in enumerate(loader(BATCH, steps=steps_of(accumulate))):
        loss = module.training_step(batch, step)
        (loss / accumulate).backward()
        losses.append(loss.item() / accumulate)
        if (step + 1) % accumulate == 0:
            if clip is not None and value:
                real = [p for p in module.parameters() if not p.is_complex()]
                torch.nn.utils.clip_grad_value_(real, clip)
                torch.view_as_real(module.phase.grad).clamp_(-clip, clip)  # torch takes none
            elif clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses, module.state_dict()


def train_sharded(
    domain: tuple[int, ...],
    strategy: dict[str, Any],
    module: LightningModule | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """The same by the Trainer on all ranks of the pool; losses averaged over data replicas."""
    module = net() if module is None else module
    losses, world = Losses(), dist.get_world_size()
    callbacks = [losses, *options.pop("callbacks", [])]
    runner = trainer(domain, strategy=strategy, callbacks=callbacks, **options)
    steps = steps_of(runner.accumulate_grad_batches)
    runner.fit(module, loader(BATCH // (world // math.prod(domain)), dtype, steps=steps))
    mean = torch.tensor(losses.values, dtype=torch.float64, device=accelerator())
    dist.all_reduce(mean)
    return (mean / world).tolist(), full_module_state(module)


def assert_equal_runs(
    found: Any, wanted: Any, tolerance: float = 1e-10, *, least: float = 0.0
) -> None:
    """Losses and parameters, relative to the largest element of each, or to `least`."""
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=0)
    assert found[1].keys() == wanted[1].keys()
    for key, value in wanted[1].items():
        torch.testing.assert_close(
            found[1][key],
            value,
            rtol=tolerance,
            atol=tolerance * max(float(value.abs().max()), least),
            msg=lambda m, key=key: f"{key}: {m}",
        )
