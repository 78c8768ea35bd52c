"""A table of wrong uses: functions that make a mistake, and the words of their errors."""

import re
from collections.abc import Callable
from typing import Any


class WrongUses(dict[str, tuple[Callable[[], Any], str]]):
    """By the function's name: the function, and a pattern for the start of "type: message"."""

    def __call__(self, words: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        """The function makes a mistake; its error must match ``words``.

        The type, the fault, the place, and the solution.
        """

        def register(function: Callable[[], Any]) -> Callable[[], Any]:
            self[function.__name__] = (function, words)
            return function

        return register

    def messages(self) -> dict[str, str]:
        """Return the outcomes of all, run one after the other."""
        found = {}
        for name, (function, _) in self.items():
            try:
                function()
                found[name] = "nothing was raised"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        return found

    def check(self, name: str, found: dict[str, str]) -> None:
        assert re.search("^" + self[name][1], found[name]), found[name]
