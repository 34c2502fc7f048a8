"""This package: its version, its extras, and the sentence for an optional package that
is missing.
"""

from __future__ import annotations

__version__ = "0.1.0"  # the only place of the version: pyproject.toml reads it from here

EXTRAS = {
    "typer": "cli",
    "click": "cli",
    "rich": "cli",
    "jinja2": "cli",
    "matplotlib": "bench",
    "transformers": "hf",
    "safetensors": "hf",
}
"""Top-level module → the extra that installs it."""


def sentence(purpose: str, package: str) -> str:
    return f"{purpose} needs {package}: pip install 'epmoe[{EXTRAS[package]}]'"


def explain(error: ModuleNotFoundError) -> str | None:
    """The sentence for a failed import of an optional package; None for any other module."""
    package = (error.name or "").partition(".")[0]
    return sentence("this command", package) if package in EXTRAS else None
