"""``checkpoint consolidate``: one file of a folder, as a single process would have saved it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection

from lightning_zero.checkpoint.archive import write_checkpoint_file
from lightning_zero.checkpoint.sharded.optimizers import has_parameter_names, numbered
from lightning_zero.checkpoint.sharded.values import CheckpointTensor
from lightning_zero.cli.checkpoint.found import Found
from lightning_zero.cli.progress import progress_bar
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.folders import to_trainer_keys

__all__ = ["consolidate"]


def consolidate(arguments: Namespace) -> int:
    """Reads a folder, after comparing it with its checksums, and writes the file. Takes the memory of all values."""
    found = Found(arguments.path)
    if found.folder is None:
        raise CheckpointError(f"{arguments.path} is one file already.")
    output = Path(arguments.output or f"{arguments.path.rstrip('/')}.consolidated")
    if output.exists():
        raise CheckpointError(f"There is something at {output} already. Give another --output, or move it away.")
    with progress_bar("compares", sum(found.sizes().values())) as read:
        found.check(read)
    content = to_trainer_keys(found.load(not arguments.trust))
    content["optimizer_states"] = [
        numbered(state) if has_parameter_names(state) else state for state in content.get("optimizer_states", ())
    ]
    if not content["optimizer_states"] and "lr_schedulers" not in content:
        del content["optimizer_states"]  # it was saved with weights only
    total = sum(found.sizes().values())
    whole = _whole(content, total)
    with progress_bar("writes", total) as wrote:
        write_checkpoint_file(whole, output, wrote=wrote)
    size = output.stat().st_size
    print(json.dumps({"output": str(output), "bytes": size}) if arguments.json else output)
    return 0


def _whole(content: dict[str, Any], total: int) -> dict[str, Any]:
    known: dict[int, Any] = {}  # tied ones stay one
    with progress_bar("reads", total) as read:

        def whole(value: CheckpointTensor) -> Any:
            if id(value) not in known:
                known[id(value)] = value.whole()
                read(value.numel() * value.itemsize)
            return known[id(value)]

        done: dict[str, Any] = apply_to_collection(content, CheckpointTensor, whole)
    return done
