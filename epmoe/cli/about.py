"""What was run, where, when and with which versions. No path outside the working directory is repeated."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any

from epmoe.bench import facts
from epmoe.cli.console import human_bytes, human_seconds


@dataclass(frozen=True)
class About:
    """A run, in words."""

    command: str
    configuration: str
    started: str
    took: str
    machine: str
    cores: int
    versions: dict[str, str]

    @classmethod
    def of_this_process(cls, configuration: Path, started: datetime) -> About:
        """The run of this process, from `started`, which has a time zone, until now."""
        found = facts.machine()
        return cls(
            command=command(sys.argv[1:]),
            configuration=without_folder(str(configuration)),
            started=f"{started:%d %B %Y, %H:%M %Z}".lstrip("0"),
            took=human_seconds((datetime.now().astimezone() - started).total_seconds()),
            machine=machine(found),
            cores=found["cores"],
            versions=versions(),
        )


def command(arguments: Sequence[str]) -> str:
    """What to type for this run: variables that override the configuration, `epmoe`, `arguments`."""
    overrides = {key: value for key, value in os.environ.items() if key.startswith("EPMOE_") and "__" in key}
    settings = [f"{key}={shlex.quote(without_folder(value))}" for key, value in sorted(overrides.items())]
    words = [option + equals + without_folder(value) for option, equals, value in map(_split, arguments)]
    return " ".join([*settings, "epmoe", *map(shlex.quote, words)])


def without_folder(word: str) -> str:
    """`word`; if it is a path outside the working directory, its last part alone."""
    path = PurePath(word)
    return path.name if path.is_absolute() or path.parts[:1] in (("..",), ("~",)) else word


def machine(found: dict[str, Any]) -> str:
    """What `facts.machine` has found, in words: processor, cores that this process may use, memory, GPUs and system."""
    cores, gpus = found["cores"], found["gpus"]
    parts = [found["cpu"], f"{cores} core{'s' * (cores != 1)}", f"{human_bytes(found['memory_bytes'])} memory"]
    parts += [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)]
    return " · ".join([*parts, f"{platform.system()} {platform.machine()}"])


def versions() -> dict[str, str]:
    """Versions of epmoe (with the commit of a checkout), Python, torch, and of what else is there."""
    found = {name: version for name, version in facts.versions().items() if version}
    if commit := facts.commit():
        short, _, dirty = commit.partition("-")
        found["epmoe"] += f" at {short[:9]}{' with changes' if dirty else ''}"
    try:
        return found | {"transformers": importlib.metadata.version("transformers")}
    except importlib.metadata.PackageNotFoundError:
        return found


def _split(argument: str) -> tuple[str, str, str]:
    """`--option=value` → its parts, any other word → ("", "", word)."""
    option, equals, value = argument.partition("=")
    return (option, equals, value) if equals and option.startswith("-") else ("", "", argument)
