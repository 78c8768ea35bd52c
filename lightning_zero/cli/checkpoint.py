"""``checkpoint``: inspect, verify, consolidate and export checkpoints of either kind."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from lightning_zero.checkpoint.full_checkpoint import write_local_file
from lightning_zero.checkpoint.integrity import tensors_in, verify_archive, verify_storages
from lightning_zero.checkpoint.optimizer_state import has_parameter_names, renumber, with_float_state
from lightning_zero.checkpoint.rank_tasks import SingleProcess
from lightning_zero.checkpoint.safetensors import ExportWeight, export_weights, parse_size, to_cpu
from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointTensor
from lightning_zero.checkpoint.sharded.metadata import METADATA
from lightning_zero.checkpoint.sharded.reader import checkpoint_kind, open_checkpoint
from lightning_zero.cli.terminal import print_progress, progress_bar, show_section, show_table
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.checkpoint_files import to_trainer_keys
from lightning_zero.sharding.host_memory import copy_mapped

UNTRUSTED = "Unsupported global"  # in torch's error
TRAINER_KEYS = {
    "callbacks",
    "epoch",
    "global_step",
    "hparams_name",
    "hyper_parameters",
    "loops",
    "lr_schedulers",
    "optimizer_states",
    "pytorch-lightning_version",
    "state_dict",
}


def run(arguments: Namespace) -> int:
    """Run the action of ``arguments``, and return the exit status."""
    actions = {"inspect": _inspect, "verify": _verify, "consolidate": _consolidate, "export": _export}
    return actions[arguments.action](arguments)


class OpenedCheckpoint:
    """A checkpoint of either kind.

    Raises:
        CheckpointError: there is none.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        kind = checkpoint_kind(path)
        if kind == "nothing":
            raise CheckpointError(f"There is nothing at {path}.")
        self.folder = open_checkpoint(path) if kind == "folder" else None
        if self.folder is None and not Path(path).is_file():
            raise CheckpointError(f"{path} is not on a file system of this host. Download it first.")

    def load(self, weights_only: bool = True) -> dict[str, Any]:
        """Return the content; tensors are read lazily."""
        if self.folder is not None:
            return self.folder.content(weights_only)
        try:
            mmap = is_zipfile(self.path)  # torch cannot map its older format
            found = torch.load(self.path, map_location="cpu", mmap=mmap, weights_only=weights_only)
            verify_storages(found, self.path, self.path)
        except CheckpointError:
            raise
        except Exception as error:  # damage may show as anything
            raise CheckpointError(f"{self.path} cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.path} holds a {type(found).__name__}, and not a checkpoint.")
        return found

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file."""
        if self.folder is not None:
            return self.folder.sizes()
        return {Path(self.path).name: Path(self.path).stat().st_size}

    def check(self, on_read: Callable[[int], None]) -> str:
        """Compare the checkpoint with its checksums, and describe the comparison.

        Raises:
            CheckpointError: it is damaged.
        """
        if self.folder is None:
            verify_archive(Path(self.path), on_read=on_read)
            compared = "the checksum of each of its parts"
        else:
            self.folder.check(self.folder.sizes(), on_read)
            compared = "sizes and checksums of its files"
        content = self._trusted_content()
        if self.folder is not None and not self.folder.has_checksums:
            for value in tensors_in(content):
                value.clone()
            compared = "the checksums that torch wrote into each piece; all its tensors can be read"
        return compared if content is not None else f"{compared}; objects of classes that are not trusted were not read"

    def _trusted_content(self) -> dict[str, Any] | None:
        """Return the content, or None if it has objects of untrusted classes; raise if it contradicts itself."""
        try:
            return self.load()
        except CheckpointError as error:
            if UNTRUSTED not in str(error):
                raise
            return None


def _checkpoints_in(path: str) -> list[str]:
    """Return the checkpoint at ``path``, or those in the folder there."""
    home = Path(path)
    if not home.is_dir() or (home / METADATA).exists():
        return [path]
    found = sorted(str(entry) for entry in home.iterdir() if entry.name.endswith(".ckpt"))
    return found or [path]


# -- inspect


def _inspect(arguments: Namespace) -> int:
    found = []
    for path in _checkpoints_in(arguments.path):
        checkpoint = OpenedCheckpoint(path)
        content = to_trainer_keys(checkpoint.load())
        facts = _facts(checkpoint, content)
        tensors = _list_tensors(content) if arguments.tensors else []
        found.append(facts | ({"tensors": tensors} if arguments.tensors else {}))
        if not arguments.json:
            show_section(path, facts)
            if tensors:
                rows = [(row["name"], str(row["shape"]), row["dtype"]) for row in tensors]
                show_table("", ("tensor", "shape", "dtype"), rows)
    if arguments.json:
        print(json.dumps(found, indent=1))
    return 0


def _facts(checkpoint: OpenedCheckpoint, content: Mapping[str, Any]) -> dict[str, Any]:
    sizes = checkpoint.sizes()
    weights = {key: value for key, value in (content.get("state_dict") or {}).items() if isinstance(value, Tensor)}
    dtypes = Counter(str(value.dtype).removeprefix("torch.") for value in weights.values())
    folder = checkpoint.folder
    return {
        "path": checkpoint.path,
        "kind": "full" if folder is None else "sharded",
        "written_by": folder and folder.written_by or _lightning_version(content),
        "ranks": folder.world_size if folder else None,
        "files": len(sizes),
        "size_gib": round(sum(sizes.values()) / 2**30, 3),
        "checksums": folder is None or folder.has_checksums,
        "epoch": content.get("epoch"),
        "global_step": content.get("global_step"),
        "weights": len(weights),
        "elements": sum(value.numel() for value in weights.values()),
        "dtypes": dict(dtypes),
        "optimizers": len(content.get("optimizer_states") or ()),
        "hyper_parameters": {str(k): str(v) for k, v in (content.get("hyper_parameters") or {}).items()},
        "also": sorted(str(key) for key in content.keys() - TRAINER_KEYS),
    }


def _list_tensors(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    weights = content.get("state_dict") or {}
    return [
        {"name": key, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        for key, value in weights.items()
        if isinstance(value, Tensor)
    ]


def _lightning_version(content: Mapping[str, Any]) -> str | None:
    version = content.get("pytorch-lightning_version")
    return None if version is None else f"lightning {version}"


# -- verify


def _verify(arguments: Namespace) -> int:
    """Return 1 if a checkpoint is damaged."""
    rows = []
    for path in _checkpoints_in(arguments.path):
        try:
            checkpoint = OpenedCheckpoint(path)
            with progress_bar(path, sum(checkpoint.sizes().values())) as on_read:
                rows.append({"path": path, "good": True, "why": f"compared: {checkpoint.check(on_read)}"})
        except (CheckpointError, OSError) as error:
            rows.append({"path": path, "good": False, "why": str(error)})
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        show_table("", ("", "", ""), [("ok" if row["good"] else "NOT GOOD", row["path"], row["why"]) for row in rows])  # type: ignore[misc]
    return 0 if all(row["good"] for row in rows) else 1


# -- consolidate


def _consolidate(arguments: Namespace) -> int:
    """Write one file of a folder, after comparing it with its checksums. Needs the memory of all values."""
    checkpoint = OpenedCheckpoint(arguments.path)
    if checkpoint.folder is None:
        raise CheckpointError(f"{arguments.path} is one file already.")
    output = Path(arguments.output or f"{arguments.path.rstrip('/')}.consolidated")
    if output.exists():
        raise CheckpointError(f"There is something at {output} already. Give another --output, or move it away.")
    with progress_bar("compares", sum(checkpoint.sizes().values())) as on_read:
        checkpoint.check(on_read)
    content = to_trainer_keys(checkpoint.load(not arguments.trust))
    content["optimizer_states"] = [
        renumber(state) if has_parameter_names(state) else state for state in content.get("optimizer_states", ())
    ]
    if not content["optimizer_states"] and "lr_schedulers" not in content:
        del content["optimizer_states"]  # it was saved with weights only
    total = sum(checkpoint.sizes().values())
    full = _read_full(content, total)
    if states := full.get("optimizer_states"):
        full["optimizer_states"] = [with_float_state(state) if "state" in state else state for state in states]
    with progress_bar("writes", total) as on_write:
        write_local_file(full, output, on_write)
    size = output.stat().st_size
    print(json.dumps({"output": str(output), "bytes": size}) if arguments.json else output)
    return 0


def _read_full(content: dict[str, Any], total: int) -> dict[str, Any]:
    known: dict[int, Any] = {}  # tied values stay tied
    with progress_bar("reads", total) as on_read:

        def read(value: CheckpointTensor) -> Any:
            if id(value) not in known:
                known[id(value)] = value.full_tensor()
                on_read(value.numel() * value.itemsize)
            return known[id(value)]

        done: dict[str, Any] = apply_to_collection(content, CheckpointTensor, read)
    return done


# -- export


def _export(arguments: Namespace) -> int:
    """Write safetensors, after comparing the checkpoint with its checksums. Holds the tensors of one file."""
    checkpoint = OpenedCheckpoint(arguments.path)
    with progress_bar("compares", sum(checkpoint.sizes().values())) as on_read:
        checkpoint.check(on_read)
    state = to_trainer_keys(checkpoint.load()).get("state_dict") or {}
    selected = {
        key.removeprefix(arguments.prefix): value
        for key, value in state.items()
        if isinstance(value, Tensor) and key.startswith(arguments.prefix)
    }
    if not selected:
        raise CheckpointError(
            f"{arguments.path} holds no weights whose names begin with {arguments.prefix!r}. There are: "
            f"{', '.join(list(state)[:5])}, ..."
        )
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    weights: dict[str, ExportWeight] = {}
    known: set[object] = set()
    for key, value in selected.items():
        place = id(value) if isinstance(value, CheckpointTensor) else (value.data_ptr(), value.shape, value.stride())
        if place in known and value.numel():
            continue  # tied, and exported by its first name
        known.add(place)
        size = (dtype or value.dtype).itemsize if value.is_floating_point() else value.itemsize
        weights[key] = ExportWeight(value.numel() * size, partial(_read, value), partial(_keep, value, dtype))
    max_bytes = parse_size(arguments.max_shard_size)
    with progress_bar("writes", sum(weight.bytes for weight in weights.values())) as on_write:
        names = export_weights(weights, Path(arguments.output), max_bytes, SingleProcess(), {}, on_write)
    print(json.dumps({"output": arguments.output, "files": names}) if arguments.json else arguments.output)
    prefix = _common_prefix(selected)
    if prefix and not arguments.prefix:
        print_progress(
            f"All names in it begin with {prefix!r}, as in your LightningModule. Libraries look for those without: "
            f"for them pass --prefix {prefix}"
        )
    return 0


def _common_prefix(names: Collection[str]) -> str:
    """Return ``"model."`` if all weights belong to one attribute of the LightningModule."""
    first, *others = {name.partition(".")[0] for name in names}
    return f"{first}." if not others and all("." in name for name in names) else ""


def _read(value: Tensor) -> Tensor:
    if isinstance(value, CheckpointTensor):
        return value.full_tensor()
    full = torch.empty_like(value)
    copy_mapped(value, full)
    return full


def _keep(value: Tensor, dtype: torch.dtype | None, full: Tensor) -> Tensor:
    return to_cpu(full, dtype, copy=full is value)
