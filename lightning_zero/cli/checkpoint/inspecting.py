"""``checkpoint inspect``: what is in one."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_zero.cli.checkpoint.found import Found, checkpoints_in
from lightning_zero.cli.show import show_section, show_table
from lightning_zero.integrations.folders import to_trainer_keys

__all__ = ["inspect"]


def inspect(arguments: Namespace) -> int:
    """Shows each checkpoint at a path."""
    told = []
    for path in checkpoints_in(arguments.path):
        found = Found(path)
        content = to_trainer_keys(found.load())
        facts = _facts(found, content)
        tensors = _tensors(content) if arguments.tensors else []
        told.append(facts | ({"tensors": tensors} if arguments.tensors else {}))
        if not arguments.json:
            show_section(path, facts)
            if tensors:
                rows = [(row["name"], str(row["shape"]), row["dtype"]) for row in tensors]
                show_table("", ("tensor", "shape", "dtype"), rows)
    if arguments.json:
        print(json.dumps(told, indent=1))
    return 0


def _facts(found: Found, content: Mapping[str, Any]) -> dict[str, Any]:
    sizes = found.sizes()
    weights = {key: value for key, value in (content.get("state_dict") or {}).items() if isinstance(value, Tensor)}
    dtypes = Counter(str(value.dtype).removeprefix("torch.") for value in weights.values())
    folder = found.folder
    return {
        "path": found.path,
        "kind": "full" if folder is None else "sharded",
        "written_by": folder and folder.written_by or _lightning(content),
        "ranks": folder.world_size if folder else None,
        "files": len(sizes),
        "gib": round(sum(sizes.values()) / 2**30, 3),
        "checksums": folder is None or folder.has_checksums,
        "epoch": content.get("epoch"),
        "global_step": content.get("global_step"),
        "weights": len(weights),
        "elements": sum(value.numel() for value in weights.values()),
        "dtypes": dict(dtypes),
        "optimizers": len(content.get("optimizer_states") or ()),
        "hyper_parameters": {str(k): str(v) for k, v in (content.get("hyper_parameters") or {}).items()},
        "also": sorted(str(key) for key in content.keys() - KNOWN),
    }


KNOWN = {
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


def _tensors(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    weights = content.get("state_dict") or {}
    return [
        {"name": key, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        for key, value in weights.items()
        if isinstance(value, Tensor)
    ]


def _lightning(content: Mapping[str, Any]) -> str | None:
    version = content.get("pytorch-lightning_version")
    return None if version is None else f"lightning {version}"
