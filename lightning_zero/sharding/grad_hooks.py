"""Run the hooks that users register on gradients of parameters.

The executor and autograd run hooks of ``register_hook`` once per backward, on this rank's own full gradient, before it
is reduced (see csrc/gradients). :class:`GradientHooks` finds the parameters that have such hooks.

Hooks of ``register_post_accumulate_grad_hook`` run after a backward, on this rank's shard of the reduced gradient.
Autograd would call them without a gradient, so a placeholder replaces them there.

If autograd itself accumulates a gradient into a shard, some code has computed with the shard (``sum(p.norm() for p in
self.parameters())``). Training would be wrong, so the executor raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from lightning_zero.sharding.sharder import Sharder


class _PostHook:
    """Take the place of a user's hook for autograd, and do nothing. The user's handle can still remove it."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook

    def __call__(self, param: Tensor) -> None:
        pass


class GradientHooks:
    """Find hooks on gradients, and run those that autograd cannot run.

    Attributes:
        hooked: parameters with a hook of ``register_hook``, by index.
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
                guard(record.index)  # again, because torch drops it at the first register_hook()
                self._guarded.add(record.index)
            post_hooks: Any = record.param._post_accumulate_grad_hooks
            for key, hook in list(post_hooks.items()) if post_hooks else ():
                if not isinstance(hook, _PostHook):
                    post_hooks[key] = _PostHook(hook)

    def has_post_hooks(self) -> bool:
        """Return True if there are hooks of ``register_post_accumulate_grad_hook``."""
        with no_shard_dispatch():
            return any(record.param._post_accumulate_grad_hooks for record in self._sharder.records)

    def run_post_hooks(self, attached: Iterable[int]) -> None:
        """Run the post-accumulate hooks of these parameters, to which a backward has just attached gradients."""
        records = [self._sharder.records[index] for index in attached]
        with no_shard_dispatch():
            hooks_by_record = [record.param._post_accumulate_grad_hooks for record in records]
        for record, post_hooks in zip(records, hooks_by_record, strict=True):
            param = record.param
            if record.visible_grad is None and param.grad is not None:
                # The executor attaches this very object each time.
                record.visible_grad = record.spec.wrap(param.grad)
            for hook in list(post_hooks.values()) if post_hooks else ():
                (hook.hook if isinstance(hook, _PostHook) else hook)(param)
            if post_hooks and param.grad is not None:
                record.spec.clear_padding(param.grad)

    def restore_post_hooks(self) -> None:
        """Let autograd call the post-accumulate hooks again, because the parameters are full."""
        for record in self._sharder.records:
            post_hooks: Any = record.param._post_accumulate_grad_hooks
            for key, hook in list(post_hooks.items()) if post_hooks else ():
                post_hooks[key] = hook.hook if isinstance(hook, _PostHook) else hook
