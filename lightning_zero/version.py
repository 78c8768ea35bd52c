"""This package's version, which `pyproject.toml` tells, too."""

__all__ = ["__version__"]

__version__ = "0.1.0"
