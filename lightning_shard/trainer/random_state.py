"""Reads and sets the states of this process's random number generators, and keeps them alike."""

import os
import random
import warnings
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.domain.subdomain import domain_of
from lightning_shard.processes.failures.failure_watch import is_of_processes
from lightning_shard.processes.subgroups import host_group


def random_state(device: torch.device) -> dict[str, Any]:
    """Read what the generators of python, numpy, torch and `device` will draw next."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - what users draw from
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def storable(state: dict[str, Any]) -> dict[str, Any]:
    """Turn what `random_state` returned into tensors and numbers, which `weights_only` reads.

    That takes longer than to note the state, which the strategy does at each step.
    """
    name, keys, *rest = state["numpy"]
    numbers = torch.tensor(np.asarray(keys).tolist(), device="cpu")
    return state | {"numpy": (str(name), numbers, *rest)}


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue with what `random_state` or `storable` returned."""
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys).astype(np.uint32), *rest))  # noqa: NPY002
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Let this process draw the numbers of a seed on the CPU, and then go on as before."""
    cpu = torch.device("cpu")
    before = random_state(cpu)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what users draw from
    try:
        yield
    finally:
        set_random_state(before, cpu)


def share_random_state(mesh: DeviceMesh, device: torch.device) -> None:
    """Let the ranks of a domain draw the same random numbers for what they all compute."""
    if mesh.size() > 1:
        states = [random_state(device)]
        for axis in reversed(range(mesh.ndim)):
            group = mesh.get_group(axis)
            dist.broadcast_object_list(states, group=group, group_src=0, device=device)
        set_random_state(states[0], device)


def share_seeded_state(device: torch.device) -> None:
    """Let all ranks that `seed_everything` seeded alike go on with the first rank's numbers."""
    if dist.get_world_size() > 1:
        seed = os.environ.get("PL_GLOBAL_SEED")
        given = [(seed, random_state(device))]
        dist.broadcast_object_list(given, src=0, device=device)
        if seed is not None and given[0][0] == seed:
            set_random_state(given[0][1], device)


def same_numbers(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two states that `random_state` returned draw the same numbers."""
    return _numbers_of(one) == _numbers_of(other)


def _numbers_of(state: dict[str, Any]) -> list[Any]:
    """Return a state as what `==` compares: two pickles of one tensor differ."""
    _, keys, *rest = state["numpy"]
    tensors = [x.tolist() for x in state.values() if isinstance(x, torch.Tensor)]
    return [*tensors, state["python"], np.asarray(keys).tolist(), rest]


class SharedNumbers:
    """Lets the ranks of a domain draw the same random numbers in each step.

    A hook that draws on the first rank alone, as to choose the sample of a picture, would let ranks
    cut other windows out of one field, and wait for rows that do not come.
    """

    def __init__(self) -> None:
        """Begin without a domain."""
        self._mesh: DeviceMesh | None = None
        self._has_warned = False

    def follow(self, mesh: DeviceMesh, device: torch.device) -> None:
        """Begin to compare the ranks of a domain."""
        self._mesh = mesh if mesh.size() > 1 and is_of_processes() else None
        self._device = device
        if self._mesh is not None:
            axes = tuple(range(mesh.ndim))
            self._group = host_group(domain_of(mesh).group(axes))

    def agree(self) -> None:
        """Go on with the numbers of the first rank where any rank would draw others; all call."""
        if self._mesh is None:
            return
        own = _checksums(random_state(self._device))
        sums = torch.tensor([*own.values()], device="cpu")
        everywhere = torch.empty(self._mesh.size() * len(own), dtype=torch.int64, device="cpu")
        dist.all_gather_into_tensor(everywhere, sums, group=self._group)
        differs = (everywhere.view(-1, len(own)) != everywhere[: len(own)]).any(0).tolist()
        if not any(differs):
            return
        share_random_state(self._mesh, self._device)
        if not self._has_warned and dist.get_rank(self._group) == 0:
            names = [name for name, other in zip(own, differs, strict=True) if other]
            warnings.warn(
                f"some of the ranks {dist.get_process_group_ranks(self._group)}, which share each "
                f"sample, have drawn random numbers of {' and '.join(names)} alone, as a hook of "
                "one rank does. All go on with those of the first rank, as one process would. Draw "
                "on all ranks alike, or from a generator of your own, such as torch.Generator().",
                stacklevel=2,
            )
        self._has_warned = True


def _checksums(state: dict[str, Any]) -> dict[str, int]:
    """Return a number for the state of each generator."""
    _, keys, *rest = state["numpy"]
    _, numbers, gauss = state["python"]
    sums = {
        "torch": zlib.crc32(state["torch"].numpy()),
        "python": hash((numbers, gauss or 0.0)),  # None has another hash in each process
        "numpy": zlib.crc32(keys, hash(tuple(rest)) % 2**32),
    }
    if "device" in state:
        sums["the device"] = zlib.crc32(state["device"].cpu().numpy())
    return sums
