"""What all files of one checkpoint of DeepSpeed's say together: whole weights and moments, read where they lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from operator import index
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.damaged import named_damage
from lightning_zero.checkpoint.deepspeed.files import Files
from lightning_zero.checkpoint.deepspeed.layout import Span, spans_of_parameter, spans_of_parameters, spans_of_pieces
from lightning_zero.checkpoint.deepspeed.loading import load_mapped
from lightning_zero.checkpoint.sharded.boxes import Box, boxes
from lightning_zero.checkpoint.sharded.values import SavedValue
from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.layout import is_strided

__all__ = ["Contents"]

MOST_DIMS = 64  # of a tensor: torch's own kernels take no more
MOST_ELEMENTS = 1 << 60  # of a tensor, whose bytes are counted in 64 bits
PLAIN = (int, float, complex, bool, type(None))  # values that an optimizer keeps once, and not for each element
STATE = "optimizer_state_dict"
OFFLOADED = "the optimizer's state was on an NVMe disk, which is not in the checkpoint. Load it under DeepSpeed with "
OFFLOADED += 'offload_optimizer={"device": "cpu"}, and save it again'


class Contents:
    """Of one checkpoint. Nothing large is read.

    Args:
        files: of the checkpoint.
        weights_only: see :func:`~lightning_zero.checkpoint.deepspeed.loading.load_mapped`.

    Attributes:
        model: what rank 0 says of the model; the Trainer's things are among it.
        stage: of ZeRO.
        version: of DeepSpeed.

    Raises:
        CheckpointError: files do not belong together, do not add up, or are of a kind that is not read.
    """

    def __init__(self, files: Files, weights_only: bool | None) -> None:
        self._files = files
        self._models = [load_mapped(path, weights_only) for path in files.model]
        optim = [load_mapped(path, weights_only) for path in files.optim]
        self._parts = [_part(path, found) for path, found in zip(files.optim, optim, strict=True)]
        for what in ("global_steps", "ds_version"):
            _same(what, files.model, [model.get(what) for model in self._models])
        _same(
            "ds_version",
            [files.model[0], *files.optim],
            [found.get("ds_version") for found in (self._models[0], *optim)],
        )
        self.model = self._models[0]
        self.version = str(self.model.get("ds_version"))
        stages = [_stage(path, part) for path, part in zip(files.optim, self._parts, strict=True)]
        self.stage = _same("zero_stage", files.optim, stages)
        self._weights = [_groups(path, part) for path, part in zip(files.optim, self._parts, strict=True)]
        self._shapes = self._read_shapes()
        self._spans = self._read_spans()

    # -- what is checked

    def _read_shapes(self) -> list[Mapping[str, torch.Size]]:
        shapes, where = self.model.get("param_shapes"), self._files.model[0]
        if not isinstance(shapes, list) or not isinstance(self.model.get("module"), Mapping):
            raise CheckpointError(f"{where} does not say which parameters there are. Use another checkpoint.")
        names = [name for named in shapes for name in _shapes(where, "param_shapes", named)]
        twice, number = Counter(names).most_common(1)[0] if names else ("", 0)
        if number > 1:
            raise CheckpointError(f"{where} speaks of {twice!r} twice, in 'param_shapes'. Use another checkpoint.")
        ranks = len(self._parts)
        for path, part in zip(self._files.optim, self._parts, strict=True):
            count = part.get("partition_count", ranks)
            counts = set(count) if isinstance(count, list | tuple) else {count}
            if counts - {ranks}:
                raise CheckpointError(
                    f"{path} was saved by {next(iter(counts - {ranks}))} ranks, and there are files of {ranks}. "
                    "Some are missing or of "
                    "another save; or parts were kept on fewer ranks (MiCS, experts), which is not read here."
                )
        if self.stage == 3 and len(self._models) != ranks:
            raise CheckpointError(f"{where.parent} lacks '*_model_states.pt' of ranks other than 0. Copy them there.")
        held = _same("number of groups", self._files.optim, [len(groups) for groups in self._weights])
        if held != len(shapes):
            raise CheckpointError(f"{where} speaks of {len(shapes)} groups of parameters, and ranks hold {held}.")
        return shapes

    def _read_spans(self) -> dict[str, list[Span]]:
        lengths = [[flat.numel() for flat in groups] for groups in self._weights]
        try:
            if self.stage == 3:
                return spans_of_parameters(self._shapes, lengths)
            pieces = [_pieces(path, part) for path, part in zip(self._files.optim, self._parts, strict=True)]
            return spans_of_pieces(self._shapes, pieces, lengths)
        except ValueError as error:
            offloaded = "nvme" in str((self.model.get("ds_config") or {}).get("zero_optimization"))
            raise CheckpointError(
                f"The files in {self._files.model[0].parent} do not fit together: {error}. "
                + (f"Maybe {OFFLOADED}." if offloaded else "One is damaged, or of another save: use another one.")
            ) from None

    # -- what is in them

    def weights(self) -> dict[str, Any]:
        """The module's state dict: float32 weights, and the rest as it was trained with. Tied ones are one."""
        made: dict[str, Any] = {}
        for parts, named in zip(zip(*self._weights, strict=True), self._shapes, strict=True):
            made |= {name: _saved(name, shape, self._spans[name], parts) for name, shape in named.items()}
        shared, frozen = self._shared(), self._frozen()
        buffers = set(self.model.get("buffer_names") or ())
        found: dict[str, Any] = {}
        for key, value in self.model["module"].items():
            name = shared.get(key, key)
            if name in made or name in frozen:
                found[key] = made[name] if name in made else frozen[name]
            elif self.stage == 3 and isinstance(value, Tensor) and not value.numel() and key not in buffers:
                raise CheckpointError(
                    f"{self._files.model[0]} does not hold the frozen weight {key!r}: DeepSpeed {self.version} did not "
                    "save it. Load the checkpoint under a later version, and save it again."
                )
            else:
                found[key] = value
        return found | {name: value for name, value in made.items() if name not in found}

    def _shared(self) -> dict[str, str]:
        """Return the weight that each tied one is."""
        where, shared = self._files.model[0], self.model.get("shared_params") or {}
        if not isinstance(shared, Mapping) or not all(isinstance(name, str) for name in (*shared, *shared.values())):
            raise CheckpointError(f"{where} does not say which weights are tied. Use another checkpoint.")
        found: dict[str, str] = {}
        for key in shared:
            trail: dict[str, None] = {}  # of three tied ones the second may be another's, too
            name = key
            while name in shared and name not in found:
                if name in trail:
                    raise CheckpointError(f"{where} says that {key!r} is tied to itself. Use another checkpoint.")
                trail[name] = None
                name = shared[name]
            tied_to = found[name] if name in found else str(name)
            found.update((one, tied_to) for one in trail)
        module = self.model["module"]
        other = next((name for name in found.values() if name not in module and name not in self._spans), None)
        if other is not None:
            raise CheckpointError(f"{where} ties a weight to {other!r}, which is not there. Use another checkpoint.")
        return found

    def optimizer(self) -> dict[str, Any] | None:
        """The optimizer's state dict, with parameters by name; None where DeepSpeed has saved less than that (its
        "elastic_checkpoint")."""
        states = [part.get("base_optimizer_state", part.get(STATE)) for part in self._parts]
        if not all(isinstance(state, Mapping) and "param_groups" in state for state in states):
            return None
        groups: list[dict[str, Any]] = []
        state: dict[str, dict[str, Any]] = {}
        self._check_numbers(states[0])
        settings = [[{key: _number(of[key]) for key in of} for of in state["param_groups"]] for state in states]
        _same("settings of the optimizer", self._files.optim, settings)
        for group in states[0]["param_groups"]:
            numbers = group["params"]
            names = chain.from_iterable(self._shapes[number] for number in numbers)
            groups.append(group | {"params": list(names)})
            for number in numbers:
                held = [rank["state"].get(number) or {} for rank in states]
                if not all(isinstance(entries, Mapping) for entries in held):
                    raise CheckpointError(f"{self._files.optim[0]} does not say what the optimizer keeps.")
                for name, shape in self._shapes[number].items():
                    entries = self._entries(name, shape, number, held)
                    if entries and "step" not in entries and "step" in group:
                        entries["step"] = group["step"]
                    if entries:
                        state[name] = entries
        return {"state": state, "param_groups": groups}

    def _check_numbers(self, state: Mapping[str, Any]) -> None:
        """Raise unless the optimizer's groups name each group of parameters once."""
        named = [number for group in state["param_groups"] for number in group["params"]]
        if not all(type(number) is int for number in named) or sorted(named) != list(range(len(self._shapes))):
            raise CheckpointError(
                f"{self._files.optim[0]} has an optimizer of other parameters than the {len(self._shapes)} groups in "
                f"{self._files.model[0].name!r}. Use another checkpoint."
            )

    def _entries(self, name: str, shape: torch.Size, group: int, held: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        _same("what the optimizer keeps", self._files.optim, [sorted(entries) for entries in held])
        made: dict[str, Any] = {}
        for key in held[0]:
            values = [entries[key] for entries in held]
            if key == "step" or not isinstance(values[0], Tensor) or not values[0].dim():
                other = next((rank for rank, value in enumerate(values) if not isinstance(_number(value), PLAIN)), None)
                if other is not None:
                    raise CheckpointError(f"{self._files.optim[other]} holds {short(values[other])} as {key!r}.")
                _same(repr(key), self._files.optim, [_number(value) for value in values])
                made[key] = values[0]
                continue
            for rank, value in enumerate(values):
                wanted = self._weights[rank][group].numel()
                if not isinstance(value, Tensor) or not _is_row(value) or value.numel() < wanted:
                    raise CheckpointError(
                        f"{self._files.optim[rank]} holds {_count(value)} elements of {key!r} for {wanted:,} of its "
                        f"weights: the file is damaged, or {OFFLOADED}."
                    )
            made[key] = _saved(f"{name}.{key}", shape, self._spans[name], values)
        return made

    def _frozen(self) -> dict[str, Any]:
        """Weights that are not trained: cut, too, with ZeRO-3, and else whole in the module's state."""
        shapes = _shapes(self._files.model[0], "frozen_param_shapes", self.model.get("frozen_param_shapes") or {})
        ranks, found = len(self._models), {}
        for name, shape in shapes.items() if self.stage == 3 else ():
            parts: list[Tensor] = []
            for path, model in zip(self._files.model, self._models, strict=True):
                part = (model.get("frozen_param_fragments") or {}).get(name)
                count = -(-prod(shape) // ranks)
                if not isinstance(part, Tensor) or not _is_row(part) or part.numel() != count:
                    raise CheckpointError(f"{path} lacks its part of the frozen {name!r}. Use another checkpoint.")
                parts.append(part)
            found[name] = _saved(name, shape, spans_of_parameter(shape, ranks), parts)
        return found


def _same(what: str, files: Sequence[Path], values: Sequence[Any]) -> Any:
    """What all these files say alike."""
    other = next((number for number, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise CheckpointError(
            f"{files[other]} and {files[0].name!r} are of different saves: {what} is {values[other]!s:.200} in "
            f"it, and {values[0]!s:.200} there. Use another checkpoint."
        )
    return values[0]


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _part(path: Path, found: Mapping[str, Any]) -> Mapping[str, Any]:
    part = found.get(STATE)
    if not isinstance(part, Mapping) or "zero_stage" not in part:
        raise CheckpointError(f"{path} is no part of a checkpoint of ZeRO: it has no 'zero_stage'.")
    return part


def _stage(path: Path, part: Mapping[str, Any]) -> int:
    with named_damage(path):
        stage = int(part["zero_stage"])
    if stage not in (1, 2, 3):
        raise CheckpointError(f"{path} is of ZeRO-{stage}, and there are 1, 2 and 3. Use another checkpoint.")
    return stage


def _shapes(where: Path, key: str, found: Any) -> Mapping[str, Sequence[int]]:
    """Return the shapes of parameters as a file names them."""
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where} does not say which shapes parameters have: {key!r} holds {short(found)}.")
    for name, shape in found.items():
        sizes = isinstance(shape, tuple | list) and len(shape) <= MOST_DIMS and all(type(n) is int for n in shape)
        if not isinstance(name, str) or not sizes or min(shape, default=0) < 0 or prod(shape) >= MOST_ELEMENTS:
            raise CheckpointError(f"{where} says that {short(name)} has the shape {short(shape)}, in {key!r}.")
    return found


def _is_row(value: Tensor) -> bool:
    """Return True if the elements lie one after another in memory."""
    return value.dim() == 1 and is_strided(value) and value.is_contiguous()


def _count(value: Any) -> str:
    return f"{value.numel():,}" if isinstance(value, Tensor) else "no"


def _groups(path: Path, part: Mapping[str, Any]) -> list[Tensor]:
    groups = part.get("fp32_flat_groups", part.get("single_partition_of_fp32_groups"))
    if not isinstance(groups, list) or not all(isinstance(group, Tensor) and _is_row(group) for group in groups):
        raise CheckpointError(f"{path} does not hold float32 weights. Use another checkpoint.")
    return [group.detach() for group in groups]


def _pieces(path: Path, part: Mapping[str, Any]) -> list[dict[str, tuple[int, int]]]:
    """What a rank of ZeRO-1 or ZeRO-2 says that it has of each parameter, by group."""
    groups = part.get("param_slice_mappings")
    if not isinstance(groups, list):
        raise CheckpointError(
            f"{path} does not say where each parameter lies in it: the version of DeepSpeed that saved it is too old. "
            "Load it under a later one, and save it again."
        )
    with named_damage(path):
        return [{name: (index(place.start), index(place.numel)) for name, place in group.items()} for group in groups]


def _saved(key: str, shape: Sequence[int], spans: Sequence[Span], parts: Sequence[Tensor]) -> SavedValue:
    """The whole of what ``parts`` hold, by rank."""
    chunks: list[tuple[Box, Callable[[], Tensor]]] = []
    for span in spans:
        at = span.start
        for box in boxes(tuple(shape), span.begin, span.end):
            chunks.append((box, partial(_view, parts[span.rank], at, box)))
            at += box.numel
    return SavedValue(key, torch.Size(shape), parts[0].dtype, chunks)


def _view(flat: Tensor, at: int, box: Box) -> Tensor:
    return flat[at : at + box.numel].view(box.sizes)
