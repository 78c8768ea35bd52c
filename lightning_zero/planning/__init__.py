"""Estimate a training's memory and time per GPU without a GPU: ``lightning_zero.plan``.

``estimate_training.py`` is the entry. ``fake_step.py`` runs a step on fake tensors, in which ``fake_compiler.py``
replaces modules by their partitioned graphs. ``memory_counter.py`` counts eager tensors, and ``graph_memory.py`` those
of compiled graphs. ``persistent_memory.py`` computes what stays between steps, and ``step_seconds.py`` the time.
"""
