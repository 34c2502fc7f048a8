"""`epmoe schema`: the JSON schema of a configuration, for editors and validators."""

from __future__ import annotations

import json

import typer

from epmoe.config.config import EPConfig


def schema() -> None:
    """Print the JSON schema of a configuration file."""
    typer.echo(json.dumps(EPConfig.model_json_schema(), indent=2))
