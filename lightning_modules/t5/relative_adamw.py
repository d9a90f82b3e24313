"""T5 from scratch: AdamW with larger steps for larger weights, and a schedule that warms up."""

import math
from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR


class RelativeAdamW(AdamW):
    """AdamW with a learning rate of its own for each parameter, in units of its root mean square.

    T5 begins with embeddings of size 1 and matrices of a tenth and less, since Adafactor, which it
    was trained with, makes steps relative to these sizes. One learning rate for all is too small
    for the embeddings or too large for the matrices. Sizes are those at the beginning.

    Args:
        params: Parameters to train.
        lr: Learning rate of a parameter of root mean square 1.
        betas: Decay rates of the means of gradients and of their squares.
        weight_decay: Part of a weight that is lost in a step, in units of its learning rate.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost"
    (https://arxiv.org/abs/1804.04235), section 8.
    """

    SMALLEST = 1e-3  # as in Adafactor: parameters that begin at zero move too

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.01,
    ) -> None:
        groups = [
            {"params": [p], "lr": lr * max(root_mean_square(p), self.SMALLEST)} for p in params
        ]
        super().__init__(groups, lr=lr, betas=betas, weight_decay=weight_decay)


def root_mean_square(x: Tensor) -> float:
    """Return the root mean square of a tensor; of a sharded one, all ranks must call it."""
    norm = x.detach().norm()
    if isinstance(norm, DTensor):  # item() of a shard would be this rank's
        norm = norm.full_tensor()
    return norm.item() / math.sqrt(x.numel())


class WarmupLinear(LambdaLR):
    """Learning rates that rise linearly to the optimizer's, then fall linearly to zero.

    Args:
        optimizer: The optimizer whose learning rates are changed.
        warmup_steps: Steps in which they rise.
        total_steps: Steps after which they are zero.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int, total_steps: int) -> None:
        def factor(step: int) -> float:
            rising = (step + 1) / warmup_steps
            falling = (total_steps - step) / (total_steps - warmup_steps)
            return max(0.0, min(rising, falling))

        super().__init__(optimizer, factor)
