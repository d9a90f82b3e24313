"""What is answered before torch or Lightning are imported, and the help of each command."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_shard.cli import main as cli
from lightning_shard.cli.early_names import arguments_of
from lightning_shard.cli.help import PAGES

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "lightning", "jsonargparse", "transformers", "numpy")
LOADED = f"""
import json, sys
from lightning_shard.cli.main import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as stop:
        print("status", stop.code, file=sys.stderr)
    print("loaded", *[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


def run(*commands: list[str]) -> tuple[str, list[str]]:
    """What a new Python prints for some commands, and the lines of its errors."""
    command = [sys.executable, "-c", LOADED, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--help"], None), (["--version"], None), (["doctor", "--help"], None),
        (["check", "--help"], None), (["fti"], 2), (["fit", "--config", "none.yaml"], 2),
        (["calibrate", "--processes", "0"], 2),
        (["plan", "--config", "none.yaml"], 2), (["fit", "stray"], 2), ([], 2),
        (["certify", "--meshes", "2"], 2), (["plan", "--best", "--cluster", "8xH10O"], 2),
        (["fit", "--config", "tfno_dracy"], 2), (["inspect", "none.ckpt"], 2),
        (["fit", "--config", "tfno_darcy", "--trainer.max_epoch", "2"], 2),
        (["plan", "--config", "tfno_darcy", "--trainer.strategy.domain_size", "2"], 2),
        (["fit", "--config", "tfno_darcy", "--model.n_layer", "2"], 2),
        (["check", "--config", "tfno_darcy", "--data.batchsize", "2"], 2),
        (["export", "none.ckpt", "out.pt"], 2), (["export", "README.md", "out.txt"], 2),
    ],
)  # fmt: skip
def test_torch_is_not_imported(words, status):
    _, errors = run(words)
    assert errors[-1] == "loaded"
    assert (status is None) == (len(errors) == 1)
    if status:
        assert errors[-2] == f"status {status}"
        assert errors[0].startswith("error: ")


@pytest.mark.slow
def test_lightning_is_not_imported():
    """By the commands that read files and tables, in one Python after each other."""
    _, errors = run(["ops", "conv2d"], ["inspect", "README.md"], ["export", "README.md", "o.pt"])
    loaded = [line.split() for line in errors if line.startswith("loaded")]
    assert len(loaded) == 3
    for names in loaded:
        assert "torch" in names
        assert "lightning" not in names


@pytest.mark.parametrize("command", ["", *PAGES])
def test_help_fits_one_screen(capsys, command):
    cli.main([command, "--help"] if command else ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: python -m lightning_shard ")
    assert "examples" in lines
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


def test_the_version_is_that_of_the_project(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out.startswith("lightning-shard 0.")


def test_doctor(capfd):
    cli.main(["doctor"])
    lines = capfd.readouterr().out.splitlines()
    found = dict(line.split(maxsplit=1) for line in lines if " " in line)
    assert {"torch", "lightning", "cuda", "xpu", "backends", "launchers"} <= found.keys()
    assert lines[-1].startswith("two processes   gloo works (")


def test_doctor_knows_the_launchers_of_the_table(monkeypatch):
    from lightning_shard.cli import doctor
    from tests.processes.test_process_info import STARTER

    monkeypatch.setattr(
        doctor, "LAUNCHERS", (*doctor.LAUNCHERS, replace(STARTER, command="starter"))
    )
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setenv(STARTER.rank, "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    launchers, variables = doctor._surroundings()
    assert launchers.split(maxsplit=1)[1] == ", ".join(
        f"{name} (/bin/{name})"
        for name in "torchrun mpirun mpirun_rsh mpiexec flux jsrun srun aprun starter".split()
    )
    assert {f"{STARTER.rank}=3", "OMPI_COMM_WORLD_RANK=1"} <= {*variables.split()}


def test_doctor_says_why_two_processes_fail(monkeypatch):
    from lightning_shard.cli import doctor

    monkeypatch.setattr(doctor, "_sum_of_ranks", _fail)
    works, sentence = doctor.try_two_processes()
    assert not works
    assert sentence.startswith("FAILED: ProcessRaisedException: ")
    assert sentence.endswith("OSError: no route")


def _fail() -> float:
    raise OSError("no route")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("doctor --verbose", "unexpected '--verbose'"),
        ("ops --conv", "unexpected '--conv'; options are --markdown"),
        ("ops relu gelu", "unexpected 'gelu'"),
        ("ops grid_sampl3", "no function with 'grid_sampl3' in its name runs on split tensors; "
         "did you mean 'F.grid_sample'?"),
        ("inspect", "the following arguments are required: checkpoint"),
        ("inspect README.md --trust", "unexpected '--trust'; did you mean '--trusted'?"),
        ("inspect pyproject.tom", "there is no file 'pyproject.tom'"),
        ("export README.md", "the following arguments are required: out"),
        ("calibrate --processes 0", "argument --processes: '0' is no whole number from 1 on"),
        ("calibrate --processes 100000", "--processes must be from 1 to"),
        ("calibrate --processes two", "argument --processes: 'two' is no whole number from 1 on"),
        ("calibrate --device gpu", "there is no device 'gpu'; use one of cuda, xpu, cpu"),
        ("calibrate --device xpu --processes 1", "this machine has no device of type 'xpu'"),
        ("calibrate --output machine.yaml", "--output must end with .json"),
        ("calibrate --output none/machine.json", "--output 'none/machine.json' is no file"),
        ("calibrate --rank 2", "unexpected '--rank'; options are --device, --output"),
        ("export README.md o.onnx", "'o.onnx' ends with none of .safetensors, .pt"),
    ],
)  # fmt: skip
def test_mistakes_in_the_words_of_tools(capsys, words, sentence):
    with pytest.raises(SystemExit) as stop:
        cli.main(words.split())
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")


def test_what_a_file_does_not_tell_is_left_to_the_parser(tmp_path, monkeypatch):
    classes = "class {name}(Base):\n    def __init__(self, width, **{kind}): ...\n"
    (tmp_path / "mine.py").write_text(classes.format(name="Open", kind="options"))
    (tmp_path / "broken.py").write_text("class Broken(\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert arguments_of("mine.Open") is None
    assert arguments_of("mine.Missing") is None
    assert arguments_of("broken.Broken") is None
    assert arguments_of("nowhere.Class") is None
    assert arguments_of("VolumeSegmentation") == [
        "classes", "channels", "filters", "strides", "deep_supervision", "res_block",
        "optimizer", "lr_scheduler",
    ]  # fmt: skip
