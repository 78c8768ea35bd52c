"""Private names of torch and Lightning, each listed once with its reason and first version.

A name is private if a component begins with an underscore. There are four forms::

    # True if a backward runs on this thread. (torch 2.11+)
    graph_task_id = private("torch._C._current_graph_task_id")

    partitioners = module("torch._functorch.partitioners")

    ATTRIBUTES = {
        # The parameters of a module, without our properties. (torch 2.11+)
        "torch.nn.Module._parameters",
    }

    _CUT = Patch("the effect that is lost without it", {"torch._functorch.partitioners.solve_min_cut": "parameters"})

Other packages import the first. If torch lacks it, using it raises an error that names it. The second is a module, for
its file only. The third is an attribute of objects, or an overridden method, which other packages use directly: a call
would cost time in each step, and Dynamo traces some of its users. The fourth lists functions that we replace, see
``patches.py``. ``graphs.py`` names keys of ``Node.meta``. ``versions.py`` has the tested versions.

``tests/unit/test_private_names.py`` rejects private names elsewhere. ``tests/unit/compat`` tests the meaning of each
entry. Importing ``lightning_private`` imports Lightning.
"""
