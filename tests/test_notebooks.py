"""Every notebook runs from top to bottom, and the committed one shows its pictures."""

import ast
import inspect
import os
from pathlib import Path

import nbformat
import pytest
from lightning.pytorch import Trainer
from nbclient import NotebookClient

import lightning_shard

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PICTURES = {
    "1": 3,
    "2": 5,
    "3": 2,
    "4": 4,
    "5": 0,
    "6": 3,
    "7": 2,
    "8": 1,
}  # by the number in the name
SHORTER = {  # what stands in a notebook, and what runs in its place
    "2": {
        "num_train=256": "num_train=8",
        "num_val=8": "num_val=4",
        "num_test=16": "num_test=3",
        "batch_size=8": "batch_size=4",
        "max_epochs=7": "max_epochs=1",
        "hidden_channels=16, n_layers=3": "hidden_channels=4, n_layers=1",
    },
    "3": {
        "width=16": "width=4",
        "torch.linspace(0, 1, 96)": "torch.linspace(0, 1, 32)",
        "in (1, 2, 4, 8)": "in (1, 2)",
        "mesh=(1, 2, 2)": "mesh=(1, 2)",
        "max_epochs=6": "max_epochs=1",
        "return 64": "return 8",
    },
    "4": {"batch_size=32": "batch_size=256", "max_epochs=6": "max_epochs=1"},
    "5": {
        'Docstrings(packages=["numpy", "torch"])': "Sentences()",  # nothing is read
        "    Docstrings,\n": "",
        "import functools\n": "import functools\nfrom tests.workloads.t5.texts import Sentences\n",
        "num_train=2000": "num_train=16",
        "num_val=32": "num_val=8",
        "num_test=32": "num_test=8",
        "max_epochs=2": "max_epochs=1",
    },
    "8": {
        "EXTENT, WINDOW, VOLUMES, EPOCHS = 48, 16, 24, 16": (
            "EXTENT, WINDOW, VOLUMES, EPOCHS = 32, 16, 2, 1"
        ),
        "for number in range(6)": "for number in range(1)",
        "(384, 512, 512)": "(48, 48, 48)",
    },
}


def pictures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def shorten(notebook: nbformat.NotebookNode, changes: dict[str, str]) -> None:
    """Write fewer samples, epochs and points into its cells."""
    for old, new in changes.items():
        cells = [cell for cell in notebook.cells if old in cell.source]
        assert cells, f"{old!r} does not stand in the notebook"
        for cell in cells:
            cell.source = cell.source.replace(old, new)


# the kernel talks to this process alone
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Kernel is running over TCP")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:(jupyter_client|zmq|tornado).*")
@pytest.mark.parametrize(
    "shorter", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["shorter", "as it is"]
)
@pytest.mark.parametrize(
    "path",
    # slow: those that train, as tests/workloads, tests/cli and tests/test_snippets.py do too, and
    # the points, as tests/ops/dense/test_neighbours.py does
    [p if p.name[0] == "1" else pytest.param(p, marks=pytest.mark.slow) for p in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_notebook_runs(monkeypatch, tmp_path, path, shorter):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the ranks that it starts share the cores
    notebook = nbformat.read(path, as_version=4)
    if shorter:
        shorten(notebook, SHORTER.get(path.name[0], {}))
    context = {"metadata": {"path": str(tmp_path)}}
    # a cell of notebook 8 took more than 900 s on two cores that other programs shared
    NotebookClient(notebook, timeout=2400, kernel_name="python3", resources=context).execute()
    assert pictures(notebook) == PICTURES[path.name[0]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    assert pictures(notebook) == PICTURES[path.name[0]]
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = [output["text"] for output in outputs if output.get("name") == "stderr"]
    assert not any("Warning" in text or "deprecated" in text for text in said)
    assert not any(output["output_type"] == "error" for output in outputs)
    texts = [cell.source for cell in notebook.cells] + [str(o.get("text", "")) for o in outputs]
    for text in texts:
        assert not any(word in text for word in ("/tmp/", "/home/", "/root/", "site-packages"))


def calls_of_ours(source: str) -> list[tuple[str, list[str]]]:
    """Names of our public functions that a cell calls, each with the keywords of the call."""
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))]
    found = []
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Call):
            words = ast.unparse(node.func).split(".")
            is_ours = words[0] == "lightning_shard" or len(words) == 1
            if is_ours and words[-1] in lightning_shard.__all__:
                found.append((words[-1], [k.arg for k in node.keywords if k.arg]))
    return found


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_calls_have_arguments_that_exist(notebook: Path) -> None:
    """Without running the notebook: an argument that has another name now is found."""
    cells = nbformat.read(notebook, as_version=4).cells
    trainer = inspect.signature(Trainer).parameters
    for cell in cells:
        for name, keywords in calls_of_ours(cell.source) if cell.cell_type == "code" else ():
            known = inspect.signature(getattr(lightning_shard, name)).parameters
            takes_more = any(p.kind == p.VAR_KEYWORD for p in known.values())
            for keyword in keywords:
                options = {*known} | ({*trainer} if takes_more else set())
                if name == "TiledStrategy":  # hands the rest to HybridShardStrategy
                    options |= {*inspect.signature(lightning_shard.HybridShardStrategy).parameters}
                assert keyword in options, f"{name}({keyword}=...) in {notebook.name}"
