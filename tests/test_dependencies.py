"""The strategy needs torch, Lightning and jsonargparse; who needs another package says which."""

import ast
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = (
    "neuralop transformers torchvision tokenizers zarr h5py scipy sklearn matplotlib threadpoolctl "
    "tltorch tensorly xarray nibabel tifffile"
).split()

# docs/devices.md says in which orders of imports Lightning knows the names
BY_NAME = """
import lightning_shard
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
known = ["hybrid_shard" in StrategyRegistry]
lightning_shard.XPUAccelerator
Trainer(accelerator="cpu", devices=1, strategy="hybrid_shard", logger=False)
print("known by name", *known, "hybrid_shard" in StrategyRegistry)
"""
FIT = """
import lightning.pytorch as pl, torch, warnings
warnings.simplefilter("ignore")
from lightning_shard import HybridShardStrategy
from lightning.pytorch.demos.boring_classes import BoringModel
trainer = pl.Trainer(
    accelerator="cpu", devices=1, strategy=HybridShardStrategy(), max_steps=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    limit_val_batches=0,
)
trainer.fit(BoringModel())
print("steps", trainer.global_step)
"""


def without(packages: list[str], folder: Path) -> dict[str, str]:
    """Variables for a Python in which these packages are not installed."""
    owners = owners_of_packages()
    hidden = {*packages}
    for package in packages:
        for name in owners.get(package, []):
            found = importlib.metadata.distribution(name)
            hidden |= {str(file).split("/")[0] for file in found.files or [] if "/" in str(file)}
    folder.mkdir()
    for kind in ("purelib", "platlib"):
        for path in Path(sysconfig.get_path(kind)).iterdir():
            module = path.name.removesuffix(".py")
            if not {path.name, module} & hidden and path.suffix != ".pth":
                link = folder / path.name
                if not link.exists():
                    link.symlink_to(path)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


def run(code: str, variables: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    # -S: the folder of links stands for the site's own
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(
        command, env=variables, cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def trained_without_all(tmp_path_factory):
    """A Python without all of them trains a step, then asks for each in turn."""
    folder = tmp_path_factory.mktemp("without")
    found = f"from importlib.util import find_spec\nprint([p for p in {OPTIONAL} if find_spec(p)])"
    tries = "\n".join(
        f"try:\n    exec({code!r})\nexcept ModuleNotFoundError as err:\n    print(err)"
        for code in NEEDS
    )
    code = "\n".join([found, BY_NAME, FIT, tries])
    done = run(code, without(OPTIONAL, folder / "site"), folder)
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_the_strategy_trains_without_all_of_them(trained_without_all):
    lines, errors = trained_without_all
    assert lines[0] == "[]", errors
    assert "steps 1" in lines, errors


@pytest.mark.slow
def test_strategy_by_name_where_lightning_came_last(trained_without_all):
    lines, errors = trained_without_all
    assert lines[1] == "known by name False True", errors


# requires it, so no installation is without; torchmetrics would import what is left
HOLDERS = {"tokenizers": ["transformers"]}


@pytest.mark.slow
@pytest.mark.parametrize("package", OPTIONAL)
def test_the_strategy_trains_without(package, tmp_path):
    hidden = [package, *HOLDERS.get(package, [])]
    done = run(FIT, without(hidden, tmp_path / "site"), tmp_path)
    assert done.stdout.endswith("steps 1\n"), done.stderr


NEEDS = {
    "from lightning_shard import PredictionWriter; PredictionWriter('x.zarr')": (
        "the file x.zarr needs the package 'zarr', which is not installed; "
        "pip install 'lightning-shard[zarr]' installs it."
    ),
    "from lightning_modules import TFNODarcy": (
        "lightning_modules.TFNODarcy needs the package 'neuralop', which is not installed; "
        "pip install 'lightning-shard[workloads]' installs it."
    ),
    "import pathlib; pathlib.Path('x.h5').touch()\n"
    "from lightning_shard import FieldDataset; FieldDataset('x.h5')": (
        "the file x.h5 needs the package 'h5py', which is not installed; "
        "pip install 'lightning-shard[hdf5]' installs it."
    ),
    "from lightning_modules import MNISTDataModule; MNISTDataModule().setup('fit')": (
        "source: digits needs the package 'sklearn', which is not installed; "
        "pip install 'lightning-shard[workloads]' installs it."
    ),
}


@pytest.mark.slow
def test_one_sentence_names_what_to_install(trained_without_all):
    lines, errors = trained_without_all
    assert lines[lines.index("steps 1") + 1 :] == list(NEEDS.values()), errors


@functools.cache
def owners_of_packages() -> Mapping[str, list[str]]:
    """The distributions that hold each package: the lists of files of all are read."""
    return importlib.metadata.packages_distributions()


def imported(package: str, top: bool) -> dict[str, str]:
    """The packages that the modules of a package import, each with a file that does.

    Args:
        package: A folder of the repository.
        top: Look at the statements that run at import only, not inside of functions.
    """
    found: dict[str, str] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        waiting: list[ast.AST] = [ast.parse(path.read_text())]
        while waiting:
            node = waiting.pop()
            if top and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if top and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found |= {name.split(".")[0]: str(path.relative_to(ROOT)) for name in names}
            waiting += ast.iter_child_nodes(node)
    ours = {"lightning_shard", "lightning_modules", *sys.stdlib_module_names}
    return {name: file for name, file in found.items() if name not in ours}


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[><=!; ]", line)[0].lower().replace("_", "-") for line in requirements}


def undeclared(imports: dict[str, str], declared: set[str]) -> dict[str, str]:
    owners = owners_of_packages()
    return {
        name: file
        for name, file in imports.items()
        if not {owner.lower().replace("_", "-") for owner in owners[name]} & declared
    }


@pytest.mark.slow
def test_what_is_imported_at_once_is_in_the_plain_install():
    plain = names_of(PROJECT["dependencies"])
    assert undeclared(imported("lightning_shard", top=True), plain) == {}


@pytest.mark.slow
def test_what_is_imported_later_is_in_an_extra():
    extras = PROJECT["optional-dependencies"].values()
    declared = names_of([*PROJECT["dependencies"], *(line for lines in extras for line in lines)])
    for package in ("lightning_shard", "lightning_modules"):
        assert undeclared(imported(package, top=False), declared) == {}


@pytest.mark.slow
def test_a_package_that_is_not_declared_is_found():
    plain = names_of(PROJECT["dependencies"])
    assert undeclared({"torch": "a.py", "pytest": "b.py"}, plain) == {"pytest": "b.py"}
    assert {"numpy", "torch", "typing_extensions"} <= set(imported("lightning_shard", top=True))
