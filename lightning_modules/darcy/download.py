"""Fetches neuraloperator's files of Darcy flow from Zenodo: whole files, or none.

Source: https://zenodo.org/records/12784353, the record that neuraloperator 2.0 reads, with an
archive `darcy_{resolution}.tgz` for each resolution.
"""

import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info

RECORD = "12784353"
RESOLUTIONS = (16, 32, 64, 128, 421)


def ensure_downloaded(folder: Path, train_resolution: int, test_resolutions: Sequence[int]) -> None:
    """Fetch the archives of the files that the folder lacks.

    Args:
        folder: The folder of `darcy_{train,test}_{resolution}.pt`; made if missing.
        train_resolution: Nodes a side of the training samples.
        test_resolutions: Nodes a side of the test samples.

    Raises:
        ValueError: There is no archive of such a resolution.
        ConnectionError: An archive could not be fetched whole; nothing of it is left.
    """
    wanted = [("train", train_resolution), *(("test", n) for n in test_resolutions)]
    files = {folder / f"darcy_{part}_{n}.pt": n for part, n in wanted}
    resolutions = sorted({n for path, n in files.items() if not path.is_file()})
    if unknown := [n for n in resolutions if n not in RESOLUTIONS]:
        raise ValueError(
            f"neuraloperator's files have {', '.join(map(str, RESOLUTIONS))} nodes a side; got "
            f"{unknown[0]}. Ask for one of these, or leave out `source` to generate samples."
        )
    if not resolutions:
        return
    rank_zero_info(f"Fetching Darcy flow at {resolutions} nodes a side, once: {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        _fetch([f"darcy_{n}.tgz" for n in resolutions], Path(partial))
        for path in Path(partial).rglob("darcy_*.pt"):
            path.replace(folder / path.name)
    if absent := [path.name for path in files if not path.is_file()]:
        raise ConnectionError(
            f"Zenodo's record {RECORD} was fetched, but held no {absent[0]}: put the file into "
            f"{folder}, or leave out `source` to generate samples."
        )


def _fetch(archives: list[str], folder: Path) -> None:
    """Fetch and unpack archives of the record, each compared with its checksum."""
    from neuralop.data.datasets.web_utils import download_from_zenodo_record

    try:
        download_from_zenodo_record(RECORD, folder, archives)
    except (OSError, AssertionError, RuntimeError, tarfile.TarError) as err:
        raise ConnectionError(
            f"{', '.join(archives)} of https://zenodo.org/records/{RECORD} could not be fetched "
            f"({type(err).__name__}); fetch and unpack them into the folder `source` elsewhere, or "
            "leave `source` out to generate samples."
        ) from err
