"""Hooks that users put on the gradients of parameters.

The executor and autograd run the hooks of ``register_hook``: once per backward, on this rank's own whole gradient,
before it is reduced (csrc/gradients/reducer.h). :class:`GradientHooks` finds which parameters have some.

Hooks of ``register_post_accumulate_grad_hook`` run when a backward has ended, on this rank's shard of the reduced
gradient: autograd would call them without one, so a stand-in takes their place there.

A gradient that autograd itself brings to a shard comes from code that computed with the shard (``sum(p.norm() for p in
self.parameters())``), which would train wrongly: the executor refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from lightning_zero.sharding.record import ShardedParameter
from lightning_zero.sharding.shard import Sharder
from lightning_zero.sharding.unsupported import no_shard_dispatch

__all__ = ["GradientHooks"]


class _Later:
    """Takes the place of a hook for autograd, and does nothing. The user's handle can still remove it."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook

    def __call__(self, param: Tensor) -> None:
        pass


class GradientHooks:
    """Finds hooks on gradients, and runs those that autograd cannot.

    Attributes:
        hooked: parameters whose gradient a hook of ``register_hook`` sees, by the index of their record.
    """

    def __init__(self, sharder: Sharder) -> None:
        self._sharder = sharder
        self._guarded: set[int] = set()
        self.hooked: dict[int, ShardedParameter] = {}

    def find(self) -> None:
        """Find the hooks that were registered or removed since the last call."""
        with no_shard_dispatch():
            self._find()

    def _find(self) -> None:
        guard, self.hooked = self._sharder.executor.parameters.install_gradient_hooks, {}
        for record in self._sharder.records:
            hooks = record.param._backward_hooks
            if hooks:
                self.hooked[record.index] = record
            elif hooks is not None:
                record.param._backward_hooks = None  # all were removed
            if (
                record.param.requires_grad
                and record.owners
                and (hooks is not None or record.index not in self._guarded)
            ):
                guard(record.index)  # again, since torch drops it at the first register_hook()
                self._guarded.add(record.index)
            later: Any = record.param._post_accumulate_grad_hooks
            for key, hook in list(later.items()) if later else ():
                if not isinstance(hook, _Later):
                    later[key] = _Later(hook)

    def has_post_hooks(self) -> bool:
        """Return True if there are hooks of ``register_post_accumulate_grad_hook``."""
        with no_shard_dispatch():
            return any(record.param._post_accumulate_grad_hooks for record in self._sharder.records)

    def run_post_hooks(self, attached: Iterable[int]) -> None:
        """Run the later hooks of these parameters, to which a backward has just attached gradients."""
        records = [self._sharder.records[index] for index in attached]
        with no_shard_dispatch():
            later_of = [record.param._post_accumulate_grad_hooks for record in records]
        for record, later in zip(records, later_of, strict=True):
            param = record.param
            if record.visible_grad is None and param.grad is not None:
                # The executor attaches this very object each time.
                record.visible_grad = record.spec.wrap(param.grad)
            for hook in list(later.values()) if later else ():
                (hook.hook if isinstance(hook, _Later) else hook)(param)
            if later and param.grad is not None:
                record.spec.clear_padding(param.grad)

    def restore_post_hooks(self) -> None:
        """Let autograd call the later hooks again: the parameters are whole."""
        for record in self._sharder.records:
            later: Any = record.param._post_accumulate_grad_hooks
            for key, hook in list(later.items()) if later else ():
                later[key] = hook.hook if isinstance(hook, _Later) else hook
