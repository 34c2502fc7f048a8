"""Hooks of MkDocs: Typer's own description of every command where a page holds the marker below,
and links to tests, which are files of the repository and no pages of the site, as their names.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

MARKER = "<!-- commands -->"
LINK_TO_TEST = re.compile(r'\[(\w+)\]\(\.\./(tests/[^ )]+) "(\w+)"\)')


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page as the site shows it. The commands are imported for their page only."""
    if MARKER in markdown:
        markdown = markdown.replace(MARKER, _commands())
    return LINK_TO_TEST.sub(r'<abbr title="\2::\3">\1</abbr>', markdown)


def _commands() -> str:
    command = [sys.executable, "-m", "typer", "epmoe.cli", "utils", "docs", "--name", "epmoe"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # From the first command on: the page itself says what comes before.
    return text[text.index("## ") :]
