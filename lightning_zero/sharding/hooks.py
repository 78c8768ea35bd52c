"""Hooks that users put on parameters' gradients.

Gradients reach parameters through the executor, so autograd would call what ``register_hook`` and
``register_post_accumulate_grad_hook`` registered with no gradient at all. These hooks are taken away from it, and run
once at the end of each backward, on this rank's part of the reduced gradient.

A gradient that autograd itself brings to a shard comes from code that computed with the shard (``sum(p.norm() for p in
self.parameters())``), which would train wrongly: the executor refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from lightning_zero.sharding.refusals import plainly
from lightning_zero.sharding.shard import Sharder

__all__ = ["GradientHooks"]


class _Later:
    """Stands where autograd finds a hook, and does nothing there. The user's handle can still remove it."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook

    def __call__(self, param: Tensor) -> None:
        pass


class GradientHooks:
    """Takes hooks over and runs them."""

    def __init__(self, sharder: Sharder) -> None:
        self._sharder = sharder
        self._adopted: dict[int, list[dict[int, Callable[[Tensor], Tensor | None]]]] = {}
        self._guarded: set[int] = set()
        self._before: dict[int, Tensor] = {}  # gradients of earlier backwards, to which the coming one adds

    def adopt(self) -> None:
        """Takes over what was registered since the last time."""
        with plainly():
            self._adopt()

    def _adopt(self) -> None:
        for record in self._sharder.records:
            hooks = record.param._backward_hooks
            if hooks is not None:
                self._adopted.setdefault(record.index, []).append(hooks)
                record.param._backward_hooks = None  # takes the executor's guard away, too
                self._guarded.discard(record.index)
            if record.index not in self._guarded and record.param.requires_grad and record.owners:
                self._sharder.executor.parameters.guard_gradient(record.index)
                self._guarded.add(record.index)
            later: Any = record.param._post_accumulate_grad_hooks
            for key, hook in list(later.items()) if later else ():
                if not isinstance(hook, _Later):
                    later[key] = _Later(hook)

    def any(self) -> bool:
        """Whether users want to see gradients that backwards bring."""
        with plainly():
            self._adopt()
            return bool(self._adopted) or any(r.param._post_accumulate_grad_hooks for r in self._sharder.records)

    def before_backward(self) -> None:
        """Adopts; and remembers what is accumulated already: ``register_hook`` hooks see a backward's own gradient."""
        self.adopt()
        held = {index: self._sharder.records[index].param.grad for index in self._adopted}
        self._before = {index: grad.clone() for index, grad in held.items() if grad is not None}

    def run(self, attached: Iterable[int]) -> None:
        """Runs the hooks of these parameters, whose gradients a backward has just brought."""
        before, self._before = self._before, {}
        records = [self._sharder.records[index] for index in attached]
        with plainly():
            later_of = [record.param._post_accumulate_grad_hooks for record in records]
        for record, later in zip(records, later_of, strict=True):
            index, param = record.index, record.param
            if record.shown_gradient is None and param.grad is not None:
                # The executor attaches this very object each time.
                record.shown_gradient = record.sight.show(param.grad)
            hooks = [hook for group in self._adopted.get(index, ()) for hook in group.values()]
            if hooks and param.grad is not None:
                earlier = before.get(index)
                grad = param.grad if earlier is None else param.grad - earlier
                for hook in hooks:
                    changed = hook(grad)
                    grad = grad if changed is None else changed
                param.grad.copy_(grad if earlier is None else earlier + grad)
            for hook in list(later.values()) if later else ():
                (hook.hook if isinstance(hook, _Later) else hook)(param)
            if (hooks or later) and param.grad is not None:
                record.sight.clear_padding(param.grad)

    def give_back(self) -> None:
        """Autograd calls the hooks again: the parameters are whole."""
        for record in self._sharder.records:
            for hooks in self._adopted.pop(record.index, ()):
                hooks.update(record.param._backward_hooks or {})
                record.param._backward_hooks = hooks
            later: Any = record.param._post_accumulate_grad_hooks
            for key, hook in list(later.items()) if later else ():
                later[key] = hook.hook if isinstance(hook, _Later) else hook
