"""Who may read and who may write shards, and when: the only caller of the four functions of the executor that say so.

Weights that eager code was given are copies. What was done to them in place must reach the shards before anybody reads
these, and what overwrites shards must win over copies that were given out before. Where ranks read each other's shards,
whoever writes waits for the readers first, and lets them go on afterwards.


---

What ``module.weight`` answers outside of a training step's forward, about gradient and flag of its parameter:
a gathered copy knows nothing of these.

In a forward it is a plain tensor, which costs nothing and surprises nobody's code.


---

What eager code gets when it reads ``module.weight`` of a sharded module. One :class:`WeightReader` for all modules of
an engine; compiled code does not ask it.

=================================  ==================================================================================
when                               what is read
=================================  ==================================================================================
inside :meth:`WeightReader.shards`   the registered parameter, a shard: optimizers are made of these
inside ``WeightReader.parameters``   an ``nn.Parameter`` of the gathered weight: code that builds a model ties these
in a training step's forward       the gathered weight, a plain tensor, which surprises nobody's code
otherwise                          a :class:`GatheredWeight`, which knows its parameter's gradient and flag
=================================  ==================================================================================
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_zero.compat.tensors import DisableTorchFunctionSubclass, disabled_torch_function
from lightning_zero.errors import UnsupportedError
from lightning_zero.native import Executor

__all__ = ["GatheredWeight", "ShardSync", "WeightReader"]


class ShardSync:
    """Asked by whatever reads or writes shards otherwise than by a gather."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.on_before_write: Callable[[], None] = lambda: None  # waits for whoever copies shards beside training

    def before_reading(self) -> None:
        """Edits of gathered weights are in the shards from here on."""
        self._executor.weights.sync_user_writes()

    def flush_user_writes(self) -> None:
        """Likewise; and what is still done to copies given out so far does not count any more."""
        self._executor.weights.sync_user_writes(forget=True)

    def before_overwriting(self, stepping: bool = False) -> None:
        """Shards are about to get values that win over copies given out before. ``stepping``: from an optimizer."""
        self.flush_user_writes()
        self.before_writing(stepping)

    def before_writing(self, stepping: bool = False) -> None:
        """Shards are about to change: ranks that still read them are waited for. Harmless when repeated. The next
        gather on this rank ends it, if :meth:`after_writing` does not."""
        self.on_before_write()
        self._executor.weights.begin_writing(stepping)

    def after_writing(self) -> None:
        """Other ranks may read what this one has written. Harmless where nothing was."""
        self._executor.weights.end_writing()

    def invalidate_copies(self) -> None:
        """Shards may have changed without a word, as under an exchange of ``param.data``: what was made of them is made
        anew before it is next read."""
        self._executor.weights.expire_compute_shards()


class _EqualElements(Tensor):
    """The elements of ``module.weight == param`` for one parameter: sets and dicts find it by either."""

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return True


class GatheredWeight(Tensor):
    """A whole weight that says of ``grad`` and ``requires_grad`` what its parameter says. Results computed with it are
    plain tensors."""

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]
    _zero_param: nn.Parameter
    _zero_reader: WeightReader

    @staticmethod
    def of(weight: Tensor, param: nn.Parameter, view: WeightReader) -> Tensor:
        """The same object."""
        weight.__class__ = GatheredWeight
        weight.__dict__.update(_zero_param=param, _zero_reader=view)
        return weight

    # -- as what the parameter passes for

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return True

    @property
    def _is_param(self) -> bool:  # type: ignore[override]
        """Have ``isinstance(module.weight, nn.Parameter)`` be True, but keep modules from registering it."""
        code, name = sys._getframe(2).f_code.co_name, sys._getframe(2).f_globals.get("__name__")
        return name != "torch.nn.modules.module" or code not in ("__setattr__", "register_parameter")

    def __hash__(self) -> int:
        with DisableTorchFunctionSubclass():
            return hash(self._zero_param)

    def __eq__(self, other: object) -> Any:
        result = Tensor.__eq__(self, other)  # type: ignore[arg-type]
        if isinstance(other, GatheredWeight) and other._zero_param is self._zero_param and type(result) is Tensor:
            result.__class__ = _EqualElements
        elif other is self._zero_param:
            result.__dict__["_zero_same"] = True
        return result

    # -- of the parameter

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """None where the parameter has none; with one rank the gradient itself, whole.

        Raises:
            UnsupportedError: its gradient lies in shards, one on each rank.
        """
        with DisableTorchFunctionSubclass():
            grad, record = self._zero_param.grad, self._zero_reader.find_record(self._zero_param)
            if grad is None:
                return None
            if record is not None and record.layout.world_size == 1:
                return record.layout.full_view(grad.as_subclass(Tensor).view(-1))
        raise self._no_gradient()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        raise self._no_gradient()

    def _no_gradient(self) -> UnsupportedError:
        record = self._zero_reader.find_record(self._zero_param)
        name = "weight" if record is None else record.name
        return UnsupportedError(
            f"{name!r} was gathered when it was read, and its gradient is not: each rank has a shard. Take "
            f"`param.grad` of the registered parameter, `dict(self.named_parameters())[{name!r}].grad`: norms, sums "
            "and the like of it are those of the whole gradient; what changes it element by element may be done "
            "there, on every rank."
        )

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        with DisableTorchFunctionSubclass():
            return self._zero_param.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> GatheredWeight:
        """Of the parameter."""
        with DisableTorchFunctionSubclass():
            self._zero_param.requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:  # type: ignore[override]
        """Register the hook on the parameter."""
        with DisableTorchFunctionSubclass():
            return self._zero_param.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:  # type: ignore[override]
        """Register the hook on the parameter."""
        with DisableTorchFunctionSubclass():
            return self._zero_param.register_post_accumulate_grad_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.detach().clone()
        with DisableTorchFunctionSubclass():
            copy.requires_grad_(self._zero_param.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # a file holds the values, and no engine


class _GatheredParameter(nn.Parameter):
    """A gathered parameter while a model is being built. Its memory is what is watched for edits, so assigning ``data``
    writes there."""

    def _write(self, value: Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    data = property(lambda self: self.detach(), _write)


class WeightReader:
    """The mode, and what eager reads leave behind. Keeps neither engine nor parameters alive: torch remembers the
    classes that refer to it for longer than an engine lives."""

    def __init__(self) -> None:
        self._shards = self._parameters = self._forward = False
        self._given = False
        self._last_read: Callable[[], nn.Parameter | None] = lambda: None
        self._engine: Callable[[], Any] = lambda: None

    # -- the mode

    @contextmanager
    def shards(self) -> Iterator[None]:
        """Inside, registered parameters are read."""
        self._shards = True
        try:
            yield
        finally:
            self._shards = False

    @contextmanager
    def parameters(self) -> Iterator[None]:
        """Inside, what is read is an ``nn.Parameter``."""
        self._parameters = True
        try:
            yield
        finally:
            self._parameters = False

    def begin_forward(self) -> None:
        """A training step's forward begins: what is read is a plain tensor."""
        self._forward = True

    def end_forward(self) -> None:
        """It has ended, and so has its backward, as far as there is one. Harmless when repeated."""
        self._forward = False

    # -- reads

    @property
    def reads_shards(self) -> bool:
        """Whether nothing is to be gathered."""
        return self._shards

    def note_read(self, param: nn.Parameter) -> None:
        """Eager code is about to read this parameter's gathered weight."""
        self._last_read = weakref.ref(param)

    def wrap(self, weight: Tensor, param: nn.Parameter) -> Tensor:
        """What eager code is given for ``param``, whose gathered weight this is."""
        if self._parameters:  # `head.weight = embedding.weight` must see a Parameter
            whole = _GatheredParameter(weight.detach(), param.requires_grad)
            for name in ("register_hook", "register_post_accumulate_grad_hook"):
                whole.__dict__[name] = getattr(param, name)
            return whole
        if self._forward and torch.is_grad_enabled():
            weight.__dict__["register_hook"] = param.register_hook  # which outlives this read, as in a plain module
            return weight
        return GatheredWeight.of(weight, param, self)

    @property
    def last_read(self) -> nn.Parameter | None:
        """The parameter that eager code has read last, if it is still there."""
        return self._last_read()

    def note_functional_call_read(self) -> None:
        """Eager code has read a whole weight that ``torch.func.functional_call`` had put in a shard's place."""
        self._given = True

    def pop_functional_call_read(self) -> bool:
        """Whether that has happened since the last question."""
        given, self._given = self._given, False
        return given

    # -- whose

    def bind_engine(self, engine: Any) -> None:
        """Modules that are read through this view find that engine by it."""
        self._engine = weakref.ref(engine)

    @property
    def engine(self) -> Any:
        """None when it is gone."""
        return self._engine()

    def find_record(self, param: nn.Parameter) -> Any:
        """The sharded parameter, or None when its engine is gone."""
        engine = self.engine
        return engine.sharder.find(param) if engine is not None else None
