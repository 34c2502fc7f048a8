"""The command line, `epmoe` or `python -m epmoe`, with one file for each command. It needs the
extra `cli`.
"""

from __future__ import annotations

import errno
import json
import signal
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from epmoe.cli import balance, bench, doctor, plan, run
from epmoe.cli.console import (
    SEE_TRACEBACK,
    UserError,
    fail,
    launched_rank,
    message_file,
    quiet_exit,
)
from epmoe.config.config import ConfigError, EPConfig
from epmoe.group.errors import EPError, named_ranks
from epmoe.native.build import BuildError
from epmoe.native.package import __version__, explain


def _without_types_of_flags(parameters: list[Any]) -> list[Any]:
    """Return the parameters of a command, without the type of flags: flags take no value, so the
    help must not show one.
    """
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


class _Commands(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments as they were typed: a command that starts ranks gives them the same
        arguments.
        """
        ctx.meta["epmoe.arguments"] = list(args)
        return super().parse_args(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line. If several ranks fail with the same mistake of the user, only rank
        0 prints it.
        """
        if not launched_rank():
            return super().main(*args, **kwargs)
        try:
            raise SystemExit(super().main(*args, **kwargs | {"standalone_mode": False}))
        except Exception as error:
            # An error with an exit code is click's, which refuses what was typed.
            code = getattr(error, "exit_code", None)
            if code:
                raise SystemExit(code) from None
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run a command, and turn its exceptions into one message and an exit code: 2 for mistakes
        of the user, 1 for failures of the exchange and of the system.
        """
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
            raise fail(
                f"{type(error).__name__}: {error}",
                code=1,
                every_rank=True,
                because_of=named_ranks(error),
            ) from None
        except OSError as error:
            # A broken pipe means that nobody reads the output any more. Typer then ends quietly.
            if error.errno == errno.EPIPE:
                raise
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise fail(what, code=1) from None
        except SystemExit:  # from rich: the reader of the output has gone
            raise quiet_exit() from None
        except KeyboardInterrupt:
            raise typer.Exit(128 + signal.SIGINT) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            # click handles its own errors. Any other error is a bug, and its traceback helps. Only
            # a rank that `epmoe` has started leaves a message instead.
            if message_file() is None or hasattr(error, "exit_code"):
                raise
            text = f"{type(error).__name__}: {error}"[:1000]
            raise fail(text + SEE_TRACEBACK, code=1, every_rank=True) from None


app = typer.Typer(cls=_Commands, name="epmoe", no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(is_wanted: bool) -> None:
    """Print the version and exit, if the user has typed `--version`."""
    if is_wanted:
        typer.echo(f"epmoe {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Expert-parallel dispatch and combine for Mixture-of-Experts models."""


def schema() -> None:
    """Print the JSON schema of a configuration file, for editors and validators."""
    typer.echo(json.dumps(EPConfig.model_json_schema(), indent=2))


for command in (run.run, plan.plan, balance.balance, doctor.doctor, schema, bench.bench):
    app.command(cls=_Command)(command)
