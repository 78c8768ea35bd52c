"""Whole parameters for a while: inside the context, the module is the plain module it was.

---

Copies of a sharded module are plain modules with whole parameters: ``copy.deepcopy(module)`` on the module's device,
``pickle.dumps(module)`` and ``torch.save(module, path)`` with parameters on the CPU. Collective, on every rank.

A module that owns shards is a plain one for as long as its own copying looks at it, whatever that is made of
(``__getstate__``, ``__deepcopy__``); its children are copied by themselves.


---

Gives modules whole parameters and their own classes back."""

from __future__ import annotations

import copy
import copyreg
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_zero.sharding.module_patching import SHAPES, ClassCache, is_sharded, raise_copy_unsupported
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.sharding.state_dict import StateDictHooks

if TYPE_CHECKING:
    from lightning_zero.sharding.sharder import Sharder

__all__ = ["ModuleCopier", "PickledAsNone", "full_parameters", "gather_full", "unshard_module"]


def gather_full(record: ShardedParameter, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The whole parameter on the shard's device, in its own dtype or another, detached from autograd. Collective."""
    shape, dtype = list(record.layout.memory_shape), dtype or record.param.dtype
    with torch.no_grad(), no_shard_dispatch():
        return record.layout.permute_from_memory(torch.ops.lightning_zero.gather(record.param, shape, dtype))


@contextmanager
def full_parameters(sharder: Sharder, module: nn.Module, writeback: bool = True) -> Iterator[None]:
    """Puts whole parameters in place of the shards of ``module`` and its children.

    Collective on entry. Takes the memory of the whole parameters on every rank. With ``writeback``, what they hold on
    exit reaches the shards: each rank keeps its own part, so every rank must make the same edits.
    """
    inside = {id(child) for child in module.modules()}
    records = [r for r in sharder.live if any(id(owner) in inside for owner, _ in r.owners)]
    with no_shard_dispatch():
        records = [r for r in records if r.param.shape != r.layout.shape or r.param.data_ptr() == r.shard.data_ptr()]
    sharder.sync.flush_user_writes()
    grads = {}
    for record in records:
        full = gather_full(record)
        grads[record.index] = record.param.grad
        record.param.grad = None
        record.set_full_data(full)
        for owner, key in record.owners:
            owner.__dict__[SHAPES][key] = None
    try:
        yield
    finally:
        for record in records:
            if writeback:
                sharder.sync.before_writing()
                with torch.no_grad():
                    record.layout.write(record.shard, record.param, sharder.mesh.shard_index)
            record.param.grad = None
            record.install_shard()
            record.param.grad = grads[record.index]
            for owner, key in record.owners:
                owner.__dict__[SHAPES][key] = tuple(record.layout.shape)
        sharder.sync.after_writing()


_COPY_METHODS = ("__deepcopy__", "__reduce_ex__")
_COMPILED_CALL = "_compiled_call_impl"


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
        sharder.classes.set_copiers(_weakly(self.deepcopy), _weakly(self.reduce))

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
            for name in _COPY_METHODS:
                module.__dict__.pop(name, None)

    def deepcopy(self, module: nn.Module, memo: dict[Any, Any]) -> Any:
        """For ``copy.deepcopy``. Collective."""

        def make_full(record: ShardedParameter) -> nn.Parameter:
            made = memo.get(id(record))  # ties are kept
            if made is None:
                made = self._full(record, self._sharder.mesh.device)
                memo[id(record)] = memo[id(made)] = made  # it is a copy already
                memo.setdefault(id(record.param), made)
            return made

        with self._as_plain(module, make_full):
            return copy.deepcopy(module, memo)

    def reduce(self, module: nn.Module, protocol: Any) -> Any:
        """For ``pickle`` and ``copy.copy``. Collective."""
        with self._as_plain(module, self._full_on_cpu):
            reduced: Any = module.__reduce_ex__(protocol)
        make, given, *state = reduced
        if make is copyreg.__newobj__ and len(given) == 1:  # type: ignore[attr-defined]
            # pickle wants an object of the very class that it names; this one says the same, and is not checked.
            make, given = copyreg._reconstructor, (*given, object, None)  # type: ignore[attr-defined]
        return make, given, *state

    def _full_on_cpu(self, record: ShardedParameter) -> nn.Parameter:
        made = self._full(record, torch.device("cpu"))
        if len(record.owners) > 1:
            # A pickler knows objects it has seen, so ties are kept if both owners show the same; as long as it lives.
            before = self._pickled.get(record.index, lambda: None)()
            if before is not None and _same_bytes(before, made):
                return before
            self._pickled[record.index] = weakref.ref(made)
        return made

    def _full(self, record: ShardedParameter, device: torch.device) -> nn.Parameter:
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
    def _as_plain(self, module: nn.Module, make_full: Callable[[ShardedParameter], nn.Parameter]) -> Iterator[None]:
        own, before = type(module), dict(module.__dict__)
        state = module.__dict__
        records = {key: None if p is None else self._sharder.find(p) for key, p in module._parameters.items()}
        params = {key: p if records[key] is None else make_full(records[key]) for key, p in module._parameters.items()}  # type: ignore[arg-type]
        for key in [key for key in state if key.startswith("_zero_") or key in (*_COPY_METHODS, _COMPILED_CALL)]:
            del state[key]
        state["_parameters"] = params
        for name in ("_state_dict_hooks", "_load_state_dict_pre_hooks"):
            state[name] = type(before[name])(
                (k, hook) for k, hook in before[name].items() if not _is_state_dict_hook(hook)
            )
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


def _is_state_dict_hook(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)
    return isinstance(getattr(getattr(function, "func", function), "__self__", None), StateDictHooks)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(value.detach().reshape(-1).view(torch.uint8) for value in (a, b)))


def unshard_module(sharder: Sharder, module: nn.Module) -> None:
    """Makes all that ``sharder`` has sharded in ``module`` plain again, on this rank's device. Collective."""
    records = sharder.live
    with full_parameters(sharder, module, writeback=False):
        values = [record.param.data for record in records]
    for record, value in zip(records, values, strict=True):
        record.param.grad = None
        record.install_full(value)
        for owner, _ in record.owners:
            if is_sharded(owner):
                ClassCache.restore(owner)
