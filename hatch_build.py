"""Adds the addresses that only the place of publication knows to what an index shows.

A workflow of GitHub is told its repository. There the links of README.md become whole, since they
are dead on an index. Elsewhere, as in an editable install, nothing is known, and nothing is added.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?://|#)([^)\s]+)\)")


class Addresses(MetadataHookInterface):
    """Sets `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both to the metadata."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        if repository := os.environ.get("GITHUB_REPOSITORY"):
            home = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
            text = with_whole_links(text, home, os.environ.get("GITHUB_REF_NAME", "main"))
            owner, _, name = repository.partition("/")
            metadata["urls"] = {
                "Documentation": f"https://{owner}.github.io/{name}/",
                "Repository": home,
                "Changelog": f"{home}/blob/main/CHANGELOG.md",
                "Issues": f"{home}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_whole_links(text: str, home: str, ref: str) -> str:
    """Put the address of the repository before the links and pictures of a page."""

    def whole(link: re.Match[str]) -> str:
        mark, words, path = link.groups()
        return f"{mark}[{words}]({home}/{'raw' if mark else 'blob'}/{ref}/{path})"

    return LINK.sub(whole, text)
