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

LONG_S, TOO_LONG_S = 1.5, 7.0
LIST = Path(__file__).with_suffix(".txt")
ALWAYS = (
    "tests/cli/test_lab_commands.py::test_check",
    "tests/cli/test_lab_commands.py::test_plan",
    "tests/cli/test_tiles.py::test_trains_in_tiles",
    "tests/domain/test_comm.py::test_derivatives_on_two_ranks",
    "tests/fsdp/test_features.py::test_with_a_domain_accumulation_and_clipping",
    "tests/lab/test_tiled_training.py::test_is_one_trainer",
    "tests/lab/test_tiled_training.py::test_trains_as_one_process[unet-2]",
    "tests/ops/test_families.py",
    "tests/ops/test_operators.py::test_second_gradients",
    "tests/ops/test_operators.py::test_three_ranks",
    "tests/test_docstrings.py",
    "tests/test_public_page.py",
    "tests/test_random_programs.py::test_three_ranks",
    "tests/test_snippets.py::test_script",
    "tests/trainer/test_exactness.py::test_four_ranks",
    "tests/trainer/test_exactness.py::test_two_ranks",
    "tests/trainer/test_features.py",
    "tests/trainer/test_hosts.py",
    "tests/trainer/test_programs.py::test_programs[1x2]",
    "tests/trainer/test_silent_mistakes.py",
    "tests/trainer/xpu/test_features.py::test_resumed_runs_equal_uninterrupted_ones[single-(1,)]",
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
        if took_s > (LONG_S if place else TOO_LONG_S) and not test.startswith(ALWAYS)
    }


if __name__ == "__main__":
    everything = listed() | chosen(Path(sys.argv[1]))
    LIST.write_text("".join(f"{test}\n" for test in sorted(everything)))
    print(f"{len(everything)} tests are slow by {LIST}")
