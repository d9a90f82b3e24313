"""docs/command_line.md shows the help of each command.

After a change: `python -m tests.test_command_line_page`
"""

from pathlib import Path

from lightning_shard.cli.help import PAGES, page

FILE = Path(__file__).parents[1] / "docs" / "command_line.md"
HEAD = """\
# The command line

`python -m lightning_shard COMMAND --help` prints these pages, and `fit --help all` every option of
the Trainer. An option may stand in a YAML file, too ([configs](configs.md)), or in a variable:
`--trainer.max_epochs` is `LIGHTNING_SHARD_FIT__TRAINER__MAX_EPOCHS`.
"""


def written() -> str:
    """The page: a section for each command."""
    sections = [f"## {name}\n\n```text\n{page(name).rstrip()}\n```\n" for name in PAGES]
    return "\n".join([HEAD, f"```text\n{page('').rstrip()}\n```\n", *sections])


def test_the_page_shows_what_the_commands_print():
    assert FILE.read_text() == written()


if __name__ == "__main__":
    FILE.write_text(written())
