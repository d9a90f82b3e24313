"""Finds weights in folders that transformers and diffusers save, under the names of the module.

Both libraries give old names new ones when they load. Their own tables of names are asked here, so
that a file of an older release fits.
"""

import re
from collections.abc import Mapping
from operator import methodcaller
from pathlib import Path
from typing import Any

from torch import nn

from lightning_shard.tensor.mixins import is_a

# in the order in which the libraries look for them
FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin",
    "diffusion_pytorch_model.bin",
)


def file_in(folder: Path) -> Path:
    """Find the file of weights in a folder of `save_pretrained`.

    Raises:
        FileNotFoundError: There is none.
    """
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    if (folder / "model_index.json").is_file():
        parts = sorted(p.parent.name for p in folder.glob("*/config.json"))
        raise FileNotFoundError(
            f"'{folder}' holds a pipeline of several networks: name the folder of one, such as "
            f"'{folder / (parts or ['unet'])[0]}'."
        )
    others = sorted(p.name for p in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")))
    hint = f"name a file, such as '{folder / others[0]}'" if others else "name another folder"
    raise FileNotFoundError(f"'{folder}' holds none of {', '.join(FILES)}; {hint}.")


def pretrained_names(
    stored: Mapping[str, Any], module: nn.Module, wanted: Mapping[str, Any], origin: str
) -> Mapping[str, Any]:
    """Give `stored` the names that transformers' or diffusers' `from_pretrained` gives it.

    Args:
        stored: Weights by their names in the file.
        module: A model of one of the libraries; others get `stored` as it is.
        wanted: The state dict of the module.
        origin: The place that the weights come from, for messages.

    Returns:
        The weights by name, without those that the library leaves out for this model.

    Raises:
        ValueError: The library computes a weight from several stored ones.
    """
    if all(name in wanted for name in stored):
        return stored
    if is_a(module, "transformers", "PreTrainedModel"):
        found = _of_transformers(stored, module, wanted, origin)
    elif is_a(module, "diffusers", "ModelMixin"):
        found = dict(stored)
        methodcaller("_fix_state_dict_keys_on_load", found)(module)  # diffusers' old names
    else:
        return stored
    ignored: Any = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    left_out = [re.compile(pattern) for pattern in ignored]
    return {
        name: value
        for name, value in found.items()
        if name in wanted or not any(pattern.search(name) for pattern in left_out)
    }


def _of_transformers(
    stored: Mapping[str, Any], module: nn.Module, wanted: Mapping[str, Any], origin: str
) -> dict[str, Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    model: Any = module
    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings: Any = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    # a checkpoint with heads: a base model takes its part of it
    has_heads = bool(prefix) and any(name.startswith(prefix) for name in stored)
    is_base = has_heads and not any(name.startswith(prefix) for name in wanted)
    # a checkpoint of the base, for a model with a head
    lacks_prefix = bool(prefix) and not has_heads and any(n.startswith(prefix) for n in wanted)
    found: dict[str, Any] = {}
    for old, value in stored.items():
        name, converter = (old, None) if old in wanted else rename_source_key(
            old, renamings, converters
        )  # fmt: skip
        if converter is not None:
            raise ValueError(
                f"transformers computes '{name}' of {type(module).__name__} from several tensors "
                f"of {origin}, such as '{old}', so no rank can read its part: write "
                "lightning_shard.save_weights(Model.from_pretrained(folder), 'weights.safetensors')"
                " in one process, and load that file."
            )
        if is_base and not old.startswith(prefix):
            continue
        if is_base:
            name = name.removeprefix(prefix)
        elif lacks_prefix and name not in wanted:
            name = prefix + name
        found[name] = value
    return found
