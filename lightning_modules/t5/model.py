"""T5 that learns to summarize, as an ordinary LightningModule.

It sees whole sequences and only torch functions, so a strategy may hand it token ids whose sequence
is split over ranks: the encoder then attends over the split sequence.

Shapes: B samples, S tokens of a text, T tokens of a summary, G tokens generated.

Source: PyTorch's tutorial "Advanced Model Training with Fully Sharded Data Parallel", which trains
T5 on WikiHow; Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (https://arxiv.org/abs/1910.10683).
"""

import difflib
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torchmetrics import MeanMetric
from torchmetrics.functional.text import rouge_score
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration
from typing_extensions import override

from lightning_modules.t5.tokenizer import tokenizer_of

Batch = dict[str, Any]

ROUGE = ("rouge1", "rouge2", "rougeL")


# Not lambdas: jsonargparse would turn them into init_args, which survive a change of class in YAML.
def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make AdamW with a learning rate of 2e-3."""
    return AdamW(parameters, lr=2e-3)


def step_lr(optimizer: Optimizer) -> LRScheduler:
    """Multiply the learning rate by 0.7 after each epoch."""
    return StepLR(optimizer, step_size=1, gamma=0.7)


class T5Summarizer(LightningModule):
    """Summarize texts with T5, trained on the cross-entropy of the summaries' tokens.

    Evaluation logs `val/loss` and `test/loss`, means over all tokens, and F-measures of ROUGE-1, -2
    and -L of generated summaries, such as `val/rougeL`; beside them those of a trivial summary, the
    first words of the text (`test/rougeL_first_words`). The tokenizer is the data module's and is
    kept in checkpoints.

    Args:
        model_name_or_path: A pretrained T5: a local folder, or a name on the Hugging Face hub such
            as "t5-base". Or the options of a T5Config, to train from scratch: `{"d_model": 128}`.
        num_generated_batches: Validation batches whose summaries are generated, on each
            data-parallel rank; all are generated in a test.
        generation: Options of transformers' `generate`; greedy search by default.
        optimizer: Makes the optimizer of the parameters; AdamW with lr 2e-3 by default. Not stored
            in checkpoints.
        lr_scheduler: Makes the scheduler of the optimizer; by default the learning rate is
            multiplied by 0.7. Not stored in checkpoints.
        lr_interval: The scheduler makes a step after each epoch, or after each step, as one that
            warms up does.
    """

    def __init__(
        self,
        model_name_or_path: str | dict[str, Any] | T5Config = "t5-base",
        num_generated_batches: int = 1,
        generation: dict[str, Any] | None = None,
        optimizer: OptimizerCallable = adamw,
        lr_scheduler: LRSchedulerCallable = step_lr,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__()
        if isinstance(model_name_or_path, T5Config):  # a checkpoint is to hold plain values
            model_name_or_path = model_name_or_path.to_diff_dict()
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler", "lr_interval"])
        self.model_name_or_path = model_name_or_path
        self.num_generated_batches = num_generated_batches
        self.generation = generation or {}
        self.make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = optimizer
        self.make_lr_scheduler = lr_scheduler
        self.lr_interval = lr_interval
        self.network: T5ForConditionalGeneration | None = None
        self.tokenizer: PreTrainedTokenizerFast | None = None
        self.metrics = nn.ModuleDict(
            {
                f"{stage}/{name}": MeanMetric()
                for stage in ("val", "test")
                for name in ("loss", *ROUGE, *(f"{key}_first_words" for key in ROUGE))
            }
            | {"train/loss": MeanMetric()}
        )

    @override
    def setup(self, stage: str) -> None:
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
        if tokenizer is None and self.tokenizer is None:
            raise ValueError(
                "T5Summarizer needs the tokenizer of its data module, which has none: pass "
                "`datamodule=SummarizationDataModule(...)`, or another one with a `tokenizer`."
            )
        self._take(tokenizer)

    @override
    def configure_model(self) -> None:
        if self.network is not None:
            return
        self.network = _network(self.model_name_or_path)
        configs: list[Any] = [getattr(part, "config", None) for part in self.network.modules()]
        for config in filter(None, configs):  # generate() has a setting of its own
            config.use_cache = False
        tokens, rows = len(self.tokenizer or ()), self.network.config.vocab_size
        if tokens > rows:
            raise ValueError(
                f"The model must have a row for each of the tokenizer's {tokens} tokens; its "
                f"vocab_size is {rows}: raise it, or lower the data module's vocab_size."
            )

    @override
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Return the logits of each token of the summaries after those before it.

        Args:
            input_ids: Tokens of the texts, (B, S).
            attention_mask: 0 where a text is padded, (B, S).
            labels: Tokens of the summaries, -100 where they are padded, (B, T).

        Returns:
            Logits, (B, T, vocabulary).
        """
        assert self.network is not None, "configure_model runs first"
        return self.network(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=self.network.prepare_decoder_input_ids_from_labels(labels),
            use_cache=False,  # keys and values are kept for generation alone
        ).logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        total, tokens = self._sum_of_losses(batch)
        mean = total.detach() / tokens
        self.log("train/loss_step", mean, prog_bar=True, batch_size=len(batch["labels"]))
        self._update("train/loss", mean, tokens)
        # Ranks have different numbers of tokens: the mean of their means would not be the mean.
        return total / self.trainer.strategy.reduce(tokens.float(), reduce_op="mean")

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> Batch:
        generated = batch_idx < self.num_generated_batches
        return self._shared_step("val", batch, generate=generated)

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> Batch:
        return self._shared_step("test", batch, generate=True)

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> list[str]:
        return self.summarize(batch["input_ids"], batch["attention_mask"])

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        schedule = {"scheduler": self.make_lr_scheduler(optimizer), "interval": self.lr_interval}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.tokenizer is not None:
            checkpoint["tokenizer"] = self.tokenizer.backend_tokenizer.to_str()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "tokenizer" in checkpoint:
            self._take(tokenizer_of(checkpoint["tokenizer"]))

    def summarize(
        self, input_ids: Tensor, attention_mask: Tensor, *, in_step: bool = False
    ) -> list[str]:
        """Generate summaries.

        Args:
            input_ids: Tokens of the texts, (B, S).
            attention_mask: 0 where a text is padded, (B, S).
            in_step: True if all ranks are here, each with its texts. With sharded parameters they
                then take equally many steps, since each of these is a collective.

        Returns:
            The summaries, B texts.
        """
        assert self.network is not None, "configure_model runs first"
        assert self.tokenizer is not None, "setup runs first, or a checkpoint is loaded"
        ids: Any = self.network.generate(  # pyright: ignore[reportAttributeAccessIssue]  # transformers hides its base class
            input_ids=input_ids,
            attention_mask=attention_mask,
            synced_gpus=in_step and self.trainer.world_size > 1,
            **self.generation,
        )
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def _take(self, tokenizer: PreTrainedTokenizerFast | None) -> None:
        """Keep the tokenizer of the data or of a checkpoint, which must be the same."""
        if self.tokenizer is None:
            self.tokenizer = tokenizer
        elif tokenizer is not None and tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                "The model was trained with another tokenizer than the data module's; use the "
                "corpus and the vocab_size of that training."
            )

    def _sum_of_losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy summed over the tokens of the summaries, and their number."""
        labels = batch["labels"]
        logits = self(batch["input_ids"], batch["attention_mask"], labels)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total, (labels != -100).sum()

    def _shared_step(self, stage: str, batch: Batch, *, generate: bool) -> Batch:
        total, tokens = self._sum_of_losses(batch)
        self._update(f"{stage}/loss", total / tokens, tokens)
        if not generate:
            return {}
        texts = self.summarize(batch["input_ids"], batch["attention_mask"], in_step=True)
        for suffix, summaries in (("", texts), ("_first_words", batch["first_words"])):
            scores = rouge_score(summaries, batch["summary"], rouge_keys=ROUGE)
            for key in ROUGE:
                self._update(f"{stage}/{key}{suffix}", scores[f"{key}_fmeasure"], len(texts))
        return {"generated": texts}

    def _update(self, name: str, value: Any, weight: Any) -> None:
        metric = self.metrics[name]
        assert isinstance(metric, MeanMetric)
        metric.update(value, weight)
        shown = name.endswith(("/loss", "/rougeL"))
        self.log(name, metric, prog_bar=shown, on_step=False, on_epoch=True, batch_size=1)


def _network(model: str | dict[str, Any]) -> T5ForConditionalGeneration:
    if isinstance(model, dict):
        return T5ForConditionalGeneration(_config(model))
    try:
        return T5ForConditionalGeneration.from_pretrained(model)
    except (OSError, ValueError) as err:
        raise FileNotFoundError(
            f"No T5 model was found at {model!r}: name a folder that holds one, or a model of the "
            "Hugging Face hub while there is a network, or give the options of a T5Config to train "
            "from scratch."
        ) from err


def _config(options: dict[str, Any]) -> T5Config:
    known = {**T5Config().to_dict(), "decoder_start_token_id": 0}
    if unknown := [name for name in options if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1) or sorted(known)
        raise ValueError(
            f"The options of T5Config have no {unknown[0]!r}; use {' or '.join(near)}."
        )
    return T5Config.from_dict({"decoder_start_token_id": 0} | options)
