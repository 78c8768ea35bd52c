"""Every private name of torch and Lightning that this package touches, once: what an upgrade may take away.

A private name has a component that begins with an underscore. Two forms, and above each a comment: why we need it, and
since which of the supported versions it is there::

    # Whether a backward runs on this thread. (torch 2.11+)
    graph_task_id = torch._C._current_graph_task_id

    ATTRIBUTES = {
        # What a module holds, without the properties that we put over it. (torch 2.11+)
        "torch.nn.Module._parameters",
    }

The first is imported from here under its new name. The second is an attribute of objects, or a method that we override:
it is used as it is, since a call around it would cost time in each step, and Dynamo traces some of its users.
``graphs.py`` gives names to texts: keys that torch leaves in graphs and documents nowhere.

``tests/unit/test_private_names.py`` refuses private names elsewhere; ``tests/unit/compat`` has a test named after each
entry, which fails when a newer torch or Lightning lacks it or means something else by it. Importing
``lightning_private`` imports Lightning, so only the top floor may.
"""

# The oldest and the newest minor version for which all entries were checked.
CHECKED = {"torch": ("2.11", "2.13"), "lightning": ("2.6", "2.6")}
