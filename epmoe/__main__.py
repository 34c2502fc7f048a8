"""The command line: `epmoe`, `python -m epmoe` and `torchrun ... -m epmoe`."""

from __future__ import annotations

import os
import sys

from epmoe.native.package import explain


def main() -> None:
    """Run the command line. Without the `cli` extra, print one sentence that names it and exit with
    code 2.
    """
    try:
        from epmoe.cli import app
    except ModuleNotFoundError as error:
        message = explain(error)
        if message is None:
            raise
        if os.environ.get("RANK", "0") == "0":  # under torchrun, only one rank prints
            print(f"epmoe: {message}", file=sys.stderr)
        sys.exit(2)
    app(prog_name="epmoe")


if __name__ == "__main__":
    main()
