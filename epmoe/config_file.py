"""Reads YAML, TOML, JSON and the environment; `EPConfig` checks the values."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

ENV_PREFIX = "EPMOE_"


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key and says what to set."""


class _Loader(yaml.SafeLoader):
    """The safe loader, made to refuse a key given twice; plain YAML silently keeps the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in seen:
                    where = f"on line {seen[key.value]} and on line {line}"
                    raise ConfigError(f"key `{key.value}` is given twice, {where}: keep one")
                seen[key.value] = line
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of the safe loader


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ConfigError(f"key `{key}` is given twice: keep one")
        result[key] = value
    return result


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique_pairs)


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": tomllib.loads,
    ".json": _parse_json,
}


def read_config(path: str | Path, holds: str = "sections such as `model:` and `topology:`") -> dict[str, Any]:
    """The mapping in a .yaml, .yml, .toml or .json file. Raises ConfigError naming the file."""
    path = Path(path)
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(f"{path}: a configuration must end in {', '.join(_PARSERS)}, got `{path.suffix}`")
    try:
        data = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, yaml.YAMLError) as error:  # tomllib and json raise subclasses of ValueError
        raise ConfigError(f"{path}: is not valid {path.suffix[1:].upper()}: {error}") from None
    data = {} if data is None else data
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{path}: must hold {holds}, got {data!r:.80}")
    return data


def environment_overrides(
    environ: Mapping[str, str], sections: Mapping[str, Collection[str]]
) -> dict[str, tuple[str, str, Any]]:
    """Variables `EPMOE_<SECTION>__<KEY>` as {variable: (section, key, value)}, values in YAML.

    Variables without the double underscore are not configuration. A variable that names no key of `sections` is an
    error, because a misspelt override would silently do nothing.
    """
    overrides = {}
    for variable in sorted(environ):
        section, found, key = variable.removeprefix(ENV_PREFIX).lower().partition("__")
        if not variable.startswith(ENV_PREFIX) or not found:
            continue
        where = f"environment variable {variable}"
        if section not in sections:
            raise ConfigError(f"{where}: no section `{section}`; there are {', '.join(sections)}")
        if key not in sections[section]:
            raise ConfigError(f"{where}: `{section}` has no key `{key}`, but {', '.join(sections[section])}")
        try:
            overrides[variable] = (section, key, _parse_yaml(environ[variable]))
        except (ConfigError, yaml.YAMLError) as error:
            raise ConfigError(f"{where}: is not a YAML value: {error}") from None
    return overrides
