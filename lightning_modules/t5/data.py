"""Texts and their summaries as a LightningDataModule, for encoder-decoder models such as T5.

Shapes: B samples per data-parallel rank, S tokens of the longest text in the batch, T tokens of the
longest summary.
"""

from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from lightning_modules.shared.cached import cached, digest
from lightning_modules.shared.loading import make_loader
from lightning_modules.shared.numbers import at_least
from lightning_modules.t5.corpus import Corpus, Pair, Split
from lightning_modules.t5.docstrings import Docstrings
from lightning_modules.t5.tokenizer import load_tokenizer, tokenizer_of, train_tokenizer

TOKENIZER_VERSION = 1  # raised whenever training it changes


def collate(
    pairs: list[Pair],
    tokenizer: PreTrainedTokenizerFast,
    max_source_tokens: int,
    max_summary_tokens: int,
    num_first_words: int,
) -> dict[str, Any]:
    """Make a batch of pairs, padded to the longest.

    Args:
        pairs: B pairs.
        tokenizer: The tokenizer of texts and summaries.
        max_source_tokens: The number of tokens after which texts are cut.
        max_summary_tokens: The number of tokens after which summaries are cut.
        num_first_words: The number of words of the trivial summary.

    Returns:
        The batch, as `SummarizationDataModule` describes it.
    """
    sources, summaries = [p.source for p in pairs], [p.summary for p in pairs]
    options: dict[str, Any] = {"truncation": True, "padding": True, "return_tensors": "pt"}
    read = tokenizer(sources, max_length=max_source_tokens, **options)
    written = tokenizer(summaries, max_length=max_summary_tokens, **options)
    return {
        "input_ids": read["input_ids"],
        "attention_mask": read["attention_mask"],
        "labels": written["input_ids"].masked_fill(written["attention_mask"] == 0, -100),
        "source": sources,
        "summary": summaries,
        "first_words": [" ".join(source.split()[:num_first_words]) for source in sources],
    }


class SummarizationDataModule(LightningDataModule):
    """Serves tokenized texts and summaries of a corpus.

    Batches are dicts: `input_ids` and `attention_mask` (B, S) int64; `labels` (B, T) int64, which
    are -100 where a summary is padded; and lists of B strings, `source`, `summary` and
    `first_words`, the trivial summary that copies the first words of the source, as many as a
    training summary has on average. `tokenizer` is there after `setup`.

    Args:
        corpus: The source of the pairs; docstrings of this Python environment by default.
        tokenizer: Folder or hub name of a pretrained model whose tokenizer to use; by default one
            is trained on the training set, and kept in `root`.
        vocab_size: Tokens of a trained tokenizer, at most.
        max_source_tokens: The number of tokens after which texts are cut.
        max_summary_tokens: The number of tokens after which summaries are cut.
        num_train: Number of training pairs; by default all, as with the two below.
        num_val: Number of validation pairs.
        num_test: Number of test pairs.
        batch_size: Training pairs per data-parallel rank and step.
        eval_batch_size: Validation, test and prediction pairs per data-parallel rank and step.
        num_workers: Processes that tokenize; 0 tokenizes in the training process.
        root: Folder of trained tokenizers.
        pin_memory: True puts batches into page-locked memory where there is an accelerator.
    """

    tokenizer: PreTrainedTokenizerFast | None = None

    def __init__(
        self,
        corpus: Corpus | None = None,
        tokenizer: str | None = None,
        vocab_size: int = 4096,
        max_source_tokens: int = 512,
        max_summary_tokens: int = 150,
        num_train: int | None = None,
        num_val: int | None = None,
        num_test: int | None = None,
        batch_size: int = 32,
        eval_batch_size: int = 100,
        num_workers: int = 0,
        root: str = "data/tokenizers",
        pin_memory: bool = True,
    ) -> None:
        super().__init__()
        at_least(1, max_source_tokens=max_source_tokens, max_summary_tokens=max_summary_tokens)
        at_least(1, num_train=num_train, num_val=num_val, num_test=num_test)
        at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        at_least(0, num_workers=num_workers)
        self.corpus = corpus or Docstrings()
        self.tokenizer_name = tokenizer
        self.vocab_size = vocab_size
        self.max_source_tokens = max_source_tokens
        self.max_summary_tokens = max_summary_tokens
        self.limits: dict[Split, int | None] = {
            "train": num_train,
            "val": num_val,
            "test": num_test,
        }
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.loading: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        self.root = Path(root)
        self.pairs: dict[Split, list[Pair]] = {}

    @override
    def prepare_data(self) -> None:
        pairs = self._read()  # fills the caches, on one process of each machine
        self._load_tokenizer(pairs["train"])

    @override
    def setup(self, stage: str) -> None:
        if self.tokenizer is None:
            self.pairs = self._read()
            self.tokenizer = self._load_tokenizer(self.pairs["train"])
            sizes = ", ".join(f"{len(found)} for {split}" for split, found in self.pairs.items())
            rank_zero_info(f"Pairs of {type(self.corpus).__name__}: {sizes}")
            lengths = [len(pair.summary.split()) for pair in self.pairs["train"]]
            self.collate = partial(
                collate,
                tokenizer=self.tokenizer,
                max_source_tokens=self.max_source_tokens,
                max_summary_tokens=self.max_summary_tokens,
                num_first_words=round(sum(lengths) / len(lengths)),
            )

    @override
    def train_dataloader(self) -> DataLoader[Pair]:
        return self._loader("train", self.batch_size, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Pair]:
        return self._loader("val", self.eval_batch_size)

    @override
    def test_dataloader(self) -> DataLoader[Pair]:
        return self._loader("test", self.eval_batch_size)

    @override
    def predict_dataloader(self) -> DataLoader[Pair]:
        return self._loader("test", self.eval_batch_size)

    def _loader(self, split: Split, batch_size: int, *, shuffle: bool = False) -> DataLoader[Pair]:
        return make_loader(
            self.pairs[split],  # pyright: ignore[reportArgumentType]  # a list serves as a dataset
            batch_size,
            shuffle=shuffle,
            collate_fn=self.collate,
            **self.loading,
        )

    def _read(self) -> dict[Split, list[Pair]]:
        """Read the corpus until there are as many pairs as wanted."""
        pairs: dict[Split, list[Pair]] = {"train": [], "val": [], "test": []}
        open_splits = {split for split, limit in self.limits.items() if limit != 0}
        for split, pair in self.corpus.pairs():
            if split in open_splits:
                pairs[split].append(pair)
                if len(pairs[split]) == self.limits[split]:
                    open_splits.remove(split)
            if not open_splits:
                break
        for split, found in pairs.items():
            wanted = self.limits[split]
            if len(found) < (wanted if wanted is not None else 1):
                raise ValueError(
                    f"num_{split} asks for {wanted or 'at least 1'} pairs, but the corpus "
                    f"{type(self.corpus).__name__} has {len(found)} of this split: lower it, or "
                    "give the corpus more texts."
                )
        return pairs

    def _load_tokenizer(self, train: list[Pair]) -> PreTrainedTokenizerFast:
        if self.tokenizer_name is not None:
            return load_tokenizer(self.tokenizer_name)
        texts = [text for pair in train for text in pair]
        key = digest([str(TOKENIZER_VERSION), str(self.vocab_size), *texts])
        path = self.root / f"tokenizer_{key}.json.gz"
        return tokenizer_of(cached(path, lambda: train_tokenizer(texts, self.vocab_size)))
