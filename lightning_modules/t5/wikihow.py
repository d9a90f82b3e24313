"""WikiHow: how-to articles with their headlines as summaries, streamed from its csv files.

Source: Koupaee and Wang, "WikiHow: A Large Scale Text Summarization Dataset"
(https://arxiv.org/abs/1810.09305); cleaning as in its process.py and in PyTorch's tutorial
"Advanced Model Training with Fully Sharded Data Parallel".
"""

import csv
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from typing_extensions import override

from lightning_modules.t5.corpus import Corpus, Pair, Split, split_of

COLUMNS = ("headline", "title", "text")
FILES = {"all": "wikihowAll.csv", "sep": "wikihowSep.csv"}
LONGEST_SUMMARY = 0.75  # as a part of its article; other articles are too short


@dataclass(frozen=True)
class WikiHow(Corpus):
    """Reads articles of WikiHow with their summaries.

    Attributes:
        folder: The folder of `wikihowAll.csv` or `wikihowSep.csv`; by default the one into which
            PyTorch's tutorial puts them.
        variant: "all": whole articles, to be summarized in the headlines of their steps. "sep":
            single steps with their headline.
    """

    folder: str = "data"
    variant: Literal["all", "sep"] = "all"

    @override
    def pairs(self) -> Iterator[tuple[Split, Pair]]:
        path = Path(self.folder) / FILES[self.variant]
        if not path.is_file():
            raise FileNotFoundError(
                f"WikiHow needs the file {path}, which does not exist: download it as "
                "https://github.com/mahnazkoupaee/WikiHow-Dataset tells, or train on `corpus: "
                "Docstrings`, which needs no download."
            )
        csv.field_size_limit(sys.maxsize)  # articles exceed the 128 KiB that Python allows
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            try:
                _check_columns(path, list(rows.fieldnames or []))
                for row in rows:
                    if pair := cleaned(row["text"] or "", row["headline"] or ""):
                        # parts of one article are numbered: "How to Draw1", "How to Draw2"
                        yield split_of((row["title"] or "").rstrip("0123456789")), pair
            except (csv.Error, UnicodeDecodeError) as err:
                raise ValueError(
                    f"{path} must be a csv file in UTF-8; line {rows.line_num + 1} is not ({err}): "
                    "download it again."
                ) from err


def _check_columns(path: Path, found: list[str]) -> None:
    if not found:
        raise ValueError(f"{path} is empty; it must have a header and rows: download it again.")
    if missing := [name for name in COLUMNS if name not in found]:
        raise ValueError(
            f"{path} must have the columns {', '.join(COLUMNS)}; {missing[0]} is missing, and its "
            f"columns are {', '.join(found)}: download it again."
        )


def cleaned(article: str, summary: str) -> Pair | None:
    """Pair an article with its summary, without the marks that the dataset's export left.

    Args:
        article: The text of the article.
        summary: Its headlines, one for each step.

    Returns:
        The pair; None if the article is short beside its summary.
    """
    if not summary.strip() or len(summary) >= LONGEST_SUMMARY * len(article):
        return None
    summary = summary.replace(".,", ".")
    article = re.sub(r"[.]+[\n]+[,]", ".\n", article)
    return Pair(_clean_text(article), _clean_text(summary))


def _clean_text(text: str) -> str:
    text = text.replace("Example of text:", "").replace("``", "").replace('"', "")
    return " ".join(text.split())
