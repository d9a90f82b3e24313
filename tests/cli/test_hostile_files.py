"""Files of a stranger run nothing: each attempt here would create a marker file if it succeeded."""

import builtins
import functools
import json
import operator
import os
import pickle
import posix
import runpy
import shutil
import subprocess
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from jsonargparse import Namespace
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.optim import AdamW

from lightning_modules.t5.tokenizer import load_tokenizer
from lightning_shard import FieldFile, load_weights
from lightning_shard.checkpoint.dcp_reader import read_dcp
from lightning_shard.cli import main as cli
from lightning_shard.cli.defaults import fill_in
from lightning_shard.cli.lightning_cli import ShardCLI
from lightning_shard.processes.process_info import rank_variables
from lightning_shard.trainer.checkpoint_io import CheckpointFiles
from tests.cli.test_main import BASE as MAIN_BASE

HERE = __name__
BASE = MAIN_BASE.replace("tests.cli.test_main.Net", f"{HERE}.Net")
TOUCH = "touch marker"
CODE = "open('marker', 'w').close()"


class Net(BoringModel):
    """Parameters of each kind that the parser treats in its own way."""

    def __init__(
        self,
        width: int = 8,
        title: str = "",
        anything=None,
        act=torch.relu,
        sizes: list[int] | None = None,
        layer: nn.Module | str | None = None,
        optimizer: OptimizerCallable = AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        **more,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["layer"])
        self.options = {"width": width, "title": title, "anything": anything, **more}
        self.optimizer = optimizer


@pytest.fixture(autouse=True)
def in_a_folder_without_marker(monkeypatch, tmp_path):
    for name in (*rank_variables(), "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)
    yield
    assert not Path("marker").exists()


class Calls:
    """Pickled as a call of `function`, which whoever unpickles it makes."""

    def __init__(self, function, *args, state=None):
        self.reduced = (function, args, state) if state else (function, args)

    def __reduce__(self):
        return self.reduced


SYSTEM = {"class_path": "os.system", "init_args": {"command": TOUCH}}
HYPER_PARAMETERS = {
    "callable": {"optimizer": SYSTEM},
    "callable of our form": {"_class_path": f"{HERE}.Net", "optimizer": SYSTEM},
    "callable of the parser's form": {
        "class_path": f"{HERE}.Net", "init_args": {"optimizer": SYSTEM},
    },
    "dict_kwargs": {"class_path": f"{HERE}.Net", "dict_kwargs": {"optimizer": SYSTEM}},
    "scheduler": {"lr_scheduler": {**SYSTEM, "class_path": "posix.system"}},
    "path alone": {"optimizer": "os.system"},
    "spec as text": {"optimizer": json.dumps(SYSTEM)},
    "untyped": {"anything": SYSTEM},
    "untyped, as text": {"anything": json.dumps(SYSTEM)},
    "untyped, as YAML": {"anything": f"class_path: os.system\ninit_args: {{command: {TOUCH}}}"},
    "in a list": {"anything": [1, SYSTEM]},
    "text in a list": {"anything": [json.dumps(SYSTEM)]},
    "in a mapping": {"anything": {"a": {"b": SYSTEM}}},
    "unknown name": {"other": SYSTEM},
    "unknown name, as text": {"other": json.dumps(SYSTEM)},
    "where a function is the default": {"act": "os.abort"},
    "class or text": {"layer": "evil_module.Layer"},
    "class": {"layer": {"class_path": "evil_module.Layer"}},
    "options of a class that the user named": {
        "optimizer": {
            "class_path": "torch.optim.AdamW", "init_args": {"lr": 1.0, "betas": SYSTEM},
        },
    },
    "another optimizer": {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}},
    "the model": {"_class_path": "subprocess.Popen", "args": ["touch", "marker"]},
    "the model, parser's form": {"class_path": "os.system", "init_args": {"command": TOUCH}},
    "the model by number": {"_class_path": 3},
    "exec": {"optimizer": {"class_path": "builtins.exec", "init_args": {"source": CODE}}},
    "eval": {"optimizer": {"class_path": "builtins.eval", "dict_kwargs": {"source": CODE}}},
    "run_path": {"optimizer": {"class_path": "runpy.run_path", "init_args": {"path": "evil.py"}}},
    "a file of options": {"optimizer": "evil.yaml"},
    "a list for the parameters": [SYSTEM],
    "a number for a name": {3: SYSTEM},
    "no mapping for the options": {"init_args": 3, "dict_kwargs": [SYSTEM]},
}  # fmt: skip


def refused(capsys, words, codes=(1, 2)):
    """The one sentence of a command that must be refused."""
    with pytest.raises(SystemExit) as stop:
        cli.main(list(map(str, words)))
    assert stop.value.code in codes
    written = capsys.readouterr()
    assert "Traceback" not in written.err
    return written.err + written.out


@pytest.mark.quick_rows("the model, parser's form-file", "the model by number-file")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=pytest.mark.slow if kind == "directory" and i % 4 else [])
        for i, name in enumerate(HYPER_PARAMETERS)
        for kind in ("file", "directory")
    ],
)
def test_hyperparameters_choose_nothing(name, kind, capsys, monkeypatch):
    Path("evil.yaml").write_text(json.dumps(SYSTEM))
    Path("evil.py").write_text(CODE)
    Path("evil_module.py").write_text(CODE)
    saved = {"state_dict": BoringModel().state_dict(), "hyper_parameters": HYPER_PARAMETERS[name]}
    path = Path("evil.ckpt")
    if kind == "directory":
        path.mkdir()
    torch.save(saved, path / "meta.pt" if kind == "directory" else path)
    words = ["fit", "--config", "base.yaml", "--ckpt_path", path]
    for typed in ([], ["--model.optimizer", "torch.optim.AdamW"]):
        if name.startswith("the model"):
            assert "was saved by the model" in refused(capsys, [*words, *typed], codes=(2,))
            continue
        model, options = built(monkeypatch, [*words, *typed])
        assert options["optimizer"]["class_path"] == "torch.optim.AdamW"
        assert options["optimizer"]["init_args"]["betas"] == (0.9, 0.999)
        assert (options["anything"], options["layer"], options["lr_scheduler"]) == (None,) * 3
        assert model.options == {"width": 8, "title": "", "anything": None}


def built(monkeypatch, words):
    """The model that `fit` builds, and its options."""
    seen = []
    monkeypatch.setattr(ShardCLI, "_run_subcommand", lambda self, _: seen.append(self))
    cli.main([*map(str, words), "--trainer.logger=false"])
    return seen[0].model, seen[0].config["fit"]["model"]["init_args"].as_dict()


def notes(capsys):
    return [line[6:] for line in capsys.readouterr().err.splitlines() if line[:6] == "note: "]


def test_hyperparameters_that_are_values_serve_where_nothing_is_given(capsys, monkeypatch):
    """Numbers, texts, and the options of a class that the configuration names."""
    stored = {
        "_class_path": "moved.since.Net", "_instantiator": "os.system",
        "width": 5, "title": "a: b", "anything": [1, 2.5, {"a": None}, "text"], "sizes": [1, 2],
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.5}}, "other": 2,
    }  # fmt: skip
    torch.save({"state_dict": {}, "hyper_parameters": stored}, "a.ckpt")
    words = ["fit", "--config", "base.yaml", "--ckpt_path", "a.ckpt"]
    model, options = built(monkeypatch, words)
    taken = {name: stored[name] for name in ("width", "title", "anything", "other")}
    assert model.options == taken
    assert options["optimizer"]["init_args"]["lr"] == 0.5
    assert options["sizes"] == [1, 2]
    assert notes(capsys) == [
        "model.width is 5 as in ckpt_path; by default it is 8",
        "model.title is 'a: b' as in ckpt_path; by default it is ''",
        "model.anything is [1, 2.5, {'a': None}, 'text'] as in ckpt_path; by default it is None",
        "model.sizes is [1, 2] as in ckpt_path; by default it is None",
        "model.optimizer.lr is 0.5 as in ckpt_path; by default it is 0.001",
    ]


@pytest.mark.slow
def test_what_is_given_wins_over_hyperparameters(capsys, monkeypatch):
    stored = {
        "_class_path": f"{HERE}.Net", "width": 5, "title": "a: b", "sizes": (1, 2), "anything": 3,
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.5, "eps": 1e-3}},
    }  # fmt: skip
    torch.save({"state_dict": {}, "hyper_parameters": stored}, "a.ckpt")
    Path("more.yaml").write_text("model: {init_args: {width: 8, title: '', sizes: [1, 2]}}\n")
    words = ["fit", "--config", "base.yaml", "--config", "more.yaml", "--ckpt_path", "a.ckpt"]
    model, options = built(monkeypatch, [*words, "--model.optimizer.lr", "0.1"])
    assert model.options == {"width": 8, "title": "", "anything": 3}
    assert options["optimizer"]["init_args"]["lr"] == 0.1
    assert options["optimizer"]["init_args"]["eps"] == 1e-3
    assert notes(capsys) == [
        "model.width is 8, but was 5 where ckpt_path was saved",
        "model.title is '', but was 'a: b' where ckpt_path was saved",
        "model.anything is 3 as in ckpt_path; by default it is None",
        "model.optimizer.lr is 0.1, but was 0.5 where ckpt_path was saved",
        "model.optimizer.eps is 0.001 as in ckpt_path; by default it is 1e-08",
    ]
    model, options = built(monkeypatch, [*words, "--model.optimizer", "torch.optim.SGD"])
    assert options["optimizer"]["class_path"] == "torch.optim.SGD"
    last = "model.optimizer is 'torch.optim.SGD', but was 'torch.optim.AdamW' where ckpt_path was"
    assert notes(capsys)[-1] == f"{last} saved"


def test_hyperparameters_of_another_type_do_not_serve(capsys, monkeypatch):
    stored = {"width": "wide", "title": 3, "sizes": 2, "act": "relu", "layer": 1}
    torch.save({"state_dict": {}, "hyper_parameters": stored}, "a.ckpt")
    model, options = built(monkeypatch, ["fit", "--config", "base.yaml", "--ckpt_path", "a.ckpt"])
    assert model.options == {"width": 8, "title": "", "anything": None}
    assert (options["sizes"], options["layer"]) == (None, None)
    said = notes(capsys)
    assert said[0] == "model.width is 8, but was 'wide' where ckpt_path was saved"
    assert len(said) == len(stored)


GADGETS = {
    "os.system": lambda: Calls(os.system, TOUCH),
    "posix.system": lambda: Calls(posix.system, TOUCH),
    "exec": lambda: Calls(builtins.exec, CODE),
    "eval": lambda: Calls(builtins.eval, CODE),
    "import": lambda: Calls(builtins.__import__, "evil_module"),
    "getattr": lambda: Calls(builtins.getattr, Calls(builtins.__import__, "os"), "system"),
    "Popen": lambda: Calls(subprocess.Popen, ["touch", "marker"]),
    "touch": lambda: Calls(Path.touch, Path("marker")),
    "run_path": lambda: Calls(runpy.run_path, "evil.py"),
    "copyfile": lambda: Calls(shutil.copyfile, "evil.py", "marker"),
    "partial": lambda: Calls(functools.partial(os.system, TOUCH)),
    "methodcaller": lambda: Calls(operator.methodcaller("touch"), Path("marker")),
    "torch.load": lambda: Calls(functools.partial(torch.load, weights_only=False), "inner.pt"),
    "storage from bytes": lambda: Calls(torch.storage._load_from_bytes, inner_bytes()),
    "numpy objects": lambda: np.array([Calls(os.system, TOUCH)], dtype=object),
    "state of a tensor": lambda: Calls(torch.Tensor, state={"a": Calls(os.system, TOUCH)}),
    "torch.compile": lambda: Calls(torch.hub.load, ".", "model", "local"),
    "numpy from a file": lambda: Calls(functools.partial(np.load, allow_pickle=True), "inner.npy"),
}


def inner_bytes() -> bytes:
    torch.save(Calls(os.system, TOUCH), "inner.pt")
    return Path("inner.pt").read_bytes()


PLACES = ("value", "weights", "hyperparameters", "plain pickle")


@pytest.mark.slow_rows(
    "weights-import", "weights-touch", "weights-partial", "hyperparameters-methodcaller"
)
@pytest.mark.parametrize("name", GADGETS)
@pytest.mark.parametrize("place", PLACES)
def test_pickles_in_files(name, place, capsys):
    """The gadget stands where each of the readers would build it; `fit` reads one place of each."""
    Path("evil.py").write_text(CODE)
    Path("hubconf.py").write_text(CODE)
    inner_bytes()
    gadget, path = GADGETS[name](), Path("evil.ckpt")
    content = {"state_dict": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}}
    if place == "weights":
        content["state_dict"]["more"] = gadget
    elif place == "hyperparameters":
        content["hyper_parameters"] = {"width": gadget}
    else:
        content["more"] = gadget
    if place == "plain pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    for read in (
        lambda: load_weights(nn.Linear(2, 2), path),
        lambda: CheckpointFiles().load_checkpoint(path),
    ):
        with pytest.raises(ValueError, match=r"evil\.ckpt") as caught:
            read()
        assert "\n" not in str(caught.value)
    refused(capsys, ["inspect", path])
    refused(capsys, ["export", path, "out.pt"])
    if place == PLACES[[*GADGETS].index(name) % 3]:
        refused(capsys, ["fit", "--config", "base.yaml", "--ckpt_path", path], codes=(2,))


@pytest.mark.parametrize("name", GADGETS)
@pytest.mark.parametrize("place", [".metadata", "chunk", "meta.pt"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pickles_in_directories(name, place, capsys):
    Path("evil.py").write_text(CODE)
    Path("hubconf.py").write_text(CODE)
    inner_bytes()
    folder = Path("evil.ckpt")
    gadget = GADGETS[name]()
    saved = {"state_dict": {"weight": torch.ones(2, 2), "bias": torch.ones(2), "more": "a"}}
    if place == "chunk":
        saved["state_dict"]["more"] = gadget
    dcp.save(saved, checkpoint_id=folder, no_dist=True)
    if place == ".metadata":
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.planner_data["more"] = gadget
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    if place == "meta.pt":
        torch.save({"more": gadget}, folder / "meta.pt")
    refused(capsys, ["inspect", folder])
    refused(capsys, ["export", folder, "out.pt"])
    if place != "meta.pt":  # which load_weights does not read
        with pytest.raises(ValueError, match=r"evil\.ckpt") as caught:
            load_weights(nn.Linear(2, 2), folder)
        assert "\n" not in str(caught.value)
        with pytest.raises(ValueError, match=r"evil\.ckpt"):
            read_dcp(folder)


YAML = (
    "!!python/object/apply:os.system ['touch marker']",
    "!!python/object/new:os.system ['touch marker']",
    "!!python/name:os.system",
    "!!python/module:evil_module",
    "!!python/object:subprocess.Popen {args: [touch, marker]}",
)


@pytest.mark.parametrize("text", YAML)
@pytest.mark.parametrize("place", ["config", "option", "variable", "key"])
def test_tags_in_yaml(text, place, capsys, monkeypatch):
    Path("evil_module.py").write_text(CODE)
    words = ["fit", "--config", "base.yaml"]
    if place == "option":
        words += ["--model.init_args.width", text]
    elif place == "variable":
        monkeypatch.setenv("LIGHTNING_SHARD_FIT__TRAINER__MAX_STEPS", text)
    elif place == "config":
        Path("x.yaml").write_text(f"model:\n  init_args:\n    width: {text}\n")
        words += ["--config", "x.yaml"]
    else:
        Path("x.yaml").write_text(f"model:\n  init_args:\n    ? {text}\n    : 1\n")
        words += ["--config", "x.yaml"]
    refused(capsys, words, codes=(2,))


HEADERS = {
    "too long": (2**40).to_bytes(8, "little") + b"{}",
    "no JSON": (4).to_bytes(8, "little") + b"\x80\x04N.",
    "pickle": pickle.dumps({"a": 1}),
    "outside of the file": (lambda h: len(h).to_bytes(8, "little") + h)(
        json.dumps({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}).encode()
    ),
    "code for pairs": (lambda h: len(h).to_bytes(8, "little") + h)(
        json.dumps({"__metadata__": {"complex": "__import__('os').abort()"}}).encode()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_safetensors(name, capsys):
    Path("a.safetensors").write_bytes(HEADERS[name])
    with pytest.raises(ValueError, match=r"a\.safetensors"):
        load_weights(nn.Linear(2, 2), "a.safetensors")
    refused(capsys, ["inspect", "a.safetensors"])


@pytest.mark.parametrize(
    "codec", ["pickle", "numcodecs.pickle", "numcodecs.json2", "evil_module.Codec"]
)
def test_codecs_of_zarr(codec):
    Path("evil_module.py").write_text(CODE)
    root = zarr.open_group("a.zarr", mode="w")
    root.create_array("x", shape=(1, 1, 2, 2), dtype="float32")
    file = Path("a.zarr/x/zarr.json")
    described = json.loads(file.read_text())
    described["codecs"] = [{"name": codec, "configuration": {}}]
    file.write_text(json.dumps(described))
    (Path("a.zarr/x/c/0/0/0")).mkdir(parents=True)
    Path("a.zarr/x/c/0/0/0/0").write_bytes(pickle.dumps(Calls(os.system, TOUCH)))
    with pytest.raises((ValueError, KeyError, TypeError)):
        FieldFile("a.zarr").arrays["x"][:]


@pytest.mark.parametrize("key", ["auto_map", "tokenizer_class", "chat_template", "tokenizer_file"])
def test_files_of_tokenizers(key):
    """A tokenizer's folder may name code beside it, which is not run."""
    Path("tok").mkdir()
    Path("tok/evil.py").write_text(CODE)
    value = {
        "auto_map": {"AutoTokenizer": ["evil.Tok", "evil.Tok"]},
        "tokenizer_class": "evil.Tok",
        "chat_template": "{{ self.__init__.__globals__['os'].system('touch marker') }}",
        "tokenizer_file": "evil.py",
    }[key]
    Path("tok/tokenizer_config.json").write_text(json.dumps({key: value}))
    Path("tok/tokenizer.json").write_text('{"added_tokens": [], "model": {"type": "evil"}}')
    with pytest.raises(Exception, match=r"contains custom code|evil|No tokenizer|ModelUntagged"):
        load_tokenizer("tok")


def test_load_from_checkpoint_without_its_instantiator():
    """Lightning's own method builds what the file names, unless it is told not to."""
    stored = {"_instantiator": "lightning.pytorch.cli.instantiate_module", "anything": SYSTEM}
    state = BoringModel().state_dict()
    version = {"pytorch-lightning_version": "2.6.6"}
    torch.save(version | {"state_dict": state, "hyper_parameters": stored}, "evil.ckpt")
    loaded = Net.load_from_checkpoint("evil.ckpt", weights_only=True, _instantiator=None)
    assert loaded.options["anything"] == SYSTEM


class Shape(Enum):
    ROUND = "round"


class Described(BoringModel):
    def __init__(self, shape: Shape, where: Path, sizes: dict):
        super().__init__()


def test_equal_values_of_other_types_are_not_noted():
    """A file holds names of enums, texts of paths, and dicts in place of dataclasses."""
    options = Namespace(shape=Shape.ROUND, where=Path("a"), sizes=Namespace(one=(Shape.ROUND, 1)))
    spec = Namespace(class_path=f"{HERE}.Described", init_args=options)
    stored = {"shape": "ROUND", "where": "a", "sizes": {"one": ["ROUND", 1]}}
    assert not [*fill_in(spec, {"model", "model.shape"}, "model", stored)]
    noted = [*fill_in(spec, {"model", "model.shape"}, "model", stored | {"shape": "FLAT"})]
    assert noted == ["model.shape is 'ROUND', but was 'FLAT' where ckpt_path was saved"]
