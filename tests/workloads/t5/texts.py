"""A few texts to summarize, a tiny T5, and one process that trains it by hand."""

import csv
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5LayerNorm
from typing_extensions import override

from lightning_modules import Corpus, SummarizationDataModule, T5Summarizer
from lightning_modules.t5.corpus import Pair, Split

WORDS = "the model of a tensor returns every shape when one split axis is read by its owner".split()

TINY = {
    "vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Sentences(Corpus):
    """Random sentences of different lengths, each summarized by some of its words."""

    train: int = 16
    val: int = 8
    test: int = 8

    @override
    def pairs(self) -> Iterator[tuple[Split, Pair]]:
        draw = random.Random(0)
        sizes: dict[Split, int] = {"train": self.train, "val": self.val, "test": self.test}
        for split, size in sizes.items():
            for _ in range(size):
                words = draw.choices(WORDS, k=draw.randint(5, 14))
                yield split, Pair(" ".join(words), " ".join(words[:: draw.randint(2, 4)]))


def texts(root: Path | str, batch_size: int = 4, **options: Any) -> SummarizationDataModule:
    return SummarizationDataModule(
        **{"corpus": Sentences(), "vocab_size": 64, "root": str(root)} | options,
        batch_size=batch_size,
        eval_batch_size=batch_size,
    )


ARTICLES = ["headline", "title", "text"]  # the columns of wikihowAll.csv


def article(number: int) -> list[str]:
    text = f"First cut the {number} apples.\nThen cook them for an hour, and stir them well. " * 3
    return [f"Cut {number} apples.,\nCook them.", f"How to Cook {number} Apples!", text]


def write_csv(folder: Path, rows: list[list[str]], name: str = "wikihowAll.csv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def write_articles(folder: Path, count: int, *more: list[str]) -> Path:
    return write_csv(folder, [ARTICLES, *map(article, range(count)), *more])


class DoubleNorm(T5LayerNorm):
    """The same, but for the variance, which transformers computes in float32 whatever the input."""

    @override
    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


def summarizer(dtype: torch.dtype = torch.float64, **options: Any) -> T5Summarizer:
    """A tiny T5, with the same weights each time; of float64 throughout if that is asked for."""
    torch.manual_seed(7)
    module = T5Summarizer(
        **{"model_name_or_path": TINY, "generation": {"max_new_tokens": 6}} | options
    )
    module.configure_model()
    if dtype == torch.float64:
        for part in module.modules():
            if isinstance(part, T5LayerNorm):
                part.__class__ = DoubleNorm
    return module.to(dtype)
