"""Convert an optimizer's state between shards, full values, and parameters by name or number.

An entry of the state either has one element for each element of its parameter and is sharded like it, or is the same on
every rank. The optimizer's registered rule (:func:`state_names`) decides by name. Without a rule shapes decide: a shard
has at least 32 elements, so a local tensor of the shard's shape is sharded. Full values of the parameter's shape are
sharded, unless the same name holds single numbers for parameters with dimensions: then it is a counter.
Optimizers that train only scalars without a rule need :func:`~lightning_zero.register_rule`.

State of 8 bits is one entry under its own name. Full checkpoints hold its float32 values. Sharded ones hold its codes
and scales, which any number of ranks reads again bit by bit.

Dicts within an entry are searched. A tensor that is neither sharded nor a single number is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.progress_reporter import ProgressReporter, silent_progress
from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointShard, CheckpointTensor
from lightning_zero.compat.tensors import tree_leaves, tree_map_only
from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.optim.quantized_state import (
    SCALES,
    codes_key,
    is_quantized,
    pack,
    quantized_names,
    scales_key,
    unpack,
    unpack_entries,
)
from lightning_zero.optim.state_dtypes import StoredDtypes
from lightning_zero.optim.support import check_state_dict, large_tensors
from lightning_zero.optim.update_rules import StateNames, state_names
from lightning_zero.sharding.host_memory import as_mapped, copy_to_host
from lightning_zero.sharding.layout import STATE_BLOCK, ShardLayout
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.shard_tensor import without_shard_dispatch
from lightning_zero.sharding.sharder import Sharder

AllocateFlat = Callable[[int, torch.dtype], Tensor]  # returns a 1-D tensor of so many elements
FindStored = Callable[[torch.optim.Optimizer, Sequence[Mapping[str, Any]]], Mapping[int, StoredDtypes]]
MakeProgress = Callable[[int], ProgressReporter]  # from the total bytes


@dataclass(frozen=True)
class QuantizedValue:
    """Codes and scales of one entry: those of a shard, or of a full contiguous parameter."""

    codes: Tensor
    scales: Tensor

    dtype = torch.float32  # of the values
    itemsize = 4

    def values(self) -> Tensor:
        return unpack(_read_full(self.codes), _read_full(self.scales))


@dataclass(frozen=True)
class StateEntry:
    """One value that an optimizer keeps for one parameter.

    Attributes:
        value: the local one, or the full one of a checkpoint.
        record: of the parameter if the value is sharded like it; None if the value is the same on every rank.
        inside: keys of the dicts around it in the optimizer's ``state_dict()``, outermost first.
    """

    key: str
    value: Any
    record: ShardedParameter | None
    inside: tuple[str, ...] = ()

    @property
    def path(self) -> tuple[str, ...]:
        return (*self.inside, self.key)


class OptimizerStateEntries:
    """List the entries of an optimizer's state, by the numbers of parameters in torch's state dicts."""

    def __init__(self, optimizer: torch.optim.Optimizer, sharder: Sharder) -> None:
        self._optimizer = optimizer
        self._sharder = sharder

    def local(self, packed: Mapping[str, Any]) -> dict[int, list[StateEntry]]:
        """Return this rank's entries of the optimizer's own state dict.

        Raises:
            UnsupportedError: it holds tensors that cannot be gathered from the ranks' shards.
        """
        check_state_dict(self._optimizer, packed)
        found: dict[int, list[StateEntry]] = {}
        for number, param, record, names in self._parameters(packed):
            found[number] = []
            for inside, key, value in _leaves(packed["state"][number]):
                if isinstance(value, QuantizedValue):
                    found[number].append(StateEntry(key, value, record, inside))
                    continue
                is_shard = record is not None and names.elementwise(key) is not False and record.has_shard_shape(value)
                if record is not None and not is_shard:
                    self._check_replicated(key, value, param, record, names)
                found[number].append(StateEntry(key, value, record if is_shard else None, inside))
        return found

    def _check_replicated(
        self, key: str, value: Any, param: Tensor, record: ShardedParameter, names: StateNames
    ) -> None:
        """Raise if ``value`` may differ between ranks."""
        large = large_tensors(value)
        if large and names.elementwise(key) is False:
            sharded = {v.data_ptr() for k, v in self._optimizer.state.get(param, {}).items() if names.elementwise(k)}
            large = [tensor for tensor in large if tensor.data_ptr() in sharded]  # under another name
        if large:
            name = type(self._optimizer).__name__
            raise UnsupportedError(
                f"The state_dict() of {name} holds {key!r} of shape {tuple(large[0].shape)} for {record.name!r}, but "
                f"only tensors with one value for each element of the shard (shape "
                f"{tuple(record.layout.visible_shape)}) can be put together from all ranks. Have state_dict() return "
                "each such tensor under the name that it has in optimizer.state, or save without optimizers: "
                "ModelCheckpoint(save_weights_only=True)."
            )

    def full(self, state: Mapping[str, Any]) -> dict[int, list[StateEntry]]:
        """Return the entries of a state dict of full values.

        Raises:
            ValueError: it was saved for parameters of other shapes.
        """
        known = [(number, record, names) for number, _, record, names in self._parameters(state) if record is not None]
        others = [
            (key, value.dim())
            for number, record, _ in known
            for _, key, value in _leaves(state["state"][number])
            if isinstance(value, Tensor) and record.layout.shape
        ]
        counters = {key for key, dim in others if not dim} - {key for key, dim in others if dim}
        return {
            number: [
                StateEntry(key, value, record if _is_sharded(key, value, record, names, counters) else None, inside)
                for inside, key, value in _leaves(state["state"][number])
            ]
            for number, record, names in known
        }

    def _parameters(
        self, state: Mapping[str, Any]
    ) -> Iterator[tuple[int, Tensor, ShardedParameter | None, StateNames]]:
        """Yield number, parameter, record and entry names for each parameter in ``state``."""
        number, saved = 0, state["param_groups"]
        for position, group in enumerate(self._optimizer.param_groups):
            # Loading a state dict loads the group's settings, too; names may depend on them.
            names = state_names(self._optimizer, group | (saved[position] if position < len(saved) else {}))
            for param in group["params"]:
                if number in state["state"]:
                    yield number, param, self._sharder.find(param), names
                number += 1


def nest_entries(entries: Iterable[StateEntry], values: Iterable[Any]) -> dict[str, Any]:
    """Return one parameter's state with other values, in the dicts of its entries."""
    root: dict[str, Any] = {}
    for entry, value in zip(entries, values, strict=True):
        inner = root
        for key in entry.inside:
            inner = inner.setdefault(key, {})
        inner[entry.key] = value
    return root


def _leaves(entries: Mapping[str, Any], inside: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Yield outer keys, key and value of each entry; search only dicts that hold tensors."""
    quantized = {codes_key(name): name for name in quantized_names(entries)}
    for key, value in entries.items():
        if key in quantized:
            name = quantized[key]
            yield inside, name, QuantizedValue(value, entries[scales_key(name)])
        elif key.endswith(SCALES) and key.removesuffix(SCALES) in quantized.values():
            continue
        elif isinstance(value, dict) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            yield from _leaves(value, (*inside, key))
        else:
            yield inside, key, value


def _is_sharded(key: str, value: Any, record: ShardedParameter, names: StateNames, counters: set[str]) -> bool:
    named = names.elementwise(key)
    if isinstance(value, QuantizedValue):
        value = value.codes
    if named is False or not isinstance(value, Tensor) or (named is None and not value.dim() and key in counters):
        return False
    if value.shape == record.layout.shape:
        return True
    raise ValueError(
        f"The checkpoint's optimizer state {key!r} for parameter {record.name!r} has shape {tuple(value.shape)}, but "
        f"the parameter has shape {tuple(record.layout.shape)}. The optimizer's parameters must come in the order in "
        "which they were saved."
    )


# -- gather and shard


@without_shard_dispatch
def gather_value(value: Any, record: ShardedParameter | None, mesh: Mesh) -> Any:
    """All-gather a value in the parameter's shape. Its storage has padding. Collective."""
    if record is None:
        return value
    value = value.values() if isinstance(value, QuantizedValue) else value
    return record.layout.full_view(mesh.all_gather_shard(value.reshape(-1)))


@without_shard_dispatch
def optimizer_state(
    optimizer: torch.optim.Optimizer, sharder: Sharder, make_progress: MakeProgress | None = None
) -> dict[str, Any]:
    """Return the full state dict on the CPU of rank 0, and an empty one on other ranks. Collective."""
    packed = optimizer.state_dict()
    if not packed:
        return {}  # Lightning's placeholder for no optimizer
    rank = sharder.mesh.rank
    state: dict[int, dict[str, Any]] = {}
    found = OptimizerStateEntries(optimizer, sharder).local(packed)
    with (make_progress or silent_progress)(sum(map(_full_bytes, chain.from_iterable(found.values())))) as on_gather:
        for number, entries in found.items():
            kept: list[Any] = []
            for entry in entries:
                full = gather_value(entry.value, entry.record, sharder.mesh)  # one at a time
                if rank == 0:
                    # A copy: the storage has padding, and training may go on before the file is written.
                    kept.append(copy_to_host(full) if isinstance(full, Tensor) else full)
                del full
                on_gather(_full_bytes(entry))
            if rank == 0:
                state[number] = nest_entries(entries, kept)
    if rank:
        return {}
    rest = {key: value for key, value in packed["state"].items() if key not in state}  # of no parameter
    return {**packed, "state": state | tree_map_only(Tensor, copy_to_host, rest)}


def shard_optimizer_state(
    state: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    sharder: Sharder,
    allocate: AllocateFlat | None = None,
    make_progress: MakeProgress | None = None,
    find_stored: FindStored = lambda optimizer, groups: {},
) -> dict[str, Any]:
    """Return this rank's shards of a full state dict, for ``optimizer.load_state_dict``. Not collective.

    Args:
        allocate: returns memory for the shards; None: on the host.
        find_stored: returns the dtypes of state that the optimizer stores in fewer bytes, by parameter index.

    Raises:
        ValueError: the state was saved for other parameters, or without an optimizer.
    """
    if not state:
        if optimizer.state_dict():
            raise ValueError(
                "The checkpoint was written where configure_optimizers() returned nothing, so it holds no state for "
                f"{type(optimizer).__name__}. Load only the weights: with load_from_checkpoint(), or by "
                "load_state_dict() in configure_model()."
            )
        return {}
    saved, own = _group_sizes(state["param_groups"]), _group_sizes(optimizer.param_groups)
    if saved != own:
        raise ValueError(
            f"The checkpoint's optimizer has parameter groups of {saved} parameters, and {type(optimizer).__name__} of "
            f"{own}. Configure the optimizer as it was when the checkpoint was saved, or load only the weights with "
            "load_from_checkpoint()."
        )
    sharded: dict[Any, Any] = dict(state["state"])
    found = OptimizerStateEntries(optimizer, sharder).full(state)
    allocate = allocate or (lambda numel, dtype: torch.empty(numel, dtype=dtype))
    # Loading the state loads the groups' settings, too.
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    stored = find_stored(optimizer, [own | {k: v for k, v in saved.items() if k != "params"} for own, saved in pairs])
    shards = _shards(found, allocate, make_progress or silent_progress, stored)
    for number, entries in found.items():
        parts = list(chain.from_iterable(_parts(entry, stored) for entry in entries))
        values = [_read_full(e.value) if e.record is None else shards[number, e.path] for e in parts]
        sharded[number] = nest_entries(parts, values)
    return tree_map_only(CheckpointTensor, _read_full, {**state, "state": sharded})


def _code_dtype(entry: StateEntry, stored: Mapping[int, StoredDtypes]) -> torch.dtype | None:
    """Return the dtype of the codes in which the optimizer stores this entry; None if in floats."""
    dtype = None if entry.record is None else stored.get(entry.record.index, {}).get(entry.key)
    return dtype if is_quantized(dtype) else None


def _parts(entry: StateEntry, stored: Mapping[int, StoredDtypes]) -> list[StateEntry]:
    """Return the entries in which the optimizer stores this one: itself, or its codes and scales."""
    if _code_dtype(entry, stored) is None:
        return [entry]
    return _code_entries(entry)


def _code_entries(entry: StateEntry) -> list[StateEntry]:
    return [replace(entry, key=codes_key(entry.key)), replace(entry, key=scales_key(entry.key))]


def _shards(
    found: Mapping[int, Sequence[StateEntry]],
    allocate: AllocateFlat,
    make_progress: MakeProgress,
    stored: Mapping[int, StoredDtypes],
) -> dict[tuple[int, tuple[str, ...]], Tensor]:
    """Return this rank's shards by parameter and path.

    Those of one path share one flat tensor, in the order of the parameters' shards, as the optimizer steps them: moving
    them later would need the memory twice.
    """
    by_path: dict[tuple[tuple[str, ...], torch.dtype], list[tuple[int, StateEntry, ShardedParameter]]] = {}
    for number, entries in found.items():
        for e in entries:
            if e.record is not None:
                dtype = _code_dtype(e, stored) or e.value.dtype
                by_path.setdefault((e.path, dtype), []).append((number, e, e.record))
    shards: dict[tuple[int, tuple[str, ...]], Tensor] = {}
    total = sum(r.layout.shard_numel * e.value.itemsize for values in by_path.values() for _, e, r in values)
    with make_progress(total) as on_read:
        for (_, dtype), values in by_path.items():
            values.sort(key=lambda one: one[2].shard.data_ptr())
            sizes = [record.layout.shard_numel for _, _, record in values]
            pieces: Iterable[Any] = allocate(sum(sizes), dtype).split(sizes)
            if is_quantized(dtype):
                blocks = [size // STATE_BLOCK for size in sizes]
                pieces = zip(pieces, allocate(sum(blocks), torch.float32).split(blocks), strict=True)
            for piece, (number, entry, record) in zip(pieces, values, strict=True):
                if is_quantized(dtype):
                    codes, scales = piece
                    _write_codes(entry.value, record, codes, scales)
                    where = [part.path for part in _parts(entry, stored)]
                    shards |= {(number, where[0]): codes.view(record.layout.visible_shape), (number, where[1]): scales}
                else:
                    _write_values(entry.value, record, piece)
                    shards[number, entry.path] = piece.view(record.layout.visible_shape)
                on_read(record.layout.shard_numel * entry.value.itemsize)
    return shards


def _write_codes(value: Any, record: ShardedParameter, codes: Tensor, scales: Tensor) -> None:
    """Write this rank's codes and scales of a full value."""
    number, layout = record.spec.shard_index, record.layout
    if isinstance(value, QuantizedValue) and value.codes.dtype is codes.dtype and layout.order is None:
        record.write_local_part(as_mapped(value.codes), codes)
        layout.block_layout.write(scales, as_mapped(value.scales), number)
        return
    shard = torch.empty(layout.shard_numel, dtype=torch.float32, device=codes.device)
    _write_values(value, record, shard)
    pack(shard, codes.dtype, codes, scales)


def _write_values(value: Any, record: ShardedParameter, shard: Tensor) -> None:
    """Write this rank's part of a full value."""
    record.write_local_part(value.values() if isinstance(value, QuantizedValue) else as_mapped(value), shard)


def _full_bytes(entry: StateEntry) -> int:
    return 0 if entry.record is None else int(entry.record.layout.numel * entry.value.itemsize)


def _group_sizes(groups: list[dict[str, Any]]) -> str:
    return ", ".join(str(len(group["params"])) for group in groups) or "no"


def _read_full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, CheckpointTensor) else value


def with_float_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's full state dict of plain tensors, with values for codes and scales."""
    entries = {key: dict(values) if isinstance(values, dict) else values for key, values in state["state"].items()}
    for values in entries.values():
        if isinstance(values, dict):
            unpack_entries(values)
    return {**state, "state": entries}


# -- names and numbers


@without_shard_dispatch
def state_by_name(optimizer: torch.optim.Optimizer, module: nn.Module, sharder: Sharder) -> dict[str, Any]:
    """Return the optimizer's state dict with parameter names for numbers, and this rank's shards."""
    packed = optimizer.state_dict()
    if not packed:
        return {}  # Lightning's placeholder for no optimizer
    names, mesh = _names(optimizer, module), sharder.mesh
    local = OptimizerStateEntries(optimizer, sharder).local(packed)

    def shard_of(layout: ShardLayout, value: Tensor) -> CheckpointShard:
        return CheckpointShard(layout, value, mesh.shard_index, mesh.replica)

    def saved(entry: StateEntry) -> list[tuple[StateEntry, Any]]:
        record, value = entry.record, entry.value
        if record is None:
            return [(entry, value)]
        if not isinstance(value, QuantizedValue):
            return [(entry, shard_of(record.layout, value))]
        if record.layout.order is not None:  # the reader may have its blocks in another order
            return [(entry, shard_of(record.layout, value.values()))]
        codes = shard_of(record.layout, value.codes), shard_of(record.layout.block_layout, value.scales)
        return list(zip(_code_entries(entry), codes, strict=True))

    def nested(entries: Sequence[StateEntry]) -> dict[str, Any]:
        pairs = list(chain.from_iterable(map(saved, entries)))
        return nest_entries((entry for entry, _ in pairs), (value for _, value in pairs))

    state = {key: entries for key, entries in packed["state"].items() if key not in local}  # of no parameter
    state |= {names[number]: nested(entries) for number, entries in local.items()}
    groups = [group | {"params": [names[number] for number in group["params"]]} for group in packed["param_groups"]]
    return {**packed, "state": state, "param_groups": groups}


def has_parameter_names(state: Mapping[str, Any]) -> bool:
    """Return True if parameters have names and not numbers in an optimizer's state dict."""
    return any(isinstance(param, str) for group in state.get("param_groups", ()) for param in group["params"])


def state_by_number(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return a state dict by name with the numbers of ``optimizer``, whose groups may be in another order.

    Raises:
        ValueError: groups hold other parameters than the saved ones.
    """
    names = _names(optimizer, module)
    numbers = {name: number for number, name in enumerate(names)}
    saved = {frozenset(group["params"]): group for group in state["param_groups"]}
    groups, begin = [], 0
    for position, group in enumerate(optimizer.param_groups):
        own = names[begin : begin + len(group["params"])]
        found = saved.get(frozenset(own))
        if found is None:
            raise ValueError(_other_groups_text(position, own, state["param_groups"]))
        groups.append(found | {"params": list(range(begin, begin + len(own)))})
        begin += len(own)
    unused = set(chain.from_iterable(saved)) - numbers.keys()
    entries = {numbers.get(name, name): value for name, value in state["state"].items() if name not in unused}
    return {**state, "state": entries, "param_groups": groups}


def renumber(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict by name with the numbers of the saved optimizer."""
    names = list(chain.from_iterable(group["params"] for group in state["param_groups"]))
    numbers = {name: number for number, name in enumerate(names)}
    groups = [group | {"params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    entries = {numbers.get(name, name): value for name, value in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


def _other_groups_text(position: int, own: list[str], saved: list[Mapping[str, Any]]) -> str:
    known = set(chain.from_iterable(group["params"] for group in saved))
    missing = [name for name in own if name not in known]
    if missing:
        what = f"trains {missing[0]!r}, of which the checkpoint's optimizer knows nothing"
        what += f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    else:
        what = f"holds other parameters than any of the {len(saved)} groups in the checkpoint"
    return (
        f"The optimizer's parameter group {position} {what}. Configure the optimizer as it was when the checkpoint was "
        "saved, or load only the weights with load_from_checkpoint()."
    )


def _names(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[str]:
    """Return the names of the optimizer's parameters in order; of tied ones the first name."""
    known = {id(param): name for name, param in module.named_parameters()}
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    return [known.get(id(param), f"a parameter outside of the module, number {n}") for n, param in enumerate(params)]
