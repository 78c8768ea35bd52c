"""Functions of torch that this package replaces while it compiles, and when a replacement is left out.

Each context manager that replaces functions of torch is decorated with a :class:`Patch`, which names them with the
parameters that are known. Where this torch lacks one of them, or one takes other parameters, the context manager does
nothing, and one line says so. Compilation is slower then; its results are the same.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec

import torch

from lightning_zero.compat.lookup import ABSENT, find
from lightning_zero.compat.versions import is_newer

__all__ = ["PATCHES", "Patch", "counted", "required_but_absent", "swap_attribute"]

log = logging.getLogger("lightning_zero.compat")

P = ParamSpec("P")
_NEWER = is_newer(str(torch.__version__))


class swap_attribute:
    """Set an attribute of an object, and set it back on exit. A tenth of the time of ``unittest.mock.patch.object``.

    The owner must be a module or a class, or an object that has the attribute itself.
    """

    __slots__ = ("_before", "_name", "_new", "_owner")

    def __init__(self, owner: Any, name: str, new: Any) -> None:
        self._owner, self._name, self._new = owner, name, new

    def __enter__(self) -> None:
        own = vars(self._owner)
        # Not getattr: a static method of a class would come back as a plain function.
        self._before = own.get(self._name, _INHERITED)
        setattr(self._owner, self._name, self._new)

    def __exit__(self, *_: object) -> None:
        if self._before is _INHERITED:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


_INHERITED = object()


class Patch:
    """A feature that replaces functions of torch.

    Args:
        feature: what compilation loses without it, for users.
        names: dotted names of what is replaced, each with the parameters that it may have, as text
            (``"self, tx, name"``, of several versions), or with None where it takes none.
        needs: dotted names of other private names that the feature alone uses.

    Attributes:
        reason: why the feature is left out with this torch; empty if it is used.
    """

    counter: Counter[str] | None = None  # of calls of replaced functions, while they are counted

    def __init__(
        self, feature: str, names: Mapping[str, str | tuple[str, ...] | None], needs: Sequence[str] = ()
    ) -> None:
        self.feature, self.names, self.needs = feature, dict(names), tuple(needs)
        self._plain: dict[str, Any] = {}
        self._said = False
        self.reason = next(filter(None, map(self._trouble_with, [*names, *needs])), "")
        PATCHES.append(self)

    def __call__(self, function: Callable[P, AbstractContextManager[Any]]) -> Callable[P, AbstractContextManager[Any]]:
        """Decorate a context manager that replaces these functions."""

        @wraps(function)
        def enter(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[Any]:
            if self.reason:
                self.say()
                return nullcontext()
            manager = function(*args, **kwargs)
            if _NEWER:
                manager = _Tried(manager, self)
            return manager if Patch.counter is None else self._counted(manager, Patch.counter)

        return enter

    def disable(self, reason: str) -> None:
        """Leave the feature out from now on."""
        self.reason = reason
        self.say()

    def say(self) -> None:
        """Log once that the feature is left out."""
        if not self._said:
            self._said = True
            log.warning("Left out with torch %s: %s (%s).", torch.__version__, self.feature, self.reason)

    def _trouble_with(self, name: str) -> str:
        try:
            found = self._plain[name] = find(name)
        except LookupError:
            return f"it has no {name}"
        known = self.names.get(name)
        if known is None:
            return ""
        now = parameters(found)
        return "" if now in ((known,) if isinstance(known, str) else known) else f"{name} takes ({now}) there"

    @contextmanager
    def _counted(self, manager: AbstractContextManager[Any], counter: Counter[str]) -> Iterator[Any]:
        with manager as value:
            changed = []
            for name in self.names:
                path, _, attribute = name.rpartition(".")
                owner = find(path)
                new = vars(owner).get(attribute)
                if new is None or getattr(owner, attribute) is self._plain[name]:
                    continue  # not by this context manager of several
                if callable(new) or isinstance(new, staticmethod):
                    changed.append((owner, attribute, new))
                    setattr(owner, attribute, _count(new, name, counter))
                else:
                    counter[name] += 1
            try:
                yield value
            finally:
                for owner, attribute, new in changed:
                    setattr(owner, attribute, new)


class _Tried:
    """A context manager whose feature is left out if torch does not have something that it asks for on entry."""

    def __init__(self, manager: AbstractContextManager[Any], patch: Patch) -> None:
        self._manager, self._patch, self._entered = manager, patch, False

    def __enter__(self) -> Any:
        try:
            value = self._manager.__enter__()
        except (AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
            self._patch.disable(f"{type(error).__name__}: {error}")
            return None
        self._entered = True
        return value

    def __exit__(self, *failure: Any) -> bool | None:
        return self._manager.__exit__(*failure) if self._entered else None


PATCHES: list[Patch] = []


def parameters(function: Any) -> str:
    """Return the names of a function's parameters as text, such as ``"self, name, *args, **kwargs"``."""
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "unknown"
    return ", ".join(stars.get(one.kind, "") + one.name for one in found)


def _count(new: Any, name: str, counter: Counter[str]) -> Any:
    function = new.__func__ if isinstance(new, staticmethod) else new
    if isinstance(function, type):  # asked for its attributes, or constructed

        class Counted(function):  # type: ignore[misc, valid-type]
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                counter[name] += 1
                return function(*args, **kwargs)

        return Counted

    def call(*args: Any, **kwargs: Any) -> Any:
        counter[name] += 1
        return function(*args, **kwargs)

    return staticmethod(call) if isinstance(new, staticmethod) else call


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Inside, count the calls of replaced functions by their dotted names, in context managers entered inside."""
    before, Patch.counter = Patch.counter, Counter()
    try:
        yield Patch.counter
    finally:
        Patch.counter = before


def required_but_absent() -> list[str]:
    """Return private names that this torch lacks and that no feature can be left out for."""
    optional = {name for patch in PATCHES for name in patch.needs}
    return sorted(set(ABSENT) - optional)
