"""The documentation site has every public name and every page, and builds without a warning."""

import re
from pathlib import Path

import pytest
from sphinx.cmd.build import build_main

import lightning_shard

DOCS = Path(__file__).parents[1] / "docs"
REFERENCE = sorted(DOCS.glob("reference/*.md"))
INDEX = (DOCS / "index.md").read_text()
CAPTIONS = re.findall(r"^:caption: (.*)\n:hidden:\n((?:\n[\w/]+)+)", INDEX, re.MULTILINE)
CHAPTERS = {caption: pages.split() for caption, pages in CAPTIONS}
FOR_USERS = ("Start", "Understand", "Do", "When it goes wrong", "Examples")
BACKGROUND = {"Reference", "Functions and classes", "Evidence", "Developers"}


def test_every_public_name_is_in_the_reference():
    text = "\n".join(page.read_text() for page in REFERENCE)
    named = re.findall(r"^\.\. auto(?:class|function|module):: ([\w.]+)", text, re.MULTILINE)
    names = [name.rpartition(".")[2] for name in named]
    assert sorted(names) == dir(lightning_shard)


def test_every_page_is_in_the_index():
    listed = [page for pages in CHAPTERS.values() for page in pages]
    pages = {str(p.relative_to(DOCS).with_suffix("")) for p in (*DOCS.glob("*.md"), *REFERENCE)}
    assert sorted(listed) == sorted(pages - {"index"})
    linked = set(re.findall(r"\]\((\w+)\.md\)", INDEX))
    assert linked == {page for page in pages if "/" not in page} - {"index"}


def test_users_have_24_pages_and_the_rest_comes_after_them():
    assert [*CHAPTERS][:5] == [*FOR_USERS]
    assert {*CHAPTERS} == {*FOR_USERS, *BACKGROUND}
    assert sum(len(CHAPTERS[caption]) for caption in FOR_USERS) <= 24


@pytest.mark.parametrize("page", [page for caption in FOR_USERS for page in CHAPTERS[caption]])
def test_pages_for_users_name_no_file_of_tests(page):
    text = re.sub(r"<!--.*?-->", "", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)
    assert not re.findall(r"\btests/\w[\w/.]*", text)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Sphinx's own dependencies
def test_it_builds_without_a_warning(tmp_path, capsys):
    status = build_main(["-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(tmp_path)])
    assert status == 0, capsys.readouterr().err
    page = (tmp_path / "reference" / "trainer.html").read_text()
    assert "domain_parallel_size" in page
    assert page.index("exact_random") < page.index("HybridShardStrategy.device_mesh")
    assert "set_world_ranks" not in page  # a hook that Lightning calls
    assert "copybutton.js" in page
    assert "Bases:" not in page
