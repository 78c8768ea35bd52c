"""Name the packages, and put a built executor into the wheel on request; pyproject.toml has the rest of the build.

The C++ sources are next to the package in the repository, and inside it in a wheel. pyproject.toml can list packages or
search for them, and a search does not find a package under another name than its folder's.

``python -m lightning_zero build --wheel`` sets LIGHTNING_ZERO_PREBUILT to a folder with the executor and its key.
Without that variable the wheel is pure Python, and the executor is built at first use.
"""

import os
import shutil
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PREBUILT = os.environ.get("LIGHTNING_ZERO_PREBUILT")


class BuildWithExecutor(build_py):
    """Copies the executor and its key into the package."""

    def run(self) -> None:
        super().run()
        target = Path(self.build_lib) / "lightning_zero" / "native" / "prebuilt_executor"
        shutil.rmtree(target, ignore_errors=True)
        if PREBUILT:
            shutil.copytree(PREBUILT, target)


class PlatformDistribution(Distribution):
    """Counts as compiled with an executor, so that the wheel is for this platform alone."""

    def has_ext_modules(self) -> bool:
        return bool(PREBUILT)


class PlatformWheel(bdist_wheel):
    """Tags a wheel with an executor for any Python: the executor uses torch's C++ interfaces and none of Python's."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if PREBUILT else (python, abi, platform)


setup(
    packages=[*find_packages(include=["lightning_zero", "lightning_zero.*"]), "lightning_zero.csrc"],
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithExecutor, "bdist_wheel": PlatformWheel},
)
