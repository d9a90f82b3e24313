"""Reads checkpoints of other strategies, which have other keys, and wrappers' words in names.

Refuses a checkpoint in which something is of another kind than what Lightning saves there: whatever
reads it later would stumble over it, in an error that names no file.
"""

from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from typing import Any

from torch import Tensor

from lightning_shard.checkpoint.stored import StoredState
from lightning_shard.processes.narrow import is_dict, is_list, is_mapping

OWN = "lightning_shard"  # in a checkpoint: the mesh, versions, random states
# FSDP1, activation checkpointing and torch.compile put these into the names of what they wrap
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
DDP = "module."
# where programs keep the weights in a file that holds more: Lightning, then others
WEIGHTS_KEYS = ("state_dict", "model_state_dict", "model", "module")


def plain_name(name: str) -> str:
    """Take out of `name` what wrappers put into it."""
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def plain_names(stored: Mapping[str, Any], wanted: Collection[str]) -> Mapping[str, Any]:
    """Give `stored` the names of a module that has the names `wanted`; unknown ones stay."""
    if all(name in wanted for name in stored):
        return stored
    own = {plain_name(name): name for name in wanted}
    found = {plain_name(name): name for name in stored}
    inner = {name.removeprefix(DDP): old for name, old in found.items()}
    if sum(name in own for name in inner) > sum(name in own for name in found):
        found = inner
    return {own.get(name, name): stored[old] for name, old in found.items()}


def by_index(state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    """Key the state of an optimizer by integers, as `Optimizer.state_dict` does.

    Args:
        state: A state as torch's optimizers give it; or keyed by names, as FSDP and
            `torch.distributed.checkpoint.state_dict` do, nested or flattened.
        groups: The names of the parameters in each group of the optimizer that is to load it.

    Raises:
        ValueError: It is the state of other parameters.
    """
    if "state" not in state and any(str(key).startswith("param_groups.") for key in state):
        state = _nested(state)
    held = [name for group in state["param_groups"] for name in group["params"]]
    wanted = [name for group in groups for name in group]
    if all(isinstance(name, int) for name in held):
        if [len(group["params"]) for group in state["param_groups"]] != list(map(len, groups)):
            raise ValueError(
                f"the optimizer in the checkpoint has {len(held)} parameters in "
                f"{len(state['param_groups'])} groups, this one {len(wanted)} in {len(groups)}; "
                "build module and optimizer as they were saved."
            )
        return state
    own = {name: index for index, name in enumerate(wanted)}
    found = {name: _plain(name, own) for name in held}
    if sorted(found.values()) != sorted(wanted):
        differing = sorted({*found.values()} ^ {*wanted})
        raise ValueError(
            f"the optimizer in the checkpoint is of other parameters than this one: they differ in "
            f"{', '.join(differing[:5])}; build module and optimizer as they were saved."
        )
    settings = {found[name]: group for group in state["param_groups"] for name in group["params"]}
    return {
        "state": {own[_plain(name, own)]: values for name, values in state["state"].items()},
        "param_groups": [
            {**settings[group[0]], "params": [own[name] for name in group]} if group else {}
            for group in groups
        ],
    }


def _plain(name: str, wanted: Collection[str]) -> str:
    plain = plain_name(name)
    return plain if plain in wanted else plain.removeprefix(DDP)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nest again a state that torch flattened into `state.NAME.KEY` and `param_groups.NAME.KEY`."""
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        name, _, field = rest.rpartition(".")
        (state if kind == "state" else settings).setdefault(name, {})[field] = value
    groups = [{**values, "params": [name]} for name, values in settings.items()]
    return {"state": state, "param_groups": groups}


def weights_of(loaded: Any, path: object) -> Mapping[str, Any]:
    """Find the state dict in what a file of `torch.save` holds.

    Raises:
        ValueError: There is none, or it is of another kind.
    """
    weights = _found(loaded)
    if weights is not None:
        held = weights.stored if isinstance(weights, StoredState) else weights
        refuse_other_weights(held, path)
        return weights
    raise ValueError(
        f"'{path}' holds no weights: expected a dict of tensors by name, or one under a key of "
        f"{', '.join(WEIGHTS_KEYS)}; got {_described(loaded)}."
    )


def _found(loaded: Any) -> Mapping[str, Any] | None:
    if not is_mapping(loaded):
        return None
    for key in WEIGHTS_KEYS:
        inner = loaded.get(key)
        if is_mapping(inner):
            return inner
    return loaded if any(isinstance(value, Tensor) for value in loaded.values()) else None


def _described(loaded: Any) -> str:
    if is_mapping(loaded):
        keys = list(loaded)
        return f"the keys {', '.join(map(str, keys[:8])) or '(none)'}"
    return f"a {type(loaded).__name__}"


def as_lightning(loaded: Any, path: object, wanted: Collection[str]) -> dict[str, Any]:
    """Make a Lightning checkpoint of a loaded file; its weights have the names `wanted`.

    Args:
        loaded: A Lightning checkpoint, or a raw state dict, as in a file of a script of your own.
        path: The file, named in error messages.
        wanted: The names in the state dict of the module.

    Raises:
        ValueError: It holds no weights, or something of another kind.
    """
    weights = weights_of(loaded, path)
    rest = {} if weights is loaded else dict(loaded)
    refuse_other_layout(rest, path)
    if isinstance(weights, StoredState):
        state: Any = StoredState(dict(plain_names(weights.stored, wanted)))
    else:
        state = plain_names(weights, wanted)
    version = {"pytorch-lightning_version": metadata.version("lightning")}
    return version | rest | {"state_dict": state}


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
    """Return True for the state of an optimizer, as torch gives it or flattened to one dict."""
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
