"""The lists of docs/models.md are those of benchmarks/models.csv, and its counts too."""

import re

from benchmarks.models import MESHES, PAGE, recorded, with_lists


def test_lists_are_generated():
    page = PAGE.read_text()
    assert with_lists(page, recorded()) == page, "run python -m benchmarks.models --page"


def test_counts():
    ranks = [mesh for mesh in MESHES if "tiles" not in mesh]
    exact = [[row[mesh].startswith("exact") for mesh in ranks] for row in recorded()]
    tiles = [row["3 tiles"].startswith("exact") for row in recorded() if row["3 tiles"]]
    page = PAGE.read_text()
    assert f"**{sum(map(any, exact))} of them are exact where they were tried**" in page
    assert f"\n{sum(map(all, exact))} on 2, 3 and 2x2 ranks" in page
    assert f"of one process, {sum(tiles)} of the {len(tiles)} that were tried are exact" in page


def test_no_recorded_result_is_wrong():
    results = {row[mesh] for row in recorded() for mesh in MESHES if row[mesh]}
    assert all(re.match(r"exact [\d(]|refused: `", result) for result in results)
