"""Which passes graphs go through: the default ones, or those that a user chooses, without those switched off."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from lightning_zero.compile.passes.base import PassSpec, check_contracts
from lightning_zero.compile.passes.pipeline import MINIMAL_PASSES

__all__ = ["PassSelection", "Schedule", "check_names", "check_passes"]


class PassSelection:
    """One engine's; the same on every rank.

    The default passes follow from a :class:`~lightning_zero.compile.context.PassContext`, so they are given each time.
    """

    def __init__(self) -> None:
        self._registered: dict[str, PassSpec] = {}
        self._chosen: Names | None = None
        self._disabled: frozenset[str] = frozenset()

    @property
    def key(self) -> Hashable:
        """Another one for other passes."""
        return self._chosen, self._disabled

    def known(self, default: Sequence[PassSpec]) -> dict[str, PassSpec]:
        """All passes that can be chosen, by name."""
        return {spec.name: spec for spec in (*MINIMAL_PASSES, *default)} | self._registered

    def passes(self, default: Sequence[PassSpec]) -> list[PassSpec]:
        """What the next graph goes through, in order."""
        known = self.known(default)
        chosen = default if self._chosen is None else [known[name] for name in self._chosen]
        return [spec for spec in chosen if spec.name not in self._disabled]

    @property
    def has_own(self) -> bool:
        """Whether a user has made passes known."""
        return bool(self._registered)

    @property
    def unversioned(self) -> set[str]:
        """Names of users' passes whose results must not come out of a cache: nobody says when they change."""
        return {spec.name for spec in self._registered.values() if spec.version is None}

    def register(self, spec: PassSpec, default: Sequence[PassSpec]) -> None:
        """Makes a user's pass known.

        Raises:
            ValueError: there is a pass of that name.
        """
        if self.known(default).get(spec.name, spec) != spec:
            raise ValueError(f"There is a pass named {spec.name!r} already. Give yours another name.")
        self._registered[spec.name] = spec

    def use(self, names: Sequence[str] | None, default: Sequence[PassSpec]) -> bool:
        """Chooses these passes, or the default ones for None. Whether that changes anything.

        Raises:
            ValueError: see :func:`check_passes`, of the names, and of what is left without those switched off.
        """
        chosen = None if names is None else check_passes(names, self.known(default))
        return self._change(chosen, self._disabled, default)

    def disable(self, names: Sequence[str], default: Sequence[PassSpec]) -> bool:
        """Switches these passes off, wherever they are chosen, and all others on again. Whether that changes anything.

        Raises:
            ValueError: an unknown name, or others could not run without them; see :func:`check_passes`.
        """
        disabled = frozenset(check_names(names, self.known(default)))
        return self._change(self._chosen, disabled, default)

    def check(self, default: Sequence[PassSpec]) -> None:
        """Whether what is chosen and switched off goes together with other default passes, those of other options.

        Raises:
            ValueError: see :func:`check_passes`.
        """
        self._check(self._chosen, self._disabled, default)

    def _change(self, chosen: Names | None, disabled: frozenset[str], default: Sequence[PassSpec]) -> bool:
        if (chosen, disabled) == (self._chosen, self._disabled):
            return False
        self._check(chosen, disabled, default)
        self._chosen, self._disabled = chosen, disabled
        return True

    def _check(self, chosen: Names | None, disabled: frozenset[str], default: Sequence[PassSpec]) -> None:
        if not disabled:
            return
        names = [spec.name for spec in default] if chosen is None else list(chosen)
        off = [name for name in names if name in disabled]
        try:
            check_passes([name for name in names if name not in disabled], self.known(default))
        except ValueError as error:
            raise ValueError(f"Graphs cannot do without {', '.join(map(repr, off))}: {error}") from error


# What a graph needs to run at all, and who gives it.
FINISHED = {"started": "group_gathers", "handed over": "enqueue_gradients", "announced": "publish_plan"}

Names = tuple[str, ...]


def check_names(names: Sequence[str], known: Mapping[str, PassSpec]) -> Names:
    """The names, when all of them are known.

    Raises:
        ValueError: no list of names, or an unknown one.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"Passes must be a list of names, not {names!r}. Choose from {', '.join(known)}.")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"There is no pass {unknown[0]!r}. Choose from {', '.join(known)}, or register yours with "
            "ZeroStrategy.register_pass()."
        )
    return tuple(names)


def check_passes(names: Sequence[str], known: Mapping[str, PassSpec]) -> Names:
    """The names, when these passes can run in this order.

    Raises:
        ValueError: see :func:`check_names`; a pass twice, a broken contract, or a graph that would be left unfinished.
    """
    check_names(names, known)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"Pass {twice[0]!r} is named twice. Name each pass once.")
    missing = FINISHED.keys() - check_contracts([known[name] for name in names])
    if missing:
        raise ValueError(
            f"These passes leave a graph that is not {sorted(missing)}. Add {', '.join(map(repr, _givers(missing)))}."
        )
    return tuple(names)


def _givers(missing: set[str]) -> list[str]:
    return [giver for what, giver in FINISHED.items() if what in missing]


@dataclass(frozen=True)
class Schedule:
    """Pairs of a step and the passes that apply from it on; None for the default ones. Before the first, too."""

    entries: tuple[tuple[int, Names | None], ...]

    @classmethod
    def of(cls, entries: Sequence[tuple[int, Sequence[str] | None]], known: Mapping[str, PassSpec]) -> Schedule:
        """Checks ``[(step, names), ...]``.

        Raises:
            ValueError: steps that are no growing numbers from 0 on, or see :func:`check_passes`.
        """
        checked: list[tuple[int, Names | None]] = []
        for entry in entries:
            if not isinstance(entry, tuple | list) or len(entry) != 2:
                raise ValueError(f"An entry of a schedule must be a pair (step, names of passes), not {entry!r}.")
            step, names = entry
            if not isinstance(step, int) or isinstance(step, bool) or step < 0:
                raise ValueError(f"The step {step!r} of a schedule must be a number from 0 on.")
            if checked and step <= checked[-1][0]:
                raise ValueError(f"Step {step} of a schedule comes after step {checked[-1][0]}. Let steps grow.")
            checked.append((step, None if names is None else check_passes(list(names), known)))
        return cls(tuple(checked))

    def at(self, step: int) -> Names | None:
        """The passes that apply at a step."""
        names: Names | None = None
        for begin, chosen in self.entries:
            if begin <= step:
                names = chosen
        return names
