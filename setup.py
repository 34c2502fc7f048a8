"""Adds `csrc` to the package, and builds the native library if torch is there (`pip install --no-build-isolation .`).

Without torch, epmoe builds the library at first use. All other settings are in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
AHEAD_OF_TIME = importlib.util.find_spec("torch") is not None


def load_builder() -> ModuleType:
    """epmoe/build.py alone: importing the package would need all its dependencies."""
    spec = importlib.util.spec_from_file_location("epmoe_build", ROOT / "epmoe" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildPy(build_py):
    """Adds the native sources and library to a wheel. An editable install builds from the checkout at first use."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "epmoe"
        shutil.copytree(ROOT / "csrc", package / "csrc", dirs_exist_ok=True)
        if AHEAD_OF_TIME:
            temporary = Path(self.get_finalized_command("build").build_temp)
            library = load_builder().build(temporary.resolve(), portable=True)
            (package / "_native").mkdir(exist_ok=True)
            shutil.copy(library, package / "_native" / "libepmoe.so")


class PlatformDistribution(Distribution):
    """Gives a wheel that holds the native library the tag of its platform."""

    def has_ext_modules(self) -> bool:
        return AHEAD_OF_TIME


setup(cmdclass={"build_py": BuildPy}, distclass=PlatformDistribution)
