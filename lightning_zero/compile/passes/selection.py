"""Select the passes of graphs: default or chosen ones without disabled ones, and schedules by step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from lightning_zero.compile.passes.base import PassSpec, check_contracts
from lightning_zero.compile.passes.pipeline import MINIMAL_PASSES


class PassSelection:
    """Pass selection of one engine, equal on all ranks.

    Default passes depend on a :class:`~lightning_zero.compile.context.PassContext`, so callers supply them.
    """

    def __init__(self) -> None:
        self._registered: dict[str, PassSpec] = {}
        self._chosen: Names | None = None
        self._disabled: frozenset[str] = frozenset()

    @property
    def key(self) -> Hashable:
        return self._chosen, self._disabled

    def known(self, default: Sequence[PassSpec]) -> dict[str, PassSpec]:
        """Return all available passes by name."""
        return {spec.name: spec for spec in (*MINIMAL_PASSES, *default)} | self._registered

    def passes(self, default: Sequence[PassSpec]) -> list[PassSpec]:
        """Return the passes of the next graph, in order."""
        known = self.known(default)
        chosen = default if self._chosen is None else [known[name] for name in self._chosen]
        return [spec for spec in chosen if spec.name not in self._disabled]

    @property
    def has_own(self) -> bool:
        """Return True if a user has registered passes."""
        return bool(self._registered)

    @property
    def unversioned(self) -> set[str]:
        """Return names of user passes without a version, whose graphs must not come from a cache."""
        return {spec.name for spec in self._registered.values() if spec.version is None}

    def register(self, spec: PassSpec, default: Sequence[PassSpec]) -> None:
        if self.known(default).get(spec.name, spec) != spec:
            raise ValueError(f"There is a pass named {spec.name!r} already. Give yours another name.")
        self._registered[spec.name] = spec

    def use(self, names: Sequence[str] | None, default: Sequence[PassSpec]) -> bool:
        """Choose these passes, or the default ones for None, and return True if that changes anything.

        Raises:
            ValueError: see :func:`check_passes`, for the passes that are not disabled.
        """
        chosen = None if names is None else check_passes(names, self.known(default))
        return self._change(chosen, self._disabled, default)

    def disable(self, names: Sequence[str], default: Sequence[PassSpec]) -> bool:
        """Disable these passes, enable all others, and return True if that changes anything.

        Raises:
            ValueError: an unknown name, or other passes require them; see :func:`check_passes`.
        """
        disabled = frozenset(check_names(names, self.known(default)))
        return self._change(self._chosen, disabled, default)

    def check(self, default: Sequence[PassSpec]) -> None:
        """Check the selection against other default passes."""
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


# Properties that a graph needs to run, and the passes that provide them.
FINISHED = {"started": "group_gathers", "enqueued": "enqueue_gradients", "published": "publish_plan"}
# Properties that a graph needs if it reads weights in place, and the passes that provide them.
IN_PLACE = {"after_reads": "reduce_after_reads"}

Names = tuple[str, ...]


def check_names(names: Sequence[str], known: Mapping[str, PassSpec]) -> Names:
    """Return the names if all are known.

    Raises:
        ValueError: not a list of names, or an unknown one.
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
    """Return the names if these passes can run in this order.

    Raises:
        ValueError: see :func:`check_names`; a duplicate, a broken contract, or an incomplete graph.
    """
    check_names(names, known)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"Pass {twice[0]!r} is named twice. Name each pass once.")
    provided = check_contracts([known[name] for name in names])
    needed = FINISHED | (IN_PLACE if "in_place" in provided else {})
    missing = needed.keys() - provided
    if missing:
        givers = [repr(giver) for what, giver in needed.items() if what in missing]
        raise ValueError(f"These passes leave a graph that is not {sorted(missing)}. Add {', '.join(givers)}.")
    return tuple(names)


@dataclass(frozen=True)
class Schedule:
    """Pairs of a step and the passes from that step on; None for the default ones.

    The default passes apply before the first step.
    """

    entries: tuple[tuple[int, Names | None], ...]

    @classmethod
    def of(cls, entries: Sequence[tuple[int, Sequence[str] | None]], known: Mapping[str, PassSpec]) -> Schedule:
        """Check ``[(step, names), ...]`` and return a schedule.

        Raises:
            ValueError: steps are not increasing numbers from 0 on; see :func:`check_passes`.
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
        names: Names | None = None
        for begin, chosen in self.entries:
            if begin <= step:
                names = chosen
        return names
