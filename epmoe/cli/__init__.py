"""The command line, `epmoe` or `python -m epmoe`: one file per command. It needs the `cli` extra."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from epmoe import __version__
from epmoe.build import BuildError
from epmoe.cli import bench, doctor, plan, run, schema
from epmoe.cli.console import UserError, fail
from epmoe.config import ConfigError
from epmoe.extras import explain
from epmoe.health import EPError


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command. A user's mistake is one message and exit code 2; a failed exchange is exit code 1."""
        try:
            return super().invoke(ctx)
        except (ConfigError, UserError, BuildError) as error:
            raise fail(str(error), code=2) from None
        except ModuleNotFoundError as error:
            message = explain(error)
            if message is None:
                raise
            raise fail(message, code=2) from None
        except EPError as error:
            raise fail(f"{type(error).__name__}: {error}", code=1, every_rank=True) from None


app = typer.Typer(
    cls=_Commands,
    name="epmoe",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"epmoe {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Expert-parallel dispatch and combine for Mixture-of-Experts models."""


for command in (run.run, plan.plan, doctor.doctor, schema.schema, bench.bench):
    app.command()(command)
