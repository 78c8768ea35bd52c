"""Patches: functions of torch that this package replaces, checked against this torch.

Each context manager that replaces functions is decorated with a :class:`Patch`, which lists them with the parameters of
the tested versions. If this torch lacks one, or one takes other parameters, the context manager does nothing and one
line is logged. Compilation is slower then, and its results are the same.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec

import torch

from lightning_zero.compat.lookup import ABSENT, find, missing
from lightning_zero.compat.versions import install_command, is_tested, tested
from lightning_zero.errors import UnsupportedError

log = logging.getLogger("lightning_zero.compat")

P = ParamSpec("P")
_UNTESTED = not is_tested(str(torch.__version__))
_INHERITED = object()
# Source files that run only while something compiles, and ours. Not torch/_ops.py, in which users' code also fails.
_COMPILING = re.compile(
    r"[/\\](lightning_zero|torch[/\\](_(dynamo|functorch|guards|higher_order_ops|inductor|logging|subclasses)|fx))(\.py$|[/\\])"
)


class swap_attribute:
    """Set an attribute of an object, and restore it on exit.

    The owner must be a module or a class, or an object that has the attribute itself.
    """

    __slots__ = ("_before", "_name", "_new", "_owner")

    def __init__(self, owner: Any, name: str, new: Any) -> None:
        self._owner, self._name, self._new = owner, name, new

    def __enter__(self) -> None:
        # Not getattr, which would return a static method of a class as a plain function.
        self._before = vars(self._owner).get(self._name, _INHERITED)
        setattr(self._owner, self._name, self._new)

    def __exit__(self, *_: object) -> None:
        if self._before is _INHERITED:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


class Patch:
    """A feature that replaces functions of torch.

    Args:
        names: dotted names of the replaced functions, each with its parameters as text, such as
            ``"self, tx, name"``. A tuple lists those of several versions; None accepts any.
        needs: other private names that only this feature uses, with the parameters of functions that it calls.

    Attributes:
        reason: why the feature is disabled with this torch; empty if it is enabled.
    """

    counter: Counter[str] | None = None  # of calls of replaced functions, while they are counted

    def __init__(
        self,
        feature: str,
        names: Mapping[str, str | tuple[str, ...] | None],
        needs: Mapping[str, str | tuple[str, ...] | None] | None = None,
    ) -> None:
        self.feature, self.names, self.needs = feature, dict(names), dict(needs or {})
        self._logged = False
        self.reason = next(filter(None, map(self._find_problem, self.names | self.needs)), "")
        PATCHES.append(self)

    def __call__(self, function: Callable[P, AbstractContextManager[Any]]) -> Callable[P, AbstractContextManager[Any]]:
        """Decorate a context manager that replaces these functions."""

        @wraps(function)
        def enter(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[Any]:
            if self.reason:
                self.log_once()
                return nullcontext()
            manager = function(*args, **kwargs)
            if _UNTESTED:
                manager = _DisableOnError(manager, self)
            return manager

        return enter

    def disable(self, reason: str) -> None:
        """Disable the feature from now on."""
        self.reason = reason
        self.log_once()

    def log_once(self) -> None:
        """Log that the feature is disabled, unless this was logged before."""
        if not self._logged:
            self._logged = True
            log.warning("Disabled with torch %s: %s (%s).", torch.__version__, self.feature, self.reason)

    @contextmanager
    def replace(self, makers: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
        """Replace functions inside.

        Args:
            makers: by the end of a dotted name, functions that take torch's function and return its replacement.
        """
        with ExitStack() as stack:
            for end, make in makers.items():
                for name in [name for name in self.names if name.endswith(end)]:
                    path, _, attribute = name.rpartition(".")
                    owner = find(path)
                    new = self.count_calls(name, make(getattr(owner, attribute)))
                    stack.enter_context(swap_attribute(owner, attribute, new))
            yield

    @staticmethod
    def count_calls(name: str, new: Any) -> Any:
        """Return what replaces ``name``, counting its calls while calls are counted."""
        if Patch.counter is None:
            return new
        if callable(new):
            return _count(new, name, Patch.counter)
        Patch.counter[name] += 1
        return new

    def _find_problem(self, name: str) -> str:
        try:
            found = find(name)
        except LookupError:
            return f"it has no {name}"
        known = (self.names | self.needs)[name]
        if known is None:
            return ""
        now = parameters(found)
        return "" if now in ((known,) if isinstance(known, str) else known) else f"{name} takes ({now}) there"


class _DisableOnError:
    """A context manager that disables its patch if torch lacks an attribute that it reads on entry."""

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
    if isinstance(new, type):  # its methods are called
        counter[name] += 1
        return new

    def call(*args: Any, **kwargs: Any) -> Any:
        counter[name] += 1
        return new(*args, **kwargs)

    return call


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of replaced functions by their dotted names, in context managers entered inside."""
    before, Patch.counter = Patch.counter, Counter()
    try:
        yield Patch.counter
    finally:
        Patch.counter = before


def required_but_absent() -> list[str]:
    """Return private names that this torch lacks and that compilation cannot do without."""
    optional = {name for patch in PATCHES for name in patch.needs}
    return sorted(set(ABSENT) - optional)


def require_compiler() -> None:
    """Raise if this torch lacks a private name that compilation cannot do without.

    Raises:
        UnsupportedError: names it.
    """
    absent = required_but_absent()
    if absent:
        raise UnsupportedError(missing(absent[0]))


def failure_of_untested_torch(error: Exception) -> UnsupportedError | None:
    """Return the error to raise instead of one from compilation with an untested torch.

    Returns:
        None if torch was tested, or the error is raised by the user's code.
    """
    installed = str(torch.__version__)
    if is_tested(installed) or isinstance(error, UnsupportedError):
        return None
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = last.tb_frame.f_code.co_filename if last is not None else ""
    if not (type(error).__module__.startswith("torch._") or _COMPILING.search(where)):
        return None
    return UnsupportedError(
        f"Compilation failed with torch {installed}, and lightning_zero was tested with torch {tested('torch')}: "
        f"{type(error).__name__}: {error}\nUse strategy='zero3', which compiles nothing, or install a tested version: "
        f"{install_command()}."
    )
