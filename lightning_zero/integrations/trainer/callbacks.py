"""Adapt Lightning's callbacks to shards: averaging, finetuning, pruning, and saves after exceptions.

The callbacks of a Trainer are patched as instances, each time it sets up; methods that users replaced stay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Checkpoint,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_zero.checkpoint.optimizer_state import gather_value
from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointShard
from lightning_zero.checkpoint.sharded.folder import full_path
from lightning_zero.engine import Engine, engine_of
from lightning_zero.errors import UnsupportedError
from lightning_zero.integrations.uncompile import (
    accept_compiled_names,
    save_compiled_names,
    uncompile_modules,
    uncompiled_name,
)
from lightning_zero.native.capture import pause_gc
from lightning_zero.sharding.full_params import PickledAsNone
from lightning_zero.sharding.host_memory import as_mapped, copy_to_host

_ALTERNATIVES: dict[type[pl.Callback], str] = {
    BatchSizeFinder: (
        "it raises the batch size until memory runs out. One rank may run out alone, and the others would wait for it. "
        "Lightning refuses it under every distributed strategy. To estimate what fits, run `python -m lightning_zero "
        "plan script.py:Module --ranks 4 --device H200`, which exits with 1 if a batch does not fit, or read "
        "lightning_zero.plan(module, batch, world_size=4, device='H200').fits."
    ),
    StochasticWeightAveraging: (
        "it copies the module after it is sharded. Use lightning.pytorch.callbacks.WeightAveraging or "
        "EMAWeightAveraging in its place, which average shards; for a constant learning rate at the end, add "
        "torch.optim.swa_utils.SWALR as a scheduler."
    ),
    ModelPruning: (
        "it ranks a parameter's elements, of which a rank has only its own, and it replaces parameters by others that "
        "no engine knows. Train without it and prune the plain module that load_from_checkpoint() returns, or prune "
        "with torch.nn.utils.prune in __init__(): weights pruned there train as usual, and stay pruned."
    ),
}


def check_callbacks(trainer: pl.Trainer) -> None:
    """Raise ``MisconfigurationException`` for callbacks that would silently work on shards."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for unsupported, alternative in _ALTERNATIVES.items():
            if isinstance(callback, unsupported):
                kind, own = unsupported.__name__, type(callback).__name__
                name = kind if own == kind else f"{own}, a {kind},"
                raise MisconfigurationException(f"{name} is not supported by the ZeRO-3 strategies: {alternative}")


# -- checkpoints


def patch_checkpoint_callbacks(trainer: pl.Trainer) -> None:
    """Let callbacks save after exceptions only if all ranks can, and know names of pending saves.

    Lightning calls callbacks before the strategy knows of an exception. A rank that saved alone would wait at another
    collective than the ranks that still train, until both time out. Here ranks that raised meet first: if all arrive
    within a few seconds and after the same step, they save together. Otherwise an error says why nothing is saved.

    ``ModelCheckpoint`` looks for a file to see if a name is taken. With asynchronous saves, the second of two best
    checkpoints of one name would replace the first, whose save has only begun.
    """
    vars(trainer).setdefault("save_checkpoint", partial(_save, trainer))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        # Patch the whole hook: it also looks for files and makes links together. A mock's class has no such method.
        own = getattr(type(callback), "on_exception", pl.Callback.on_exception)
        if isinstance(callback, Checkpoint) and own is not pl.Callback.on_exception:
            vars(callback).setdefault("on_exception", partial(_on_exception, callback))
        if isinstance(callback, ModelCheckpoint):
            vars(callback).setdefault("file_exists", partial(_file_exists, callback))


def _save(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
    if trainer.interrupted and not _all_ranks_can_save(trainer):
        return
    # A save creates many small objects; without this the garbage collector would run while the training waits.
    with pause_gc() if getattr(trainer.strategy, "saves_async", False) else nullcontext():
        type(trainer).save_checkpoint(trainer, *args, **kwargs)


def _on_exception(callback: Any, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
    # A callback that would not save does not start the collective: another callback may.
    if not getattr(callback, "save_on_exception", True) or _all_ranks_can_save(trainer):
        type(callback).on_exception(callback, trainer, *args, **kwargs)


def _all_ranks_can_save(trainer: pl.Trainer) -> bool:
    check = getattr(trainer.strategy, "all_ranks_can_save", None)  # the callback may be in another Trainer by now
    return check is None or check()


def _file_exists(callback: Any, filepath: str | Path, trainer: pl.Trainer) -> bool:
    if type(callback).file_exists(callback, filepath, trainer):
        return True
    strategy: Any = trainer.strategy  # the callback may be in another Trainer by now
    if not getattr(strategy, "saves_async", False):
        return False
    taken = trainer.is_global_zero and full_path(filepath) == strategy.pending_save_path()
    return bool(strategy.broadcast(taken))


# -- finetuning


def compare_shards_by_identity(trainer: pl.Trainer, engine: Engine) -> None:
    """Make ``BaseFinetuning`` callbacks, such as ``BackboneFinetuning``, compare parameters by identity.

    They leave out parameters that the optimizer has already, and compare values for that. Shards of different
    parameters may be equal on one rank only, for example if they are all padding, and parameter groups would differ.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):
            callback.__dict__.pop("on_train_epoch_start", None)  # set for an earlier engine
            callback.__dict__["on_train_epoch_start"] = _IdentityEqual(engine, callback.on_train_epoch_start)


class _IdentityEqual(TorchFunctionMode):
    """Call a hook in which ``torch.equal`` of two shards is True only for the same parameter."""

    def __init__(self, engine: Engine, hook: Callable[..., None]) -> None:
        super().__init__()
        self._engine = engine
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        with self:
            self._hook(*args)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.equal and len(args) == 2 and all(self._engine.sharder.find(arg) for arg in args):
            return args[0] is args[1]
        return func(*args, **(kwargs or {}))


# -- weight averaging


def average_shards(trainer: pl.Trainer, engine: Engine, module: nn.Module, device: torch.device) -> None:
    """Make ``WeightAveraging`` callbacks, such as ``EMAWeightAveraging``, average ``module``'s shards.

    The callback copies the module before it is sharded. Then it averages, swaps and copies parameters elementwise, so
    each rank averages its shards. Checkpoints hold full values.

    Raises:
        MisconfigurationException: The module's parameters changed after the callback copied it.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, WeightAveraging) or callback._average_model is None:
            continue
        average: Any = callback._average_model.module
        if not getattr(average, "_zero_average", False):
            average._zero_average = _ShardedAverage(engine, module, average)
            average.to(callback._device or device)
            for name in ("_swap_models", "_copy_average_to_current"):
                callback.__dict__.pop(name, None)  # set in an earlier fit
                callback.__dict__[name] = partial(_flush_before, getattr(callback, name))
            if getattr(callback.should_update, "func", None) is not _notify_update:
                callback.__dict__["should_update"] = partial(_notify_update, callback, callback.should_update)


def _flush_before(exchange: Callable[[Any], None], module: Any) -> None:
    engine = engine_of(module)
    # The callback writes to `param.data`; edits of gathered weights that are pending would overwrite it.
    with nullcontext() if engine is None else engine.overwriting_weights():
        exchange(module)


def _notify_update(callback: Any, decide: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """Announce an update to a save in progress, which may be copying the averages."""
    updates = decide(*args, **kwargs)
    shards = getattr(callback._average_model.module, "_zero_average", None) if updates else None
    if shards is not None:
        shards.before_update()
    return updates


class _ShardedAverage(PickledAsNone):
    """Shard an averaged copy like its module; hooks give its state dict full values."""

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
            if record.format is not None:
                raise UnsupportedError(
                    f"An average of {record.name!r} would be one of its {record.format.kind} codes. Leave "
                    "frozen_dtype out, or the callback that averages weights."
                )
            self._records[name] = record
            # Copy from the shards: they have rank 0's initial values, and the copies may have others.
            copies[name].data = record.param.detach().to(copies[name].dtype, copy=True)
        # A partial, because torch sets an attribute on the function.
        average.register_state_dict_post_hook(partial(self._gather))
        average.register_load_state_dict_pre_hook(self._scatter)
        save_compiled_names(compiled)
        average.__dict__["__deepcopy__"] = self._deepcopy
        average.__dict__["__reduce_ex__"] = self._reduce

    def before_update(self) -> None:
        engine = self._engine
        engine.sharder.sync.wait_for_readers()

    def _gather(self, average: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Keep full values on rank 0's CPU only, or each rank's shards for a sharded checkpoint. Collective."""
        values: dict[int, Any] = {}  # by record, so that tied parameters stay one tensor
        sharded, rank = self._engine.config.state_dict_type == "sharded", self._engine.rank
        mesh = self._engine.mesh
        for key, shard in state.items():
            record = self._records.get(uncompiled_name(key[len(prefix) :])) if key.startswith(prefix) else None
            if record is None:
                if key.startswith(prefix) and not sharded and isinstance(shard, Tensor):
                    # Copy buffers, since a file may be written while they change.
                    state[key] = copy_to_host(shard)
                continue
            if sharded:
                values.setdefault(record.index, CheckpointShard(record.layout, shard, mesh.shard_index, mesh.replica))
            if record.index not in values:
                value = gather_value(shard, record, mesh)
                values[record.index] = copy_to_host(value) if rank == 0 else shard
            state[key] = values[record.index]
        if rank != 0 and not sharded:
            state.clear()

    def _scatter(self, average: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
        for name, record in self._records.items():
            full = state.get(prefix + name)
            if full is not None and full.shape == record.layout.shape:
                state[prefix + name] = record.local_part(as_mapped(full))

    def _deepcopy(self, memo: dict[Any, Any]) -> Any:
        """Return a plain module with full values on the average's device. Collective."""
        average, before = self._average, dict(self._average.__dict__)
        shards = {name: param.data for name, param in average.named_parameters()}
        full = {}
        for name, shard in shards.items():
            value = gather_value(shard, self._records[name], self._engine.mesh)
            full[name] = value.to(shard.device, copy=True)
        self._fill(full)
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
