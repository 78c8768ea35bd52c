"""Equal layers are differentiated once: AOTAutograd sees one call in place of each, and the layer's own forward and
backward stand there again before any pass looks at the graph.

Dynamo's graph is searched for parts that repeat (``find.py``, ``alike.py``), each of which becomes a call of an op that
has shapes and a derivative, and computes nothing (``standin.py``). One of equal parts is traced by itself with what
traces whole graphs (``trace.py``, ``body.py``); the joint graph then gets its nodes once for each call (``inline.py``),
and is what it would have been. A checkpointed region is a call of a graph of its own there (``called.py``); it is
traced along, and in each layer it gets a number of its own (``numbers.py``).
"""

from lightning_zero.compile.layer_dedup.layer_call import NotOutlined, standins_made_at_once
from lightning_zero.compile.layer_dedup.layers import Outline, outline
from lightning_zero.compile.layer_dedup.trace_layers import tracer

__all__ = ["NotOutlined", "Outline", "outline", "standins_made_at_once", "tracer"]
