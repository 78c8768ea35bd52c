"""Which passes graphs go through: the default ones, or those that a user chooses, without those switched off."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from lightning_zero.compile.passes import MINIMAL_PASSES, PassSpec
from lightning_zero.compile.schedule import Names, check_names, check_passes

__all__ = ["PassSelection"]


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
