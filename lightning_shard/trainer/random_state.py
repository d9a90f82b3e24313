"""Reads and sets the states of this process's random number generators."""

import os
import pickle
import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


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
    return state | {"numpy": (str(name), torch.tensor(np.asarray(keys).tolist()), *rest)}


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
    """Let the ranks of a domain draw the same random numbers for what they all compute.

    Args:
        mesh: The domain mesh, of one or several axes.
        device: The device of this process.
    """
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
    return pickle.dumps(storable(one)) == pickle.dumps(storable(other))
