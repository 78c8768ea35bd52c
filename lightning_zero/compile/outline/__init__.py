"""Equal layers are differentiated once: AOTAutograd sees one call in place of each, and the layer's own forward and
backward stand there again before any pass looks at the graph.

Dynamo's graph is searched for parts that repeat (:mod:`find`), each of which becomes a call of an op that has shapes
and a derivative, and computes nothing (:mod:`standin`). One of equal parts is traced by itself, as the whole graph would
be (:mod:`body`); the joint graph then gets its nodes once for each call (:mod:`inline`), and is what it would have been.
"""

from lightning_zero.compile.outline.body import NotOutlined
from lightning_zero.compile.outline.outline import Outline, outline

__all__ = ["NotOutlined", "Outline", "outline"]
