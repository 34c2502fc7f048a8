"""Finds and reads files in YAML, TOML and JSON, reads variables of the environment, and puts errors
into words. `EPConfig` checks the values.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ENV_PREFIX = "EPMOE_"
_PACKAGE = Path(__file__).resolve().parents[1]
# Writes a value into a message, shortened, since the value may be as large as its file.
_REPR = reprlib.Repr()
_REPR.maxstring = 80
_REPR.maxother = 80
_REPR.maxlevel = 3


class Override(NamedTuple):
    """What a variable of the environment sets."""

    section: str
    key: str
    value: Any


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key and says what to set."""


_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)",
    "tag:yaml.org,2002:float": (
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
}
"""Patterns of numbers as people write them, by YAML's tags. They differ from those of YAML 1.1 in
three cases: there 1:04 is the number 64, 010 is the number 8, and 1e-20 is a text.
"""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader with two changes. It refuses a key that is given twice, of which plain
    YAML silently takes the last. And it reads numbers as `_NUMBERS` says.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Make the dict of a YAML mapping. Raises ConfigError for a key that is given twice."""
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                where = f"on line {seen[key.value]} and on line {line}"
                raise ConfigError(f"key `{key.value}` is given twice, {where}: keep one")
            seen[key.value] = line
        return super().construct_mapping(node, deep)


# Replace the patterns of YAML 1.1 for numbers by ours.
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in _NUMBERS]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), [*"-+.0123456789"])


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dict of a JSON object. Raises ConfigError for a key that is given twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        key = next(key for key, count in counts.items() if count > 1)
        raise ConfigError(f"key `{key}` is given twice: keep one")
    return result


_parse_yaml = partial(yaml.load, Loader=_Loader)
_parse_json = partial(json.loads, object_pairs_hook=_unique_pairs)
_PARSERS: dict[str, Callable[[str], object]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": tomllib.loads,
    ".json": _parse_json,
}


def ready_configs() -> dict[str, Path]:
    """The files of the configurations that come with epmoe, by name. An installed package has them
    in its own folder, a checkout of the repository in its root.
    """
    folders = [_PACKAGE / "configs"]
    # Only in a checkout there is a pyproject.toml beside the package. Elsewhere, a folder `configs`
    # beside the package belongs to somebody else.
    if (_PACKAGE.parent / "pyproject.toml").exists():
        folders.append(_PACKAGE.parent / "configs")
    for folder in folders:
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def find_config(name_or_path: str | Path) -> Path:
    """Find a configuration: an existing file, or else the configuration of this name that comes
    with epmoe, such as `cpu_demo`.

    A path that has a suffix or names a folder, but does not exist, is returned as it is: reading it
    then gives a clear error. Raises ConfigError for the folder of a checkpoint, and for any other
    name, with a list of the names that exist.
    """
    path = Path(name_or_path)
    ready = ready_configs()
    # An existing file comes before a configuration of the same name.
    if path.is_file():
        return path
    for name, file in ready.items():
        if str(path) in (name, file.name):
            return file
    # It is neither of them, so say what is wrong.
    if path.is_dir() and path.suffix.lower() not in _PARSERS:
        raise ConfigError(
            f"{path}: is a folder: give a file, or for a checkpoint `--nproc` (`EPConfig.from_hf`)"
        )
    if path.suffix or len(path.parts) > 1:
        return path
    raise ConfigError(
        f"{path}: is neither a file nor a ready configuration; there are "
        f"{', '.join(ready) or 'none'}"
    )


def read_config(
    path: str | Path, holds: str = "sections such as `model:` and `topology:`"
) -> dict[str, Any]:
    """Read the mapping in a .yaml, .yml, .toml or .json file. Raises ConfigError, which names the
    file.
    """
    path = Path(path)
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(
            f"{path}: a configuration must end in {', '.join(_PARSERS)}, got `{path.suffix}`"
        )
    try:
        # Errors of parsers do not name the file, so each is raised again with its path.
        data = parse(_text_of(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep") from None
    except (ValueError, yaml.YAMLError) as error:  # tomllib and json raise subclasses of ValueError
        raise ConfigError(
            f"{path}: is not valid {path.suffix[1:].upper()}: {_brief(error)}"
        ) from None
    if data is None:  # an empty file
        data = {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{path}: must hold {holds}, got {_REPR.repr(data)}")
    return data


def _text_of(path: Path) -> str:
    """Read a text file. Raises ConfigError, whose message the caller completes with the path."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError("no such configuration file") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        raise ConfigError(f"is not a text file in UTF-8: {byte}") from None


def _brief(error: Exception) -> str:
    """Say in one line where a mistake of a file is, and what it is. The errors of the parsers for
    YAML and JSON have these under different names.
    """
    # YAML's marks count lines from 0.
    line = getattr(error, "lineno", None)
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        line = mark.line + 1
    where = "" if line is None else f"line {line}: "
    text = (
        getattr(error, "problem", None)
        or getattr(error, "reason", None)
        or getattr(error, "msg", None)
        or error
    )
    return where + _short(" ".join(str(text).split()), 160)


def environment_overrides(
    environ: Mapping[str, str], sections: Mapping[str, Collection[str]]
) -> dict[str, Override]:
    """Read the variables `EPMOE_<SECTION>__<KEY>`, whose values are YAML. Returns what each
    variable sets, by the name of the variable.

    `sections` are all sections with their keys. Other variables that begin with `EPMOE_`, and have
    no double underscore, are no configuration. But a misspelt variable would silently do nothing.
    So it raises ConfigError for a variable that names an unknown section or key, that names a
    section alone, or that has one underscore in place of two.
    """
    overrides = {}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX):
            continue
        section, underscores, key = variable.removeprefix(ENV_PREFIX).lower().partition("__")
        where = f"environment variable {variable}"
        # Without a double underscore it sets no key. Refuse it if it looks as if it should.
        if not underscores:
            _check_means_nothing(variable, sections)
            continue
        # Check that the section and the key exist, and that the value is YAML.
        if section not in sections:
            raise ConfigError(f"{where}: no section `{section}`; there are {', '.join(sections)}")
        if key not in sections[section]:
            raise ConfigError(
                f"{where}: `{section}` has no key `{key}`, but {', '.join(sections[section])}"
            )
        try:
            value = _parse_yaml(environ[variable])
        except (ConfigError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{where}: is not a YAML value: {_brief(error)}") from None
        overrides[variable] = Override(section, key, value)
    return overrides


def _check_means_nothing(variable: str, sections: Mapping[str, Collection[str]]) -> None:
    """Raise ConfigError if a variable without a double underscore looks like an override."""
    name = variable.removeprefix(ENV_PREFIX).lower()
    where = f"environment variable {variable}"
    if name in sections:
        key = next(iter(sections[name]))
        raise ConfigError(
            f"{where}: has no effect, since it names a section; one of its keys is "
            f"{variable}__{key.upper()}"
        )
    meant = _closest_override(name, sections)
    if meant:
        raise ConfigError(f"{where}: has no effect; did you mean {meant}, with two underscores?")


def _closest_override(name: str, sections: Mapping[str, Collection[str]]) -> str | None:
    """The variable that the user probably meant by a name without a double underscore, or None. The
    name may be close to SECTION_KEY, or be the KEY alone.
    """
    overrides = {}
    by_key = {}
    for section, keys in sections.items():
        for key in keys:
            override = f"{section}__{key}"
            overrides[f"{section}_{key}"] = override
            by_key[key] = override
    close = difflib.get_close_matches(name, overrides, n=1, cutoff=0.9)
    meant = overrides[close[0]] if close else by_key.get(name)
    return ENV_PREFIX + meant.upper() if meant else None


def explain(item: Any, known: Sequence[str]) -> str:
    """Put one error of pydantic into the words of this package: the key with dots, what its value
    must be, and what it is. For an unknown key the message names a similar one out of `known`.
    """
    last = item["loc"][-1] if item["loc"] else None
    key = f"`{_dotted(item['loc'])}`"
    got = _REPR.repr(item["input"])
    match item["type"]:
        case "value_error":
            return str(item["ctx"]["error"])
        case "missing":
            return f"{key} must be set"
        case "extra_forbidden" | "invalid_key":
            close = difflib.get_close_matches(str(last), known, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"use {', '.join(known)}"
            return f"{key} is not a known key; {hint}"
        case "model_type":
            return f"{key} must be a mapping of keys, got {got}"
    return f"{key} {item['msg'].replace('Input should be', 'must be')}, got {got}"


def _dotted(places: Sequence[int | str]) -> str:
    """Write a key with dots between its parts, and with the index of a list in brackets."""
    dotted = ""
    for place in places:
        if isinstance(place, int):
            dotted += f"[{place}]"
        else:
            dotted += f".{_short(place)}"
    return dotted.lstrip(".")


def _short(text: str, max_length: int = 80) -> str:
    """Shorten a text to `max_length` characters, since a value may be as large as its file."""
    if len(text) <= max_length:
        return text
    return text[: max_length - 1] + "…"
