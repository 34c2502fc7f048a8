"""The part of SGLang's integration that needs no SGLang: entry point, variable, the sentence if it
is missing.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import import_module

import pytest
from helpers import ROOT

from epmoe.integrations import sglang


def test_the_entry_point_names_the_plugin():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "sglang.srt.plugins"
    ]
    module, name = points["epmoe"].split(":")
    assert getattr(import_module(module), name) is sglang.register


@pytest.mark.parametrize("value", [None, "", "0"])
def test_does_nothing_unless_it_is_chosen(value, monkeypatch):
    monkeypatch.delitem(sys.modules, "epmoe.integrations.sglang.dispatcher", raising=False)
    monkeypatch.delenv("EPMOE_SGLANG", raising=False)
    if value is not None:
        monkeypatch.setenv("EPMOE_SGLANG", value)
    sglang.register()
    assert "epmoe.integrations.sglang.dispatcher" not in sys.modules


@pytest.mark.parametrize("value", ["yes", "[1]", '{"live": 1000}', '{"live": {}, "every": 10}'])
def test_an_unknown_value_is_an_error(value, monkeypatch):
    monkeypatch.setenv("EPMOE_SGLANG", value)
    with pytest.raises(
        ValueError,
        match=re.escape(f'must be 0, 1, layer or {{"live": {{"every": 1000}}}}, got {value!r}'),
    ):
        sglang.register()


def test_says_what_is_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, "epmoe.integrations.sglang.dispatcher", raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)  # as if it were not installed
    monkeypatch.setenv("EPMOE_SGLANG", "1")
    with pytest.raises(ImportError, match="epmoe.integrations.sglang needs SGLang 0.5.23"):
        sglang.register()
