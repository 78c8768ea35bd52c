"""What users mean by ``ckpt_path`` and ``load_from_checkpoint``: Lightning knows neither folders with tensors, nor what
to do when the last checkpoint is no good.

:func:`install_checkpoint_lookup` puts both into Lightning when this package is imported; for other strategies nothing changes, but that
``load_from_checkpoint`` reads folders.
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
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.core import saving
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_zero.checkpoint.locating import located
from lightning_zero.checkpoint.places import INCOMPLETE
from lightning_zero.checkpoint.sharded.folder import is_complete
from lightning_zero.checkpoint.sharded.manifest import MANIFEST
from lightning_zero.checkpoint.sharded.metadata import METADATA
from lightning_zero.checkpoint.sharded.opened import checkpoint_kind
from lightning_zero.checkpoint.sharded.values import CheckpointTensor
from lightning_zero.compat.lightning_private import CheckpointConnector
from lightning_zero.integrations.files import named, naming
from lightning_zero.integrations.folders import to_trainer_keys, read_folder

__all__ = ["install_checkpoint_lookup", "asked_by_keyword", "other_checkpoints"]

KEYWORDS = (None, "last", "best", "hpc")  # None: Lightning chooses


def install_checkpoint_lookup() -> None:
    """Harmless when repeated."""
    if not hasattr(saving.pl_load, "__wrapped__"):
        saving.pl_load = _read_folders(saving.pl_load)
        CheckpointConnector._parse_ckpt_path = _remember_request(CheckpointConnector._parse_ckpt_path)  # type: ignore[method-assign]


def asked_by_keyword(trainer: pl.Trainer) -> bool:
    """Whether the user has asked for ``"last"`` or ``"best"``, or left it to Lightning, and not for a certain file."""
    return getattr(trainer._checkpoint_connector, "_zero_asked", "a file") in KEYWORDS


def other_checkpoints(path: str | Path) -> list[str]:
    """The other checkpoints beside one that is no good, whole or not."""
    fs, place = located(path)
    home = os.path.dirname(place)
    fs.invalidate_cache()  # others have written since this process has looked
    entries = [entry.rstrip("/") for entry in (fs.ls(home, detail=False) if fs.isdir(home) else [])]
    if "://" in str(path):  # there one that is complete may stand beside its place, in which there is nothing
        beside = [entry for entry in entries if entry.endswith(f".ckpt{INCOMPLETE}") and is_complete(fs, entry)]
        entries += [entry.removesuffix(INCOMPLETE) for entry in beside]
    names = {entry: os.path.basename(entry) for entry in entries}
    others = [entry for entry, name in names.items() if name.endswith(".ckpt") and name != os.path.basename(place)]
    found = sorted(others, key=lambda entry: _age(fs, entry))
    return [fs.unstrip_protocol(entry) if "://" in str(path) else entry for entry in found]


def _age(fs: Any, entry: str) -> float:
    """Less for what is newer. Object stores do not know when a folder was made."""
    for place in (f"{entry}{INCOMPLETE}/{MANIFEST}", f"{entry}/{MANIFEST}", f"{entry}/{METADATA}", entry):
        with suppress(OSError, NotImplementedError, KeyError):
            return -float(fs.modified(place).timestamp())
    return 0.0


def _remember_request(parse: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parse)
    def parsed(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        self._zero_asked = ckpt_path
        found = parse(self, state_fn, ckpt_path, *args, **kwargs)
        name = getattr(self.trainer.strategy, "strategy_name", "")  # DDPStrategy has none
        if found is None and ckpt_path == "last" and str(name).startswith("zero3"):
            return _replace_broken_last(self.trainer)
        return found

    return parsed


def _replace_broken_last(trainer: pl.Trainer) -> str | None:
    """Whoever is killed before a save ends leaves a ``last.ckpt`` that leads nowhere: Lightning makes links at once,
    and would begin anew. It does so, too, where checkpoints lie at a URL, whose names it takes for those of files."""
    for callback in trainer.checkpoint_callbacks:
        home = getattr(callback, "dirpath", None)
        if home and "://" in str(home):
            for path in other_checkpoints(f"{str(home).rstrip('/')}/*"):
                rank_zero_warn(f"Lightning finds no last checkpoint in {home}. Going on from {path}, the newest.")
                return path
        for path in other_checkpoints(Path(home) / "last.ckpt") if home and _has_last_remains(Path(home), callback) else ():
            rank_zero_warn(f"The last checkpoint in {home} was not saved to its end. Going on from {path}, the newest.")
            return path
    return None


def _has_last_remains(home: Path, callback: Any) -> bool:
    """Whether anything is left of a last one, if only a link or what was begun; else there was none to go on from."""
    begins = str(getattr(callback, "CHECKPOINT_NAME_LAST", "last")).partition("{")[0]
    return home.is_dir() and any(entry.name.startswith(begins) for entry in home.iterdir())


def _read_folders(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def loaded(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if named(path, lambda: checkpoint_kind(path)) != "folder":
            return naming(path, lambda: load(path, map_location=map_location, weights_only=weights_only))
        checkpoint = to_trainer_keys(named(path, lambda: read_folder(path, weights_only)))
        whole = partial(_full_value, map_location=map_location)
        return checkpoint | {"state_dict": apply_to_collection(checkpoint.get("state_dict", {}), CheckpointTensor, whole)}

    return loaded


def _full_value(value: CheckpointTensor, map_location: Any) -> Any:
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu", "cpu")
    return value.whole().to(map_location) if isinstance(map_location, str | torch.device) else value.whole()
