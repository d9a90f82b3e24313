"""Runs training steps of one rank alone on fake tensors: shapes and memory, and no numbers.

What an operation would take is counted (ledger.py). Integers stay real where nothing fake went into
them, since sizes and indices are computed with them. A fake number that Python asks for is one, and
fake tensors are equal.
"""

import copy
import warnings
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from typing_extensions import override

from lightning_shard.fsdp import offload as offload
from lightning_shard.lab.ledger import Ledger, Peak
from lightning_shard.lab.lone_steps import Training, train
from lightning_shard.lab.machine import Device
from lightning_shard.lab.simulate import alone
from lightning_shard.lab.timeline import Recorder, Timeline
from lightning_shard.processes.torch_private.internals import (
    FakeTensor,
    FakeTensorMode,
    base_of,
    fake_copies,
    own_buffers,
    own_parameters,
    tree_leaves,
    tree_map,
)
from lightning_shard.tensor.tensor import DomainTensor

_aten: Any = torch.ops.aten
_ITEM = "aten::_local_scalar_dense"
_WHOLE_NUMBERS = (_aten.arange, _aten.randperm, _aten.scalar_tensor)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Traced:
    """What one step of a rank takes.

    Attributes:
        timeline: Its computation and its collectives.
        peak: Where it holds most.
    """

    timeline: Timeline
    peak: Peak


def traced(training: Training, processes: int, rank: int, device: Device) -> Traced:
    """Trace a step of one rank, without any number.

    Args:
        training: What each rank trains.
        processes: Of all ranks.
        rank: Which one.
        device: Whose seconds are counted.
    """
    ledger = Ledger(device)
    recorder = Recorder(rank, clock=lambda: ledger.seconds)
    alone(_Body(training, ledger, recorder), processes=processes, rank=rank, listener=recorder)
    return Traced(recorder.steps[-1], ledger.peak)


class _Body:
    """What the rank runs; not copied for it."""

    def __init__(self, training: Training, ledger: Ledger, recorder: Recorder) -> None:
        self._training, self._ledger, self._recorder = training, ledger, recorder

    def __deepcopy__(self, memo: Any) -> "_Body":
        return self

    def __call__(self) -> None:
        given, mode = self._training, _Mode(self._ledger)
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of addresses of tensors without memory
            stack.enter_context(replaced(nn.Module, "_apply", _apply))
            stack.enter_context(replaced(offload, "OnHost", lambda: _OnHost(self._ledger)))
            stack.enter_context(mode)
            with fake_copies(mode):
                module, data = copy.deepcopy((given.module, given.data))
            if data is not None:  # it was set up for its batch, and could read files here
                for hook in ("prepare_data", "setup"):
                    setattr(data, hook, _nothing)
            batch = tree_map(_as_fake, given.batch)
            follower = _Follow(self._ledger)
            options = given.trainer | {"callbacks": [follower]}
            fake = replace(given, module=module, data=data, batch=batch, trainer=options)
            train(fake, 1, self._recorder.cut, warm_up=1)


def _nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    """Let an attribute have another value, while open."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _OnHost(saved_tensors_hooks):
    """As `OnHost`, on a device whose memory is not the host's."""

    def __init__(self, ledger: Ledger) -> None:
        def is_moved(x: Tensor) -> bool:
            is_wrapper = isinstance(x, DTensor | DomainTensor)
            return not is_wrapper and not isinstance(base_of(x), nn.Parameter)

        def pack(x: Tensor) -> Tensor:
            if is_moved(x):
                ledger.to_host(x)
            return x

        def unpack(x: Tensor) -> Tensor:
            if is_moved(x):
                ledger.from_host(x)
            return x

        super().__init__(pack, unpack)


def _as_fake(x: Any) -> Any:
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    return torch.empty(x.shape, dtype=x.dtype)


class _Mode(FakeTensorMode):
    """Makes fake tensors; DTensor enters it again, to compute shapes that no rank holds."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._ledger, self._depth = ledger, 0

    def __deepcopy__(self, memo: Any) -> Any:
        """Copies of fake tensors are of this mode.

        A copy of it would have weak references to the same memory, and each of them frees it
        (torch 2.15): a step that logs made such copies, and the heap was damaged.
        """
        return self

    def __enter__(self) -> Any:
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._depth -= 1
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._depth > 1:
            return super().__torch_dispatch__(func, types, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) for x in given):
            if func.name() == _ITEM:
                return 1.0 if given[0].is_floating_point() else 1
            if func is _aten.equal.default:
                return True
        elif _is_of_integers(func, given, leaves, kwargs.get("dtype")):
            return func(*args, **kwargs)
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except ValueError as error:
            if func is _aten.view.default:  # of which real tensors say it so
                raise RuntimeError(str(error)) from error
            raise
        if isinstance(out, FakeTensor):
            out.constant = None  # a real tensor, of which no deep copy can be made here
        if func.namespace != "prim" and not any(map(_holds_nothing, [*given, *tree_leaves(out)])):
            self._ledger.note(func, args, kwargs, given, out)
        return out


def _is_of_integers(func: Any, given: list[Tensor], leaves: list[Any], dtype: Any) -> bool:
    if given:
        return all(x.dtype in _INTEGERS for x in given) and dtype in (None, *_INTEGERS)
    if dtype is None:
        return func.overloadpacket in _WHOLE_NUMBERS and not any(
            isinstance(x, float) for x in leaves
        )
    return dtype in _INTEGERS


def _holds_nothing(x: Any) -> bool:
    """Whether it is a wrapper, what is in which is counted by itself, or shapes that are tried."""
    return isinstance(x, DomainTensor | DTensor) or (isinstance(x, Tensor) and x.is_meta)


def _apply(self: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """As `Module._apply`, which would write into the memory that fake parameters do not have."""
    for module in self.modules() if recurse else (self,):
        for own in (own_parameters(module), own_buffers(module)):
            kept: Any = own
            for name, old in [(name, x) for name, x in own.items() if x is not None]:
                new = change(old.detach())
                if (new.dtype, new.device) != (old.dtype, old.device):
                    is_parameter = isinstance(old, nn.Parameter)
                    kept[name] = nn.Parameter(new, old.requires_grad) if is_parameter else new
    return self


class _Follow(Callback):
    """Tells the ledger what computes, and why a step holds what it does."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._hooks = ExitStack()
        self._open: list[str] = []
        self._names: dict[nn.Module, str] = {}

    def __deepcopy__(self, memo: Any) -> "_Follow":
        return self

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._names = {module: name for name, module in pl_module.named_modules()}
        self._hooks.callback(register_module_forward_pre_hook(self._enter).remove)
        self._hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)
        self._hooks.enter_context(saved_tensors_hooks(self._keep, lambda x: x))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._open.append(self._names.get(module, type(module).__name__))
        self._ledger.place = f"forward of {self._open[-1] or 'the module'}"

    def _leave(self, *_: Any) -> None:
        self._open.pop()

    def _keep(self, x: Tensor) -> Tensor:
        self._ledger.hold(_locals([x]), "activations")
        return x

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        ledger, own = self._ledger, [*pl_module.parameters()]
        ledger.next_step()
        ledger.hold(_locals([*own, *pl_module.buffers()]), "parameters")
        ledger.hold(_locals([p.grad for p in own]), "gradients")
        states = tree_leaves([list(o.state.values()) for o in trainer.optimizers])
        ledger.hold(_locals(states), "optimizer")
        ledger.hold(_locals(tree_leaves(batch)), "batch")

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self._ledger.place = "backward"

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        self._ledger.place = "the optimizer's step"
        self._ledger.hold(_locals([p.grad for p in pl_module.parameters()]), "gradients")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hooks.close()


def _locals(tensors: Iterable[Any]) -> list[Tensor]:
    with torch.no_grad():
        own: Any = [x for x in tensors if isinstance(x, Tensor)]
        return [x.to_local() if isinstance(x, DTensor | DomainTensor) else x for x in own]
