"""Hook of MkDocs: puts Typer's own description of every command where a page holds the marker
below.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

MARKER = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with the marker replaced; the commands are imported for that page only."""
    return markdown.replace(MARKER, _commands()) if MARKER in markdown else markdown


def _commands() -> str:
    command = [sys.executable, "-m", "typer", "epmoe.cli", "utils", "docs", "--name", "epmoe"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # From the first command on: the page itself says what comes before.
    return text[text.index("## ") :]
