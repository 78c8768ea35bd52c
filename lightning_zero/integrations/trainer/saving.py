"""The part of a strategy that fills checkpoints and reads them, and says what a copy of it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint.sharded.folder import full_path
from lightning_zero.checkpoint.sharded.owned import materialize_extra_state, materialize_values
from lightning_zero.compat.lightning_private import WrappingCheckpointIO, optimizer_to_device
from lightning_zero.config import EngineConfig
from lightning_zero.engine import Engine, engine_of
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.files import (
    BackgroundFileIO,
    FileIO,
    check_storage_options,
    load_file,
    report_progress_of,
    report_user_io,
)
from lightning_zero.integrations.folders import to_trainer_keys, parted, read_on_all_ranks
from lightning_zero.integrations.trainer.bars import progress_bar_for
from lightning_zero.integrations.trainer.finding import asked_by_keyword, other_checkpoints
from lightning_zero.integrations.trainer.precision import unwrap_optimizer

__all__ = ["TrainerCheckpointing"]

log = logging.getLogger(__name__)


class TrainerCheckpointing(ParallelStrategy):
    """For a strategy, which says where its engine is, and shards its module."""

    _prepared: bool
    _engine: Engine | None
    _options: EngineConfig
    _loaded_path: object = None  # where what is being loaded lies
    _is_loading: bool  # a checkpoint, which has failed, where this stays so
    _ranks_can_save: bool | None  # of all ranks, after an exception in this stage; None: nobody has asked

    def _require_engine(self) -> Engine:
        raise NotImplementedError

    def _prepare_module(self, trainer: pl.Trainer) -> None:
        raise NotImplementedError

    @property
    def _sharded(self) -> bool:
        return self._options.state_dict_type == "sharded"

    @property
    def _sharded_engine(self) -> Engine | None:
        """The engine; None where the module is not sharded yet, or no longer."""
        module, engine = self.lightning_module, self._engine
        return engine if module is not None and engine is not None and engine_of(module) is engine else None

    @property
    def saves_async(self) -> bool:
        return self._options.async_save or isinstance(self._checkpoint_io, (AsyncCheckpointIO, BackgroundFileIO))

    @property
    def _attached_trainer(self) -> pl.Trainer | None:
        """The module's Trainer; None where there is none yet: users may load by hand, too."""
        module = self.lightning_module
        return None if module is None else module._trainer

    def _is_running(self) -> bool:
        """Whether there is a training that a save can go on beside; else a checkpoint is there when it was saved."""
        return self._attached_trainer is not None and self._attached_trainer.state.status == TrainerStatus.RUNNING

    def saving_to(self) -> str | None:
        """Where a save goes on that readers do not see yet. On rank 0."""
        io, engine = self._checkpoint_io, self._sharded_engine
        if isinstance(io, BackgroundFileIO) and io.busy:
            return io.path
        return None if engine is None else engine.checkpoints.saver.saving_to

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self.lightning_module
        if module is None:
            return self._require_engine().model_state()  # which says what is missing
        engine = engine_of(module)  # another Trainer's, maybe
        # Before it is sharded every rank holds it whole.
        if engine is None:
            return super().lightning_module_state_dict()
        with self._show_progress(engine):
            if isinstance(self._checkpoint_io, BackgroundFileIO):
                with engine.checkpoints.together.busy("waits until the file before is written"):
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
        # Lightning's way to write beside training is replaced by ours, unless users have put something inside.
        if io is None or (type(io) is AsyncCheckpointIO and io.checkpoint_io is None and not _has_own_methods(io)):
            io = self._checkpoint_io = BackgroundFileIO() if self.saves_async else FileIO()
        elif isinstance(io, WrappingCheckpointIO):
            io.checkpoint_io = FileIO()  # only where the innermost one has none: what is there stays
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
        if engine is None:  # every rank holds all of it
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif not self._sharded:
            with self._show_progress():
                engine.checkpoints.together.first(
                    f"save the checkpoint {filepath}", lambda: self._write(checkpoint, filepath, storage_options)
                )
        else:
            mark, again = self._find_save_last(str(filepath), checkpoint)
            state, rest = parted(checkpoint)
            with self._show_progress():
                engine.checkpoints.save(filepath, state, rest, self._saves_async_now, mark, again)

    def _barrier_is_redundant(self, barrier: str | None) -> bool:
        # A save beside training; and behind a barrier the host has waited for all that its device was given.
        return barrier == "Trainer.save_checkpoint" and self._sharded_engine is not None and self._saves_async_now

    @property
    def _saves_async_now(self) -> bool:
        return self.saves_async and self._is_running()

    @contextmanager
    def _show_progress(self, engine: Engine | None = None) -> Iterator[None]:
        """Inside, bars are shown of what takes long, where the Trainer shows one."""
        checkpoints = (engine or self._require_engine()).checkpoints
        checkpoints.show = None if self._attached_trainer is None else progress_bar_for(self._attached_trainer)
        try:
            with report_progress_of(self.checkpoint_io, checkpoints.telling):
                yield
        finally:
            checkpoints.show = None

    def _write(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None) -> None:
        io = self.checkpoint_io
        with self._report_busy(f"saving {path}"):
            io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            if self._is_running():
                return
            if isinstance(io, BackgroundFileIO):
                io.finish()
            elif isinstance(io, AsyncCheckpointIO):
                io.teardown()  # which waits; the next save starts it anew

    def _report_busy(self, what: str) -> AbstractContextManager[None]:
        """Surrounds what a user's own may do, which tells nobody."""
        return report_user_io(self.checkpoint_io, what, self._require_engine().checkpoints.telling_for)

    def _find_save_last(self, path: str, checkpoint: Mapping[str, Any]) -> tuple[tuple[int, int] | None, bool]:
        """Which callback with ``save_last=True`` saves after which step, and whether for the second time: first it
        saves to a place of its own, and then at once to that of the last one."""
        assert self.lightning_module is not None
        for number, callback in enumerate(self.lightning_module.trainer.checkpoint_callbacks):
            if not isinstance(callback, ModelCheckpoint) or callback.save_last is not True:
                continue
            again = path == callback.last_model_path
            if again or path in (callback.best_model_path, *callback.best_k_models):
                return (number, checkpoint["global_step"]), again
        return None, False

    def all_ranks_can_save(self) -> bool:
        """After an exception: whether all ranks have raised one after the same step, and will save together."""
        if self._ranks_can_save is None:
            self._ranks_can_save = self._check_all_ranks_can_save()
        return self._ranks_can_save

    def _check_all_ranks_can_save(self) -> bool:
        module = self.lightning_module
        engine = (module is not None and engine_of(module)) or self._engine
        loading = module is not None and (self._is_loading or _is_restoring(module.trainer))
        alone = module is None or module.trainer.world_size == 1
        word = "" if module is None else "at a checkpoint" if loading else f"after step {module.trainer.global_step}"
        absent = "" if alone or engine is None else engine.checkpoints.together.absent(word)
        if loading and not absent:
            log.error("No checkpoint is saved after this exception, which came while one was being loaded.")
            return False
        if module is None or alone or engine is None:
            return alone
        if absent:
            log.error(
                "No checkpoint is saved after this exception: %s. Those that were saved before are there.", absent
            )
        else:
            engine.cycle.clean_up()  # an exception may have left work half done
        return not absent

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Not before the one that is being saved, for which it makes room, is there."""
        remove = partial(super().remove_checkpoint, full_path(filepath))  # it may be done later, from another folder
        if self._sharded_engine is None:
            remove()
        else:
            self._sharded_engine.checkpoints.saver.afterwards(remove)

    def _finish_saving(self) -> None:
        """Waits for what is saved beside training, and raises on every rank what went wrong. After an exception ranks
        cannot do that together any more: what went wrong is then only said."""
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
            checkpoints.together.first("save the last checkpoint", self._tear_down)

    def _tear_down(self) -> None:
        with self._report_busy("saving the last checkpoint"):
            self.checkpoint_io.teardown()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Either kind. Where the user named no file, but asked for the last or the best one, and that one is no good,
        the newest other one beside it that is whole."""
        self._is_loading = True
        found = self._load_with_fallback(checkpoint_path, weights_only)
        self._is_loading = False
        return found

    def _load_with_fallback(self, checkpoint_path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        try:
            return self._load(checkpoint_path, weights_only)
        except (CheckpointError, FileNotFoundError) as error:
            if self._attached_trainer is None or not asked_by_keyword(self._attached_trainer):
                raise
            together = self._require_engine().checkpoints.together
            again = [str(checkpoint_path)] if "://" in str(checkpoint_path) else []  # a network may have failed once
            for other in [
                *again,
                *together.first("look for another checkpoint", lambda: other_checkpoints(checkpoint_path)),
            ]:
                try:
                    found = self._load(other, weights_only)
                except (CheckpointError, FileNotFoundError):
                    continue
                if other not in again:
                    rank_zero_warn(f"{error} Going on from {other} instead, the newest other checkpoint that is whole.")
                return found
            raise

    def _load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        checkpoints = self._require_engine().checkpoints
        checkpoints.saver.finish()  # it may be this one
        with self._show_progress():
            if checkpoints.is_folder(path):
                found = to_trainer_keys(read_on_all_ranks(checkpoints, path, weights_only))
            else:
                found = to_trainer_keys(load_file(self.checkpoint_io, path, weights_only, checkpoints.together))
        if "pytorch-lightning_version" not in found:
            raise CheckpointError(
                f"{path} was not saved by a Trainer: it says nothing of loops to go on from. Load its weights into the "
                "module, where `python -m lightning_zero checkpoint consolidate` may help to make one file of them."
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
        with self._show_progress(), self._require_engine().checkpoints.loading_weights(self._loaded_path):
            super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        with self._show_progress(), self._require_engine().checkpoints.halfway.optimizers(self._loaded_path):
            self._load_states(checkpoint["optimizer_states"])

    def _load_states(self, states: Sequence[dict[str, Any]]) -> None:
        if self.optimizers and not states:
            rank_zero_warn(
                "The checkpoint holds no state of optimizers, so they start anew. If it was written where "
                "configure_optimizers() returned none, this is as it should be."
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
        # A copy of the module is a plain one, with whole parameters. Optimizers, schedulers and what observes an
        # engine's graphs belong to the shards: a copy is a strategy that has not been set up.
        state = super().__getstate__()
        state.update(_engine=None, _remove_stop_check=None, _stop=None, _prepared=False, _observers=[])
        state.update(_optimizers=[], lr_scheduler_configs=[])
        return state


def _has_own_methods(io: CheckpointIO) -> bool:
    """Return True if methods were replaced on this object, as mocks do."""
    return any(callable(value) for value in vars(io).values())


def _is_restoring(trainer: pl.Trainer) -> bool:
    """Whether a checkpoint has been read, and is not all in place yet."""
    return bool(trainer._checkpoint_connector._loaded_checkpoint)
