"""Sharding a model while it is being built, so that no rank ever holds it whole.

Inside :func:`sharded_construction` every submodule is sharded at the moment its parent receives it. Code that goes on
initialising it (``self.apply(init)``, ``module.weight.data.normal_()``) gets the gathered weight; what it writes there
reaches the shard. Assigning one module's weight to another ties them, as usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.sharding.copies import copied_modules
from lightning_zero.sharding.shard import Sharder
from lightning_zero.sharding.state import StateDictHooks

__all__ = ["sharded_construction"]


@contextmanager
def sharded_construction(sharder: Sharder, state: StateDictHooks) -> Iterator[None]:
    """Collective: every rank must build the same model. Random numbers inside come from rank 0's generator on every
    rank."""
    hooks = torch.nn.modules.module

    def on_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        index = -1 if param is None else sharder.executor.weights.find_gathered(param)
        if index < 0:
            return None
        record = sharder.records[index]
        sharder.adopt(module, name, record)
        return record.param

    def on_module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        for path, module in child.named_modules() if child is not None else ():
            if not any(param is not None and param.is_meta for param in module._parameters.values()):
                sharder.shard_module(module, f"{name}.{path}" if path else name)
                state.install(module)

    handles = [hooks.register_module_parameter_registration_hook(cast(Any, on_parameter))]
    handles.append(hooks.register_module_module_registration_hook(on_module))
    try:
        with (
            sharder.view.parameters(),
            _random_numbers_of_rank_0(sharder.mesh.control_group),
            copied_modules(sharder, state),
        ):
            yield
    finally:
        for handle in handles:
            handle.remove()
        sharder.sync.settle()


@contextmanager
def _random_numbers_of_rank_0(group: dist.ProcessGroup) -> Iterator[None]:
    # Ranks keep slices of what they initialise: slices of different random matrices would not be a draw of the intended
    # matrix.
    own = torch.get_rng_state()
    states: list[Any] = [own]
    dist.broadcast_object_list(states, group=group, group_src=0)
    same = torch.equal(own, states[0])
    torch.set_rng_state(states[0])
    try:
        yield
    finally:
        if not same:
            torch.set_rng_state(own)
