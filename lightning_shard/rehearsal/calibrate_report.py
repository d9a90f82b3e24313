"""What `calibrate` measured, in words."""

from collections.abc import Sequence

from lightning_shard.rehearsal.machine import GB, Cluster, Device

DTYPES = ("float32", "bfloat16", "float16", "float64")


def words(found: Cluster) -> str:
    """Two short tables: rates of kernels, and what collectives take."""
    ranks = f"{found.devices} ranks" if found.devices > 1 else "1 rank"
    lines = [f"{ranks} of {found.device.name}, {found.device.source}", ""]
    lines += _table(["10⁹ operations/s", *DTYPES], _kernels(found.device))
    sizes = found.device.bandwidths
    lines += ["", *_table(
        ["bytes of a kernel", *(_bytes(size) for size, _ in sizes)],
        [["GB/s", *(f"{rate / GB:.3g}" for _, rate in sizes)]],
    )]  # fmt: skip
    lines += ["", f"A kernel takes {found.device.per_call * 1e6:.3g} µs at least."]
    if found.collectives:
        lines += ["", *_collectives(found)]
    return "\n".join(lines)


def _kernels(device: Device) -> list[list[str]]:
    rates = {"product of matrices": device.flops} | device.kernels
    return [
        [name.replace("_", " "), *(f"{of[d] / GB:.3g}" if d in of else "" for d in DTYPES)]
        for name, of in rates.items()
    ]


def _collectives(found: Cluster) -> list[str]:
    sizes = [size for size, *_ in found.collectives[0][2]]
    rows = [
        [f"{name.removesuffix('_single')} of {ranks}",
         *(f"{1e3 * (busy + link):.3g}" for _, busy, link in costs)]
        for name, ranks, costs in found.collectives
    ]  # fmt: skip
    return _table(["ms, of bytes sent", *map(_bytes, sizes)], rows)


def _bytes(size: int) -> str:
    for name, unit in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= unit:
            return f"{size / unit:.0f} {name}"
    return f"{size} B"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
