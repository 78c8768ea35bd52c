"""What eager code gets when it reads ``module.weight`` of a sharded module. One :class:`WeightReader` for all modules of
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

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.sharding.gathered import GatheredWeight

__all__ = ["WeightReader"]


class _Whole(nn.Parameter):
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
            whole = _Whole(weight.detach(), param.requires_grad)
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
