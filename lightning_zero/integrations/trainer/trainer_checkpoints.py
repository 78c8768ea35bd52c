"""Save and load checkpoints with the Trainer: files with full values, or folders with shards."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from tqdm import tqdm
from typing_extensions import override

from lightning_zero.checkpoint.progress_reporter import ShowBar
from lightning_zero.checkpoint.sharded.checkpoint_tensors import materialize_extra_state, materialize_values
from lightning_zero.checkpoint.sharded.folder import full_path
from lightning_zero.compat.lightning_private import WrappingCheckpointIO, optimizer_to_device
from lightning_zero.engine import Engine, engine_of
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.checkpoint_files import (
    BackgroundFileIO,
    FileIO,
    check_storage_options,
    load_file,
    read_on_all_ranks,
    report_progress_of,
    split_state,
    to_trainer_keys,
)
from lightning_zero.integrations.strategy_base import ZeroStrategyBase
from lightning_zero.integrations.trainer.checkpoint_lookup import other_checkpoints
from lightning_zero.integrations.trainer.precision import unwrap_optimizer

log = logging.getLogger(__name__)

BAR_DELAY_S = 3.0


class TrainerCheckpointing(ZeroStrategyBase, ParallelStrategy):
    """Save and load, for a strategy that shards its module in :meth:`_prepare_module`."""

    _prepared: bool
    _loaded_path: object = None  # of the last checkpoint
    _is_loading: bool  # stays True if the load fails
    _ranks_can_save: bool | None  # after an exception in this stage; None before ranks meet

    def _prepare_module(self, trainer: pl.Trainer) -> None:
        raise NotImplementedError

    @property
    def _sharded_engine(self) -> Engine | None:
        """Return the engine while the module is sharded by it."""
        module, engine = self.lightning_module, self._engine
        return engine if module is not None and engine is not None and engine_of(module) is engine else None

    @property
    def saves_async(self) -> bool:
        return self._options.async_save or isinstance(self._checkpoint_io, (AsyncCheckpointIO, BackgroundFileIO))

    @property
    def _attached_trainer(self) -> pl.Trainer | None:
        """Return the module's Trainer; None if there is none, since users may load without one."""
        module = self.lightning_module
        return None if module is None else module._trainer

    def _is_running(self) -> bool:
        """Return True during a training; otherwise a save must be complete when it returns."""
        return self._attached_trainer is not None and self._attached_trainer.state.status == TrainerStatus.RUNNING

    def pending_save_path(self) -> str | None:
        """Return the path of a save in progress that readers do not see yet. Valid on rank 0."""
        io, engine = self._checkpoint_io, self._sharded_engine
        if isinstance(io, BackgroundFileIO) and io.busy:
            return io.path
        return None if engine is None else engine.checkpoints.saver.saving_to

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self.lightning_module
        if module is None:
            return self._require_engine().model_state()  # raises an error that explains it
        engine = engine_of(module)  # may belong to another Trainer
        if engine is None:  # every rank has full values
            return super().lightning_module_state_dict()
        with self._show_progress(engine):
            if isinstance(self._checkpoint_io, BackgroundFileIO):
                with engine.checkpoints.ranks.busy("waits until the file before is written"):
                    self._checkpoint_io.wait()
            return engine.checkpoints.model_state(self._sharded)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self._show_progress():
            return self._require_engine().checkpoints.optimizer_state(unwrap_optimizer(optimizer), self._sharded)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        io = self._checkpoint_io
        # Replace Lightning's asynchronous IO by ours, unless users put something inside.
        if io is None or (type(io) is AsyncCheckpointIO and io.checkpoint_io is None and not _has_own_methods(io)):
            io = self._checkpoint_io = BackgroundFileIO() if self.saves_async else FileIO()
        elif isinstance(io, WrappingCheckpointIO):
            io.checkpoint_io = FileIO()  # sets the innermost IO only if it has none
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        engine = self._sharded_engine
        check_storage_options(self.checkpoint_io, storage_options, sharded=engine is not None and self._sharded)
        if engine is None:  # every rank has full values
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif not self._sharded:
            with self._show_progress():
                engine.checkpoints.ranks.run_on_rank0(
                    f"save the checkpoint {filepath}", lambda: self._write(checkpoint, filepath, storage_options)
                )
        else:
            state, rest = split_state(checkpoint)
            with self._show_progress():
                engine.checkpoints.save(filepath, state, rest, self._saves_async_now)

    def _barrier_is_redundant(self, barrier: str | None) -> bool:
        # The ranks have just met in an asynchronous save, and a barrier would wait for all queued work of the device.
        return barrier == "Trainer.save_checkpoint" and self._sharded_engine is not None and self._saves_async_now

    @property
    def _saves_async_now(self) -> bool:
        return self.saves_async and self._is_running()

    @contextmanager
    def _show_progress(self, engine: Engine | None = None) -> Iterator[None]:
        """Show progress bars of long operations, if the Trainer shows one."""
        checkpoints = (engine or self._require_engine()).checkpoints
        checkpoints.show_bar = None if self._attached_trainer is None else progress_bar_for(self._attached_trainer)
        try:
            with report_progress_of(self.checkpoint_io, checkpoints.progress):
                yield
        finally:
            checkpoints.show_bar = None

    def _write(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None) -> None:
        io = self.checkpoint_io
        io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        if self._is_running():
            return
        if isinstance(io, BackgroundFileIO):
            io.finish()
        elif isinstance(io, AsyncCheckpointIO):
            io.teardown()  # which waits; the next save starts it anew

    def all_ranks_can_save(self) -> bool:
        """Return True if all ranks raised an exception after the same step, and save together. Collective."""
        if self._ranks_can_save is None:
            self._ranks_can_save = self._check_all_ranks_can_save()
        return self._ranks_can_save

    def _check_all_ranks_can_save(self) -> bool:
        module = self.lightning_module
        engine = (module is not None and engine_of(module)) or self._engine
        loading = module is not None and (self._is_loading or _is_restoring(module.trainer))
        alone = module is None or module.trainer.world_size == 1
        word = "" if module is None else "at a checkpoint" if loading else f"after step {module.trainer.global_step}"
        absent = "" if alone or engine is None else engine.checkpoints.ranks.find_disagreement(word)
        if loading and not absent:
            log.error("No checkpoint is saved after this exception, because it occurred while loading one.")
            return False
        if module is None or alone or engine is None:
            return alone
        if absent:
            log.error(
                "No checkpoint is saved after this exception: %s. Those that were saved before are there.", absent
            )
        else:
            engine.cycle.clean_up()  # the exception may have interrupted a step
        return not absent

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint after the save in progress, for which it makes room."""
        remove = partial(super().remove_checkpoint, full_path(filepath))  # the working directory may change until then
        engine = self._sharded_engine
        if engine is None:
            remove()
        else:
            engine.checkpoints.saver.run_after_commit(remove)

    def _finish_saving(self) -> None:
        """Wait for asynchronous saves and raise their errors on every rank; after a failure only log them."""
        engine = self._sharded_engine
        if engine is None:
            self.checkpoint_io.teardown()
            return
        checkpoints = engine.checkpoints
        if engine.watchdog.failed:
            checkpoints.saver.give_up(alone=bool(engine.watchdog.native.abort_reason()))
            self.checkpoint_io.teardown()
            return
        checkpoints.saver.finish()
        with self._show_progress():
            checkpoints.ranks.run_on_rank0("save the last checkpoint", self.checkpoint_io.teardown)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._is_loading = True
        try:
            found = self._load(checkpoint_path, weights_only)
        except FileNotFoundError:
            # Lightning takes the leftover of a killed save at SLURM's requeue for the newest checkpoint.
            if "hpc_ckpt_" not in str(checkpoint_path):
                raise
            ranks = self._require_engine().checkpoints.ranks
            others = ranks.run_on_rank0("look for another checkpoint", lambda: other_checkpoints(checkpoint_path))
            if not others:
                raise
            rank_zero_warn(
                f"{checkpoint_path} is incomplete. Going on from {others[0]}, the newest complete checkpoint."
            )
            found = self._load(others[0], weights_only)
        self._is_loading = False
        return found

    def _load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        checkpoints = self._require_engine().checkpoints
        checkpoints.saver.finish()  # a save in progress may write this checkpoint
        with self._show_progress():
            if checkpoints.is_folder(path):
                found = to_trainer_keys(read_on_all_ranks(checkpoints, path, weights_only))
            else:
                found = to_trainer_keys(load_file(self.checkpoint_io, path, weights_only, checkpoints.ranks))
        if "pytorch-lightning_version" not in found:
            raise CheckpointError(
                f"{path} was not saved by a Trainer: it has no loop state to resume from. Load its weights into the "
                "module; `python -m lightning_zero checkpoint consolidate` makes one file of a folder."
            )
        self._loaded_path = path
        return found

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if not self._prepared:
            materialize_values(self.lightning_module)
            self._prepare_module(self.lightning_module.trainer)
        checkpoint = {**checkpoint, "state_dict": materialize_extra_state(checkpoint["state_dict"])}
        engine = self._require_engine()
        with (
            self._show_progress(),
            engine.overwriting_weights(),
            engine.checkpoints.loading_weights(self._loaded_path),
        ):
            super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        with self._show_progress():
            self._load_states(checkpoint["optimizer_states"])

    def _load_states(self, states: Sequence[dict[str, Any]]) -> None:
        if self.optimizers and not states:
            rank_zero_warn(
                "The checkpoint holds no optimizer state, so optimizers start from scratch. This is expected if "
                "configure_optimizers() returned none when it was saved."
            )
            return
        if len(states) != len(self.optimizers):
            raise MisconfigurationException(
                f"The checkpoint holds the state of {len(states)} optimizers, but configure_optimizers() returned "
                f"{len(self.optimizers)}. "
                "Return the same optimizers in the same order, or load only the weights with load_from_checkpoint()."
            )
        engine = self._require_engine()
        for optimizer, state in zip(self.optimizers, states, strict=True):
            engine.load_optimizer_state(unwrap_optimizer(optimizer), state)
            if not engine.optimizers.on_host:
                optimizer_to_device(optimizer, self.root_device)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module is plain, with full parameters. Optimizers, schedulers and observers of graphs belong to
        # the shards, so a copy is a strategy before its setup.
        state = super().__getstate__()
        state.update(_engine=None, _remove_stop_check=None, _prepared=False, _observers=[])
        state.update(_optimizers=[], lr_scheduler_configs=[])
        return state


def _has_own_methods(io: CheckpointIO) -> bool:
    """Return True if methods were replaced on this object, as mocks do."""
    return any(callable(value) for value in vars(io).values())


def _is_restoring(trainer: pl.Trainer) -> bool:
    """Return True while a checkpoint is read but not fully restored."""
    return bool(trainer._checkpoint_connector._loaded_checkpoint)


def progress_bar_for(trainer: pl.Trainer) -> ShowBar | None:
    """Return a maker of progress bars on rank 0's terminal; None without a terminal or Lightning's bar.

    Rich's bar redraws the whole screen, so with it only log lines report progress.
    """
    bar = trainer.progress_bar_callback
    shown = isinstance(bar, TQDMProgressBar) and bar.is_enabled and trainer.is_global_zero
    return _show_bar if shown and sys.stdout.isatty() else None


def _show_bar(description: str, total: int) -> Any:
    units: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    return tqdm(
        desc=description, total=total, delay=BAR_DELAY_S, leave=False, file=sys.stdout, dynamic_ncols=True, **units
    )
