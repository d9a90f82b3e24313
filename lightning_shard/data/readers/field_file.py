"""Opens, reads and writes files of fields, HDF5 or Zarr, a part of a sample at a time.

Both formats hold arrays (S, C, *spatial) in small blocks with checksums: a part is read without its
neighbours, and damaged bytes raise an error.

Shapes: S samples of C channels.
"""

import functools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lightning_shard.data.atomic import partial_of, put_in_place, remove
from lightning_shard.data.failing_later import FailingLater
from lightning_shard.data.file_field import Read, as_array
from lightning_shard.data.readers.opened import OpenFile, damaged, optional

HDF5, ZARR = (".h5", ".hdf5"), (".zarr",)
BLOCKS = 16  # along each dim of a field, so that the parts of up to as many ranks overlap little
EDGE = 8  # nodes that a block has at least
_ALL_STORED = "lightning_shard_all_stored"  # an attribute of arrays of Zarr: no sample lacks a file


class FieldFile:
    """An HDF5 file (.h5, .hdf5) or a Zarr group (.zarr) of arrays `(S, C, *spatial)`, to read.

    Each process opens it when it reads first, so a `FieldFile` may travel to worker processes.

    Args:
        path: The file.
        group: The group that holds the arrays; ignored in a file that has no such group.

    Example:
        >>> file = FieldFile("train.zarr")
        >>> count, shape = file.shapes(["x"])["x"]  # 1000, (3, 4096, 4096)
        >>> rows = file.read("x", 7, (slice(0, 3), slice(0, 1024), slice(0, 4096)))
    """

    SUFFIXES = HDF5 + ZARR  # the ends of the names of such files

    def __init__(self, path: str | Path, group: str = "") -> None:
        self.path, self.group = Path(path).absolute(), group  # a later os.chdir changes nothing
        self._open = OpenFile(functools.partial(_open_fields, self.path, group))

    @property
    def arrays(self) -> Any:
        """The open arrays by name.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is of another format, or damaged.
        """
        return self._open()

    def shapes(self, names: Sequence[str]) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return S and `(C, *spatial)` of each array; C is 1 for an array of (S, H, W).

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file cannot be read, or lacks an array.
        """
        with _opened(self.path, self.group) as arrays:
            if missing := [name for name in names if name not in arrays]:
                where = f", at its root or in a group {self.group}" if self.group else ""
                raise ValueError(
                    f"{self.path} needs datasets {' and '.join(names)}{where}, but has no "
                    f"{missing[0]}; got {sorted(arrays)}. Rename them, or read another file."
                )
            stored: dict[str, tuple[int, ...]]
            with damaged(f"{self.path} is damaged", "; restore it."):
                stored = {name: getattr(arrays[name], "shape", None) or () for name in names}
            if single := [name for name in names if not stored[name]]:
                raise ValueError(
                    f"{single[0]} of {self.path} must be (samples, channels, *extents); it is a "
                    "single value or a group."
                )
        return {
            name: (shape[0], shape[1:] if len(shape) > 3 else (1, *shape[1:]))
            for name, shape in stored.items()
        }

    def read(self, name: str, sample: int, index: Sequence[slice]) -> np.ndarray:
        """Read the part at `index` of a sample `(C, *spatial)` of an array, such as `slab.index`.

        Raises:
            ValueError: It is damaged, or holds no numbers.
        """
        array = self.arrays[name]
        stored = index[len(index) + 1 - array.ndim :]  # without a channel dim of one
        values = _read(array, self.path, (sample, *stored))
        return values if array.ndim > len(index) else values[None][index[0]]

    def samples(self) -> list[tuple[Read, tuple[int, ...]]]:
        """Return for each sample of the only array a function that reads a part, and its shape.

        Raises:
            ValueError: There are several arrays, and none is named x.
        """
        with _opened(self.path, self.group) as arrays:
            names = sorted(arrays)
        if len(names) > 1 and "x" not in names:
            raise ValueError(
                f"{self.path} holds {', '.join(names)}; name the array that is read x, or read a "
                "file that holds it alone."
            )
        name = names[0] if len(names) == 1 else "x"
        count, shape = self.shapes([name])[name]
        return [(functools.partial(self.read, name, n), shape) for n in range(count)]

    def blocks(
        self, names: Sequence[str], count: int, size: int
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield the first `count` samples of some arrays, whole, at most `size` of them at a time.

        Raises:
            ValueError: A sample is damaged.
        """
        with _opened(self.path, self.group) as arrays:
            for start in range(0, count, size):
                some = slice(start, min(start + size, count))
                yield {name: _read(arrays[name], self.path, (some,)) for name in names}


def _library(path: Path) -> Any:
    """Return the package that reads and writes the format of a file."""
    package, extra = ("h5py", "hdf5") if path.suffix in HDF5 else ("zarr", "zarr")
    return optional(package, f"the file {path}", extra)


def _open_fields(path: Path, group: str = "") -> Any:
    """Return the arrays of an HDF5 file or a Zarr group by name; `group` only if it is there.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is of another format, or damaged.
    """
    _refuse_other_ends(path)
    if not path.exists():
        raise FileNotFoundError(f"the file of fields {path} does not exist; check its name.")
    try:
        root = open_hdf5(path) if path.suffix in HDF5 else _open_zarr(path)
    except (OSError, KeyError, RuntimeError) as error:  # HDF5 has errors of all these kinds
        raise ValueError(
            f"{path} is not a whole {'HDF5 file' if path.suffix in HDF5 else 'Zarr group'} "
            f"({error}); restore it, or remove it if it was generated."
        ) from error
    if not (group and group in root):
        return root
    if path.suffix in HDF5:
        for name in root[group]:
            inside(root, f"{group}/{name}", path)
    return root[group]


def open_hdf5(path: Path) -> Any:
    """Return the root of an HDF5 file whose arrays are all in the file.

    Raises:
        OSError: It is damaged, or of another format.
        ValueError: An array is outside of it.
    """
    root = optional("h5py", f"the file {path}", "hdf5").File(path, "r")
    for name in root:
        inside(root, name, path)
    return root


def _refuse_other_ends(path: Path) -> None:
    if path.suffix not in HDF5 + ZARR:
        raise ValueError(f"{path} must end in {', '.join(HDF5 + ZARR)}, which say its format.")


def _open_zarr(path: Path) -> dict[str, Any]:
    library = optional("zarr", f"the file {path}", "zarr")
    store = library.storage.LocalStore(path, read_only=True)
    try:
        root = library.open_group(store, mode="r")
        with no_gaps_read(library):
            groups = {name: dict(group.arrays()) for name, group in root.groups()}
            return groups | dict(root.arrays())
    except ValueError as error:
        raise OSError(error) from error


def no_gaps_read(zarr: Any) -> AbstractContextManager[Any]:
    """Let arrays that are opened meanwhile read their own chunks alone.

    zarr 3.4 reads what lies between two chunks that are less than 1 MiB apart, too, which are
    other ranks' rows. Its older releases know no such setting.
    """
    return zarr.config.set({"array.sharding_coalesce_max_gap_bytes": 0})


def inside(root: Any, name: str, path: Path) -> Any:
    """Return an array or a group of an HDF5 file, by its path in the file.

    A file of HDF5 can name any other file of this machine to be read in place of its own data.

    Raises:
        ValueError: It is outside of the file.
    """
    library = optional("h5py", f"the file {path}", "hdf5")
    parts = name.split("/")
    links = [root.get("/".join(parts[:n]), getlink=True) for n in range(1, len(parts) + 1)]
    external = any(isinstance(link, library.ExternalLink) for link in links)
    if external or _is_outside(library, root.get(name), root):
        raise ValueError(
            f"{path} keeps '{parts[-1]}' outside of it (an external file, a link or a virtual "
            "dataset), which is not read; copy the data into the file."
        )
    return root.get(name)


def _is_outside(library: Any, found: Any, root: Any) -> bool:
    if found is None:  # a link to nothing
        return False
    if found.file.filename != root.filename:  # a soft link by way of an external one
        return True
    return isinstance(found, library.Dataset) and bool(found.external or found.is_virtual)


def _read(array: Any, path: Path, index: tuple[slice | int, ...]) -> np.ndarray:
    """Read what lies at `index` of an open array.

    Raises:
        ValueError: It is damaged, or holds no numbers.
    """
    what = f"sample {index[0]} of {array.name} in {path} is damaged"
    with damaged(what, "; restore the file, or remove it if it was generated."):
        values = np.asarray(array[index])
        if path.suffix in ZARR and _is_gone(array, path, index[0], values):
            raise ValueError("it is not all there")
    if values.dtype.kind not in "biufc":
        raise ValueError(
            f"{array.name} in {path} holds values of {values.dtype}, which are no numbers; read "
            "another array."
        )
    return values.astype(values.dtype.newbyteorder("="), copy=False)  # torch has no other order


def _is_gone(array: Any, path: Path, samples: slice | int, values: np.ndarray) -> bool:
    """Return whether a file of `write_fields` is missing: Zarr reads it as the fill value."""
    if array.dtype.kind == "f":
        return array.fill_value == unset(array.dtype) and bool((values == array.fill_value).any())
    if not array.attrs.get(_ALL_STORED):
        return False
    numbers = [samples] if isinstance(samples, int) else range(array.shape[0])[samples]
    rest = (0,) * (array.ndim - 1)
    keys = [array.metadata.encode_chunk_key((number, *rest)) for number in numbers]
    return not all((path / array.path / key).exists() for key in keys)


def unset(dtype: np.dtype) -> Any:
    """Return a value that hardly any field has: NaN is for fields that have gaps."""
    return np.nextafter(np.finfo(dtype).min, dtype.type(0))


def write_fields(path: str | Path, count: int, blocks: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Write samples block by block, so that they need not fit into memory.

    The file gets its name when all is written. One that was there before is replaced then.

    Args:
        path: The HDF5 file or Zarr group.
        count: The number S of all samples.
        blocks: Some samples at a time: for each array its name and `(samples, C, *spatial)`, of
            NumPy or a tensor; bfloat16 is written as float32.

    Raises:
        OSError: It cannot be written, for example on a full disk.
        ValueError: The end of the path is not known, a value is no number, or the blocks do not
            make up `count` samples of one shape and dtype for each name.
    """
    path = Path(path)
    _refuse_other_ends(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    try:
        _write_fields(partial, path, count, blocks)
        put_in_place(partial, path)
    except BaseException:
        remove(partial)
        raise


def _write_fields(
    partial: Path, path: Path, count: int, blocks: Iterable[Mapping[str, np.ndarray]]
) -> None:
    if path.suffix not in HDF5:
        zarr = _library(path)
        # samples of zeros, too, so that a missing file is noticed
        with zarr.config.set({"array.write_empty_chunks": True}):
            _fill(zarr.open_group(partial, mode="w"), path, count, blocks)
        return
    with FailingLater(partial, "w+") as file:
        with _library(path).File(file, "w", libver="latest") as root:
            _fill(root, path, count, file.watch(blocks))
        file.check()


def _fill(root: Any, path: Path, count: int, blocks: Iterable[Mapping[str, np.ndarray]]) -> None:
    start, kinds = 0, dict[str, Any]()
    for given in blocks:
        block = {name: as_array(values) for name, values in given.items()}
        found = {name: (values.shape[1:], values.dtype) for name, values in block.items()}
        sizes = {len(values) for values in block.values()}
        kinds = kinds or found
        if found != kinds or len(sizes) != 1 or start + max(sizes) > count:
            raise ValueError(
                f"the samples from {start} on do not belong into {path}: they are "
                f"{_words(block)}, but each block must have as many samples of each of "
                f"{_of_kinds(kinds)}, of {count} samples in all."
            )
        for name, values in block.items():
            if start == 0:
                _create(root, name, (count, *values.shape[1:]), values.dtype)
            # one by one: when one cannot be written, Zarr would still be writing others
            for i, value in enumerate(values, start):
                root[name][i] = value
        start += sizes.pop()
    if start < count:
        raise ValueError(
            f"{path} was given {start} of {count} samples; give blocks of all, or another count."
        )


def _words(block: Mapping[str, np.ndarray]) -> str:
    return ", ".join(f"{name} {values.shape} {values.dtype}" for name, values in block.items())


def _of_kinds(kinds: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> str:
    return ", ".join(
        f"{name} (samples, {str(s)[1:-1]}) {dtype}" for name, (s, dtype) in kinds.items()
    )


def _create(root: Any, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if dtype.kind not in "biufc":
        raise ValueError(f"{name} has values of {dtype}, which are no numbers; leave it out.")
    edges = [min(n, max(EDGE, -(-n // BLOCKS))) for n in shape[2:]]
    chunks = (1, *shape[1:2], *edges)
    if not hasattr(root, "create_array"):  # HDF5
        root.create_dataset(name, shape, dtype, chunks=chunks, fletcher32=True)
        return
    sample = (1, *shape[1:2], *(-(-n // e) * e for n, e in zip(shape[2:], edges, strict=True)))
    root.create_array(
        name,
        shape=shape,
        dtype=dtype,
        chunks=chunks,
        shards=sample,  # one file for each sample, of which single blocks are read
        compressors=optional("zarr.codecs", "a Zarr group", "zarr").Crc32cCodec(),
        fill_value=unset(dtype) if dtype.kind == "f" else 0,
        attributes={_ALL_STORED: True},
    )


@contextmanager
def _opened(path: Path, group: str) -> Generator[Any]:
    arrays = _open_fields(path, group)
    try:
        yield arrays
    finally:
        if path.suffix in HDF5:
            arrays.file.close()
