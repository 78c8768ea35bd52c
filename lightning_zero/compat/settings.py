"""Torch's settings, which are asked for again and again."""

from typing import Any

__all__ = ["ReadOnce"]


class ReadOnce:
    """A module of settings as it was when each was read first: reading one takes torch three calls, and code that makes
    guards reads 900 for each layer of GPT-2. For as long as nobody changes any."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._settings, name)
        setattr(self, name, value)  # found without this call from now on
        return value
