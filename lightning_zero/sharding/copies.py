"""``copy.deepcopy`` of sharded modules while a model is being built.

``nn.TransformerEncoder`` copies the layer that it is given. A copy gets parameters of its own, sharded likewise and
with the same values; what is tied inside of what is copied is tied in the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_zero.sharding.shard import Sharder
from lightning_zero.sharding.state import StateDictHooks

__all__ = ["copied_modules"]


@contextmanager
def copied_modules(sharder: Sharder, state: StateDictHooks) -> Iterator[None]:
    """Inside, modules that ``sharder`` has sharded can be deep-copied."""

    def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        sharder.sync.before_reading()  # what was read from the original and edited belongs into the copy, too
        for param in module._parameters.values():
            record = None if param is None else sharder.find(param)
            if record is not None and id(param) not in memo:
                memo[id(param)] = sharder.twin(record).param
        reduced: Any = object.__reduce_ex__(module, 4)
        make, arguments, contents = reduced[:3]
        other: nn.Module = make(*arguments)
        memo[id(module)] = other
        other.__setstate__(copy.deepcopy(contents, memo))
        for key, param in other._parameters.items():
            record = None if param is None else sharder.find(param)
            if record is not None:
                sharder.adopt(other, key, record)
        state.install_on_copy(other, module)
        return other

    with sharder.classes.copying_by(copied):
        yield
