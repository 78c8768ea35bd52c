"""Shard a model while it is being built, so that no rank ever holds all of it.

Inside :func:`sharded_construction` a submodule is sharded when its parent receives it. Code that goes on initializing
it (``self.apply(init)``, ``module.weight.data.normal_()``) gets the gathered weight, and its writes reach the shard.
Assigning one module's weight to another ties them. ``copy.deepcopy`` of a sharded module (``nn.TransformerEncoder``
copies its layer) gives one with its own shards of the same values; ties inside the copied module stay ties.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.sharding.shard_tensor import is_shard, spec_of
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.sharding.state_dict import StateDictHooks


@contextmanager
def sharded_construction(sharder: Sharder, state: StateDictHooks) -> Iterator[None]:
    """Shard modules as they are constructed inside. Collective: every rank must build the same model.

    Random numbers inside come from rank 0's generator on every rank.
    """
    hooks = torch.nn.modules.module

    def on_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        own = module._parameters.get(name)
        known = None if own is None else sharder.find(own)
        if known is not None and own is not param and is_shard(param) and spec_of([param]) is known.spec:
            # A new parameter of the shard's values, as PEFT makes to cast an adapter.
            assert own is not None
            assert param is not None
            own.data = param.data
            own.requires_grad_(param.requires_grad)
            return own
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
            sharder.reader.reading_parameters(),
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
    # Each rank keeps its shard of the values that it draws. Shards of different draws would not be a draw of the full
    # matrix, for example of an orthogonal one.
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
    """Inside, let modules that ``sharder`` has sharded be deep-copied."""

    def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        sharder.sync.before_reading()  # the copy needs pending writes to the original's gathered weights
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
