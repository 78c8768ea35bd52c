"""Every private name of torch and Lightning that this package touches, once: what an upgrade may take away.

A private name has a component that begins with an underscore. Above each stands a comment: why we need it, and since
which of the supported versions it is there. There are four forms::

    # Whether a backward runs on this thread. (torch 2.11+)
    graph_task_id = private("torch._C._current_graph_task_id")

    partitioners = module("torch._functorch.partitioners")

    ATTRIBUTES = {
        # What a module holds, without the properties that we put over it. (torch 2.11+)
        "torch.nn.Module._parameters",
    }

    _CUTS = Patch("the effect that is lost without it", {"torch._functorch.partitioners.solve_min_cut": "parameters"})

The first is imported from here under its new name. Where a torch does not have it, using it raises an error that names
it. The second is a module, for this file alone. The third is an attribute of objects, or a method that we override: it
is used as it is, since a call around it would cost time in each step, and Dynamo traces some of its users. The fourth
names functions that we replace, see ``patches.py``: a feature is left out where torch has others. ``graphs.py`` gives
names to texts: keys that torch leaves in graphs and documents nowhere. ``versions.py`` has the tested versions.

``tests/unit/test_private_names.py`` refuses private names elsewhere; ``tests/unit/compat`` has a test named after each
entry, which fails when a newer torch or Lightning lacks it or means something else by it. Importing
``lightning_private`` imports Lightning, so only the top floor may.
"""
