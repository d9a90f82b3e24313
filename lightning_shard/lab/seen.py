"""Records what one rank sees in the rehearsal of a step."""

from dataclasses import dataclass, field

from torch import Tensor

from lightning_shard.trainer.split_summary import SplitSummary

Value = Tensor | float | str


@dataclass
class Rehearsal:
    """What one step gave.

    Attributes:
        loss: The loss of a training step; None if the step was refused.
        gradients: Each parameter's gradient, whole, and each buffer after the training step.
        values: What an evaluation step returned, whole, and what it logged, by name.
        gathered: Functions without a rule for split tensors, which ran on gathered ones.
        functions: Those of them that are custom autograd Functions.
        refused: The sentence with which the step stopped, if it did.
        split: Which entries of the batch were split.
        parameters: Bytes of all parameters.
        block: Bytes of the parameters of the largest block, which are gathered at once.
        optimizer: Bytes of the optimizer's states of all parameters.
        activations: Bytes that this rank keeps from forward for backward.
        batch: Bytes of the batch that this rank holds.
        sent: Bytes that this rank sent.
    """

    loss: float | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    gathered: list[str] = field(default_factory=list[str])
    functions: list[str] = field(default_factory=list[str])
    refused: str = ""
    split: SplitSummary = field(default_factory=SplitSummary)
    parameters: int = 0
    block: int = 0
    optimizer: int = 0
    activations: int = 0
    batch: int = 0
    sent: int = 0
