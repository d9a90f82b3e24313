"""Docstrings as a corpus: which pairs are read, that they are kept, and what is said of damage."""

import errno
import gzip
from pathlib import Path

import pytest

from lightning_modules import Docstrings, SummarizationDataModule
from lightning_modules.t5 import docstrings
from lightning_modules.t5.corpus import split_of
from lightning_modules.t5.docstrings import Package, docstrings_of, installed
from lightning_modules.t5.tokenizer import load_tokenizer, tokenizer_of, train_tokenizer

FILE = '''
raise RuntimeError("source is read, never run")


class TreeNode:
    """A node of a tree with its children.

    Children are kept in the order in which they were added.
    """

    def addChild(self, new_node, *, at_end=True):
        """Add a node
        below this one.

        Parameters
        ----------
        new_node : TreeNode
            The node that is added.
        """

    def parent(self):
        """Parent.

        There is too little here to be summarized in anything else.
        """

    def depth(self):
        """How deep this node lies below the root."""

    def again(self):
        """A node of a tree, with its children!

        The same summary, and another body than above.
        """


if True:

    async def spread_out(tree):
        """The widest layer of a tree.

        Layers are compared by how many nodes they have.
        """
'''


def some_package(folder: Path, name: str = "python", text: str = FILE) -> Package:
    path = folder / "package" / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return Package(name, "1.2", "MIT", lambda: [path])


def many(count: int) -> str:
    """Source with definitions whose names and summaries differ."""
    return "\n".join(
        f'def function_{"x" * i}():\n    """Return thing {"y" * i} of this.\n\n'
        f'    The body is {"z" * i} and some words more.\n    """\n'
        for i in range(1, count + 1)
    )


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A standard library of one file, and nothing installed."""
    package = some_package(tmp_path, text=many(200))
    monkeypatch.setattr(docstrings, "_standard_library", lambda: package)
    return package


def corpus(folder: Path) -> Docstrings:
    return Docstrings(packages=[], root=str(folder / "cache"))


def test_a_docstring_becomes_a_text_and_a_summary(tmp_path):
    (path,) = some_package(tmp_path).files()
    found = {each.name: (each.source, each.summary) for each in docstrings_of(path)}
    assert found == {
        "TreeNode": (
            "Tree Node: Children are kept in the order in which they were added.",
            "A node of a tree with its children.",
        ),
        "addChild": (
            "add Child of Tree Node (new node, at end): "
            "Parameters new_node : TreeNode The node that is added.",
            "Add a node below this one.",
        ),
        "again": (
            "again of Tree Node (): The same summary, and another body than above.",
            "A node of a tree, with its children!",
        ),
        "spread_out": (
            "spread out (tree): Layers are compared by how many nodes they have.",
            "The widest layer of a tree.",
        ),
    }


def test_markup_is_left_out(tmp_path):
    text = 'def f(x):\n    """Give *x* to :func:`~a.g`.\n\n    It is ``x*y*z`` that *g* needs."""'
    (path,) = some_package(tmp_path, text=text).files()
    ((_, source, summary),) = docstrings_of(path)
    assert summary == "Give x to a.g."
    assert source == "f (x): It is x*y*z that g needs."


def test_repetitions_are_dropped(tmp_path):
    packages = [some_package(tmp_path), some_package(tmp_path, "copy")]
    found = docstrings.read(packages, tmp_path / "x.json.gz")
    assert sorted(each.name for each in found) == ["TreeNode", "addChild", "spread_out"]
    note = (tmp_path / "x_packages.md").read_text()
    assert note.endswith("| python | 1.2 | MIT | 3 |\n")  # the copy added nothing


@pytest.mark.parametrize("text", ["def (", "\0", "x = '\\ud800"])
def test_what_is_no_python_is_passed_over(tmp_path, text):
    (path,) = some_package(tmp_path, text=text).files()
    assert list(docstrings_of(path)) == []
    assert list(docstrings_of(tmp_path / "gone.py")) == []


def test_splits_are_those_of_the_name(tmp_path, environment):
    found = list(corpus(tmp_path).pairs())
    assert len(found) == 200
    assert list(corpus(tmp_path).pairs()) == found
    for split, pair in found:
        name = pair.source.split(" (")[0].replace(" ", "_")
        assert split == split_of(name)
    shares = {split: sum(s == split for s, _ in found) for split in ("train", "val", "test")}
    assert min(shares.values()) > 3
    assert shares["train"] > 160


def test_packages_and_their_licences_are_listed_beside_the_pairs(tmp_path, environment):
    list(corpus(tmp_path).pairs())
    pairs, note = sorted((tmp_path / "cache").iterdir())
    assert note.name == pairs.name.replace(".json.gz", "_packages.md")
    assert "| python | 1.2 | MIT | 200 |" in note.read_text()
    assert "these 200 docstrings" in note.read_text()


@pytest.mark.slow
def test_packages_of_this_environment():
    packages = {package.name: package for package in installed(["Jsonargparse"])}
    assert set(packages) == {"jsonargparse", "python"}
    assert packages["python"].licence == "PSF-2.0"
    library = packages["python"].files()
    assert {"ast.py", "decoder.py"} <= {path.name for path in library}
    assert not any({"site-packages", "test"} & {*path.parts} for path in library)
    assert packages["jsonargparse"].licence != "not stated"
    found = [each for path in packages["jsonargparse"].files() for each in docstrings_of(path)]
    assert len(found) > 50


def test_a_package_that_is_not_installed():
    with pytest.raises(ValueError, match=r"no-such-package is not installed: install it, or .*\.$"):
        list(Docstrings(packages=["no_such.package"]).pairs())


def test_the_second_run_reads_the_file(tmp_path, environment, monkeypatch):
    first = list(corpus(tmp_path).pairs())
    monkeypatch.setattr(docstrings, "docstrings_of", lambda path: pytest.fail("read again"))
    assert list(corpus(tmp_path).pairs()) == first


@pytest.mark.quick_rows("cut")
@pytest.mark.parametrize("damage", ["cut", "flip", "text", "empty"])
def test_a_damaged_file_is_made_again(tmp_path, environment, damage):
    first = list(corpus(tmp_path).pairs())
    (path,) = (tmp_path / "cache").glob("*.json.gz")
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    contents = {"cut": whole[:-9], "flip": flipped, "text": b"nothing", "empty": b""}
    path.write_bytes(contents[damage])
    with pytest.warns(UserWarning, match=r"docstrings_.*\.json\.gz is damaged; making it again\."):
        assert list(corpus(tmp_path).pairs()) == first
    assert path.read_bytes() == whole


@pytest.mark.slow
def test_a_damaged_tokenizer_is_trained_again(tmp_path, environment):
    def prepared():
        data = SummarizationDataModule(
            corpus(tmp_path), vocab_size=60, root=str(tmp_path / "tokenizers")
        )
        data.prepare_data()
        data.setup("fit")
        return data.tokenizer.backend_tokenizer.to_str()

    first = prepared()
    (path,) = (tmp_path / "tokenizers").iterdir()
    path.write_bytes(gzip.compress(b"{"))
    with pytest.warns(UserWarning, match=r"tokenizer_.*\.json\.gz is damaged; making it again\."):
        assert prepared() == first


def test_a_full_disk_leaves_nothing(tmp_path, environment, monkeypatch):
    write = Path.write_bytes

    def half(path, content):
        write(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    wanted = r"could not be written \(No space left on device\); it needs \d+ bytes .*: make room, "
    with pytest.raises(OSError, match=wanted) as caught:
        list(corpus(tmp_path).pairs())
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path, environment):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OSError, match=r"docstrings_.* could not be written .*: make room, or name"):
        list(corpus(tmp_path).pairs())


def test_a_tokenizer_gives_words_back_in_lower_case():
    texts = ["Return the shape of a Tensor, or 12.", "the shape of the tensor"] * 5
    trained = train_tokenizer(texts, 100)
    assert train_tokenizer(texts, 100) == trained
    tokenizer = tokenizer_of(trained)
    assert tokenizer.convert_tokens_to_ids(["<pad>", "</s>", "<unk>"]) == [0, 1, 2]
    ids = tokenizer(texts[0])["input_ids"]
    assert ids[-1] == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == texts[0].lower()


def test_no_tokenizer_of_this_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No tokenizer was found at '.*nowhere': name a"):
        load_tokenizer(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["{}", "{", "[]", '{"model": {}, "added_tokens": 3}', ""], ids=str)
def test_a_broken_tokenizer_is_one_sentence(tmp_path, text):
    tokenizer_of(train_tokenizer(["some words to learn"], 40)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"^The tokenizer '.*' cannot be read .*save it again"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_is_loaded_from_a_folder(tmp_path):
    tokenizer_of(train_tokenizer(["some words to learn"], 40)).save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    ids = loaded("some words")["input_ids"]
    assert loaded.decode(ids, skip_special_tokens=True) == "some words"
