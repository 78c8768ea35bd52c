"""What passes would take at their peak under each budget of activations, reckoned before anything is tried.

Where a graph is compiled for training that a plan of memory is going to be made for, its joint graph is cut once for
each budget (``sweep.py``), as it would be compiled with that, and what both halves hold in memory is followed from op
to op (``lifetimes.py``, ``live_values.py``).
"""

from lightning_zero.compile.budget_sweep.sweep import chart

__all__ = ["chart"]
