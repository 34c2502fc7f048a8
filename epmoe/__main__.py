"""`python -m epmoe`, also as `torchrun ... -m epmoe`: the command line."""

from epmoe.cli import app

app(prog_name="epmoe")
