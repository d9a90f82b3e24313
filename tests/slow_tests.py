"""Which tests are slow because they took long; `slow_tests.txt` lists them.

    bash tests/run --junitxml=results.xml
    python -m tests.slow_tests results.xml

This adds to the list what took more than `LONG_S`, but of each test function the row that was the
quickest, unless that too took more than `TOO_LONG_S`. What `ALWAYS` names runs in any case.
"""

import functools
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

LONG_S, TOO_LONG_S = 0.9, 2.5  # on 2 cores, next to two other workers
LIST = Path(__file__).with_suffix(".txt")
ALWAYS = (
    "tests/checkpoint/test_meshes.py::test_any_mesh[1x2-file]",
    "tests/checkpoint/test_resume.py::test_bit_equal_with_dropout[2x2-later-6]",
    "tests/checkpoint/test_sharded.py::test_what_is_in_it",
    "tests/cli/test_lab_commands.py::test_check",
    "tests/cli/test_lab_commands.py::test_plan",
    "tests/domain/test_comm.py::test_derivatives_on_two_ranks",
    "tests/faults/test_faults.py::test_ctrl_c_says_that_nothing_was_saved",
    "tests/fsdp/test_features.py::test_on_two_data_replicas",
    "tests/fsdp/test_features.py::test_with_a_domain_accumulation_and_clipping",
    "tests/lab/test_certify.py::test_a_halo_that_is_one_row_short_is_found_and_named",
    "tests/lab/test_tiled_training.py::test_is_one_trainer",
    "tests/ops/test_families.py::test_double_backward",
    "tests/ops/test_families.py::test_three_ranks",
    "tests/ops/test_families.py::test_two_by_two",
    "tests/ops/test_operators.py::test_second_gradients",
    "tests/ops/test_operators.py::test_three_ranks",
    "tests/processes/test_device.py::test_only_the_table_names_devices",
    "tests/processes/test_group.py::test_rank_that_is_not_started",
    "tests/processes/test_torch_internals.py::test_no_other_file_uses_private_names",
    "tests/tensor/test_compiled_blocks.py::test_two_ranks[attention]",
    "tests/test_docstrings.py",
    "tests/test_public_page.py",
    "tests/test_random_programs.py::test_three_ranks",
    "tests/test_snippets.py::test_script",
    "tests/trainer/test_exactness.py::test_four_ranks",
    "tests/trainer/test_exactness.py::test_mesh_1x1",
    "tests/trainer/test_exactness.py::test_two_ranks",
    "tests/trainer/test_features.py::test_on_each_mesh_by_turns",
    "tests/trainer/test_hosts.py",
    "tests/trainer/test_programs.py::test_programs",
    "tests/trainer/test_silent_mistakes.py::test_optimizer_made_before_sharding",
    "tests/trainer/test_silent_mistakes.py::test_what_hooks_do_to_parameters",
    "tests/trainer/test_uneven_evaluation.py::test_three_replicas",
    "tests/workloads/t5/test_ranks.py::test_tied_embeddings_stay_one[domain1]",
)


@functools.cache
def listed() -> frozenset[str]:
    """The node ids of the list."""
    return frozenset(LIST.read_text().splitlines())


def chosen(results: Path) -> set[str]:
    """The node ids of tests that took too long for the default run."""
    by_function = defaultdict[str, list[tuple[float, str]]](list)
    for case in ElementTree.parse(results).iter("testcase"):
        path, name = case.attrib["classname"].replace(".", "/"), case.attrib["name"]
        function = f"{path}.py::{name.partition('[')[0]}"
        by_function[function].append((float(case.attrib["time"]), f"{path}.py::{name}"))
    return {
        test
        for rows in by_function.values()
        for place, (took_s, test) in enumerate(sorted(rows))
        if took_s > (LONG_S if place else TOO_LONG_S) and not _always(test)
    }


def _always(test: str) -> bool:
    """Return whether `ALWAYS` has a test, its function or its file."""
    function = test.partition("[")[0]
    return not {test, function, function.partition("::")[0]}.isdisjoint(ALWAYS)


if __name__ == "__main__":
    everything = {test for test in listed() | chosen(Path(sys.argv[1])) if not _always(test)}
    LIST.write_text("".join(f"{test}\n" for test in sorted(everything)))
    print(f"{len(everything)} tests are slow by {LIST}")
