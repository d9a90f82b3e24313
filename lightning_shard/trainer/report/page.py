"""Writes HTML that stands alone: pictures are inside, nothing is loaded, no script runs.

Everything that comes from a run is escaped here, and the page forbids its browser to load anything.
"""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

PICTURES_BYTES = 1_300_000  # as files; in the page they take a third more, so it stays below 2 MB
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #ccc; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
table { display: block; overflow-x: auto; border-collapse: collapse; margin: .5rem 0;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .15rem .8rem; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
table.words td { text-align: left; overflow-wrap: anywhere; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; font-size: 12px; white-space: pre-wrap;
  overflow-wrap: anywhere; }
figure { margin: 1rem 0; break-inside: avoid; }
img, svg { max-width: 100%; height: auto; }
svg { display: block; width: 100%; break-inside: avoid; }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr));
  gap: 1rem; }
figcaption { font-size: .85rem; color: #555; }
@media print { main { max-width: none; padding: 0; } pre { background: none; } }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(title: str, lead: str, sections: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Put a page together.

    Args:
        title: The heading.
        lead: The sentence below it.
        sections: A heading and elements of HTML for each; those without elements are left out.
    """
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
        f"<h1>{escape(title)}</h1>",
        paragraph(lead),
    ]
    for heading, elements in sections:
        if shown := [element for element in elements if element]:
            parts += [f"<section>\n<h2>{escape(heading)}</h2>", *shown, "</section>"]
    return "\n".join([*parts, "</main>\n</body>\n</html>\n"])


def paragraph(text: str) -> str:
    """Make a paragraph of a sentence."""
    return f"<p>{escape(text)}</p>"


def literal(text: str) -> str:
    """Show text as it is, such as a file."""
    return f"<pre>{escape(text)}</pre>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, words: bool = False) -> str:
    """Make a table; numbers have four digits.

    Args:
        head: The titles of the columns, if they need any.
        rows: The cells, of which the first names the row.
        words: True if the cells hold words, which are aligned left.
    """
    if not (cells := [[_cell(value) for value in row] for row in rows]):
        return ""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = [f'<table class="{"words" if words else "numbers"}">']
    lines += [f"<tr>{titles}</tr>"] if head else []
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells]
    return "\n".join([*lines, "</table>"])


def _cell(value: object) -> str:
    return escape(f"{value:#.4g}" if isinstance(value, float) else str(value))


def side_by_side(elements: Iterable[str]) -> str:
    """Put elements beside each other, as many as a line has room for; leave out empty ones."""
    shown = [element for element in elements if element]
    return "\n".join(['<div class="row">', *shown, "</div>"]) if shown else ""


def figure(element: str, caption: str) -> str:
    """Put a sentence below a picture."""
    return f"<figure>\n{element}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"


def pictures(folder: Path, since: float) -> list[str]:
    """Embed the pictures of a folder; where they are too large together, the newest of them.

    Args:
        folder: The folder of the `.png` files; the newest come first.
        since: The time at which the run began; older files belong to another run.
    """
    found = [(path.stat().st_mtime, path) for path in folder.glob("*.png")]
    newest = sorted(((time, path) for time, path in found if time >= since), reverse=True)
    chosen: list[Path] = []
    left_out: list[str] = []
    room = PICTURES_BYTES
    for _, path in newest:
        if path.stat().st_size <= room:
            room -= path.stat().st_size
            chosen.append(path)
        else:
            left_out.append(path.name)
    shown = [figure(_inlined(path), path.name) for path in chosen]
    if left_out:
        names = ", ".join(sorted(left_out))
        shown.append(paragraph(f"Left out, to keep this page small: {names}, in {folder}."))
    return shown


def _inlined(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'
