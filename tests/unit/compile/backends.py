"""A backend for tests that compile."""

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from lightning_zero.compat.compiler import dynamo_config


class Backend:
    """Run graphs as they are, count them, and record whether Dynamo guarded hooks of modules."""

    def __init__(self) -> None:
        self.graphs = 0
        self.hooks_guarded = False

    def __call__(self, module: GraphModule, inputs: Any, **kwargs: Any) -> Callable[..., Any]:
        self.graphs += 1
        self.hooks_guarded = not dynamo_config.skip_nnmodule_hook_guards
        return module.forward
