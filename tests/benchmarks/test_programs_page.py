"""The table of docs/gallery.md is that of benchmarks/programs.csv, and nothing in it is wrong."""

import re

import pytest

from benchmarks.program_zoo import programs
from benchmarks.programs import MESHES, PAGE, recorded, results, with_table


def test_the_table_is_generated():
    page = PAGE.read_text()
    assert with_table(page, recorded()) == page, "run python -m benchmarks.programs --page"


def test_no_recorded_result_is_wrong():
    found = {row[mesh] for row in recorded() for mesh in MESHES if row[mesh]}
    assert all(re.match(r"exact: |refused: ", result) for result in found)


def test_each_recorded_program_is_there():
    known = programs()
    assert {row["program"] for row in recorded()} <= known.keys()
    assert {row["changed"] for row in recorded()} <= {p.changed for p in known.values()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [row["program"] for row in recorded()])
def test_a_program_that_is_installed_is_exact(name):
    program = programs()[name]
    if program.missing:
        pytest.skip(f"{program.missing} is not installed")
    row = results(program, program.meshes[:1])
    assert re.match(r"exact: |refused: ", row[program.meshes[0]]), row
