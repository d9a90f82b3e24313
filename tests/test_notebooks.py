"""Every notebook runs from top to bottom, and the committed one shows its pictures."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PICTURES = {"1": 3, "2": 5, "3": 1, "4": 4}  # by the number in the name


def pictures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


# the kernel talks to this process alone
@pytest.mark.filterwarnings("ignore:.*Kernel is running over TCP")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:(jupyter_client|zmq|tornado).*")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(monkeypatch, tmp_path, path):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the ranks that it starts share the cores
    notebook = nbformat.read(path, as_version=4)
    context = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=context).execute()
    assert pictures(notebook) == PICTURES[path.name[0]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    assert pictures(notebook) == PICTURES[path.name[0]]
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert all(output.get("name") != "stderr" for output in outputs), "warnings"
    texts = [cell.source for cell in notebook.cells] + [str(o.get("text", "")) for o in outputs]
    for text in texts:
        assert not any(word in text for word in ("/tmp/", "/home/", "/root/", "site-packages"))
