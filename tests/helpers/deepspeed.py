"""Checkpoints in the layout of DeepSpeed's, written without it.

Files of DeepSpeed 0.19.8 on CPUs (ZeRO-1 to ZeRO-3, float32 and bfloat16, one to three ranks) have these files, keys,
shapes and classes. Other content is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VERSION = "0.19.8"
LOSS_SCALER, STAGE = "deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.runtime.zero.config.ZeroStageEnum"
ADDRESS = "deepspeed.utils.tensor_fragment.fragment_address"

Named = Mapping[str, Tensor]


def write(
    folder: Path,
    stage: int,
    ranks: int,
    groups: Sequence[Mapping[str, Any]],
    moments: Mapping[str, Named],
    others: Named,
    client: Mapping[str, Any],
    *,
    frozen: Sequence[str] = (),
    shared: Mapping[str, str] | None = None,
    reverse: bool = False,
    mappings: bool = True,
    version: str = VERSION,
) -> None:
    """Writes ``folder/checkpoint/`` and ``folder/latest``.

    groups: of the optimizer: settings, and under "params" trained weights by name
    moments: by weight's name, state of the optimizer in its shape
    others: the rest of the state dict: buffers, and ``frozen`` weights
    client: the state that the Trainer saves
    shared: of tied weights, the name of each and that of the one that is in groups
    reverse: each partition holds parameters in another order than the list of shapes, as after "round robin"
    mappings: ranks save the places of parameters, which early versions did not
    """
    home = folder / "checkpoint"
    home.mkdir(parents=True)
    (folder / "latest").write_text("checkpoint")
    with _classes() as made:
        kept = _cut_each(ranks, groups, moments) if stage == 3 else _cut_rows(ranks, groups, moments, reverse, made)
        for rank, part in enumerate(kept):
            if not mappings:
                del part["param_slice_mappings"]
            part |= {"zero_stage": made[STAGE](stage), "loss_scaler": made[LOSS_SCALER]()}
            part = {"optimizer_state_dict": part, "ds_version": version, "ds_config": {}}
            torch.save(part, home / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    trained = {name: value for group in groups for name, value in group["params"].items()}
    whole = trained | dict(others) | {name: trained[one] for name, one in (shared or {}).items()}
    for rank in range(ranks if stage == 3 else 1):
        model = {
            "module": {
                name: torch.empty(0) if stage == 3 and (name not in others or name in frozen) else value
                for name, value in whole.items()
            },
            "buffer_names": [name for name in others if name not in frozen],
            "param_shapes": [{name: value.shape for name, value in group["params"].items()} for group in groups],
            "frozen_param_shapes": {name: others[name].shape for name in frozen},
            "frozen_param_fragments": {
                name: _pieces(others[name], ranks)[rank] if stage == 3 else others[name] for name in frozen
            },
            "shared_params": dict(shared or {}),
            "ds_version": version,
            "ds_config": {"zero_optimization": {"stage": stage}},
            "global_steps": 3,
            **client,
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(model, home / name)


def _settings(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(group) | {"params": [number]} for number, group in enumerate(groups)]


def _cut_rows(ranks: int, groups: Any, moments: Any, reverse: bool, made: Mapping[str, type]) -> list[dict[str, Any]]:
    """ZeRO-1 and ZeRO-2: parameters one after the other, cut at the borders of partitions."""
    found: list[dict[str, Any]] = [
        {
            "single_partition_of_fp32_groups": [],
            "base_optimizer_state": {"state": {}, "param_groups": _settings(groups)},
            "param_slice_mappings": [],
            "partition_count": [ranks] * len(groups),
        }
        for _ in range(ranks)
    ]
    for number, group in enumerate(groups):
        names = sorted(group["params"], reverse=reverse)
        count = sum(group["params"][name].numel() for name in names)
        width = -(-count // ranks)
        for rank, part in enumerate(found):
            here, mapping, offset = range(rank * width, min(count, (rank + 1) * width)), {}, 0
            for name in names:
                end = offset + group["params"][name].numel()
                first, last = max(offset, here.start), min(end, here.stop)
                if first < last:
                    mapping[name] = made[ADDRESS](last - first, first - here.start)
                offset = end
            part["param_slice_mappings"].append(mapping)

            def row(values: Mapping[str, Tensor], names: list[str] = names, here: range = here) -> Tensor:
                return torch.cat([values[name].reshape(-1) for name in names])[here.start : here.stop].clone()

            part["single_partition_of_fp32_groups"].append(row(group["params"]))
            part["base_optimizer_state"]["state"][number] = {
                key: row({name: moments[name][key] for name in names}) if key != "step" else value
                for key, value in moments[names[0]].items()
            }
    return found


def _cut_each(ranks: int, groups: Any, moments: Any) -> list[dict[str, Any]]:
    """ZeRO-3: a piece of each parameter on each rank."""
    return [
        {
            "fp32_flat_groups": [
                torch.cat([_pieces(value, ranks)[rank] for value in group["params"].values()]) for group in groups
            ],
            "optimizer_state_dict": {
                "state": {
                    number: {
                        key: torch.cat([_pieces(moments[name][key], ranks)[rank] for name in group["params"]])
                        if key != "step"
                        else value
                        for key, value in moments[next(iter(group["params"]))].items()
                    }
                    for number, group in enumerate(groups)
                },
                "param_groups": _settings(groups),
            },
            "partition_count": ranks,
        }
        for rank in range(ranks)
    ]


def _pieces(value: Tensor, ranks: int) -> list[Tensor]:
    """Return parts of one size, the last with padding."""
    width = -(-value.numel() // ranks)
    flat = torch.cat([value.detach().reshape(-1), torch.full((width * ranks - value.numel(),), float("nan"))])
    return [piece.clone() for piece in flat.split(width)]


@contextmanager
def _classes() -> Iterator[dict[str, type]]:
    """Classes of DeepSpeed's that its files name, in modules that are there as long as something is saved."""

    class LossScaler:
        def __init__(self) -> None:
            self.cur_scale, self.dynamic = 1.0, False

    class FragmentAddress:
        def __init__(self, numel: int, start: int) -> None:
            self.numel, self.start = numel, start

    Stage = Enum("Stage", {"optimizer_states": 1, "gradients": 2, "weights": 3})
    made: dict[str, type] = {LOSS_SCALER: LossScaler, STAGE: Stage, ADDRESS: FragmentAddress}
    for path, cls in made.items():
        module, name = path.rsplit(".", 1)
        cls.__module__, cls.__qualname__, cls.__name__ = module, name, name
        at = ""
        for step in module.split("."):
            at = f"{at}.{step}".lstrip(".")
            sys.modules.setdefault(at, ModuleType(at))
        setattr(sys.modules[module], name, cls)
    try:
        yield made
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
            del sys.modules[name]
