"""Finds the modules a training step calls, and compiles those calls in place.

The unit is the outermost module call: ``self(x)`` compiles the LightningModule's forward; ``self.encoder(x)`` and
``self.decoder(y)`` in one step compile both. Everything between the calls stays plain Python: logging, metrics, manual
backward, optimizer toggling. Metrics are modules too, but bookkeeping: they are left alone, and so are modules without
parameters.

Compiled code can be differentiated once, and not inside a transform of ``torch.func``. Modules of which the first step
shows that they need more (a gradient penalty, forces) stay as they are.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.compat.compiler import dynamo_config
from lightning_zero.compat.dynamo import ChangingInts, LimitHit, watch_recompile_limits
from lightning_zero.compat.patches import failure_of_newer_torch
from lightning_zero.compat.tensors import (
    fake_weights_from_sizes,
    graph_task_id,
    inside_functorch,
    retains_graph,
    tree_leaves,
)
from lightning_zero.compile import requires_grad_hooks
from lightning_zero.compile.dynamo_layer_reuse import reuse_layer_traces
from lightning_zero.compile.fast_compile import collect_young_only
from lightning_zero.compile.grad_leaves import ignore_grad_leaves
from lightning_zero.compile.hooks import ModuleHooks, guard_hooks, needs_hook_guards
from lightning_zero.compile.pending_compiles import PendingCompiles
from lightning_zero.compile.recompile_reason import format_first_guard
from lightning_zero.compile.user_compiled import explain_unsupported
from lightning_zero.errors import UnsupportedError
from lightning_zero.offload.activations import OffloadQuota
from lightning_zero.sharding.module_patching import pop_functional_call_read
from lightning_zero.sharding.shard_tensor import ShardParameter

__all__ = ["CallInfo", "CompiledModules"]

log = logging.getLogger(__name__)


@dataclass
class CallInfo:
    """What a compiler should know of the calls that it compiles.

    Attributes:
        called: the module that is being called, or was last, in words.
        retains_graph: a backward of the first step left its graph as it was, for another (``retain_graph=True``).
        quota: of what calls save for backward, that leaves for the host.
        unfinished: graphs that were compiled for calls, and have not been called.
    """

    called: str = ""
    retains_graph: bool = False
    quota: OffloadQuota = field(default_factory=OffloadQuota)
    pending_compiles: PendingCompiles = field(default_factory=PendingCompiles)

    def begin(self, called: str) -> None:
        """A call of a compiled module."""
        self.called = called
        self.quota.begin_call(called)


class CompiledModules:
    """The modules compiled for one engine.

    Args:
        root: modules that are not ``root`` or inside it are ignored.
        arguments: for ``torch.compile``.
        skip: module types that are never compiled.
        report: shows a line to the user.
        quota: hears of calls.

    Attributes:
        modules: those that are compiled, by name.
        eager: why others are not, that would be.
        limit_reasons: those of ``modules`` that torch does not compile any more, and why; calls run eagerly, unless they
            are like one that was compiled.
    """

    def __init__(
        self,
        root: nn.Module,
        arguments: dict[str, Any],
        skip: tuple[type, ...] = (),
        report: Callable[[str], None] = log.info,
        quota: OffloadQuota | None = None,
    ) -> None:
        self._inside = {id(module): name for name, module in root.named_modules()}
        self._root = root
        self._arguments = arguments
        self._skip = skip
        self._codes: dict[Any, CodeType] = {}
        self._report = report
        self._outermost: str | None = None  # of the modules that a watched step is in
        self._see_input_gradients: set[str] = set()
        self._ints = ChangingInts()
        self.modules: dict[str, nn.Module] = {}
        self.eager_reasons: dict[str, str] = {}
        self.limit_reasons: dict[str, str] = {}
        self.call_info = CallInfo(quota=quota or OffloadQuota())
        # Since some module has got a hook, or lost one, after it was compiled; or since there are some from the start.
        self._guards_hooks = False

    @contextmanager
    def step(self, first: bool) -> Iterator[None]:
        """Surrounds each training step; the first one runs eagerly, to be watched."""
        with self.discover() if first else self.dynamo_settings(), self.explain_errors():
            yield

    @contextmanager
    def discover(self) -> Iterator[None]:
        """Watches a step that runs eagerly; on leaving, compiles what it called. Nothing is compiled when the step
        fails."""
        depth = 0
        found: dict[str, nn.Module] = {}
        calls: Counter[str] = Counter()

        def enter(module: nn.Module, args: Any) -> None:
            nonlocal depth
            if id(module) not in self._inside:
                return
            transformed = inside_functorch()
            if depth == 0:
                self._outermost = name = self._inside[id(module)]
                again = graph_task_id() != -1  # a checkpointed module, in backward
                if not again and not isinstance(module, self._skip) and next(module.parameters(), None) is not None:
                    if transformed:
                        self._leave_eager(name, module, "it is called inside torch.func (grad, vmap, ...)")
                    else:
                        found.setdefault(name, module)
                        calls[name] += 1
            elif transformed and self._outermost in found:
                why = "it calls modules inside torch.func (grad, vmap, ...)"
                self._leave_eager(self._outermost, found[self._outermost], why)
            depth += 1

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal depth
            if id(module) in self._inside:
                depth -= 1
                if self._outermost in found and pop_functional_call_read(module):
                    why = "it is called with other weights (torch.func.functional_call)"
                    self._leave_eager(self._outermost, found[self._outermost], why)
                if self._outermost in found and not inside_functorch():
                    self._watch_backward(self._outermost, found[self._outermost], output)
                if depth == 0 and self._outermost in found:
                    self._watch_input_gradients(self._outermost, module, output)

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
            if name not in self.eager_reasons:
                self.compile(name, module)
        self.call_info.quota.calls_per_pass = max(sum(calls[name] for name in self.modules), 1)

    def _watch_backward(self, name: str, module: nn.Module, output: Any) -> None:
        def backward(grads: tuple[Tensor, ...]) -> None:
            if torch.is_grad_enabled():  # only with create_graph=True
                self._leave_eager(name, module, "it is differentiated twice (create_graph=True)")
            elif retains_graph():
                self.call_info.retains_graph = True

        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                value.grad_fn.register_prehook(backward)

    def _watch_input_gradients(self, name: str, module: nn.Module, output: Any) -> None:
        if requires_grad_hooks.asking(ModuleHooks(module).all) and requires_grad_hooks.output_needs_hooks(output):
            self._see_input_gradients.add(name)

    def _leave_eager(self, name: str, module: nn.Module, why: str) -> None:
        if name in self.eager_reasons:
            return
        self.eager_reasons[name] = why
        if self.modules.pop(name, None) is not None:
            module._compiled_call_impl = None
        self._report(f"Not compiling {self._show(name, module)}: {why}, which compiled code does not support.")

    def _on_recompile_limit(self, name: str, module: nn.Module, code: CodeType, hit: LimitHit) -> None:
        if name in self.limit_reasons:
            return
        guard = format_first_guard(hit.guard)
        self.limit_reasons[name] = f"torch compiled it {hit.value} times, and no more ({guard})"
        part = "" if hit.code.startswith(f"{code.co_name!r} ") else f", as far as it is the code of {hit.code},"
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.warning(
                "%s%s runs eagerly from now on: torch has compiled it %d times, its limit "
                "(torch._dynamo.config.%s). The guard that failed last: %s. Keep a value that changes in each step in "
                "a tensor (register_buffer, or an argument that is a tensor), change it outside of forward, or "
                "decorate the method that reads it with torch.compiler.disable. To compile more often, raise that "
                "limit.",
                self._show(name, module), part, hit.value, hit.limit, guard,
            )  # fmt: skip

    @staticmethod
    def _show(name: str, module: nn.Module) -> str:
        return f"{name!r} ({type(module).__name__})" if name else f"the whole {type(module).__name__}"

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Around what may run a backward: says what to do where compiled code is asked for more than it can.

        Raises:
            UnsupportedError: in place of torch's own errors about it.
        """
        try:
            yield
        except Exception as error:
            if (instead := failure_of_newer_torch(error)) is not None:
                raise instead from error
            if not isinstance(error, RuntimeError):
                raise
            if (refusal := explain_unsupported(error)) is not None:
                raise refusal from error
            if not any(words in str(error) for words in ("support double backward", "non-empty donated")):
                raise
            which = ", ".join(self._show(name, module) for name, module in list(self.modules.items())[:4])
            raise UnsupportedError(
                "Compiled code was differentiated twice (create_graph=True), or its graph was kept for another "
                f"backward (retain_graph=True), which it was not compiled for. Compiled: {which}. A module of which "
                "the first training step does so is recognised; this began later. Decorate its forward with "
                "torch.compiler.disable, or pass compile=False to the strategy (strategy='zero3')."
            ) from error

    @contextmanager
    def dynamo_settings(self) -> Iterator[None]:
        """Surrounds a later step."""
        # Or torch 2.11 would take a parameter for unchanged as long as its module holds the same one, and would run
        # code in which weights that were unfrozen since get no gradient. (``config.patch`` takes milliseconds.)
        config = torch.compiler.config
        before = config.skip_tensor_guards_with_matching_dict_tags
        config.skip_tensor_guards_with_matching_dict_tags = False
        ignored = dynamo_config.ignore_logging_functions
        dynamo_config.ignore_logging_functions = cast(Any, _LogOnceMethods(ignored))
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            config.skip_tensor_guards_with_matching_dict_tags = before
            dynamo_config.ignore_logging_functions = ignored
            self.call_info.pending_compiles.finish_after(failure)
            del failure  # which knows this frame

    def compile(self, name: str, module: nn.Module) -> None:
        """Compiles calls of ``module`` from now on. The module object, its class and its state dict keys stay as they
        are."""
        self.limit_reasons.pop(name, None)
        plain = self._plain_call(module)
        compiled = torch.compile(plain, **self._arguments)
        give_up = partial(self._on_recompile_limit, name, module, plain.__code__)
        notes, shown, first = self.call_info, self._show(name, module), True
        hooks = ModuleHooks(module)
        asking = [] if name in self._see_input_gradients else requires_grad_hooks.asking(hooks.all)
        # Where one module goes without such hooks, and another of its class with them, they do differ.
        left_out = () if self._see_input_gradients else asking
        self._guards_hooks = self._guards_hooks or needs_hook_guards(self._root, left_out)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            if not torch.compiler.is_compiling():
                notes.begin(shown)
            # Compiled code cannot run inside a transform.
            run = module._call_impl if inside_functorch() else compiled
            if not self._guards_hooks and hooks.changed():
                self._guards_hooks = True
                torch.compiler.reset()  # what was compiled so far has no such guards
            leave_out = asking and not torch.compiler.is_compiling()
            leaving_out = requires_grad_hooks.left_out(asking) if leave_out else nullcontext()
            guarding = guard_hooks() if self._guards_hooks else nullcontext()
            at_once, ints = fake_weights_from_sizes(ShardParameter), self._ints.mark_as_inputs()
            noticing = nullcontext() if torch.compiler.is_compiling() else watch_recompile_limits(give_up)
            try:
                with guarding, leaving_out, ignore_grad_leaves(), reuse_layer_traces(), at_once, ints, noticing:
                    if not first:
                        return run(*args, **kwargs)
                    first = False
                    with collect_young_only():
                        return run(*args, **kwargs)
            except Exception as error:
                if (instead := failure_of_newer_torch(error)) is None:
                    raise
                raise instead from error

        module._compiled_call_impl = call
        self.modules[name] = module
        log.debug("compiling calls of %s (%s)", name or "the root module", type(module).__name__)

    def compile_again(self, arguments: dict[str, Any]) -> None:
        """Compiles the same modules with other arguments, when they are next called."""
        self._arguments = arguments
        for name, module in self.modules.items():
            self.compile(name, module)

    def restart(self, arguments: dict[str, Any]) -> CompiledModules:
        """For another beginning with other arguments; nothing is compiled until then."""
        self.restore()
        return CompiledModules(self._root, arguments, self._skip, self._report, self.call_info.quota)

    def restore(self) -> None:
        """Makes the calls plain again."""
        for module in self.modules.values():
            module._compiled_call_impl = None
        self.modules.clear()
        self.eager_reasons.clear()
        self.limit_reasons.clear()

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


class _LogOnceMethods(list[Any]):
    """What Dynamo leaves out: what the user wants it to, and methods that somebody gave to loggers, that say each thing
    once (transformers' ``warning_once``): they have said it in the first step, which runs eagerly, and would break each
    graph in two. No set, whose members torch 2.11 would write down as JSON after each compilation, and cannot."""

    def __init__(self, wanted: Collection[Any]) -> None:
        super().__init__()
        self._wanted = wanted

    def __contains__(self, function: object) -> bool:
        return function in self._wanted or (hasattr(function, "cache_info") and _is_logger_method(function))


def _is_logger_method(function: object) -> bool:
    return any(function is method for method in vars(logging.Logger).values())
