"""Graph passes: pure functions from a graph to a graph, run in the order given."""

from lightning_zero.compile.passes.base import PassSpec, run_passes
from lightning_zero.compile.passes.pipeline import MINIMAL_PASSES, default_passes, offload_limits, saved_limits

__all__ = ["MINIMAL_PASSES", "PassSpec", "default_passes", "offload_limits", "run_passes", "saved_limits"]
