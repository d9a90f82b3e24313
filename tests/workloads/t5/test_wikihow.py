"""WikiHow's csv files: what is read of them, when reading ends, and what is said of bad ones."""

import pickle
from pathlib import Path

import pytest

from lightning_modules import SummarizationDataModule, WikiHow
from lightning_modules.t5.corpus import split_of
from lightning_modules.t5.wikihow import cleaned
from tests.workloads.t5.texts import ARTICLES, article, write_articles, write_csv


def data_of(folder: Path, **options) -> SummarizationDataModule:
    options = {"vocab_size": 60, "root": str(folder / "tokenizers")} | options
    data = SummarizationDataModule(WikiHow(str(folder)), **options)
    data.prepare_data()
    data.setup("fit")
    return data


def test_articles_are_cleaned_and_short_ones_dropped():
    text = 'Example of text: ``Peel`` the "apple".\n\n,\nEat it. ' * 4
    pair = cleaned(text, "Peel it.,\nEat it.")
    assert pair is not None
    assert pair.summary == "Peel it. Eat it."
    assert pair.source == " ".join(["Peel the apple. Eat it."] * 4)
    assert cleaned("Peel it and eat it.", "Peel it.\nEat it.") is None
    assert cleaned(text, " \n") is None


def test_batches_are_cut_and_counted(tmp_path):
    write_articles(tmp_path, 200, ["a", "b", "c"])
    sizes = {"max_source_tokens": 40, "max_summary_tokens": 9}
    data = data_of(tmp_path, num_train=12, num_val=3, num_test=3, batch_size=6, **sizes)
    assert {split: len(pairs) for split, pairs in data.pairs.items()} == {
        "train": 12, "val": 3, "test": 3,
    }  # fmt: skip
    loader = data.train_dataloader()
    pickle.dumps(loader.collate_fn)  # for worker processes
    batch = next(iter(loader))
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (6, 40)
    assert batch["labels"].shape == (6, 9)
    assert (batch["input_ids"][:, -1] == 1).all()  # the end, also of what was cut
    assert all(summary.endswith("apples. Cook them.") for summary in batch["summary"])
    assert batch["first_words"][0] == " ".join(batch["source"][0].split()[:5])


def test_reading_ends_when_there_is_enough(tmp_path):
    path = write_articles(tmp_path, 200)
    with path.open("ab") as file:
        file.write(b'"\xff, which is not read')
    assert len(data_of(tmp_path, num_train=2, num_val=1, num_test=1).pairs["train"]) == 2
    with pytest.raises(ValueError, match=r"csv file in UTF-8; line \d+ is not .*download it again"):
        data_of(tmp_path)


def test_parts_of_one_article_are_in_one_split(tmp_path):
    rows = [[*article(i)[:1], f"How to Cook Apples{i}", article(i)[2]] for i in range(40)]
    write_csv(tmp_path, [ARTICLES, *rows])
    assert {s for s, _ in WikiHow(str(tmp_path)).pairs()} == {split_of("How to Cook Apples")}


def test_single_steps_and_long_fields(tmp_path):
    title = "How to Cook"
    steps = [["Of apples", "Cut them.", "word " * 100_000, "Steps", title]]
    header = ["overview", "headline", "text", "sectionLabel", "title"]
    write_csv(tmp_path, [header, *steps], "wikihowSep.csv")
    ((split, pair),) = WikiHow(str(tmp_path), "sep").pairs()
    assert split == split_of(title)
    assert pair.summary == "Cut them."
    assert len(pair.source) == 5 * 100_000 - 1


def test_a_missing_file_and_where_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        data_of(tmp_path)
    message = str(caught.value)
    for part in (str(tmp_path / "wikihowAll.csv"), "https://github.com/", "`corpus: Docstrings`"):
        assert part in message
    assert message.endswith(".")
    assert "\n" not in message


def test_an_empty_file(tmp_path):
    write_csv(tmp_path, [])
    with pytest.raises(ValueError, match=r"wikihowAll.csv is empty; it must have a header"):
        data_of(tmp_path)


def test_a_header_alone(tmp_path):
    write_csv(tmp_path, [ARTICLES])
    with pytest.raises(ValueError, match=r"num_train asks for at least 1 pairs, but the corpus"):
        data_of(tmp_path)


def test_wrong_columns(tmp_path):
    write_csv(tmp_path, [["headline", "text"], ["a", "b"]])
    wanted = "must have the columns headline, title, text; title is missing, and its columns are"
    with pytest.raises(ValueError, match=wanted):
        data_of(tmp_path)
