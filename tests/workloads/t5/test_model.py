"""T5Summarizer in one process: losses, metrics, generation, checkpoints, errors."""

import csv
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from transformers import T5Config, T5ForConditionalGeneration

from lightning_modules import (
    RelativeAdamW,
    SummaryTable,
    T5Summarizer,
    WarmupLinear,
)
from lightning_shard import EpochReport
from tests.workloads.t5.texts import TINY, Sentences, summarizer, texts

pytestmark = [
    # tokenizing a few words needs no worker processes
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # four steps are fewer than the logging interval
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


def trainer(folder, **options):
    settings = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
    }  # fmt: skip
    return Trainer(**settings | options, default_root_dir=folder)


@pytest.fixture
def data(tmp_path):
    data = texts(tmp_path / "tokenizers")
    data.prepare_data()
    data.setup("fit")
    return data


def test_loss_is_that_of_transformers_and_ignores_padding(data):
    module = summarizer()
    batch = next(iter(data.val_dataloader()))
    labels = batch["labels"]
    assert (labels == -100).any()
    assert (labels[labels != -100] > 0).all()
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "labels")}
    total, tokens = module._sum_of_losses(batch)
    assert tokens == (labels != -100).sum()
    torch.testing.assert_close(total / tokens, module.network(**inputs).loss)
    padded = batch | {"labels": torch.nn.functional.pad(labels, (0, 3), value=-100)}
    torch.testing.assert_close(module._sum_of_losses(padded)[0], total)


def test_optimizer_and_scheduler_default_to_those_of_the_tutorial():
    made = summarizer().configure_optimizers()
    assert isinstance(made["optimizer"], AdamW)
    assert made["optimizer"].defaults["lr"] == 2e-3
    schedule = made["lr_scheduler"]
    assert isinstance(schedule["scheduler"], StepLR)
    assert (schedule["scheduler"].step_size, schedule["scheduler"].gamma) == (1, 0.7)
    assert schedule["interval"] == "epoch"


def test_relative_steps():
    module = summarizer()
    rates = {
        id(group["params"][0]): group["lr"]
        for group in RelativeAdamW(module.parameters()).param_groups
    }
    for parameter in module.parameters():
        size = parameter.detach().square().mean().sqrt().item()
        assert rates[id(parameter)] == pytest.approx(0.05 * size)
    (still,) = RelativeAdamW([torch.nn.Parameter(torch.zeros(3))], lr=0.1).param_groups
    assert still["lr"] == pytest.approx(1e-4)


def test_warmup():
    optimizer = RelativeAdamW([torch.nn.Parameter(torch.full((2,), c)) for c in (1.0, 2.0)], lr=0.1)
    schedule, rates = WarmupLinear(optimizer, warmup_steps=2, total_steps=6), []
    for _ in range(8):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    expected = torch.tensor([0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    torch.testing.assert_close(torch.tensor(rates), expected[:, None] * torch.tensor([0.1, 0.2]))


@pytest.mark.slow
def test_fit_test_predict_and_what_is_kept(tmp_path, data, capsys):
    module = summarizer(torch.float32)
    best = ModelCheckpoint(
        tmp_path / "best",
        "epoch={epoch:02d}-val_loss={val/loss:.3f}",
        monitor="val/loss",
        auto_insert_metric_name=False,
    )
    logger = CSVLogger(tmp_path, version=0)
    runner = trainer(
        tmp_path,
        callbacks=[best, SummaryTable(num_rows=3), EpochReport()],
        enable_checkpointing=True,
        logger=logger,
        max_epochs=2,
    )
    runner.fit(module, datamodule=data)
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert rest[0].startswith("Training ended at step ")
    assert rest[1].startswith(f"Best checkpoint: {best.best_model_path} (val/loss ")
    assert rest[2].startswith("Test: trainer.test(module, data, ckpt_path=")
    assert rest[3].startswith("Resume: trainer.fit(module, data, ckpt_path=")
    for line in (first, second):
        assert line.startswith(f"Epoch {int(line is second)}: ")
        for part in (
            " s, ",
            "train/loss ",
            "val/loss ",
            "val/rougeL ",
            " samples/s, ",
            "peak memory ",
        ):
            assert part in line
    with (tmp_path / "lightning_logs/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(bool(row["epoch_s"]) for row in rows) == 2
    assert all(float(row["peak_memory_mib"]) > 10 for row in rows if row["peak_memory_mib"])
    lowest = min(float(row["val/loss"]) for row in rows if row["val/loss"])
    assert f"val_loss={lowest:.3f}" in best.best_model_path

    with (tmp_path / "lightning_logs/version_0/summaries/epoch_0001.csv").open() as file:
        table = list(csv.reader(file))
    assert table[0] == ["source", "reference", "generated"]
    assert [row[:2] for row in table[1:]] == [list(pair) for pair in data.pairs["val"][:3]]

    (metrics,) = runner.test(module, datamodule=data, verbose=False)
    assert (tmp_path / "lightning_logs/version_0/summaries/test.csv").is_file()
    assert metrics.keys() == {
        f"test/{name}"
        for name in (
            "loss", "rouge1", "rouge2", "rougeL",
            "rouge1_first_words", "rouge2_first_words", "rougeL_first_words",
        )
    }  # fmt: skip
    assert metrics["test/rougeL_first_words"] > 0.3  # summaries are words of the sentences

    loaded = T5Summarizer.load_from_checkpoint(best.best_model_path, weights_only=True).eval()
    batch = next(iter(data.test_dataloader()))
    assert runner.predict(loaded, datamodule=data)[0] == loaded.summarize(
        batch["input_ids"], batch["attention_mask"]
    )


def test_a_checkpoint_summarizes_without_its_data(tmp_path, data):
    module = summarizer(torch.float32)
    runner = trainer(tmp_path)
    runner.fit(module, datamodule=data)
    runner.save_checkpoint(tmp_path / "x.ckpt")
    loaded = T5Summarizer.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).eval()
    texts = ["the shape of a tensor", "the owner"]
    read = loaded.tokenizer(texts, padding=True, return_tensors="pt")
    assert loaded.summarize(**read) == module.eval().summarize(**read)


@pytest.mark.slow
def test_the_tokenizer_of_a_checkpoint_must_be_the_datas(tmp_path, data):
    module, path = summarizer(torch.float32), tmp_path / "x.ckpt"
    runner = trainer(tmp_path)
    runner.fit(module, datamodule=data)
    runner.save_checkpoint(path)
    same = texts(tmp_path / "tokenizers")
    (metrics,) = trainer(tmp_path).test(
        summarizer(torch.float32), datamodule=same, ckpt_path=path, verbose=False
    )
    assert metrics == runner.test(module, datamodule=data, verbose=False)[0]
    other = texts(tmp_path / "tokenizers", vocab_size=50)
    wanted = "trained with another tokenizer than the data module's"
    with pytest.raises(ValueError, match=wanted):
        trainer(tmp_path).test(summarizer(torch.float32), datamodule=other, ckpt_path=path)
    with pytest.raises(ValueError, match=wanted):
        trainer(tmp_path).test(T5Summarizer.load_from_checkpoint(path), datamodule=other)


def test_a_config_of_transformers_and_its_options_are_the_same_model():
    config = T5Config(**TINY, decoder_start_token_id=0)
    module = summarizer(model_name_or_path=config)
    expected = summarizer()
    assert module.network.config.d_model == 16
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], value, rtol=0, atol=0)


def test_a_pretrained_model_is_read_from_a_folder(tmp_path):
    torch.manual_seed(1)
    T5ForConditionalGeneration(T5Config(**TINY, decoder_start_token_id=0)).save_pretrained(tmp_path)
    module = T5Summarizer(str(tmp_path))
    module.configure_model()
    again = T5ForConditionalGeneration.from_pretrained(tmp_path)
    for key, value in again.state_dict().items():
        torch.testing.assert_close(module.network.state_dict()[key], value, rtol=0, atol=0)


def test_no_model_of_this_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No T5 model was found at .*nowhere'.*\.$"):
        T5Summarizer(str(tmp_path / "nowhere")).configure_model()


def test_an_option_that_no_t5_has():
    with pytest.raises(ValueError, match=r"T5Config have no 'd_modle'; use d_model\.$"):
        T5Summarizer(TINY | {"d_modle": 32}).configure_model()


def test_a_vocabulary_larger_than_the_models(tmp_path, data):
    module = T5Summarizer(TINY | {"vocab_size": 40})
    with pytest.raises(ValueError, match=r"each of the tokenizer's 64 tokens; .* is 40: raise it"):
        trainer(tmp_path).fit(module, datamodule=data)


def test_data_without_a_tokenizer(tmp_path, data):
    with pytest.raises(ValueError, match="needs the tokenizer of its data module"):
        trainer(tmp_path).fit(summarizer(), data.train_dataloader(), data.val_dataloader())


def test_a_table_needs_what_was_generated(tmp_path, data):
    module = summarizer(torch.float32, num_generated_batches=0)
    with pytest.raises(ValueError, match=r"needs evaluation steps .* got \[\]\. Return it"):
        trainer(tmp_path, callbacks=[SummaryTable()]).fit(module, datamodule=data)


class Tables(Logger):
    """A logger that takes texts as TensorBoard does, or tables as Weights & Biases does."""

    name, version = "tables", 0

    def __init__(self, way):
        self.received = Mock()
        if way == "add_text":
            self.experiment = Mock(spec=["add_text"], add_text=self.received)
        else:
            self.log_table = self.received

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, *_, **__):
        pass


@pytest.mark.parametrize("way", ["add_text", "log_table"])
def test_loggers_get_the_table(tmp_path, data, way):
    logger = Tables(way)
    trainer(tmp_path, callbacks=[SummaryTable(num_rows=2)], logger=logger).fit(
        summarizer(torch.float32), datamodule=data
    )
    ((args, options),) = logger.received.call_args_list
    pair = data.pairs["val"][1]
    if way == "add_text":
        name, text, step = args
        head, rule, _, row = text.splitlines()
        assert (head, rule) == ("| source | reference | generated |", "| --- | --- | --- |")
        assert row.startswith(f"| {pair.source} | {pair.summary} | ")
    else:
        (name,), step = args, options["step"]
        assert options["columns"] == ["source", "reference", "generated"]
        assert options["data"][1][:2] == list(pair)
    assert (name, step) == ("summaries", 4)


def test_rouge_by_hand(tmp_path):
    """torchmetrics' scores are the F-measures of Lin's definition."""
    from lightning_modules.t5.model import ROUGE, rouge_score

    found = rouge_score("the cat sat on a mat", "a cat sat on the mat", rouge_keys=ROUGE)
    assert found["rouge1_fmeasure"] == 1  # the same words
    assert found["rouge2_fmeasure"] == pytest.approx(2 / 5)  # "cat sat", "sat on" of five each
    assert found["rougeL_fmeasure"] == pytest.approx(4 / 6)  # "cat sat on mat"


def test_too_few_pairs(tmp_path):
    data = texts(tmp_path, corpus=Sentences(train=5), num_train=6)
    wanted = r"num_train asks for 6 pairs, but the corpus Sentences has 5 .*: lower it"
    with pytest.raises(ValueError, match=wanted):
        data.prepare_data()
