"""The part of FlashInfer's integration that needs no FlashInfer: the sentence if it is missing."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest


def test_says_what_is_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, "epmoe.integrations.flashinfer", raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as if it were not installed
    with pytest.raises(ImportError, match="epmoe.integrations.flashinfer needs FlashInfer 0.7.4"):
        import_module("epmoe.integrations.flashinfer")
