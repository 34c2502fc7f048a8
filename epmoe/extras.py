"""Optional packages: the extra of epmoe that installs each one, and the sentence for one that is missing."""

from __future__ import annotations

EXTRAS = {
    "typer": "cli", "click": "cli", "rich": "cli", "jinja2": "cli", "matplotlib": "bench", "transformers": "hf",
    "safetensors": "hf",
}  # fmt: skip
"""Top-level module → the extra that installs it."""


def sentence(purpose: str, package: str) -> str:
    """What to tell a user: `purpose` needs `package`, and the command that installs it."""
    return f"{purpose} needs {package}: pip install 'epmoe[{EXTRAS[package]}]'"


def explain(error: ModuleNotFoundError) -> str | None:
    """The sentence for a failed import of an optional package; None for any other module."""
    package = (error.name or "").partition(".")[0]
    return sentence("this command", package) if package in EXTRAS else None
