"""Copies of a sharded module are plain modules with whole parameters: ``copy.deepcopy(module)`` on the module's device,
``pickle.dumps(module)`` and ``torch.save(module, path)`` with parameters on the CPU. Collective, on every rank.

A module that owns shards is a plain one for as long as its own copying looks at it, whatever that is made of
(``__getstate__``, ``__deepcopy__``); its children are copied by themselves.
"""

from __future__ import annotations

import copy
import copyreg
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.sharding.full import gather_full
from lightning_zero.sharding.module_patching import SHAPES, ClassCache, raise_copy_unsupported
from lightning_zero.sharding.record import ShardedParameter
from lightning_zero.sharding.shard import Sharder
from lightning_zero.sharding.state import StateDictHooks
from lightning_zero.sharding.unsupported import no_shard_dispatch

__all__ = ["ModuleCopier", "PickledAsNone"]

_COPIERS = ("__deepcopy__", "__reduce_ex__")
_COMPILED = "_compiled_call_impl"


class PickledAsNone:
    """What is copied or pickled together with something that refers to such an object refers to None instead."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(None), ()


class ModuleCopier:
    """Copies the modules of one sharder."""

    def __init__(self, sharder: Sharder) -> None:
        self._sharder = sharder
        self._guarded: list[nn.Module] = []
        self._pickled: dict[int, weakref.ref[nn.Parameter]] = {}  # by index
        sharder.classes.copy_by(_weakly(self.deepcopy), _weakly(self.reduce))

    def guard(self, root: nn.Module) -> None:
        """Has ``root`` copied by us, and modules with a ``__getstate__`` of their own: they would hand on the engine,
        and compiled calls, which call the module that they were made from."""
        for module in root.modules():
            own = type(module).__getstate__ is not nn.Module.__getstate__
            if (own or module is root) and SHAPES not in module.__dict__:
                module.__dict__["__deepcopy__"] = partial(self.deepcopy, module)
                module.__dict__["__reduce_ex__"] = partial(self.reduce, module)
                self._guarded.append(module)

    def release(self) -> None:
        """Undoes :meth:`guard`."""
        for module in self._guarded:
            for name in _COPIERS:
                module.__dict__.pop(name, None)

    def deepcopy(self, module: nn.Module, memo: dict[Any, Any]) -> Any:
        """For ``copy.deepcopy``. Collective."""

        def whole(record: ShardedParameter) -> nn.Parameter:
            made = memo.get(id(record))  # ties are kept
            if made is None:
                made = self._whole(record, self._sharder.mesh.device)
                memo[id(record)] = memo[id(made)] = made  # it is a copy already
                memo.setdefault(id(record.param), made)
            return made

        with self._plain(module, whole):
            return copy.deepcopy(module, memo)

    def reduce(self, module: nn.Module, protocol: Any) -> Any:
        """For ``pickle`` and ``copy.copy``. Collective."""
        with self._plain(module, self._whole_on_cpu):
            reduced: Any = module.__reduce_ex__(protocol)
        make, given, *state = reduced
        if make is copyreg.__newobj__ and len(given) == 1:  # type: ignore[attr-defined]
            # pickle wants an object of the very class that it names; this one says the same, and is not checked.
            make, given = copyreg._reconstructor, (*given, object, None)  # type: ignore[attr-defined]
        return make, given, *state

    def _whole_on_cpu(self, record: ShardedParameter) -> nn.Parameter:
        made = self._whole(record, torch.device("cpu"))
        if len(record.owners) > 1:
            # A pickler knows objects it has seen, so ties are kept if both owners show the same; as long as it lives.
            before = self._pickled.get(record.index, lambda: None)()
            if before is not None and _same_bytes(before, made):
                return before
            self._pickled[record.index] = weakref.ref(made)
        return made

    def _whole(self, record: ShardedParameter, device: torch.device) -> nn.Parameter:
        self._sharder.sync.before_reading()
        param = record.param
        with no_shard_dispatch():
            in_place = param.shape == record.layout.shape and param.data_ptr() != record.shard.data_ptr()
            value = param.detach() if in_place else gather_full(record)
            made = nn.Parameter(value.to(device, copy=True), param.requires_grad)  # a copy has no padding
        ours = ("numel", "nelement", "_zero_spec")
        made.__dict__.update({key: value for key, value in param.__dict__.items() if key not in ours})
        return made

    @contextmanager
    def _plain(self, module: nn.Module, whole: Callable[[ShardedParameter], nn.Parameter]) -> Iterator[None]:
        own, before = type(module), dict(module.__dict__)
        state = module.__dict__
        records = {key: None if p is None else self._sharder.find(p) for key, p in module._parameters.items()}
        params = {key: p if records[key] is None else whole(records[key]) for key, p in module._parameters.items()}  # type: ignore[arg-type]
        for key in [key for key in state if key.startswith("_zero_") or key in (*_COPIERS, _COMPILED)]:
            del state[key]
        state["_parameters"] = params
        for name in ("_state_dict_hooks", "_load_state_dict_pre_hooks"):
            state[name] = type(before[name])((k, hook) for k, hook in before[name].items() if not _is_ours(hook))
        ClassCache.restore(module)
        try:
            yield
        finally:
            module.__class__ = own
            state.clear()
            state.update(before)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    reference = weakref.WeakMethod(method)
    return lambda module, argument: (reference() or raise_copy_unsupported)(module, argument)


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)
    return isinstance(getattr(getattr(function, "func", function), "__self__", None), StateDictHooks)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(value.detach().reshape(-1).view(torch.uint8) for value in (a, b)))
