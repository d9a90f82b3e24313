"""T5 on two ranks, which share the texts or the tokens of each text, equals one process."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader
from torchmetrics.functional.text import rouge_score
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

from lightning_modules import RelativeAdamW, SummarizationDataModule, T5Summarizer
from lightning_modules.t5.model import adamw
from lightning_shard.checkpoint.state import full_module_state
from tests.checkpoint.tiny import mean_over_ranks, quiet
from tests.pairs import choose
from tests.parity import assert_same
from tests.training import Losses, shared_path, trainer
from tests.workloads.t5.texts import TINY, summarizer, texts

BATCH = 4  # samples of one step, over all data replicas
SPLIT = {"shard_dims": {"input_ids": 1}}
RUNS = {
    "full": ((1,), {"sharding": "full", "wrap": ["T5Block"]}, adamw),
    "gradients": ((1,), {"sharding": "gradients", "wrap": ["T5Block"]}, adamw),
    "checkpointing": ((1,), {"activation_checkpointing": ["T5Block"]}, adamw),
    "relative": ((1,), {"wrap": ["T5Block"]}, partial(RelativeAdamW, lr=0.01)),
    "split": ((2,), {**SPLIT, "wrap": ["T5Block"]}, adamw),
    "split checkpointing": ((2,), {**SPLIT, "activation_checkpointing": ["T5Block"]}, adamw),
}


class Texts(Callback):
    """What was generated for each text, on all ranks."""

    def __init__(self) -> None:
        self.generated: dict[str, str] = {}

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.generated |= dict(zip(batch["source"], outputs["generated"], strict=True))

    on_test_batch_end = on_validation_batch_end

    def everywhere(self) -> dict[str, str]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.generated)
        return {source: text for each in found for source, text in each.items()}


def data_of(domain: tuple[int, ...]) -> SummarizationDataModule:
    """Texts in order: what draws the order of a run draws other numbers than `alone`."""
    replicas = dist.get_world_size() // domain[0]
    data = texts(shared_path("tokenizers"), BATCH // replicas)
    data.train_dataloader = partial(data._loader, "train", data.batch_size)
    return data


def alone(
    data: SummarizationDataModule, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[T5Summarizer, list[float]]:
    """One epoch by hand, on transformers' own loss."""
    module = summarizer(dtype, **options)
    assert module.network is not None
    optimizer = module.configure_optimizers()["optimizer"]
    pairs, losses = data.pairs["train"], []
    for batch in DataLoader(pairs, BATCH, collate_fn=data.collate):  # pyright: ignore[reportArgumentType]
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "labels")}
        loss = module.network(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    module.tokenizer = data.tokenizer
    return module.eval(), losses


def evaluated_alone(
    module: T5Summarizer, data: SummarizationDataModule
) -> tuple[dict[str, float], dict[str, str]]:
    """Loss and ROUGE of the validation set, of which each sample is a batch of its own."""
    total, tokens, generated = 0.0, 0, {}
    for pair in data.pairs["val"]:
        batch = data.collate([pair])
        with torch.no_grad():
            loss, count = module._sum_of_losses(batch)
        total, tokens = total + loss.item(), tokens + int(count)
        (generated[pair.source],) = module.summarize(batch["input_ids"], batch["attention_mask"])
    summaries = [pair.summary for pair in data.pairs["val"]]
    scores = rouge_score(list(generated.values()), summaries, rouge_keys=("rouge1", "rougeL"))
    metrics = {f"val/{key}": scores[f"{key}_fmeasure"].item() for key in ("rouge1", "rougeL")}
    return {"val/loss": total / tokens} | metrics, generated


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", choose(RUNS, fast=["full", "split"]))
def test_training_and_generation_equal_one_process(name):
    domain, options, optimizer = RUNS[name]
    data, module = data_of(domain), summarizer(num_generated_batches=100, optimizer=optimizer)
    losses, generated = Losses(), Texts()
    runner = trainer(domain, strategy=options, callbacks=[losses, generated])
    with quiet():
        runner.fit(module, datamodule=data)
    expected, expected_losses = alone(data, optimizer=optimizer)
    assert len(losses.values) == 4
    assert_same(mean_over_ranks(losses.values), torch.tensor(expected_losses, dtype=torch.float64))
    state = full_module_state(module)
    for key, value in expected.state_dict().items():
        assert_same(state[key], value, key)
    metrics, summaries = evaluated_alone(expected, data)
    assert len(set(summaries.values())) > 1
    assert generated.everywhere() == summaries
    for key, value in metrics.items():  # metrics are kept in float32
        assert runner.callback_metrics[key].item() == pytest.approx(value, rel=1e-5), key


@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", choose([(1,), (2,)], fast=[(2,)]))
def test_tied_embeddings_stay_one(domain):
    data, module = data_of(domain), summarizer()
    with quiet():
        trainer(domain, strategy=SPLIT if domain == (2,) else {}).fit(module, datamodule=data)
    assert module.network is not None
    shared = module.network.shared.weight
    assert module.network.lm_head.weight is shared
    assert module.network.encoder.embed_tokens.weight is shared
    assert module.network.decoder.embed_tokens.weight is shared


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", choose([(1,), (2,)], fast=[(2,)]))
def test_unmodified_t5_in_float32_and_bfloat16(domain):
    found = {}
    for precision in ("32-true", "bf16-mixed"):
        data, module, losses = data_of(domain), summarizer(torch.float32), Losses()
        options = SPLIT if domain == (2,) else {}
        with quiet():
            trainer(domain, strategy=options, callbacks=[losses], precision=precision).fit(
                module, datamodule=data
            )
        assert next(module.parameters()).dtype == torch.float32
        found[precision] = mean_over_ranks(losses.values)
    expected = torch.tensor(alone(data, torch.float32)[1], dtype=torch.float64)
    torch.testing.assert_close(found["32-true"], expected, rtol=1e-5, atol=0)
    assert not torch.equal(found["bf16-mixed"], found["32-true"])
    torch.testing.assert_close(found["bf16-mixed"], found["32-true"], rtol=0.02, atol=0)


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_blocks_are_found_without_being_named():
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 1024, "num_heads": 4, "num_layers": 2}
    data = data_of((1,))
    module = summarizer(torch.float32, model_name_or_path={"vocab_size": 64, **sizes})
    with quiet():
        strategy = {"sharding": "full"}
        trainer((1,), strategy=strategy, limit_train_batches=1).fit(module, datamodule=data)
    blocks = [m for m in module.modules() if isinstance(m, T5Block)]
    assert len(blocks) == 4
    sharded = torch.distributed.fsdp.FSDPModule
    assert all(isinstance(block, sharded) for block in blocks)
    assert not isinstance(module.network.encoder, sharded)


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", choose([(1,), (2,)], fast=[(2,)]))
def test_prediction_of_uneven_sets(domain):
    data = texts(shared_path("tokenizers"), 2, num_test=5)
    module = summarizer()
    options = SPLIT if domain == (2,) else {}
    with quiet():
        found = trainer(domain, strategy=options).predict(module, datamodule=data)
    pairs = data.pairs["test"][(dist.get_rank() if domain == (1,) else 0) :: 2 // domain[0]]
    alone = summarizer().eval()
    alone.tokenizer = data.tokenizer
    assert found is not None
    for text, pair in zip([text for batch in found for text in batch], pairs, strict=True):
        batch = data.collate([pair])
        assert [text] == alone.summarize(batch["input_ids"], batch["attention_mask"])


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("sharding", choose(["full", "gradients"], fast=["gradients"]))
def test_ranks_that_generate_summaries_of_different_lengths(sharding):
    """Each token is a collective with sharded parameters: the shorter rank must go on with it."""
    data, module = data_of((1,)), summarizer(num_generated_batches=100)
    lengths = (2, 9)
    module.generation = {"max_new_tokens": lengths[dist.get_rank()], "min_new_tokens": 1}
    generated = Texts()
    options = {"wrap": ["T5Block"], "sharding": sharding}
    with quiet():
        trainer((1,), strategy=options, callbacks=[generated]).validate(module, datamodule=data)
    alone = summarizer().eval()
    alone.tokenizer = data.tokenizer
    found = generated.everywhere()
    for i, pair in enumerate(data.pairs["val"]):
        alone.generation = {"max_new_tokens": lengths[i % 2], "min_new_tokens": 1}
        batch = data.collate([pair])
        (text,) = alone.summarize(batch["input_ids"], batch["attention_mask"])
        assert found[pair.source] == text


class AsInTheTutorial(LightningModule):
    """Calls transformers' model with labels and its defaults, which keep a cache."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.network = T5ForConditionalGeneration(T5Config(**TINY, decoder_start_token_id=0))

    def training_step(self, batch, batch_idx):
        return self.network(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_blocks_that_run_again_keep_no_cache():
    data = DataLoader(torch.arange(32).view(4, 8) % 9 + 1, 2)
    states = []
    for strategy in ({}, {"activation_checkpointing": ["T5Block"]}):
        module = AsInTheTutorial()
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            trainer((1,), strategy=strategy).fit(module, data)
        said = [w for w in noted if "use_cache of the model's config is False" in str(w.message)]
        assert len(said) == len(strategy)
        states.append(full_module_state(module))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value)
