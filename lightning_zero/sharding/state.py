"""``state_dict()`` and ``load_state_dict()`` of a sharded module speak of whole parameters.

``state_dict()`` gathers, so it is collective: call it on every rank. ``load_state_dict()`` is not: each rank takes its
part from the whole values it is given. A format of checkpoints says by :meth:`StateDictHooks.overriding_values` what stands there
instead of a whole value on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.full import gather_full
from lightning_zero.sharding.host_memory import copy_to_host
from lightning_zero.sharding.mapped import mapped
from lightning_zero.sharding.module_patching import SHAPES
from lightning_zero.sharding.record import ShardedParameter
from lightning_zero.sharding.shard import Sharder
from lightning_zero.sharding.state_values import StateDictTensor

__all__ = ["StateDictHooks", "ignore_bytes", "full_on_cpu"]

Show = Callable[[ShardedParameter], torch.Tensor | None]


def full_on_cpu(record: ShardedParameter, here: bool = True) -> torch.Tensor | None:
    """The whole parameter, in memory that holds no padding; None where it is not wanted ``here``. Collective."""
    full = gather_full(record)  # one at a time: the peak is one whole parameter
    return copy_to_host(full) if here else None


def ignore_bytes(count: int) -> None:
    """Is told of bytes."""


class StateDictHooks:
    """Installs the hooks on modules that own shards.

    Attributes:
        replaced: bytes of shards in whose place ``load_state_dict()`` has put others, ever.
        on_loaded_bytes: is told how many more.
    """

    def __init__(self, sharder: Sharder) -> None:
        self.sharder = sharder
        self.replaced = 0
        self.on_loaded_bytes: Callable[[int], object] = ignore_bytes
        self._show: Show = full_on_cpu
        self._handles: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()

    def install(self, root: nn.Module) -> None:
        """On ``root`` and all modules in it that own shards, as far as they have none yet."""
        for module in root.modules():
            if SHAPES in module.__dict__ and module not in self._handles:
                self._handles[module] = [
                    module.register_state_dict_post_hook(partial(self._gather)),
                    module.register_load_state_dict_pre_hook(self._scatter),
                ]

    def install_on_copy(self, copy: nn.Module, original: nn.Module) -> None:
        """On a copy, which has the original's hooks already."""
        for handle in self._handles.get(original, ()):
            copy._state_dict_hooks.pop(handle.id, None)
            copy._load_state_dict_pre_hooks.pop(handle.id, None)
        self.install(copy)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDictHooks:
        return self  # a copied module's hooks are the same object's

    def remove(self) -> None:
        for handle in chain.from_iterable(self._handles.values()):
            handle.remove()
        self._handles.clear()

    @contextmanager
    def overriding_values(self, show: Show) -> Iterator[None]:
        """Inside, ``state_dict()`` holds what ``wrap`` makes of each sharded parameter, and nothing where that is None.
        ``wrap`` is called in the order of the keys, for a tied parameter once for each."""
        before, self._show = self._show, show
        try:
            yield
        finally:
            self._show = before

    def _gather(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        self.sharder.sync.before_reading()
        for key, shape in module.__dict__[SHAPES].items():
            param = module._parameters.get(key)
            record = None if param is None else self.sharder.find(param)
            if record is None or shape is None or prefix + key not in state:
                continue
            shown = self._show(record)
            if shown is None:
                del state[prefix + key]
            else:
                written = self._show is full_on_cpu
                state[prefix + key] = StateDictTensor.of(shown, record, self.sharder) if written else shown

    def _scatter(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *told: Any
    ) -> None:
        _strict, _missing, _unexpected, errors = told  # as torch calls such a hook
        if metadata.get("assign_to_params_buffers"):
            raise UnsupportedError("load_state_dict(assign=True) would replace shards. Leave out assign=True.")
        self.sharder.sync.settle()
        for key, shape in module.__dict__[SHAPES].items():
            param, full = module._parameters.get(key), state.get(prefix + key)
            record = None if param is None else self.sharder.find(param)
            if record is None or shape is None or full is None:
                continue
            if full.shape != record.layout.shape:
                errors.append(
                    f"size mismatch for {prefix + key}: the checkpoint has shape {tuple(full.shape)}, the model "
                    f"{tuple(record.layout.shape)}."
                )
                assert param is not None
                state[prefix + key] = param.detach()  # unchanged, and not reported as missing besides
                continue
            state[prefix + key] = record.spec.wrap(record.local_part(mapped(full)))  # torch compares full shapes
            self.replaced += record.shard.nbytes
            self.on_loaded_bytes(record.shard.nbytes)
