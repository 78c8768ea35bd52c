"""Let Lightning find checkpoints that are folders, and replace a last checkpoint that is broken.

:func:`install_checkpoint_lookup` patches Lightning when this package is imported. With other strategies two things
change: ``load_from_checkpoint`` reads folders, and a strategy that reads only files names the command that makes one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_zero.checkpoint.atomic import INCOMPLETE
from lightning_zero.checkpoint.remote_files import resolve_url
from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointTensor
from lightning_zero.checkpoint.sharded.folder import MANIFEST, is_complete
from lightning_zero.checkpoint.sharded.metadata import METADATA
from lightning_zero.checkpoint.sharded.reader import checkpoint_kind
from lightning_zero.compat.lightning_private import CheckpointConnector
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.checkpoint_files import read_folder, read_named, read_verified, to_trainer_keys


def install_checkpoint_lookup() -> None:
    """Patch Lightning. Repeated calls do nothing."""
    if not hasattr(saving.pl_load, "__wrapped__"):
        saving.pl_load = _read_folders(saving.pl_load)
        CheckpointConnector._parse_ckpt_path = _find_last(CheckpointConnector._parse_ckpt_path)  # type: ignore[method-assign]


def other_checkpoints(path: str | Path) -> list[str]:
    """Return the other checkpoints in the folder of ``path``, complete or not, newest first."""
    fs, location = resolve_url(path)
    home = os.path.dirname(location)
    fs.invalidate_cache()  # other processes may have written since
    entries = [entry.rstrip("/") for entry in (fs.ls(home, detail=False) if fs.isdir(home) else [])]
    if "://" in str(path):  # at a URL, a complete checkpoint may still have its temporary name
        complete = [entry for entry in entries if entry.endswith(f".ckpt{INCOMPLETE}") and is_complete(fs, entry)]
        entries += [entry.removesuffix(INCOMPLETE) for entry in complete]
    names = {entry: os.path.basename(entry) for entry in entries}
    others = [entry for entry, name in names.items() if name.endswith(".ckpt") and name != os.path.basename(location)]
    found = sorted(others, key=lambda entry: _age(fs, entry))
    return [fs.unstrip_protocol(entry) if "://" in str(path) else entry for entry in found]


def _age(fs: Any, entry: str) -> float:
    """Return a lower number for newer checkpoints, by their files: stores have no times of folders."""
    for file in (f"{entry}{INCOMPLETE}/{MANIFEST}", f"{entry}/{MANIFEST}", f"{entry}/{METADATA}", entry):
        with suppress(OSError, NotImplementedError, KeyError):
            return -float(fs.modified(file).timestamp())
    return 0.0


def _find_last(parse: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parse)
    def parsed(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        found = parse(self, state_fn, ckpt_path, *args, **kwargs)
        name = getattr(self.trainer.strategy, "strategy_name", "")  # DDPStrategy has none
        if found is None and ckpt_path == "last" and str(name).startswith("zero3"):
            return _replace_broken_last(self.trainer)
        if found is not None:
            _check_readable(self.trainer.strategy, str(found))
        return found

    return parsed


def _check_readable(strategy: Any, path: str) -> None:
    """Raise ``CheckpointError`` for a folder if the strategy reads only files."""
    overridden = type(strategy).load_checkpoint is not Strategy.load_checkpoint
    if overridden or not isinstance(strategy.checkpoint_io, TorchCheckpointIO) or checkpoint_kind(path) != "folder":
        return
    raise CheckpointError(
        f"{path} is a sharded checkpoint, which {type(strategy).__name__} cannot read. Make one file of it first: "
        f"`lightning-zero checkpoint consolidate {path}`. Then pass ckpt_path='{path.rstrip('/')}.consolidated'."
    )


def _replace_broken_last(trainer: pl.Trainer) -> str | None:
    """Return the newest checkpoint if the last one is a link to nothing, or if checkpoints are at a URL.

    Lightning makes the link ``last.ckpt`` when a save begins. A process that is killed before the end leaves it
    dangling, and Lightning would train from the start. It also does so for URLs, which it looks up as local files.
    """
    for callback in trainer.checkpoint_callbacks:
        home = getattr(callback, "dirpath", None)
        if home and "://" in str(home):
            for path in other_checkpoints(f"{str(home).rstrip('/')}/*"):
                rank_zero_warn(f"Lightning finds no last checkpoint in {home}. Going on from {path}, the newest.")
                return path
        for path in (
            other_checkpoints(Path(home) / "last.ckpt") if home and _has_last_remains(Path(home), callback) else ()
        ):
            rank_zero_warn(f"The last checkpoint in {home} was not saved to its end. Going on from {path}, the newest.")
            return path
    return None


def _has_last_remains(home: Path, callback: Any) -> bool:
    """Return True if there was a last checkpoint: a link or an incomplete save is left of it."""
    begins = str(getattr(callback, "CHECKPOINT_NAME_LAST", "last")).partition("{")[0]
    return home.is_dir() and any(entry.name.startswith(begins) for entry in home.iterdir())


def _read_folders(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def loaded(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if read_named(path, lambda: checkpoint_kind(path)) != "folder":
            return read_verified(path, lambda file: load(file, map_location=map_location, weights_only=weights_only))
        checkpoint = to_trainer_keys(read_named(path, lambda: read_folder(path, weights_only)))
        full = partial(_full_value, map_location=map_location)
        return checkpoint | {
            "state_dict": apply_to_collection(checkpoint.get("state_dict", {}), CheckpointTensor, full)
        }

    return loaded


def _full_value(value: CheckpointTensor, map_location: Any) -> Any:
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu", "cpu")
    return value.full_tensor().to(map_location) if isinstance(map_location, str | torch.device) else value.full_tensor()
