"""Which way to shard is the best, and by how much worse each other one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_zero.profiling.scale.estimate import Estimate, estimate
from lightning_zero.profiling.scale.given import Cluster, Model
from lightning_zero.profiling.scale.sharding import SHARDINGS, Sharding

__all__ = ["Choice", "compare"]

ALIKE = 0.01  # the model cannot tell what is nearer than that apart


@dataclass(frozen=True)
class Choice:
    """One way among others.

    Attributes:
        estimate: of a step.
        slower: its seconds over those of the fastest that fits, less one: 0.5 is half as long again. Of the fastest 0.
    """

    estimate: Estimate
    slower: float

    @property
    def name(self) -> str:
        return self.estimate.sharding.name


def compare(model: Model, cluster: Cluster, shardings: Sequence[Sharding] = SHARDINGS) -> list[Choice]:
    """The best first: the fastest that fits, and of those within a hundredth the one that stands first in
    ``shardings``. Then the others that fit, by time; then those that do not, by bytes. Where nothing fits,
    ``result[0].estimate.fits`` is false, and ``slower`` counts from the fastest of all."""
    found = [estimate(model, cluster, sharding) for sharding in shardings]
    if not found:
        raise ValueError("shardings is empty: pass those that are to be compared, SHARDINGS say.")
    fitting = [one for one in found if one.fits]
    fastest = min(one.seconds for one in fitting or found)
    alike = [one for one in fitting if one.seconds <= fastest * (1 + ALIKE)]
    others = sorted((one for one in fitting if one not in alike), key=lambda one: one.seconds)
    too_large = sorted((one for one in found if not one.fits), key=lambda one: one.memory.total)
    return [Choice(one, one.seconds / fastest - 1) for one in (*alike, *others, *too_large)]
