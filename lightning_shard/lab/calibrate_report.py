"""What `calibrate` measured, in words."""

from lightning_shard.lab.aligned import aligned
from lightning_shard.lab.machine import GB, Cluster, Device

DTYPES = ("float32", "bfloat16", "float16", "float64")


def words(found: Cluster) -> str:
    """Two short tables: rates of kernels, and what collectives take."""
    ranks = f"{found.devices} ranks" if found.devices > 1 else "1 rank"
    lines = [f"{ranks} of {found.device.name}, {found.device.source}", ""]
    lines += aligned([["10⁹ operations/s", *DTYPES], *_kernels(found.device)], numbers=True)
    sizes = found.device.bandwidths
    by_size = [
        ["bytes of a kernel", *(_bytes(size) for size, _ in sizes)],
        ["GB/s", *(f"{rate / GB:.3g}" for _, rate in sizes)],
    ]
    lines += ["", *aligned(by_size, numbers=True)]
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
    return aligned([["ms, of bytes sent", *map(_bytes, sizes)], *rows], numbers=True)


def _bytes(size: int) -> str:
    for name, unit in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= unit:
            return f"{size / unit:.0f} {name}"
    return f"{size} B"
