"""Sharding a model while it is being built, so that no rank ever holds it whole.

Inside :func:`sharded_construction` every submodule is sharded at the moment its parent receives it. Code that goes on
initialising it (``self.apply(init)``, ``module.weight.data.normal_()``) gets the gathered weight; what it writes there
reaches the shard. Assigning one module's weight to another ties them, as usual.


---

``copy.deepcopy`` of sharded modules while a model is being built.

``nn.TransformerEncoder`` copies the layer that it is given. A copy gets parameters of its own, sharded likewise and
with the same values; what is tied inside of what is copied is tied in the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.sharding.sharder import Sharder
from lightning_zero.sharding.state_dict import StateDictHooks

__all__ = ["copied_modules", "sharded_construction"]


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
        sharder.attach(module, name, record)
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
        sharder.sync.flush_user_writes()


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


@contextmanager
def copied_modules(sharder: Sharder, state: StateDictHooks) -> Iterator[None]:
    """Inside, modules that ``sharder`` has sharded can be deep-copied."""

    def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        sharder.sync.before_reading()  # what was read from the original and edited belongs into the copy, too
        for param in module._parameters.values():
            record = None if param is None else sharder.find(param)
            if record is not None and id(param) not in memo:
                memo[id(param)] = sharder.clone(record).param
        reduced: Any = object.__reduce_ex__(module, 4)
        make, arguments, contents = reduced[:3]
        other: nn.Module = make(*arguments)
        memo[id(module)] = other
        other.__setstate__(copy.deepcopy(contents, memo))
        for key, param in other._parameters.items():
            record = None if param is None else sharder.find(param)
            if record is not None:
                sharder.attach(other, key, record)
        state.install_on_copy(other, module)
        return other

    with sharder.classes.overriding_deepcopy(copied):
        yield
