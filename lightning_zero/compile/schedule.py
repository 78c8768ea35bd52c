"""Which passes apply from which step on, as data that is checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_zero.compile.passes.base import PassSpec, check_contracts

__all__ = ["Schedule", "check_names", "check_passes"]

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
