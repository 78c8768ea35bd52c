"""Version of this package. `pyproject.toml` has the same value."""

__version__ = "0.1.0"
