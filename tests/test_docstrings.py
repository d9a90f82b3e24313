"""What editors and `--help` show of the public names: each argument described, nothing broken."""

import dataclasses
import inspect

import pytest
from docstring_parser.common import ParseError
from docstring_parser.google import GoogleParser

import lightning_shard

WITHOUT_ARGUMENTS = {"functional"}


def described(text: str | None) -> dict[str, str]:
    return {p.arg_name: p.description or "" for p in GoogleParser().parse(text or "").params}


def documented(name: str) -> tuple[set[str], dict[str, str]]:
    """The arguments of a public name, and those that its docstring describes."""
    value = getattr(lightning_shard, name)
    if dataclasses.is_dataclass(value):
        return {f.name for f in dataclasses.fields(value)}, described(inspect.getdoc(value))
    if not inspect.isclass(value):
        return set(inspect.signature(value).parameters), described(inspect.getdoc(value))
    if "__init__" not in vars(value):
        return set(), {}
    parameters = set(inspect.signature(value.__init__).parameters) - {"self"}
    return parameters, described(value.__doc__) | described(value.__init__.__doc__)


@pytest.mark.parametrize("name", sorted(set(dir(lightning_shard)) - WITHOUT_ARGUMENTS))
def test_described_arguments_exist(name):
    """A wrapped line that is not indented looks like an argument: "domain." for one."""
    parameters, words = documented(name)
    assert set(words) <= parameters, sorted(set(words) - parameters)
    assert all(words.values())


@pytest.mark.parametrize("name", ["HybridShardStrategy", "ShardingOptions", "parallelize"])
def test_all_arguments_are_described(name):
    parameters, words = documented(name)
    assert parameters == set(words)


def test_the_strategy_has_few_arguments():
    assert len(documented("HybridShardStrategy")[0]) <= 14


def test_a_broken_line_is_found():
    broken = """Do.

    Args:
        size: All processes divided by the
        domain.
    """
    with pytest.raises(ParseError, match="domain"):
        described(inspect.cleandoc(broken))
