"""Names the packages; everything else about the build is in pyproject.toml.

The C++ sources live beside the package in the repository but travel inside it in a wheel. A list in pyproject.toml is
either searched for or written out, and a search cannot find a package under another name than its folder's.
"""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["lightning_zero", "lightning_zero.*"]), "lightning_zero.csrc"])
