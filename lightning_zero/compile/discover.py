"""Finds the modules a training step calls, and compiles those calls in place.

The unit is the outermost module call: ``self(x)`` compiles the LightningModule's forward; ``self.encoder(x)`` and
``self.decoder(y)`` in one step compile both. Everything between the calls stays plain Python: logging, metrics, manual
backward, optimizer toggling. Metrics are modules too, but bookkeeping: they are left alone, and so are modules without
parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["CompiledCalls"]

log = logging.getLogger(__name__)


class CompiledCalls:
    """The modules compiled for one engine.

    Args:
        root: modules that are not ``root`` or inside it are ignored.
        arguments: for ``torch.compile`` of the module of a name.
        skip: module types that are never compiled.
    """

    def __init__(
        self, root: nn.Module, arguments: Callable[[str], dict[str, Any]], skip: tuple[type, ...] = ()
    ) -> None:
        self._inside = {id(module): name for name, module in root.named_modules()}
        self._arguments = arguments
        self._skip = skip
        self.modules: dict[str, nn.Module] = {}

    @contextmanager
    def discover(self) -> Iterator[None]:
        """Watches a step that runs eagerly; on leaving, compiles what it called. Nothing is compiled when the step
        fails."""
        depth = 0
        found: dict[str, nn.Module] = {}

        def enter(module: nn.Module, args: Any) -> None:
            nonlocal depth
            if id(module) not in self._inside:
                return
            if depth == 0 and not isinstance(module, self._skip) and next(module.parameters(), None) is not None:
                found.setdefault(self._inside[id(module)], module)
            depth += 1

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal depth
            if id(module) in self._inside:
                depth -= 1

        hooks = torch.nn.modules.module
        handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for name, module in found.items():
            self.compile(name, module)

    def compile(self, name: str, module: nn.Module) -> None:
        """Compiles calls of ``module`` from now on. The module object, its class and its state dict keys stay as they
        are."""
        module._compiled_call_impl = torch.compile(_plain_call(module), **self._arguments(name))
        self.modules[name] = module
        log.debug("compiling calls of %s (%s)", name or "the root module", type(module).__name__)

    def restore(self) -> None:
        """Makes the calls plain again."""
        for module in self.modules.values():
            module._compiled_call_impl = None
        self.modules.clear()


def _plain_call(module: nn.Module) -> Any:
    # An outer frame of ours: Dynamo does not compile the frames of torch.nn's own modules when they come first.
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call
