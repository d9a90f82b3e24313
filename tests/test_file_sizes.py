"""Files of the package are short enough to be read at once."""

from pathlib import Path

import lightning_shard

LINES = 400
LONGER = {  # they only shrink: a file that is shorter now has a lower number here, or none
    "fsdp/parallelize.py": 414, "lab/timeline.py": 420, "memory/paging/pager.py": 420,
    "processes/torch_private/internals.py": 409, "tensor/tensor.py": 446,
    "trainer/strategy.py": 470,
}  # fmt: skip
PACKAGE = Path(lightning_shard.__file__).parent


def test_files_are_short():
    lines = {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    long = {file: count for file, count in lines.items() if count > LONGER.get(file, LINES)}
    assert not long, long
    short = {file for file in LONGER if lines.get(file, LONGER[file]) <= LONGER[file] - 100}
    assert not short, f"lower the numbers of {short}"
