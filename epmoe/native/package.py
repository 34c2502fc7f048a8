"""The version of this package, its extras, and the text for an extra that is missing."""

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
"""The extra of epmoe that installs a package, by the package's top-level module."""


def sentence(purpose: str, package: str) -> str:
    """Tell the user how to install a package that is needed for `purpose`."""
    return f"{purpose} needs {package}: pip install 'epmoe[{EXTRAS[package]}]'"


def explain(error: ModuleNotFoundError) -> str | None:
    """Tell the user how to install an optional package whose import has failed. None if the module
    is not one of an extra.
    """
    package = (error.name or "").partition(".")[0]
    return sentence("this command", package) if package in EXTRAS else None
