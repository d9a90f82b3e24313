"""The page of public names: what it holds, and what a script that uses a part of it loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_shard

HEAVY = ("lightning", "zarr", "h5py", "neuralop", "transformers", "torchvision", "matplotlib")
ENGINE = (
    "DomainTensor shard from_local gather functional local_map allow_gather allow_function "
    "curve_order crossing_edges ordered_graph "
    "register_rule Subdomain Layout UnsupportedOperationError spectral_method use_exact_random "
    "parallelize split_inputs whole_parameters no_sync clip_grad_norm_ clip_grad_value_ "
    "load_weights launch simulate StuckError start_process_group init_mesh find_mesh process_info "
    "ProcessInfo"
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


def test_the_three_lists_of_the_page_hold_the_same_names():
    """For tools, for type checkers and for the import at run time."""
    page = ast.parse(Path(lightning_shard.__file__).read_text())
    block = next(node for node in page.body if isinstance(node, ast.If))
    typed = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = lightning_shard._MODULES.items()
    assert typed == {name: f"lightning_shard.{module}" for name, module in modules}
    assert lightning_shard.__all__ == dir(lightning_shard)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'shards'"):
        lightning_shard.shards  # noqa: B018


def test_the_engine_loads_neither_lightning_nor_file_formats():
    names = ", ".join(ENGINE.split())
    assert loaded_after(f"from lightning_shard import {names}") == set()


IMPORTS = """
import sys
import lightning.pytorch, torch, torch.distributed.checkpoint, torch.utils.checkpoint, torch._dynamo
import opt_einsum.backends.dispatch as opt_einsum
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry
from torch.autograd import Function
from torch.nn.modules._functions import BackwardHookFunction, SyncBatchNorm
from torch.utils.checkpoint import CheckpointFunction

def loaded():
    return {name for name in HEAVY if name in sys.modules}

def functions():
    owners = {"torch": torch, "Tensor": torch.Tensor, "F": torch.nn.functional,
              "Function": Function, "SyncBatchNorm": SyncBatchNorm,
              "CheckpointFunction": CheckpointFunction, "BackwardHook": BackwardHookFunction,
              "distributed": torch.distributed, "checkpoint": torch.utils.checkpoint,
              "nn": torch.nn, "Module": torch.nn.Module, "fft": torch.fft}
    found = {(o, n): v for o, owner in owners.items() for n, v in vars(owner).items()
             if callable(v) or isinstance(v, classmethod | staticmethod | property)}
    return found | {("opt_einsum", n): v for n, v in opt_einsum._aliases.items()}

def replaced(before):
    after = functions()
    return sorted(k for k, v in before.items() if after.get(k) is not v and after.get(k) != v)

of_lightning, before = loaded(), functions()  # its torchmetrics imports transformers, torchvision

# what asks CUDA for its devices could not fork afterwards, as notebooks do
asked, own = [], dict(vars(torch.accelerator))
for name in ("is_available", "current_accelerator", "device_count"):
    setattr(torch.accelerator, name, lambda *_, name=name, **__: asked.append(name))
import lightning_shard
assert "xpu" in AcceleratorRegistry and "hybrid_shard" in StrategyRegistry
print("loads", *loaded() - of_lightning)
from lightning_shard import HybridShardStrategy
import lightning_shard.memory.offload
vars(torch.accelerator).update(own)
print("strategy loads", *loaded() - of_lightning, *of_lightning & {"zarr", "h5py", "neuralop"})
print("strategy asks", *asked)
print("replaces", *replaced(before))

import neuralop.models
before = functions()
for name in dir(lightning_shard):
    getattr(lightning_shard, name)
print("all names replace", *replaced(before))
"""


@pytest.fixture(scope="module")
def of_imports():
    """What a Python prints that imports Lightning, then this package, then all of its names."""
    command = [sys.executable, "-W", "ignore", "-c", f"HEAVY = {HEAVY}\n{IMPORTS}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines(), done.stderr


def test_lightning_knows_our_names_and_the_strategy_loads_no_file_formats(of_imports):
    lines, errors = of_imports
    assert lines[:2] == ["loads", "strategy loads"], errors


def test_the_strategy_asks_for_no_device_at_import(of_imports):
    lines, errors = of_imports
    assert lines[2] == "strategy asks", errors


def test_nothing_of_torch_is_replaced_at_import(of_imports):
    """A module that another one imports may appear in torch; a function that was there stays."""
    lines, errors = of_imports
    assert lines[3:] == ["replaces", "all names replace"], errors
