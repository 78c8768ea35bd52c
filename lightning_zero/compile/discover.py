"""Finds the modules a training step calls, and compiles those calls in place.

The unit is the outermost module call: ``self(x)`` compiles the LightningModule's forward; ``self.encoder(x)`` and
``self.decoder(y)`` in one step compile both. Everything between the calls stays plain Python: logging, metrics, manual
backward, optimizer toggling. Metrics are modules too, but bookkeeping: they are left alone, and so are modules without
parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import nn

__all__ = ["CompiledCalls"]

log = logging.getLogger(__name__)


class CompiledCalls:
    """The modules compiled for one engine.

    Args:
        root: modules that are not ``root`` or inside it are ignored.
        arguments: for ``torch.compile``.
        skip: module types that are never compiled.
    """

    def __init__(self, root: nn.Module, arguments: dict[str, Any], skip: tuple[type, ...] = ()) -> None:
        self._inside = {id(module): name for name, module in root.named_modules()}
        self._arguments = arguments
        self._skip = skip
        self._codes: dict[Any, CodeType] = {}
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

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Surrounds a later step."""
        # Or torch 2.11 would take a parameter for unchanged as long as its module holds the same one, and would run
        # code in which weights that were unfrozen since get no gradient. (``config.patch`` takes milliseconds.)
        config = torch.compiler.config
        before = config.skip_tensor_guards_with_matching_dict_tags
        config.skip_tensor_guards_with_matching_dict_tags = False
        try:
            yield
        finally:
            config.skip_tensor_guards_with_matching_dict_tags = before

    def compile(self, name: str, module: nn.Module) -> None:
        """Compiles calls of ``module`` from now on. The module object, its class and its state dict keys stay as they
        are."""
        module._compiled_call_impl = torch.compile(self._plain_call(module), **self._arguments)
        self.modules[name] = module
        log.debug("compiling calls of %s (%s)", name or "the root module", type(module).__name__)

    def compile_again(self, arguments: dict[str, Any]) -> None:
        """Compiles the same modules with other arguments, when they are next called."""
        self._arguments = arguments
        for name, module in self.modules.items():
            self.compile(name, module)

    def restore(self) -> None:
        """Makes the calls plain again."""
        for module in self.modules.values():
            module._compiled_call_impl = None
        self.modules.clear()

    def _plain_call(self, module: nn.Module) -> Any:
        # An outer frame of ours: Dynamo does not compile the frames of torch.nn's own modules when they come first.
        def call(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        # Dynamo counts what it compiles by code object, and gives up after eight: modules that look alike share one,
        # and its graphs; others have their own.
        looks = tuple((name, param.shape, param.dtype) for name, param in module.named_parameters())
        code = call.__code__.replace(co_name=f"call of {type(module).__name__}")
        call.__code__ = self._codes.setdefault((type(module), looks), code)
        return call
