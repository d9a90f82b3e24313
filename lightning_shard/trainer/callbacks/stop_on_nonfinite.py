"""Ends training before an optimizer step that NaN or infinity would spoil.

Plain Lightning trains on: the weights become NaN, and the next checkpoint replaces the last good
one.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.data.tree import leaves_of
from lightning_shard.lightning import Callback, LightningModule, Trainer
from lightning_shard.processes.torch_private.typed import named_modules
from lightning_shard.tensor.tensor import DomainTensor


class StopOnNonFinite(Callback):
    """Ends training on all ranks before the weights take up a loss or gradient that is not finite.

    The error names the rank, the batch, and the first module on that rank whose output is not
    finite. Weights and checkpoints stay as they were before the step. Each optimizer step costs
    one all-reduce of two numbers. With precision "16-mixed" only losses are watched, since its
    gradient scaler skips steps with infinite gradients by itself.
    """

    def __init__(self) -> None:
        """Begin without a batch."""
        self._batch: tuple[Any, int] | None = None
        self._bad: tuple[Any, int] | None = None

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch, to be run again if its loss or gradients are not finite."""
        self._batch = (batch, batch_idx)

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Note the first batch with a loss that is not finite; ranks are compared later."""
        if self._bad is None and not loss.detach().isfinite().all():
            self._bad = self._batch

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Compare the ranks.

        Raises:
            FloatingPointError: A loss or a gradient is not finite; all ranks raise.
        """
        device = trainer.strategy.root_device
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        groups: list[dict[str, Any]] = optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        bad = torch.zeros(2, device=device)
        bad[0] = self._bad is not None
        bad[1] = not (scaled or _gradients_are_finite(parameters, device))
        if dist.is_initialized():
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad.any():
            raise FloatingPointError(self._what_happened(trainer, pl_module))

    def _what_happened(self, trainer: Trainer, module: LightningModule) -> str:
        """Run the step again on all ranks, and compare where it stops to be finite."""
        batch, index = self._bad or self._batch or (None, -1)
        with torch.no_grad(), _watched(module) as found, _without_logs(module):
            if not _all_finite(leaves_of(batch)):
                found.append((-1, "the batch itself"))
            trainer.strategy.training_step(batch, index)
        here = min(found, default=None)
        everywhere: list[tuple[int, str] | None] = [here]
        if dist.is_initialized():
            everywhere = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, here)
        where = f"batch {index} of epoch {trainer.current_epoch}"
        after = "The weights are those of before this optimizer step, and so are the checkpoints"
        firsts = [(first, rank) for rank, first in enumerate(everywhere) if first is not None]
        if not firsts:
            return (
                f"the loss or a gradient of {where} is not finite, though the outputs of all "
                f"modules are; look for sqrt, log, a division or a norm at 0. {after}."
            )
        (_, name), rank = min(firsts)
        return (
            f"the loss or a gradient of {where} is not finite: on rank {rank} the first values "
            f"that are not finite are those of {name}. {after}; look at the samples of this batch, "
            "or resume from the last checkpoint with a lower learning rate."
        )


def _gradients_are_finite(parameters: Iterable[Tensor], device: torch.device) -> bool:
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    if not local:
        return True
    return bool(torch.stack([g.isfinite().all().to(device) for g in local]).all())


def _all_finite(values: Iterable[Any]) -> bool:
    """Return True if this rank's parts of the tensors among `values` are finite."""
    local = [v.to_local() if isinstance(v, DomainTensor) else v for v in values]
    numbers = [
        v for v in local if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex())
    ]
    return all(bool(v.detach().isfinite().all()) for v in numbers)


@contextmanager
def _watched(module: nn.Module) -> Generator[list[tuple[int, str]]]:
    """Collect the modules whose output on this rank is not finite, numbered as they run."""
    found: list[tuple[int, str]] = []
    handles: list[Any] = []
    calls = 0

    def watch(name: str, part: nn.Module) -> None:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            nonlocal calls
            calls += 1
            if not _all_finite(leaves_of(output)):
                found.append((calls, f"the output of {name} ({type(part).__name__})"))

        handles.append(part.register_forward_hook(look))

    for name, part in named_modules(module):
        if part is not module:
            watch(name, part)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without_logs(module: LightningModule) -> Generator[None]:
    """Log nothing while a step is made again."""
    own: dict[str, Any] = dict.fromkeys(("log", "log_dict"), _log_nothing)
    module.__dict__.update(own)
    try:
        yield
    finally:
        for name in own:
            del module.__dict__[name]


def _log_nothing(*_: Any, **__: Any) -> None:
    pass
