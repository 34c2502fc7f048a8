"""Prints the rooms of the house with their lines and ceilings, those of CONTRIBUTING.md. Fails
above a ceiling.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".html", ".cpp", ".h", ".cu", ".cuh"}


def ceilings() -> dict[str, int]:
    """By the paths of a room."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \| ([\d,]+) \|", page, re.MULTILINE)
    return {paths.replace("`", ""): int(ceiling.replace(",", "")) for paths, ceiling in rows}


def lines_of(paths: str) -> int:
    found = [ROOT / path for path in paths.split(", ")]
    files = [file for path in found for file in ([path] if path.is_file() else path.rglob("*"))]
    return sum(
        len(file.read_text(encoding="utf-8").splitlines())
        for file in files
        if file.suffix in SUFFIXES
    )


def main() -> int:
    """The number of rooms above their ceilings."""
    above = 0
    for paths, ceiling in ceilings().items():
        lines = lines_of(paths)
        above += lines > ceiling
        print(
            f"{paths:<40} {lines:>7,} of {ceiling:>7,}{' is too much' if lines > ceiling else ''}"
        )
    return above


if __name__ == "__main__":
    sys.exit(main())
