"""Layer deduplication: equal layers are traced and differentiated once.

``matching.py`` finds equal layers in Dynamo's graph. ``dedup.py`` replaces each by an op with shapes and a derivative
(``layer_call.py``). ``layer_graph.py`` traces one layer of each kind, and ``expand.py`` puts its nodes into the joint
graph for each call, which then equals the joint graph of the whole model. Passes see no difference.

torch's ``nested_compile_region`` needs annotations in the model. Its reuse (none in torch 2.11) installs no guards for
the reused layers in 2.13, so it can run with a stale value: examples/benchmarks/2026-11-24-starts-cpu.md. Compare again
with each torch release.
"""

from lightning_zero.compile.layer_dedup.dedup import LayerDedup, dedup_layers
from lightning_zero.compile.layer_dedup.layer_call import DedupFailed
from lightning_zero.compile.layer_dedup.layer_graph import joint_tracer

__all__ = ["DedupFailed", "LayerDedup", "dedup_layers", "joint_tracer"]
