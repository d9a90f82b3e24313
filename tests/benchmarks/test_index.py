"""The page of benchmarks lists every script, and each number's page names the script."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "benchmarks/README.md").read_text()


def test_every_script_has_a_line():
    scripts = {p.stem for p in ROOT.glob("benchmarks/*.py") if '"__main__"' in p.read_text()}
    assert set(re.findall(r"python -m benchmarks\.(\w+)", PAGE)) == scripts


def test_pages_with_numbers_name_the_script():
    for line in PAGE.splitlines():
        pages = re.findall(r"\(\.\./([\w/]+\.md)\)", line)
        for script in re.findall(r"python -m benchmarks\.(\w+)", line):
            for page in pages:
                text = (ROOT / page).read_text()
                assert re.search(rf"benchmarks[./]{script}\b", text), f"{page}: {script}"
