"""The states of this process's random number generators, as plain tensors and numbers."""

from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states


def random_state(device: torch.device) -> dict[str, Any]:
    """What the generators of python, numpy, torch and `device` will draw next."""
    state = _collect_rng_states(include_cuda=False)
    name, keys, *rest = state["numpy"]
    state["numpy"] = (str(name), torch.tensor(keys.tolist()), *rest)  # weights_only knows tensors
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue with what `random_state` returned."""
    name, keys, *rest = state["numpy"]
    numpy_state = (name, keys.numpy().astype(np.uint32), *rest)
    _set_rng_states({**state, "numpy": numpy_state})
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)
