"""Hooks of mkdocs (see mkdocs.yml), which runs them; nobody else needs to.

The pages link to files of the repository, which the site does not hold. There the name remains.
"""

import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links that leave docs/ by their text."""
    depth = page.file.src_uri.count("/")

    def kept(match: re.Match[str]) -> str:
        leaves = match[2].count("../") > depth
        return match[1] if leaves else match[0]

    return LINK.sub(kept, markdown)
