"""Version of this package. `pyproject.toml` has the same value."""

__all__ = ["__version__"]

__version__ = "0.1.0"
