"""The table of docs/gallery.md is that of benchmarks/programs.csv, and nothing in it is wrong."""

import re
import traceback

import pytest

from benchmarks.program_zoo import programs
from benchmarks.programs import (
    MESHES,
    PAGE,
    _ending,
    _sentence,
    chosen,
    recorded,
    results,
    with_table,
)
from lightning_shard import UnsupportedOperationError


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


def test_a_whole_name_chooses_one_program_and_a_word_all_that_have_it():
    assert [p.name for p in chosen(["medvision_unet"])] == ["medvision_unet"]
    assert {"medvision_unet", "medvision_unet3d"} < {p.name for p in chosen(["vision_u"])}


@pytest.mark.slow
@pytest.mark.parametrize("name", [row["program"] for row in recorded()])
def test_a_program_that_is_installed_is_exact(name):
    program = programs()[name]
    if program.missing:
        pytest.skip(f"{program.missing} is not installed")
    row = results(program, program.meshes[:1])
    assert re.match(r"exact: |refused: ", row[program.meshes[0]]), row


def test_the_sentence_of_a_refusal_names_the_operator():
    def refused():
        try:
            raise UnsupportedOperationError("it has no rule")
        except UnsupportedOperationError as error:
            raise UnsupportedOperationError("cannot run torch.f: it has no rule") from error

    with pytest.raises(UnsupportedOperationError) as caught:
        refused()
    written = "".join(traceback.format_exception(caught.value))
    told = RuntimeError(f"[rank 1] {written}\n[rank 0] ValueError: another")
    assert _sentence(told) == "cannot run torch.f: it has no rule"


def test_a_refusal_below_the_error_of_another_package():
    told = RuntimeError(
        "RuntimeError: applying EnsureType\npackage.SomeError: no split tensor is a MetaTensor"
    )
    assert _ending(told, "MetaTensor") == "refused: no split tensor is a MetaTensor"
    assert _ending(told, "applying") == "refused: applying EnsureType"
    assert _ending(told, "") == "ERROR: applying EnsureType"
