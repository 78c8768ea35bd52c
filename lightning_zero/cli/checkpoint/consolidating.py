"""``checkpoint consolidate``: one file of a folder, as a single process would have saved it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection

from lightning_zero.checkpoint.archive import write_archive
from lightning_zero.checkpoint.sharded.optimizers import is_by_name, numbered
from lightning_zero.checkpoint.sharded.values import SavedValue
from lightning_zero.cli.checkpoint.found import Found
from lightning_zero.cli.progress import bar
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.folders import as_trainers

__all__ = ["consolidate"]


def consolidate(arguments: Namespace) -> int:
    """Reads a folder, after comparing it with its checksums, and writes the file. Takes the memory of all values."""
    found = Found(arguments.path)
    if found.folder is None:
        raise CheckpointError(f"{arguments.path} is one file already.")
    output = Path(arguments.output or f"{arguments.path.rstrip('/')}.consolidated")
    if output.exists():
        raise CheckpointError(f"There is something at {output} already. Give another --output, or move it away.")
    with bar("compares", sum(found.sizes().values())) as read:
        found.check(read)
    content = as_trainers(found.load(not arguments.trust))
    content["optimizer_states"] = [
        numbered(state) if is_by_name(state) else state for state in content.get("optimizer_states", ())
    ]
    if not content["optimizer_states"] and "lr_schedulers" not in content:
        del content["optimizer_states"]  # it was saved with weights only
    total = sum(found.sizes().values())
    whole = _whole(content, total)
    with bar("writes", total) as wrote:
        write_archive(whole, output, wrote=wrote)
    size = output.stat().st_size
    print(json.dumps({"output": str(output), "bytes": size}) if arguments.json else output)
    return 0


def _whole(content: dict[str, Any], total: int) -> dict[str, Any]:
    known: dict[int, Any] = {}  # tied ones stay one
    with bar("reads", total) as read:

        def whole(value: SavedValue) -> Any:
            if id(value) not in known:
                known[id(value)] = value.whole()
                read(value.numel() * value.itemsize)
            return known[id(value)]

        done: dict[str, Any] = apply_to_collection(content, SavedValue, whole)
    return done
