"""Keeps what a step does to its whole parameters, which FSDP2 forgets when it shards them again.

A step may write into them, as for a teacher that follows its student, and may freeze them. FSDP2
gathers into the memory that it has allocated once, so `p.data = value` is written there too.
"""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.fsdp.remembered import Remembered
from lightning_shard.fsdp.shard_block import class_name, sharded_modules
from lightning_shard.processes.torch_private.internals import (
    gathered_by,
    local_shape_and_offset,
    module_of,
    own_parameters,
    shard_memory_of,
    storage_key,
    version_of,
    writes_seen,
)

GATHERED = "_gathered"  # attribute of a module
_ASSIGN = "assign_to_params_buffers"  # as torch tells the parts of a module


class Gathered:
    """The parameters of a sharded module that are whole at the moment, each with its shard."""

    def __init__(self, root: nn.Module, remembered: Remembered | None = None) -> None:
        """Follow all parameters of `root`; they are sharded now.

        Args:
            root: The module.
            remembered: Places outside of modules that hold parameters of it.
        """
        self.remembered = Remembered() if remembered is None else remembered
        self._blocks = sharded_modules(root)
        owned = [(m, name, p) for m in root.modules() for name, p in own_parameters(m).items()]
        places = {p: (m, name) for m, name, p in reversed(owned) if isinstance(p, DTensor)}
        self._places: list[tuple[nn.Module, str, Any]] = [
            (*place, p) for p, place in places.items()
        ]
        self._memory: dict[Tensor, Tensor] = {}  # into which FSDP2 gathers
        self._begun: dict[Tensor, tuple[bool, int]] = {}  # whether it is trained, and its version
        self._versions: dict[Tensor, tuple[int, int]] = {}  # of the shards
        self._open = False
        self._slices: dict[Tensor, tuple[slice, ...]] = {}  # of the whole, by shard
        self._by_memory: dict[int, tuple[nn.Module, str, Any]] = {}  # places of shards
        self.steps = False  # whether an optimizer steps: all is gathered after it

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

    @contextmanager
    def whole(self) -> Generator[None]:
        """Inside, parameters are whole, also for those who remember them; writes are kept."""
        outer, self._open = self._open, True
        self.begin()
        self.remembered.show({shard: whole for whole, shard in self.pairs()})
        try:
            with writes_seen(self.take_written):
                yield
        finally:
            self.remembered.hide()
            self._open = outer
        self.put_back()

    def before_state(self, *_: Any) -> None:
        """Keep writes before a state dict is read or loaded, for which FSDP2 shards again."""
        if self._open:
            self.put_back()

    def before_load(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        """Keep writes, and shard again, so that a state dict that is loaded can be sharded too.

        In a step `assign=True` copies into what is frozen, which has the same effect.

        Raises:
            RuntimeError: It would replace a trained parameter in a step, or change a dtype.
        """
        if self._open:
            if metadata.get(_ASSIGN):
                _check_assigned(module, state, prefix)
                metadata[_ASSIGN] = False
            self.put_back()
            for block in self._blocks:
                block.reshard()

    def begin(self) -> None:
        """Note how the parameters are before a step."""
        self._by_memory = {}
        for whole, shard in self.pairs():
            if whole not in self._memory:
                self._memory[whole] = whole.detach()
                copy_attributes(shard, whole)
            self._begun[whole] = whole.requires_grad, version_of(whole)
            self._versions[shard] = _versions_of(shard)

    @torch.no_grad()
    def take_written(self, target: Any) -> None:
        """Gather shards that were written, as of optimizer.param_groups, where they are whole.

        All ranks write the same shards.

        Args:
            target: A tensor that was written, or a list of them.

        Raises:
            RuntimeError: The whole parameter was written too.
        """
        if self.steps:
            return
        if not self._by_memory:
            self._by_memory = {storage_key(place[2].to_local()): place for place in self._places}
        for tensor in target if isinstance(target, list | tuple) else [target]:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if storage_key(local) not in self._by_memory:
                continue
            module, name, shard = self._by_memory[storage_key(local)]
            now = own_parameters(module).get(name)
            whole = None if isinstance(now, DTensor) else now
            if whole is None:
                continue  # its block gathers it when it runs
            if version_of(whole) != self._begun.get(whole, (True, -1))[1]:
                raise self._refusal(shard)
            whole.copy_(shard.full_tensor())
            self._begun[whole] = whole.requires_grad, version_of(whole)

    def is_shard_written(self) -> bool:
        """Return whether a shard was written in a way that `take_written` has not seen."""
        return any(
            _versions_of(shard) != self._versions[shard]
            and self._differs(whole, shard, shard.to_local())  # pyright: ignore[reportAttributeAccessIssue]
            for whole, shard in self.pairs()
            if shard in self._versions
        )

    def _refusal(self, shard: Tensor) -> RuntimeError:
        return RuntimeError(
            f"a step wrote into the shard of a parameter of shape {tuple(shard.shape)}, "
            "such as those of optimizer.param_groups, while the parameter is whole: write "
            "into those of self.parameters() instead, or in a hook."
        )

    @torch.no_grad()
    def put_back(self) -> None:
        """Write what the whole parameters are into their shards.

        Raises:
            RuntimeError: A parameter was written that is gathered in another dtype, or a shard was
                written while the parameter was whole.
        """
        for whole, shard in self.pairs():
            if whole not in self._begun:  # it is gathered since, and nobody has written
                continue
            trained, version = self._begun[whole]
            local: Tensor = shard.to_local()  # pyright: ignore[reportAttributeAccessIssue]
            if _versions_of(shard) != self._versions[shard] and self._differs(whole, shard, local):
                raise self._refusal(shard)
            written = version_of(whole) != version
            if whole.requires_grad != trained:
                shard.requires_grad_(whole.requires_grad)
            self._begun[whole] = whole.requires_grad, version_of(whole)
            dtype = whole.dtype
            if dtype == shard.dtype:  # also unless written: p.data.mul_() leaves no trace
                local.copy_(whole[self._slice(shard)])
                self._versions[shard] = _versions_of(shard)
            written = self._keep_memory(whole) or written
            if written and dtype != shard.dtype:
                raise RuntimeError(
                    f"a step wrote into a parameter of shape {tuple(whole.shape)} that is gathered "
                    f"as {dtype} and kept as {shard.dtype}, so the write would lose digits; "
                    "write it in a hook such as on_train_batch_end."
                )

    def part_of(self, gradient: Tensor, shard: Any) -> Tensor:
        """Return the part of a whole gradient that belongs to a shard."""
        part = gradient[self._slice(shard)].to(shard.dtype).contiguous()
        mesh, placements = shard.device_mesh, shard.placements
        form = {"shape": shard.shape, "stride": shard.stride()}
        return DTensor.from_local(part, mesh, placements, run_check=False, **form)

    def _differs(self, whole: Tensor, shard: Any, local: Tensor) -> bool:
        """Return True unless the parameter was gathered again after its shard was written."""
        now = whole[self._slice(shard)]
        return not torch.equal(now.nan_to_num(), local.to(now.dtype).nan_to_num())

    def _keep_memory(self, whole: nn.Parameter) -> bool:
        """Put back the memory into which FSDP2 gathers; True if `p.data = value` gave other memory.

        It keeps its values: backward needs those with which the forward pass ran.
        """
        memory = self._memory[whole]
        if storage_key(memory) == storage_key(whole):
            return False
        whole.data = memory
        return True

    def _slice(self, shard: Any) -> tuple[slice, ...]:
        """Return the slices of the whole tensor that this rank's part fills."""
        if shard not in self._slices:
            where = local_shape_and_offset(shard.shape, shard.device_mesh, shard.placements)
            self._slices[shard] = tuple(slice(o, o + n) for n, o in zip(*where, strict=True))
        return self._slices[shard]


def _versions_of(shard: Any) -> tuple[int, int]:
    """Count the writes into a shard, and into its local tensor, as `p.to_local().mul_()`."""
    return version_of(shard), version_of(shard.to_local())


def _check_assigned(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    for name, p in own_parameters(module).items():
        value = state.get(prefix + name)
        if p is None or not isinstance(value, Tensor):
            continue
        if p.requires_grad or value.dtype != p.dtype:
            raise RuntimeError(
                "load_state_dict(assign=True) in a step would replace the parameter "
                f"{prefix + name} of {class_name(module)}, which is trained or has another dtype: "
                "leave out assign=True, which copies the values, or load in a hook such as "
                "on_train_batch_end."
            )


def keeping_writes(method: Callable[..., Any], gathered: Gathered) -> Callable[..., Any]:
    """Let a method that FSDP2 gathers for keep what it does to parameters."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with gathered.whole():
            return method(*args, **kwargs)

    return wrapped


def copy_attributes(source: Tensor, target: Tensor) -> None:
    """Give `target` the attributes that a program has set on `source`, such as `p.no_decay`."""
    given, own = vars(source), vars(target)
    own.update({name: value for name, value in given.items() if name not in own})


class Replaced:
    """Parameters that a hook has put in the place of those that FSDP2 gathers.

    FSDP2 gathers the memory that it knows. Without this, another parameter (after
    `load_state_dict(assign=True)`), or other memory (after `swap_tensors`), would be forgotten.
    """

    def __init__(self, root: nn.Module, plain: Iterable[nn.Parameter]) -> None:
        """Follow `root`, whose parameters in `plain` are whole on each rank."""
        self.root = root
        self._plain = set(plain)
        self._steps = 0

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
        self._steps += 1
        if self._steps < 3 or self._steps % 100 == 0:
            for name, p in self.root.named_parameters():
                if p not in known and p.requires_grad:
                    raise RuntimeError(
                        f"the parameter {name} was made after the module was sharded, in a hook "
                        "such as on_fit_start, so each rank would train its own: make it in "
                        "__init__, configure_model or setup, and copy values into parameters "
                        "instead of replacing them."
                    )

    def _take(self, record: Any) -> Any:
        place = module_of(record)
        held = own_parameters(place.module).get(place.param_name)
        if not isinstance(held, DTensor):
            raise RuntimeError(
                f"the parameter {place.param_name} of {class_name(place.module)} was replaced "
                "after the module was sharded, so the new one would be forgotten: copy the value "
                "into it instead, under torch.no_grad()."
            )
        local = held.to_local()
        moved = local.numel() and storage_key(local) != storage_key(shard_memory_of(record))
        if held is not record.sharded_param or moved:
            record.reset_sharded_param()
            for module, name in zip(place.shared_modules, place.shared_param_names, strict=True):
                own_parameters(module)[name] = held
        return held
