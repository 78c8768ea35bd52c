"""Install full parameters for a while or for good, and copy or pickle sharded modules as plain ones.

``copy.deepcopy(module)`` keeps the module's device; ``pickle.dumps(module)`` and ``torch.save(module, path)`` store
parameters on the CPU. All are collective. A module that owns shards is a plain one while its own copying method
(``__getstate__``, ``__deepcopy__``) looks at it; its children are copied by themselves.
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

from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.module_patching import SHAPES, ClassCache, is_sharded, raise_copy_unsupported
from lightning_zero.sharding.param_record import ShardedParameter, gather_full
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.sharding.state_dict import StateDictHooks


@contextmanager
def full_parameters(sharder: Sharder, module: nn.Module, writeback: bool = True) -> Iterator[None]:
    """Install full parameters in place of the shards of ``module`` and its children.

    Collective on entry. Every rank needs memory for all full parameters. With ``writeback``, each rank writes its part
    of the parameters to its shards on exit, so every rank must make the same changes.

    Raises:
        UnsupportedError: With ``writeback``, a parameter has another shape or dtype on exit. It keeps its old value.
    """
    inside = {id(child) for child in module.modules()}
    records = [r for r in sharder.live if any(id(owner) in inside for owner, _ in r.owners)]
    with no_shard_dispatch():
        records = [r for r in records if not r.is_full]
    sharder.sync.flush_user_writes()
    grads = {}
    for record in records:
        full = gather_full(record)
        grads[record.index] = record.param.grad
        record.param.grad = None
        record.set_full_data(full)
        for owner, key in record.owners:
            owner.__dict__[SHAPES][key] = None
    kinds = [(record.param.shape, record.param.dtype) for record in records]
    changed: list[ShardedParameter] = []
    try:
        yield
    finally:
        for record, kind in zip(records, kinds, strict=True):
            if writeback and (record.param.shape, record.param.dtype) != kind:
                changed.append(record)
            elif writeback:
                sharder.sync.before_writing()
                with torch.no_grad():
                    record.write_local_part(record.param, record.shard)
            record.param.grad = None
            record.install_shard()
            record.param.grad = grads[record.index]
            for owner, key in record.owners:
                owner.__dict__[SHAPES][key] = tuple(record.shape)
        sharder.sync.after_writing()
    if changed:
        names = ", ".join(repr(record.name) for record in changed[:4])
        raise UnsupportedError(
            f"{len(changed)} parameters have another shape or dtype than before full_parameters(): {names}. Sharded "
            "parameters keep both, and these keep their old values. Assign values of their dtype "
            "(`module.weight.data = x.to(module.weight.dtype)`), or call lightning_zero.unshard(module) first."
        )


_COPY_METHODS = ("__deepcopy__", "__reduce_ex__")
_COMPILED_CALL = "_compiled_call_impl"


class PickledAsNone:
    """Be copied or pickled as None by objects that refer to this one."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(None), ()


class ModuleCopier:
    """Copy the modules of one sharder."""

    def __init__(self, sharder: Sharder) -> None:
        self._sharder = sharder
        self._guarded: list[nn.Module] = []
        self._pickled: dict[int, weakref.ref[nn.Parameter]] = {}  # by index
        sharder.classes.set_copiers(_weakly(self.deepcopy), _weakly(self.reduce))

    def guard(self, root: nn.Module) -> None:
        """Let this object copy ``root``, and modules with their own ``__getstate__``.

        Their own methods would copy the engine, and compiled calls, which call the original module.
        """
        for module in root.modules():
            own = type(module).__getstate__ is not nn.Module.__getstate__
            if (own or module is root) and SHAPES not in module.__dict__:
                module.__dict__["__deepcopy__"] = partial(self.deepcopy, module)
                module.__dict__["__reduce_ex__"] = partial(self.reduce, module)
                self._guarded.append(module)

    def release(self) -> None:
        """Undo :meth:`guard`."""
        for module in self._guarded:
            for name in _COPY_METHODS:
                module.__dict__.pop(name, None)

    def deepcopy(self, module: nn.Module, memo: dict[Any, Any]) -> Any:
        """Implement ``copy.deepcopy``. Collective."""

        def make_full(record: ShardedParameter) -> nn.Parameter:
            made = memo.get(id(record))  # keep ties
            if made is None:
                made = self._full(record, self._sharder.mesh.device)
                memo[id(record)] = memo[id(made)] = made  # do not copy the copy
                memo.setdefault(id(record.param), made)
            return made

        with self._as_plain(module, make_full):
            return copy.deepcopy(module, memo)

    def reduce(self, module: nn.Module, protocol: Any) -> Any:
        """Implement ``pickle`` and ``copy.copy``. Collective."""
        with self._as_plain(module, self._full_on_cpu):
            reduced: Any = module.__reduce_ex__(protocol)
        make, given, *state = reduced
        if make is copyreg.__newobj__ and len(given) == 1:  # type: ignore[attr-defined]
            # pickle requires that the named class is the object's class; _reconstructor is not checked.
            make, given = copyreg._reconstructor, (*given, object, None)  # type: ignore[attr-defined]
        return make, given, *state

    def _full_on_cpu(self, record: ShardedParameter) -> nn.Parameter:
        made = self._full(record, torch.device("cpu"))
        if len(record.owners) > 1:
            # A pickler memoizes objects, so ties are kept if both owners return the same live object.
            before = self._pickled.get(record.index, lambda: None)()
            if before is not None and _same_bytes(before, made):
                return before
            self._pickled[record.index] = weakref.ref(made)
        return made

    def _full(self, record: ShardedParameter, device: torch.device) -> nn.Parameter:
        self._sharder.sync.before_reading()
        param = record.param
        with no_shard_dispatch():
            value = param.detach() if record.is_full else gather_full(record)
            made = nn.Parameter(value.to(device, copy=True), param.requires_grad)  # without padding
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
    """Install full parameters for good in ``module``, on this rank's device. Collective."""
    records = sharder.live
    with full_parameters(sharder, module, writeback=False):
        values = [record.param.data for record in records]
    for record, value in zip(records, values, strict=True):
        record.param.grad = None
        record.install_full(value)
        for owner, _ in record.owners:
            if is_sharded(owner):
                ClassCache.restore(owner)
