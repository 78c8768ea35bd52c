"""How far the decisions about one training's memory are, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zero.budget.facts import MemoryConfig, PlannerInputs

__all__ = ["PlannerState", "PlanUpdate"]


@dataclass(frozen=True)
class PlanUpdate:
    """What holds from now on.

    Attributes:
        chosen: all of it.
        share: of its weights, that each graph is to keep for backward, for which all is compiled again; None for as
            much as before.
    """

    chosen: MemoryConfig
    share: float | None = None


@dataclass
class PlannerState:
    """How far the decisions of one training are.

    Attributes:
        done: nothing is going to be compiled again but for what was watched.
        looked: at the first step.
        first_peak: of that one, on the fullest rank; None until then.
        told_first: that it was too much.
        watching: whether what was planned is held.
        foreseen: whether it will be once all is replayed was looked at.
        room: that there was then, without replays; below 0 where nobody looked, too.
        emptied: what the allocator kept was given back since.
        replanned: since it was not held.
        facts: that the last plan within a limit was made from.
        traffic: bytes that a pass gathered then.
    """

    done: bool = False
    looked: bool = False
    first_peak: int | None = None
    told_first: bool = False
    watching: bool = False
    foreseen: bool = False
    room: float = float("-inf")
    emptied: bool = False
    replanned: bool = False
    facts: PlannerInputs | None = None
    traffic: float = 0.0
