"""What `best` found in words, as a picture, and as a config for `fit`."""

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import yaml

from lightning_shard.lab.aligned import aligned
from lightning_shard.lab.best import Candidate, Ranking

NAME = "plan"
SHOWN = 12
GIB = 2**30
ROW, LEFT, WIDE, MIDDLE = 22, 210, 300, 60  # of the picture
COLORS = {"compute": "#1f5fa8", "exchange": "#c8541a", "parameters_traffic": "#8c6d1f"}
WORDS = {
    "compute": "compute", "exchange": "exchange of fields",
    "parameters_traffic": "traffic of parameters",
}  # fmt: skip
NOTHING_FITS = "Nothing fits: take smaller fields or batches, or more devices."
NOT_YET = "Nothing that was tried fits, and there was no time for the rest: let nothing else run."
HEAD = ("mesh", "sharding", "activations", "s/step", "samples/s", "GiB", "limited by", "cost/epoch")


def words(found: Ranking) -> str:
    """A table of the fastest settings, and what else is worth knowing."""
    ranked = found.candidates[:SHOWN]
    lines = [f"{found.cluster.devices} devices: {found.cluster}", ""]
    lines += aligned([HEAD, *(_row(found, each) for each in ranked)])
    if not ranked:
        lines[2:] = [NOT_YET if found.not_tried else NOTHING_FITS]
    if found.cluster.price is None and ranked:
        lines.append("cost/epoch needs --price, of one device for an hour.")
    if largest := found.largest:
        candidate, extents = largest
        setting = candidate.setting
        lines.append(
            f"The largest field that fits: about {_by(extents)} instead of {_by(found.extents)}, "
            f"on {_by(setting.mesh)} with activations {setting.kept}."
        )
    if meshes := dict.fromkeys(each.setting.mesh for each in found.too_large):
        fits = {each.setting.mesh for each in found.candidates}
        if names := [_by(mesh) for mesh in meshes if mesh not in fits]:
            lines.append(f"Does not fit into {_gib(found)} GiB: {', '.join(names)}.")
    lines += [f"{_by(mesh)} cannot train it: {why}" for mesh, why in found.refused.items()]
    if found.slower:
        names = ", ".join(map(_by, found.slower))
        lines.append(f"Cannot be faster, even without any exchange: {names}.")
    if found.not_tried:
        lines.append(f"No time was left for {', '.join(map(_by, found.not_tried))}.")
    return "\n".join(lines)


def _row(found: Ranking, each: Candidate) -> tuple[str, ...]:
    cost = found.cost_of_epoch(each)
    return (
        _by(each.setting.mesh),
        each.setting.sharding,
        each.setting.kept,
        f"{each.forecast.seconds:.3g}",
        f"{each.rate:.3g}",
        f"{each.forecast.memory / GIB:.1f}",
        each.limit,
        "" if cost is None else f"{cost:,.2f}" if cost >= 1 else f"{cost:.2g}",
    )


def _by(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def _gib(found: Ranking) -> str:
    return f"{found.cluster.device.memory / GIB:.1f}"


def overlay(found: Ranking) -> str:
    """A config with the fastest setting, to be given to `fit` after the run's own.

    Raises:
        ValueError: Nothing fits.
    """
    if not found.candidates:
        raise ValueError("no setting fits into the memory of a device; there is nothing to write.")
    best = found.candidates[0]
    setting, cluster = best.setting, found.cluster
    domain = list(setting.mesh[1:])
    sharding: dict[str, Any] = {"mode": setting.sharding}
    if setting.activation_checkpointing:
        sharding["activation_checkpointing"] = True
    if setting.activation_offload:
        sharding["activation_offload"] = True
    arguments = {
        "data_parallel_size": setting.mesh[0],
        "domain_parallel_size": domain if len(domain) > 1 else domain[0],
        "sharding": sharding,
    }
    strategy = {"class_path": "lightning_shard.HybridShardStrategy", "init_args": arguments}
    trainer = {"devices": cluster.per_node, "num_nodes": cluster.nodes, "strategy": strategy}
    head = (
        f"# Written by plan --best for {cluster}:\n"
        f"# {best.rate:.3g} samples/s predicted, limited by {best.limit}.\n"
    )
    return head + yaml.safe_dump({"trainer": trainer}, sort_keys=False, default_flow_style=None)


def picture(found: Ranking) -> str:
    """Time and memory of the fastest settings of each mesh as bars, as SVG."""
    first = {each.setting.mesh: each for each in reversed(found.too_large + found.candidates[::-1])}
    shown = sorted(first.values(), key=lambda c: (not c.fits, -c.rate))[:SHOWN]
    height = ROW * (len(shown) + 3)
    second = LEFT + WIDE + MIDDLE
    body: list[str] = []
    slowest = max((c.forecast.seconds / c.forecast.samples for c in shown), default=1.0)
    capacity = found.cluster.device.memory
    most = max((capacity * 1.1, *(c.forecast.memory for c in shown)))
    for place, each in enumerate(shown):
        y = ROW * (place + 2)
        name = f"{_by(each.setting.mesh)} {each.setting.kept}"
        body.append(_text(LEFT - 8, y + 14, name, "end"))
        body += _bars(each, y, WIDE / slowest / each.forecast.samples)
        memory = WIDE * each.forecast.memory / most
        color = "#2d7f4f" if each.fits else "#999999"
        body.append(f'<rect x="{second}" y="{y}" width="{memory:.1f}" height="16" fill="{color}"/>')
    edge = second + WIDE * capacity / most
    body.append(f'<path d="M{edge:.1f} {ROW}V{height - ROW}" stroke="#c00"/>')
    body.append(_text(LEFT, 14, f"seconds of a sample, the longest {slowest:.3g}"))
    body.append(_text(second, 14, f"memory; the line is {_gib(found)} GiB"))
    for place, (cause, color) in enumerate(COLORS.items()):
        x = LEFT + 150 * place
        body.append(f'<rect x="{x}" y="{height - 16}" width="10" height="10" fill="{color}"/>')
        body.append(_text(x + 14, height - 7, WORDS[cause]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {second + WIDE + 10} {height}">'
        "<style>svg { background: white; font: 12px sans-serif }</style>\n"
        + "\n".join(body) + "\n</svg>\n"
    )  # fmt: skip


def _bars(each: Candidate, y: int, scale: float) -> list[str]:
    found, x = [], float(LEFT)
    for cause, color in COLORS.items():
        width = getattr(each.forecast, cause) * scale
        found.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="16" fill="{color}"/>')
        x += width
    return found


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def save(found: Ranking, folder: str | Path) -> Path:
    """Write `plan.txt`, `plan.svg` and the overlay `plan.yaml`, where anything fits, to a folder.

    Returns:
        The overlay, or the folder where nothing fits.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{NAME}.txt").write_text(f"{words(found)}\n", encoding="utf-8")
    (path / f"{NAME}.svg").write_text(picture(found), encoding="utf-8")
    if not found.candidates:
        return path
    (path / f"{NAME}.yaml").write_text(overlay(found), encoding="utf-8")
    return path / f"{NAME}.yaml"
