"""Adds `csrc`, `configs` and, if torch is there, the native library to the package.

Torch is there with `pip install --no-build-isolation .` and with `make wheel`. Without it, epmoe
builds the library at first use. All other settings are in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
AHEAD_OF_TIME = importlib.util.find_spec("torch") is not None


def load_builder() -> ModuleType:
    """epmoe/native/build.py alone: importing the package would need all its dependencies."""
    spec = importlib.util.spec_from_file_location(
        "epmoe_build", ROOT / "epmoe" / "native" / "build.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class BuildPy(build_py):
    """Completes the package of a wheel. An editable install finds everything in the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "epmoe"
        for folder in ("csrc", "configs"):
            shutil.copytree(ROOT / folder, package / folder, dirs_exist_ok=True)
        if AHEAD_OF_TIME:
            builder = load_builder()
            library = builder.build(portable=True)
            native = package / "_native"
            shutil.rmtree(native, ignore_errors=True)  # of an earlier build, perhaps with CUDA
            native.mkdir()
            for path in library.parent.glob("*.so"):
                shutil.copy(path, native)


class BdistWheel(bdist_wheel):
    """Tags a wheel with the native library by its platform alone: the library does not call
    Python's C interface.
    """

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class PlatformDistribution(Distribution):
    """Gives a wheel that holds the native library the tag of its platform."""

    def has_ext_modules(self) -> bool:
        return AHEAD_OF_TIME


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel}, distclass=PlatformDistribution)
