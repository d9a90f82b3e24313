"""Adds a remedy to errors of torch and Lightning that only describe their own insides."""

import traceback
from collections.abc import Iterable, Sequence

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.domain.errors import UnsupportedOperationError

_WHOLE = "sharding='none' keeps parameters whole on each rank, and then this runs as under DDP. "
_NO_FUNCTION = _WHOLE + (
    "Or: torch has no such function for sharded parameters and gradients, which ModelPruning and "
    "parameters_to_vector flatten, so call it on p.full_tensor() or p.grad.full_tensor(), which "
    "are whole on every rank. What writes into p, as nn.init does, goes inside `with "
    "lightning_shard.whole_parameters(module):`."
)
_WHOLE_GRADIENT = (
    "To set a gradient of a whole tensor, equal on all ranks: p.grad.copy_(torch.distributed."
    "tensor.distribute_tensor(whole, p.device_mesh, p.placements))."
)
_NO_LARGEST = _WHOLE + (
    "Or: torch finds no largest or least number of a parameter or gradient of which a rank has no "
    "part: ask p.full_tensor() or p.grad.full_tensor(), on all ranks."
)
_BY_MESSAGE = {
    "got mixed torch.Tensor and DTensor": _WHOLE + (
        "Or: a parameter, or its gradient, was used where each rank holds a shard of it. Outside "
        "of the steps call the module itself, mark the method as fabric's "
        "model.mark_forward_method('name'), or read and write parameters inside `with "
        f"lightning_shard.whole_parameters(module):`. {_WHOLE_GRADIENT}"
    ),
    "does not have a sharding strategy registered": _NO_FUNCTION,
    "Sharding propagation failed": _NO_FUNCTION,
    "appears to not have been used in the graph": (
        "If it is a parameter: " + _WHOLE + "Or: in a step the parameters of a block are whole "
        "while the block runs only, and torch.autograd.grad finds no shard; with "
        "sharding='gradients' they stay whole until backward."
    ),
    "is not supported for tensor subclasses": _WHOLE + (
        "Or: sharded parameters and gradients have no array: write p.full_tensor().numpy() or "
        "p.grad.full_tensor().numpy() on all ranks, and likewise .tolist()."
    ),
    "'Tensor' object has no attribute 'placements'": _WHOLE + (
        "Or: torch.amp.GradScaler takes shards and whole parameters, such as scalars, in one "
        "optimizer only if its first parameter is a shard: give it that one first, or let "
        "precision='16-mixed' scale the loss."
    ),
    "FSDP expects uniform original parameter dtype": _WHOLE + (
        "Or: a hook such as on_fit_start has changed the dtype of a part after the module was "
        "sharded: change it in __init__, configure_model or setup."
    ),
    "cannot compute the infinity norm on an empty tensor": _WHOLE + (
        "Or: torch finds no largest number of a gradient of which a rank has no part; clip by "
        "another norm, or by gradient_clip_val of the Trainer."
    ),
    "Expected reduction dim to be specified for input.numel() == 0": _NO_LARGEST,
    "Expected reduction dim 0 to have non-zero size": _NO_LARGEST,
    "but its data is not allocated yet": _WHOLE + (
        "Or: torch.tensor was given sharded tensors, such as norms of gradients, which it cannot "
        "read: give it those of p.grad.full_tensor(). Or: the module is called after a gradient "
        "with create_graph=True, which reads parameters later: call it before. Or: a part of a "
        "module of Fabric was called alone, as model.head(x): call a method of the module that "
        "model.mark_forward_method('name') has marked."
    ),
    "modified by an inplace operation": (
        "If it is a value that fabric.all_reduce was given, which it changes in place: give it "
        "loss.detach().clone()."
    ),
    "but you have set Trainer(max_epochs=": (
        "max_epochs counts the epochs of the checkpoint, too: give one that is larger than its "
        "current_epoch, by as many as are to be trained."
    ),
    "unable to lock file": (
        "Another rank may have opened this file: the ranks of a domain hold one batch and run the "
        "same hooks. Write it where self.trainer.is_global_zero, or put self.global_rank into its "
        "name."
    ),
    "stateful loaders, but found": (
        "The checkpoint was saved inside an epoch, by a run whose loader had a state of its own, "
        "as in first versions of lightning_shard: resume from one of the end of an epoch."
    ),
    "FSDP does not support deepcopy": _WHOLE + (
        "Or: a module with shards cannot be copied, which a callback such as "
        "StochasticWeightAveraging does at the start of each stage; give the callback to the first "
        "fit only, or make a copy of your own, such as an AveragedModel, in __init__."
    ),
}  # fmt: skip


_MANUAL_STEP = (
    "In a manual step p is whole and p.grad is a shard: read it as p.grad.full_tensor(), and call "
    "self.manual_backward(loss) in place of loss.backward(). To write into p, as SAM does, keep "
    "parameters whole with sharding='none'; this runs there as under DDP."
)
_OF_OPTIMIZERS = (
    "The optimizer {} cannot update sharded parameters: keep them whole on every process with "
    "sharding='none', or take one that docs/optimizers.md lists as exact, such as AdamW."
)
# the last three: of a rank without rows
_WORDS_OF_SHARDS = (
    "dtensor", "shard", "distributed.tensor", "numel() == 0", "0 elements", "empty tensor",
)  # fmt: skip
_NO_OPTIMIZERS = ("lightning.", "pytorch_lightning.", "lightning_shard.fsdp.step_writes")


def _is_of_too_small_a_dataset(error: BaseException) -> bool:
    """Return True if a sampler refuses that Lightning makes before a strategy sees the loader."""
    frames = list(traceback.walk_tb(error.__traceback__))
    made_by = frames[-1][0].f_code.co_qualname if frames else ""
    return isinstance(error, AssertionError) and made_by == "UnrepeatedDistributedSampler.__init__"


def _optimizer_of(error: BaseException, optimizers: Iterable[Optimizer]) -> Optimizer | None:
    """Find the optimizer that raised `error` for the shards that it was given."""
    of_class = {kind.__name__: o for o in optimizers for kind in type(o).__mro__[:-2]}
    found: Optimizer | None = None
    inside = str(error)
    # an error does not name the optimizer, which the remedy needs (tests/trainer/test_explain.py)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module: str = frame.f_globals.get("__name__", "")
        method = frame.f_code.co_qualname.partition(".")[0]
        if method in of_class:
            found = of_class[method]
        elif module.startswith(_NO_OPTIMIZERS):  # a closure with the step, or a hook
            found = None
        inside = f"{module.removeprefix('lightning_shard')} {error}"
    held = () if found is None else (p for g in found.param_groups for p in g["params"])
    is_of_shards = any(isinstance(p, DTensor) for p in held)
    return found if is_of_shards and any(w in inside.lower() for w in _WORDS_OF_SHARDS) else None


def _of_optimizer(optimizer: Optimizer) -> str:
    """Word what an optimizer of shards cannot do; a program may have given it whole gradients."""
    held = [p for g in optimizer.param_groups for p in g["params"] if isinstance(p, DTensor)]
    if any(p.grad is not None and not isinstance(p.grad, DTensor) for p in held):
        return f"{_WHOLE}Or: a gradient is whole where its parameter is a shard. {_WHOLE_GRADIENT}"
    return _OF_OPTIMIZERS.format(type(optimizer).__name__)


def _is_of_step(error: BaseException) -> bool:
    """Return True if a training step raised `error`, in which parameters are whole."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name == "training_step" for frame, _ in frames)


def _refusals_behind(error: BaseException) -> Sequence[BaseException]:
    """Return a refusal of ours that another package has put behind an error of its own."""
    behind = error.__cause__ or error.__context__
    seen: list[BaseException] = []
    while behind is not None and behind not in seen:
        seen.append(behind)
        behind = behind.__cause__ or behind.__context__
    if isinstance(error, UnsupportedOperationError):
        return []
    return [each for each in seen if isinstance(each, UnsupportedOperationError)][:1]


def explain(
    error: BaseException, optimizers: Iterable[Optimizer] = (), *, by_hand: bool = False
) -> None:
    """Add a remedy to `error` if one is known, as a note with which its traceback ends."""
    optimizer = _optimizer_of(error, optimizers)
    if optimizer is not None:
        notes = [_of_optimizer(optimizer)]
    else:
        notes = [note for message, note in _BY_MESSAGE.items() if message in str(error)]
        if "got mixed torch.Tensor and DTensor" in str(error) and by_hand and _is_of_step(error):
            notes = [_MANUAL_STEP]
    if _is_of_too_small_a_dataset(error):
        notes.append(
            "The dataset has fewer samples than there are data replicas; use fewer processes, a "
            "larger domain_parallel_size, or more samples."
        )
    notes += [str(refusal) for refusal in _refusals_behind(error)]
    for note in notes:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
