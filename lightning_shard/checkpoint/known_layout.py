"""Refuses a checkpoint in which something is of another kind than what Lightning saves there.

Whatever reads it later would stumble over it, in an error that names no file.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_shard.processes.typed import is_dict, is_list, is_mapping

OWN = "lightning_shard"  # in a checkpoint: the mesh, versions, random states


def refuse_other_weights(weights: Mapping[Any, Any], path: object) -> None:
    """Refuse weights whose names are no text, or that have no numbers.

    Raises:
        ValueError: There are such weights.
    """
    for name, value in weights.items():
        if not isinstance(name, str):
            raise ValueError(f"'{path}' holds a weight whose name is {name!r}, which is no text.")
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(
                f"{name!r} in '{path}' has no numbers: it was saved from the meta device."
            )


def refuse_other_layout(checkpoint: Mapping[str, Any], path: object) -> None:
    """Refuse what is beside the weights, if it is of another kind than what is saved there.

    Raises:
        ValueError: It is.
    """
    states = checkpoint.get("optimizer_states", [])
    own = checkpoint.get(OWN, {})
    kept = {
        "hyper_parameters": is_mapping(checkpoint.get("hyper_parameters", {})),
        "optimizer_states": is_list(states) and all(map(_is_state, states)),
        OWN: is_mapping(own) and all(is_mapping(own.get(key, {})) for key in ("mesh", "versions")),
    }
    for key, right in kept.items():
        if not right:
            raise ValueError(
                f"'{path}' is no checkpoint that Lightning wrote: its '{key}' are of another kind."
            )


def _is_state(state: object) -> bool:
    """Whether it is the state of an optimizer, as torch gives it or flattened to one dict."""
    if not is_mapping(state):
        return False
    if "param_groups" not in state:
        return all(isinstance(key, str) for key in state)
    groups = state["param_groups"]
    entries = state.get("state")
    return (
        is_mapping(entries)
        and all(map(is_mapping, entries.values()))
        and is_list(groups)
        and all(is_dict(group) and is_list(group.get("params")) for group in groups)
    )
