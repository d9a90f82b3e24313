"""The page of public names: what it holds, and what a script that uses a part of it loads."""

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_shard

HEAVY = ("lightning", "zarr", "h5py", "neuralop", "transformers", "torchvision", "matplotlib")
ENGINE = (
    "DomainTensor shard from_local gather functional local_map allow_gather allow_function "
    "register_rule Subdomain Layout UnsupportedOperationError spectral_method use_exact_random "
    "parallelize whole_parameters no_sync clip_grad_norm_ clip_grad_value_ load_weights "
    "launch start_process_group init_mesh process_info ProcessInfo"
)


def loaded_after(code: str) -> set[str]:
    """The packages of HEAVY that a new Python holds after `code`."""
    report = f"{code}\nimport sys\nprint(*[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    return set(done.stdout.split())


def test_every_name_is_there():
    for name in dir(lightning_shard):
        assert getattr(lightning_shard, name) is not None
    assert lightning_shard.__all__ == dir(lightning_shard)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'shards'"):
        lightning_shard.shards  # noqa: B018


def test_the_engine_loads_neither_lightning_nor_file_formats():
    names = ", ".join(ENGINE.split())
    assert loaded_after(f"from lightning_shard import {names}") == set()


STEPS = """
import sys

def loaded():
    return {name for name in HEAVY if name in sys.modules}

import lightning.pytorch
of_lightning = loaded()  # by itself: its torchmetrics imports transformers and torchvision

import lightning_shard
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry
assert "xpu" in AcceleratorRegistry and "hybrid_shard" in StrategyRegistry
assert loaded() == of_lightning, loaded()

from lightning_shard import HybridShardStrategy
assert loaded() == of_lightning, loaded()
assert not of_lightning & {"zarr", "h5py", "neuralop"}
"""


def test_lightning_knows_our_names_and_the_strategy_loads_no_file_formats():
    assert "lightning" in loaded_after(f"HEAVY = {HEAVY}\n{STEPS}")


def test_strategy_by_name_where_lightning_came_last():
    """docs/devices.md says in which orders of imports Lightning knows the names."""
    loaded_after(
        "import lightning_shard\n"
        "from lightning.pytorch import Trainer\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "assert 'hybrid_shard' not in StrategyRegistry\n"
        "lightning_shard.XPUAccelerator\n"
        "Trainer(accelerator='cpu', devices=1, strategy='hybrid_shard', logger=False)"
    )
