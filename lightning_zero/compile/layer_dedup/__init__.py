"""Equal layers are differentiated once: AOTAutograd sees one call in place of each, and the layer's own forward and
backward stand there again before any pass looks at the graph.

``find_layers.py`` and ``matching.py`` find equal parts of Dynamo's graph. Each part becomes a call of an op that has
shapes and a derivative, and computes nothing (``layer_call.py``). AOTAutograd traces one of the equal parts by itself
(``trace_layers.py``, ``layer_graph.py``). The joint graph then gets the nodes of that part once for each call
(``expand.py``), and equals the joint graph of the whole. A checkpointed region is a call of its own graph
(``hop_bodies.py``), is traced with its layer, and gets another region number in each layer (``region_ids.py``).
"""

from lightning_zero.compile.layer_dedup.dedup import LayerDedup, dedup_layers
from lightning_zero.compile.layer_dedup.layer_call import DedupFailed, fast_layer_call_fakes
from lightning_zero.compile.layer_dedup.layer_graph import joint_tracer

__all__ = ["DedupFailed", "LayerDedup", "dedup_layers", "fast_layer_call_fakes", "joint_tracer"]
