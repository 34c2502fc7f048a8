"""The command line, `epmoe` or `python -m epmoe`: one file per command."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from epmoe.build import BuildError
from epmoe.cli import bench, doctor, plan, run, schema
from epmoe.cli.console import UserError, fail
from epmoe.config import ConfigError
from epmoe.health import EPError


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """A user's mistake is one clean message and exit code 2; a failed exchange is exit code 1."""
        try:
            return super().invoke(ctx)
        except (ConfigError, UserError, BuildError) as error:
            raise fail(str(error), code=2) from None
        except EPError as error:
            raise fail(f"{type(error).__name__}: {error}", code=1, every_rank=True) from None


app = typer.Typer(
    cls=_Commands,
    name="epmoe",
    help="Expert-parallel dispatch and combine for Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (run.run, plan.plan, doctor.doctor, schema.schema, bench.bench):
    app.command()(command)
