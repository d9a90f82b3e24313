from pathlib import Path

import pytest
import torch

from lightning_shard.cli.main import main
from lightning_shard.ops import functions_with_rules

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def test_the_page_is_what_the_command_prints(capsys):
    page = PAGE.read_text()
    made_with = page.partition("(here with torch ")[2].partition(")")[0]
    if made_with != torch.__version__.partition("+")[0]:
        pytest.skip(f"the page was made with torch {made_with}, which has other functions")
    main(["ops", "--markdown"])
    assert capsys.readouterr().out == page, "run: python -m lightning_shard ops --markdown"


def test_names_and_limits(capsys):
    main(["ops", "conv2d"])
    out = capsys.readouterr().out
    assert "conv2d" in out
    assert "limits: channels and weights must be whole" in out
    assert "linear" not in out


def test_unknown_name(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["ops", "frobnicate"])
    assert stop.value.code == 2
    assert "no function with 'frobnicate' in its name" in capsys.readouterr().err


def test_every_function_is_listed(capsys):
    main(["ops"])
    listed = capsys.readouterr().out
    assert len(listed) > 5 * len({getattr(f, "__name__", "") for f in functions_with_rules()})
    for name in ("F.interpolate", "fft.rfftn", "linalg.solve", "einsum", "register_hook"):
        assert name in listed
