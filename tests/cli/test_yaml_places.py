"""Files that would take all time or memory, and keys that are given twice, are one sentence."""

import os
import time
from pathlib import Path

import pytest

from lightning_shard.cli import positions
from lightning_shard.cli.positions import (
    UsageError,
    check_variables,
    find_configs,
    named_configs,
    read_given,
)
from lightning_shard.cli.positions import read_file as options_of


def read_yaml(path):
    return {option.key: option for option in options_of(path)}


@pytest.fixture(autouse=True)
def in_its_own_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def bomb(kind: str) -> str:
    """Nine aliases of nine aliases ...: 9 ** 12 values in 13 lines."""
    lines = ["a0: &a0 {x: 1}"]
    for i in range(1, 13):
        again = ", ".join([f"*a{i - 1}"] * 9)
        lines.append(
            f"a{i}: &a{i} [{again}]" if kind == "list" else f"a{i}: &a{i} {{<<: [{again}]}}"
        )
    return "\n".join(lines)


HOSTILE = {
    "aliases of lists": (bomb("list"), "holds more than 100,000 values once its aliases"),
    "aliases that merge": (bomb("merge"), "holds more than 100,000 values once its aliases"),
    "an alias of itself": ("a: &a [*a]", "more than 100 levels"),
    "many levels": ("a: " + "[" * 3000 + "]" * 3000, "more than 100 levels"),
    "many levels of keys": (
        "\n".join("  " * i + f"k{i}:" for i in range(3000)), "more than 100 levels"
    ),
    "a key twice": (
        "trainer:\n  max_epochs: 1\nmodel:\n  x: 1\ntrainer:\n  max_steps: 1\n",
        "x.yaml:5 gives 'trainer' a second time (the first is in line 1); keep one of them",
    ),
    "a key twice below": (
        "model:\n  init_args:\n    modes: 1\n    modes: 2\n",
        "x.yaml:4 gives 'model.init_args.modes' a second time (the first is in line 3)",
    ),
}  # fmt: skip


@pytest.mark.slow_rows("many levels")
@pytest.mark.parametrize(("text", "expected"), HOSTILE.values(), ids=HOSTILE.keys())
def test_one_sentence_at_once(text, expected):
    Path("x.yaml").write_text(text)
    start = time.process_time()
    with pytest.raises(UsageError) as err:
        read_yaml("x.yaml")
    assert expected in str(err.value)
    assert len(str(err.value)) < 300
    assert time.process_time() - start < 60  # of one process; without a limit it never ends


def test_a_pipe_is_not_read():
    os.mkfifo("x.yaml")
    with pytest.raises(UsageError, match="is a pipe or a device, not a file; name a YAML file"):
        read_yaml("x.yaml")


def test_a_bomb_in_a_word():
    with pytest.raises(UsageError, match="a value on the command line holds more than"):
        read_given(["--model", f"{{{', '.join(bomb('list').splitlines())}}}"], "fit")


def test_merged_keys_are_no_second_ones():
    Path("x.yaml").write_text("a: &a {x: 1, y: 1}\nb:\n  <<: *a\n  y: 2\n")
    options = read_yaml("x.yaml")
    assert options["b.y"] == positions.Option("b.y", "2", "at x.yaml:4")
    assert options["b.x"].where == "at x.yaml:1"


def test_what_is_written_last_has_its_place():
    Path("x.yaml").write_text("model:\n  class_path: A\n  init_args:\n    modes: 1\n    lr: 1e-3\n")
    given = read_given(["--config", "x.yaml", "--model.modes=3"], "fit")
    last = given.last("model.init_args.modes")
    assert last is not None
    assert last.text == "3"
    assert given.place("model.init_args.modes") == "on the command line"
    assert given.place("model.lr") == "at x.yaml:5"
    assert given.place("model.init_args.zzz") == ""
    assert "data" not in given


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LIGHTNING_SHARD_FIT__TRAINER__MAX_EPOCH", "_FIT__TRAINER__MAX_EPOCHS'?"),
        ("LIGHTNING_SHARD_TRACBACK", "did you mean 'LIGHTNING_SHARD_TRACEBACK'?"),
    ],
)
def test_unknown_variables(monkeypatch, name, expected):
    monkeypatch.setenv(name, "1")
    with pytest.raises(UsageError, match=f"the variable {name} names no option") as err:
        check_variables(("fit", "test"), ["trainer.max_epochs"])
    assert str(err.value).endswith(expected)


def test_known_variables(monkeypatch):
    monkeypatch.setenv("LIGHTNING_SHARD_FIT__TRAINER__MAX_EPOCHS", "1")
    monkeypatch.setenv("LIGHTNING_SHARD_FIT__CONFIG", "x.yaml")
    monkeypatch.setenv("LIGHTNING_SHARD_TRACEBACK", "1")
    check_variables(("fit", "test"), ["trainer.max_epochs"])


def test_configs_of_the_package_have_bare_names():
    found = find_configs(["fit", "--config", "tfno_darcy", "-c=quick", "--config=own/x.yaml"])
    configs = named_configs()
    assert found == [
        "fit", "--config", str(configs["tfno_darcy"]), f"-c={configs['quick']}",
        "--config=own/x.yaml",
    ]  # fmt: skip
    assert Path(found[2]).is_file()


def test_a_file_comes_before_a_bare_name():
    Path("tfno_darcy").write_text("trainer: {}")
    assert find_configs(["fit", "--config", "tfno_darcy"])[2] == "tfno_darcy"


def test_an_unknown_bare_name():
    with pytest.raises(UsageError, match=r"no config of this name .*; did you mean 'tfno_darcy'"):
        find_configs(["fit", "--config", "tfno_dracy"])
    with pytest.raises(UsageError, match=r"the package has t5_docstrings, t5_wikihow"):
        find_configs(["fit", "--config", "t5"])


def test_a_file_of_a_hundred_thousand_values_is_too_large(monkeypatch):
    monkeypatch.setattr(positions, "MAX_BYTES", 10)
    Path("x.yaml").write_text("trainer: {max_epochs: 1}")
    with pytest.raises(UsageError, match="more than 10 bytes"):
        read_yaml("x.yaml")
