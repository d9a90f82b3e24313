"""The documentation site has every public name and every page, and builds without a warning."""

import re
from pathlib import Path

import pytest
from sphinx.cmd.build import build_main

import lightning_shard

DOCS = Path(__file__).parents[1] / "docs"
REFERENCE = sorted(DOCS.glob("reference/*.md"))


def test_every_public_name_is_in_the_reference():
    text = "\n".join(page.read_text() for page in REFERENCE)
    named = re.findall(r"^\.\. auto(?:class|function|module):: ([\w.]+)", text, re.MULTILINE)
    names = [name.rpartition(".")[2] for name in named]
    assert sorted(names) == dir(lightning_shard)


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text()
    listed = re.findall(r"^([\w/]+)$", index, re.MULTILINE)
    pages = {str(p.relative_to(DOCS).with_suffix("")) for p in (*DOCS.glob("*.md"), *REFERENCE)}
    assert sorted(listed) == sorted(pages - {"index"})
    linked = set(re.findall(r"\]\((\w+)\.md\)", index))
    assert linked == {page for page in pages if "/" not in page} - {"index"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Sphinx's own dependencies
def test_it_builds_without_a_warning(tmp_path, capsys):
    status = build_main(["-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(tmp_path)])
    assert status == 0, capsys.readouterr().err
    page = (tmp_path / "reference" / "trainer.html").read_text()
    assert "domain_parallel_size" in page
