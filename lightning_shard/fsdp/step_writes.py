"""Shows the whole parameters of a sharded module, and refuses what a step writes into them.

FSDP2 forgets what is written into gathered parameters when it shards them again. Where a program
asks for whole parameters itself (`whole_parameters`), its writes go into the shards at the end.
"""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.fsdp.shard_block import class_name, sharded_modules
from lightning_shard.processes.torch_private.internals import (
    gathered_by,
    hooks_of,
    local_shape_and_offset,
    module_of,
    own_parameters,
    shard_memory_of,
    storage_key,
    version_of,
)

GATHERED = "_gathered"  # attribute of a module
_WAY_OUT = (
    "sharding='none' keeps parameters whole, and serves it; or write in a hook such as "
    "on_train_batch_end"
)


class GatheredParameters:
    """The parameters of a sharded module that are whole at the moment, each with its shard."""

    def __init__(self, root: nn.Module) -> None:
        """Follow all parameters of `root`; they are sharded now."""
        self._root, self._blocks = root, sharded_modules(root)
        owned = [(m, name, p) for m in root.modules() for name, p in own_parameters(m).items()]
        places = {p: (m, name) for m, name, p in reversed(owned) if isinstance(p, DTensor)}
        self._places: list[tuple[nn.Module, str, Any]] = [
            (*place, p) for p, place in places.items()
        ]
        self._memory: dict[Tensor, Tensor] = {}  # into which FSDP2 gathers
        self._begun: dict[Tensor, tuple[bool, int]] = {}  # whether it is trained, and its version
        self._slices: dict[Tensor, tuple[slice, ...]] = {}  # slices of the whole, by shard
        self._values: dict[Tensor, Tensor] = {}  # in a loop, this rank's part as it was gathered
        self.frozen_in_step: set[Tensor] = set()  # whole parameters that the step switched off
        self._in_step = self._keeps = False
        self.in_loop = False  # a loop of the user's own calls the module, and may write after it

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse, as FSDP2 does, a copy of a module whose parameters this follows.

        Raises:
            RuntimeError: Always; a plain copy of a part would compute with shards.
        """
        raise RuntimeError(
            "FSDP does not support deepcopy of a module, or a part of one, that is sharded."
        )

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Give each whole parameter that its shard is a part of, with that shard."""
        for i, (module, name, shard) in enumerate(self._places):
            now = own_parameters(module).get(name)
            if isinstance(now, DTensor):
                self._places[i] = (module, name, now)
            elif now is not None and now.shape == shard.shape:
                yield now, shard

    def see_shards(self) -> None:
        """Follow the shards that hooks have put into the place of others, before a step."""
        for _ in self.pairs():
            pass

    @contextmanager
    def whole(self) -> Generator[None]:
        """Inside, parameters are whole; what is written into them goes into the shards."""
        outer, self._keeps = self._keeps, True
        self.begin()
        try:
            yield
        finally:
            self._keeps = outer
        self.keep_writes()

    @contextmanager
    def step(self) -> Generator[None]:
        """Inside a step runs, which may not write into whole parameters, nor go backward to them.

        Raises:
            RuntimeError: It has done so. Manual optimization looks after gradients itself.
        """
        outer, self._in_step = self._in_step, True
        self.begin()
        had = {whole: _state_of(whole.grad) for whole, _ in self.pairs()}
        try:
            yield
        finally:
            self._in_step = outer
        self.refuse_writes()
        is_manual = torch.is_grad_enabled() and not getattr(
            self._root, "automatic_optimization", False
        )
        for whole, _ in self.pairs() if not is_manual else ():
            of_root = whole in had  # FSDP2 hears of others as their blocks go backward
            if of_root and type(whole.grad) is Tensor and had[whole] != _state_of(whole.grad):
                raise RuntimeError(
                    "backward() in a step has left gradients with parameters that are whole while "
                    "the step runs, where no optimizer finds them: take torch.autograd.grad of "
                    "what the step trains itself, or go backward in a hook such as "
                    "on_train_batch_end; sharding='none' keeps parameters whole, and serves it."
                )

    def before_state(self, *_: Any) -> None:
        """Look after writes before a state dict is read, for which FSDP2 shards again."""
        if self._keeps:
            self.keep_writes()
        elif self._in_step:
            self.refuse_writes()
        elif self.in_loop:
            self.shard_again()

    def before_load(self, *_: Any) -> None:
        """Shard again, so that a state dict that is loaded can be sharded too.

        Raises:
            RuntimeError: A step loads it.
        """
        if self._keeps:
            self.keep_writes()
            for block in self._blocks:
                block.reshard()
        elif self._in_step:
            raise RuntimeError(
                "load_state_dict in a step would write into sharded parameters while they are "
                f"whole: {_WAY_OUT}."
            )
        elif self.in_loop:
            self.shard_again()

    def shard_again(self) -> None:
        """Shard what a forward has left whole, with what a loop has written into it since."""
        self.keep_writes_of_loop()
        for block in self._blocks:
            block.reshard()

    def begin(self) -> None:
        """Note how the parameters are before a step."""
        for whole, shard in self.pairs():
            if whole not in self._memory:
                copy_attributes(shard, whole)
            self._memory[whole] = whole.detach()
            self._begun[whole] = whole.requires_grad, version_of(whole)
            if self.in_loop:
                self._values[whole] = whole.detach()[self._slice(shard)].clone()

    @torch.no_grad()
    def refuse_writes(self) -> None:
        """Keep whether parameters are trained, and refuse other changes of a step.

        Raises:
            RuntimeError: A whole parameter was written, or its shard while it was whole.
        """
        for whole, shard in self.pairs():
            if whole not in self._begun:  # it is gathered since
                continue
            trained, version = self._begun[whole]
            if whole.requires_grad != trained:
                shard.requires_grad_(whole.requires_grad)
                self._begun[whole] = whole.requires_grad, version
                switched = self.frozen_in_step
                (switched.discard if whole.requires_grad else switched.add)(whole)
            # p.data.mul_() leaves no trace but the values
            if version_of(whole) != version or self._is_moved(whole) or self._differs(whole, shard):
                raise RuntimeError(
                    f"a step wrote into a sharded parameter of shape {tuple(whole.shape)}, through "
                    "self.parameters() or optimizer.param_groups, and FSDP2 would lose it: "
                    f"{_WAY_OUT}."
                )

    def is_switched_on(self) -> bool:
        """Return True if a parameter that was frozen as the step began is trained now."""
        begun = ((whole, self._begun.get(whole)) for whole, _ in self.pairs())
        return any(at and whole.requires_grad and not at[0] for whole, at in begun)

    @torch.no_grad()
    def keep_writes(self) -> None:
        """Write what the whole parameters are into their shards."""
        for whole, shard in self.pairs():
            if whole in self._begun:  # others are gathered since, and nobody has written
                self._keep(whole, shard)

    @torch.no_grad()
    def keep_writes_of_loop(self) -> None:
        """Write into the shards what a loop has written into whole parameters since a forward."""
        for whole, shard in self.pairs():
            if whole not in self._values:
                continue
            # p.data.mul_() leaves no trace but the values, and a rank's part may have none
            now, before = whole[self._slice(shard)], self._values[whole]
            if self._is_moved(whole) or not _same(now, before):
                before.copy_(now)
                self._keep(whole, shard)
            else:
                self._keep_training(whole, shard)

    def _keep_training(self, whole: Tensor, shard: Any) -> None:
        """Train the shard as the whole parameter is trained now."""
        if whole.requires_grad != self._begun[whole][0]:
            shard.requires_grad_(whole.requires_grad)
        self._begun[whole] = whole.requires_grad, version_of(whole)

    def _keep(self, whole: Tensor, shard: Any) -> None:
        """Write what a whole parameter is into its shard."""
        shard.to_local().copy_(whole[self._slice(shard)])
        if self._is_moved(whole):
            whole.data = self._memory[whole]  # FSDP2 gathers into it, and frees it
        self._keep_training(whole, shard)

    def part_of(self, gradient: Tensor, shard: Any) -> Tensor:
        """Return the part of a whole gradient that belongs to a shard."""
        part = gradient[self._slice(shard)].to(shard.dtype).contiguous()
        mesh, placements = shard.device_mesh, shard.placements
        form = {"shape": shard.shape, "stride": shard.stride()}
        return DTensor.from_local(part, mesh, placements, run_check=False, **form)

    def _is_moved(self, whole: Tensor) -> bool:
        """Return True after `p.data = value` of a whole parameter."""
        return storage_key(self._memory[whole]) != storage_key(whole)

    def _differs(self, whole: Tensor, shard: Any) -> bool:
        """Return True unless the whole parameter has the values of its shard."""
        return not _same(whole[self._slice(shard)], shard.to_local().to(whole))  # may be offloaded

    def _slice(self, shard: Any) -> tuple[slice, ...]:
        """Return the slices of the whole tensor that this rank's part fills."""
        if shard not in self._slices:
            where = local_shape_and_offset(shard.shape, shard.device_mesh, shard.placements)
            self._slices[shard] = tuple(slice(o, o + n) for n, o in zip(*where, strict=True))
        return self._slices[shard]


def _same(one: Tensor, other: Tensor) -> bool:
    """Return True if the values are equal, of which some may be NaN."""
    numbers = torch.equal(one.nan_to_num(), other.nan_to_num())
    return numbers and torch.equal(one.isnan(), other.isnan())


def _state_of(gradient: Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), version_of(gradient))


def refusing_writes(method: Callable[..., Any], gathered: GatheredParameters) -> Callable[..., Any]:
    """Let a method that FSDP2 gathers for refuse to write into parameters."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with gathered.step():
            return method(*args, **kwargs)

    return wrapped


def copy_attributes(source: Tensor, target: Tensor) -> None:
    """Give `target` the attributes that a program has set on `source`, such as `p.no_decay`."""
    given, own = vars(source), vars(target)
    own.update({name: value for name, value in given.items() if name not in own})


class ReplacedParameters:
    """Parameters that a hook has put in the place of those that FSDP2 gathers.

    FSDP2 gathers the memory that it knows. Without this, another parameter (after
    `load_state_dict(assign=True)`), or other memory (after `swap_tensors`), would be forgotten.
    """

    def __init__(self, root: nn.Module, plain: Iterable[nn.Parameter]) -> None:
        """Follow `root`, whose parameters in `plain` are whole on each rank."""
        self.root = root
        self._plain = set(plain)

    def take(self) -> None:
        """Let FSDP2 gather what is there now; before a step, where parameters are sharded.

        Raises:
            RuntimeError: A parameter is not sharded, so the ranks would train it apart.
        """
        known: set[Any] = set(self._plain)
        for block in sharded_modules(self.root):
            for record in gathered_by(block):
                known.update((record.sharded_param, getattr(record, "_unsharded_param", None)))
                if record.sharded_state.name == "SHARDED":
                    known.add(self._take(record))
        for name, p in self.root.named_parameters():
            if p not in known and p.requires_grad:
                raise RuntimeError(
                    f"the parameter {name} was made after the module was sharded, in a hook such "
                    "as on_fit_start, so each rank would train its own: make it in __init__, "
                    "configure_model or setup, and copy values into parameters instead of "
                    "replacing them, or keep parameters whole with sharding='none'."
                )

    def _take(self, record: Any) -> Any:
        place = module_of(record)
        held = own_parameters(place.module).get(place.param_name)
        if not isinstance(held, DTensor):
            raise RuntimeError(
                f"the parameter {place.param_name} of {class_name(place.module)} was replaced "
                "after the module was sharded, so the new one would be forgotten: copy the value "
                "into it instead, under torch.no_grad(), or keep parameters whole with "
                "sharding='none'."
            )
        if hooks_of(held)[0]:
            raise NotImplementedError(
                f"the parameter {place.param_name} of {class_name(place.module)} has a hook for "
                "its gradient (register_hook), which a sharded parameter does not call: keep "
                "parameters whole with sharding='none', or change p.grad in "
                "on_before_optimizer_step."
            )
        local = held.to_local()
        moved = local.numel() and storage_key(local) != storage_key(shard_memory_of(record))
        if held is not record.sharded_param or moved:
            record.reset_sharded_param()
            for module, name in zip(place.shared_modules, place.shared_param_names, strict=True):
                own_parameters(module)[name] = held
        return held
