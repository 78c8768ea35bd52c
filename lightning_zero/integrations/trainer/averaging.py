"""Lightning's ``WeightAveraging`` (and ``EMAWeightAveraging``), over shards.

The callback copies the module before it is sharded. From then on it only averages, swaps and copies elements, parameter
by parameter, so an average of shards serves: each rank keeps its part. Checkpoints hold whole values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_zero.checkpoint.inventory import gather_value
from lightning_zero.checkpoint.sharded.values import CheckpointShard
from lightning_zero.engine import Engine, engine_of
from lightning_zero.integrations.uncompile import (
    save_compiled_names,
    uncompiled_name,
    accept_compiled_names,
    uncompile_modules,
)
from lightning_zero.sharding.copying import PickledAsNone
from lightning_zero.sharding.host_memory import copy_to_host
from lightning_zero.sharding.mapped import mapped

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["average_shards"]


def average_shards(trainer: pl.Trainer, engine: Engine, module: nn.Module, device: torch.device) -> None:
    """Makes the averages of the Trainer's callbacks averages of ``module``'s shards. Harmless when repeated.

    Raises:
        MisconfigurationException: the module got or lost parameters after the callback had copied it.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, WeightAveraging) or callback._average_model is None:
            continue
        average: Any = callback._average_model.module
        if not getattr(average, "_zero_average", False):
            average._zero_average = _ShardedAverage(engine, module, average)
            average.to(callback._device or device)
            for name in ("_swap_models", "_copy_average_to_current"):
                callback.__dict__.pop(name, None)  # of an earlier fit
                callback.__dict__[name] = partial(_flush_before, getattr(callback, name))
            if getattr(callback.should_update, "func", None) is not _notify_update:
                callback.__dict__["should_update"] = partial(_notify_update, callback, callback.should_update)


def _flush_before(exchange: Callable[[Any], None], module: Any) -> None:
    engine = engine_of(module)
    if engine is not None:
        # It writes to `param.data`, which nobody notices: weights read earlier would win over it.
        engine.cycle.before_step()
    exchange(module)


def _notify_update(callback: Any, decide: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """Who decides for an update tells a save of it, which may be copying the averages."""
    updates = decide(*args, **kwargs)
    shards = getattr(callback._average_model.module, "_zero_average", None) if updates else None
    if shards is not None:
        shards.before_update()
    return updates


class _ShardedAverage(PickledAsNone):
    """Cuts an averaged copy like the module that it is a copy of; its hooks make its state dict one of whole
    values."""

    def __init__(self, engine: Engine, module: nn.Module, average: nn.Module) -> None:
        self._engine = engine
        self._average = average
        compiled = uncompile_modules(average)
        accept_compiled_names(average, compiled)
        named = dict(module.named_parameters(remove_duplicate=False))
        copies = dict(average.named_parameters(remove_duplicate=False))
        if list(named) != list(copies):
            differing = sorted(named.keys() ^ copies.keys())
            raise MisconfigurationException(
                f"WeightAveraging copied the module before its parameters were complete: {differing[0]!r} is only in "
                f"one of module and copy ({len(differing)} such). Create the network in __init__() or "
                "configure_model(), not in setup()."
            )
        self._records = {}
        for name, param in named.items():
            record = engine.sharder.find(param)
            assert record is not None
            self._records[name] = record
            # The copies may be of other initial values than rank 0's, which the shards are of.
            copies[name].data = record.param.detach().to(copies[name].dtype, copy=True)
        average.register_state_dict_post_hook(partial(self._gather))  # torch leaves a mark on the function
        average.register_load_state_dict_pre_hook(self._scatter)
        save_compiled_names(compiled)
        average.__dict__["__deepcopy__"] = self._deepcopy
        average.__dict__["__reduce_ex__"] = self._reduce

    def before_update(self) -> None:
        self._engine.sharder.sync.on_before_write()

    def _gather(self, average: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Whole values on rank 0's CPU, which writes the file; nothing elsewhere. For a sharded checkpoint, on every
        rank its part. Collective."""
        whole: dict[int, Tensor] = {}  # what is tied stays one tensor
        sharded, rank = self._engine.config.state_dict_type == "sharded", self._engine.rank
        mesh = self._engine.mesh
        for key, shard in state.items():
            record = self._records.get(uncompiled_name(key[len(prefix) :])) if key.startswith(prefix) else None
            if record is None:
                if key.startswith(prefix) and not sharded and isinstance(shard, Tensor):
                    # A buffer: a copy, too, since a file may be written while it changes.
                    state[key] = copy_to_host(shard)
                continue
            if sharded:
                whole.setdefault(record.index, CheckpointShard(record.layout, shard, mesh.shard_index, mesh.replica))
            if record.index not in whole:
                value = gather_value(shard, record, mesh)
                whole[record.index] = copy_to_host(value) if rank == 0 else shard
            state[key] = whole[record.index]
        if rank != 0 and not sharded:
            state.clear()

    def _scatter(self, average: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
        for name, record in self._records.items():
            full = state.get(prefix + name)
            if full is not None and full.shape == record.layout.shape:
                state[prefix + name] = record.local_part(mapped(full))

    def _deepcopy(self, memo: dict[Any, Any]) -> Any:
        """A plain module with whole values on the average's device. Collective."""
        average, before = self._average, dict(self._average.__dict__)
        shards = {name: param.data for name, param in average.named_parameters()}
        whole = {}
        for name, shard in shards.items():
            value = gather_value(shard, self._records[name], self._engine.mesh)
            whole[name] = value.to(shard.device, copy=True)
        self._fill(whole)
        state = average.__dict__
        for key in ("__deepcopy__", "__reduce_ex__", "_zero_average"):
            del state[key]
        for hooks in ("_state_dict_hooks", "_load_state_dict_pre_hooks"):
            state[hooks] = type(before[hooks])((k, h) for k, h in before[hooks].items() if not self._is_ours(h))
        try:
            return copy.deepcopy(average, memo)
        finally:
            state.clear()
            state.update(before)
            self._fill(shards)

    def _reduce(self, protocol: Any) -> Any:
        return _identity, (copy.deepcopy(self._average).to("cpu"),)

    def _fill(self, values: dict[str, Tensor]) -> None:
        for name, param in self._average.named_parameters():
            param.data = values[name]

    def _is_ours(self, hook: Any) -> bool:
        function = getattr(hook, "hook", hook)
        return getattr(getattr(function, "func", function), "__self__", None) is self


def _identity(module: nn.Module) -> nn.Module:
    return module
