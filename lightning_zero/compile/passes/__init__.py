"""Graph passes: pure functions from a graph to a graph, run in the order given."""

from lightning_zero.compile.passes.base import PassSpec, run_passes
from lightning_zero.compile.passes.reduce import hand_over_gradients
from lightning_zero.compile.passes.split import split_gathers

__all__ = ["DEFAULT_PASSES", "PassSpec", "run_passes"]

DEFAULT_PASSES = (
    PassSpec("split_gathers", split_gathers, provides=frozenset({"started"})),
    PassSpec("hand_over_gradients", hand_over_gradients, provides=frozenset({"handed_over"})),
)
