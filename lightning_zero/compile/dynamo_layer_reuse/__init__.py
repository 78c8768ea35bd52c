"""Layers that are alike are traced once by Dynamo: it follows the first one's code, and the others are stamped into the
graph, with guards of their own.

Dynamo's trace of a call is decided by what it guards: whoever passes the guards of a trace may run what was made of it.
So a layer that is called as another one was, and passes the guards that were made of it with itself in its place, would
be traced into the same nodes, of its own weights. These are copied, its guards are installed, and nobody reads its code
again, which takes most of what a start spends in Dynamo. Whatever is not known to be alike is traced as ever.
"""

from lightning_zero.compile.dynamo_layer_reuse.layer_calls import layers_traced_once

__all__ = ["layers_traced_once"]
