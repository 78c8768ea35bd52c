"""Discover the modules that a training step calls, and compile these calls in place.

The unit is the outermost module call: ``self(x)`` compiles the LightningModule's forward; ``self.encoder(x)`` and
``self.decoder(y)`` in one step compile both. Code between the calls stays plain Python: logging, manual backward,
toggling of optimizers. Modules without parameters and skipped types, such as metrics, stay eager.

Compiled code can be differentiated only once, and not inside ``torch.func``. Modules whose first step needs more
(gradient penalties, forces) stay eager.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.compat.compiler import Unsupported, collect_young_only, dynamo_config
from lightning_zero.compat.dynamo import ChangingInts, CompileContexts, LimitHit, watch_recompile_limits
from lightning_zero.compat.patches import failure_of_untested_torch
from lightning_zero.compat.tensors import (
    fake_weights_from_sizes,
    graph_task_id,
    inside_functorch,
    retains_graph,
    tree_leaves,
)
from lightning_zero.compile.async_compile import PendingCompiles
from lightning_zero.compile.capture import requires_grad as requires_grad_hooks
from lightning_zero.compile.capture.changing_sizes import ChangingSizes
from lightning_zero.compile.capture.module_hooks import ModuleHooks, guard_hooks, needs_hook_guards
from lightning_zero.compile.capture.recompile_reason import FRAME, argument_names, explain_recompilation
from lightning_zero.compile.capture.requires_grad import ignore_grad_leaves
from lightning_zero.compile.dynamo_layer_reuse import reuse_layer_traces
from lightning_zero.errors import UnsupportedError
from lightning_zero.offload.activations import OffloadQuota
from lightning_zero.sharding.module_patching import pop_functional_call_read
from lightning_zero.sharding.shard_tensor import ShardParameter
from lightning_zero.task_progress import TaskProgress

log = logging.getLogger(__name__)


@dataclass
class CallInfo:
    """State of the calls being compiled, for the backend.

    Attributes:
        called: description of the module that is called now, or was called last.
        argument_names: names of its positional arguments.
        retains_graph: a backward of the first step kept its graph for another one (``retain_graph=True``).
        quota: limit of activations that the calls offload.
        pending_compiles: graphs that were compiled and have not been called yet.
    """

    called: str = ""
    argument_names: Sequence[str] = ()
    retains_graph: bool = False
    quota: OffloadQuota = field(default_factory=OffloadQuota)
    pending_compiles: PendingCompiles = field(default_factory=PendingCompiles)

    def begin(self, called: str, argument_names: Sequence[str] = ()) -> None:
        """Begin a call of a compiled module."""
        self.called, self.argument_names = called, argument_names
        self.quota.begin_call(called)


class CompiledModules:
    """The modules compiled for one engine.

    Attributes:
        modules: compiled modules by name.
        eager_reasons: reasons why other modules that were called stay eager.
        limit_reasons: reasons for those of ``modules`` that torch does not recompile any more. Their calls run eagerly
            unless they match earlier compiled code.
    """

    def __init__(
        self,
        root: nn.Module,
        arguments: dict[str, Any],
        skip: tuple[type, ...] = (),
        report: Callable[[str], None] = log.info,
        quota: OffloadQuota | None = None,
        tasks: TaskProgress | None = None,
    ) -> None:
        self._tasks = tasks or TaskProgress()
        self._inside = {id(module): name for name, module in root.named_modules()}
        self._root = root
        self._arguments = arguments
        self._skip = skip
        self._codes: dict[Any, CodeType] = {}
        self._report = report
        self._outermost: str | None = None  # outermost module of the current call in a discovered step
        self._needs_input_gradients: set[str] = set()
        self._ints = ChangingInts()
        self._sizes = ChangingSizes()
        self.modules: dict[str, nn.Module] = {}
        self.eager_reasons: dict[str, str] = {}
        self.limit_reasons: dict[str, str] = {}
        self.call_info = CallInfo(quota=quota or OffloadQuota())
        # True if hooks changed after compilation, or if modules of one class differ in hooks.
        self._guards_hooks = False

    @contextmanager
    def step(self, first: bool) -> Iterator[None]:
        """Return a context for each training step. The first one runs eagerly and is discovered."""
        with self.discover() if first else self.dynamo_settings(), self.explain_errors():
            yield

    @contextmanager
    def discover(self) -> Iterator[None]:
        """Return a context that records the modules called by an eager step and then compiles them.

        Nothing is compiled if the step fails.
        """
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
                        self._keep_eager(name, module, "it is called inside torch.func (grad, vmap, ...)")
                    else:
                        found.setdefault(name, module)
                        calls[name] += 1
            elif transformed and self._outermost in found:
                why = "it calls modules inside torch.func (grad, vmap, ...)"
                self._keep_eager(self._outermost, found[self._outermost], why)
            depth += 1

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal depth
            if id(module) in self._inside:
                depth -= 1
                if self._outermost in found and pop_functional_call_read(module):
                    why = "it is called with other weights (torch.func.functional_call)"
                    self._keep_eager(self._outermost, found[self._outermost], why)
                if self._outermost in found and not inside_functorch():
                    self._watch_backward(self._outermost, found[self._outermost], output)
                if depth == 0 and self._outermost in found:
                    self._watch_input_gradients(self._outermost, module, output)

        def note_sizes(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if depth == 1 and self._outermost in found and self._inside.get(id(module)) == self._outermost:
                self._sizes.add(self._outermost, args, kwargs)

        hooks = torch.nn.modules.module
        handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(note_sizes, with_kwargs=True),  # before `leave`
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
            if torch.is_grad_enabled():  # True only with create_graph=True
                self._keep_eager(name, module, "it is differentiated twice (create_graph=True)")
            elif retains_graph():
                self.call_info.retains_graph = True

        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                value.grad_fn.register_prehook(backward)

    def _watch_input_gradients(self, name: str, module: nn.Module, output: Any) -> None:
        if requires_grad_hooks.find_requires_grad_hooks(
            ModuleHooks(module).all
        ) and requires_grad_hooks.output_needs_hooks(output):
            self._needs_input_gradients.add(name)

    def _keep_eager(self, name: str, module: nn.Module, why: str) -> None:
        if name in self.eager_reasons:
            return
        self.eager_reasons[name] = why
        if self.modules.pop(name, None) is not None:
            module._compiled_call_impl = None
        self._report(f"Not compiling {self._show(name, module)}: {why}, which compiled code does not support.")

    def _on_recompile_limit(self, name: str, module: nn.Module, code: CodeType, hit: LimitHit) -> None:
        if name in self.limit_reasons:
            return
        guard = explain_recompilation(hit.guard, argument_names(module)).text
        log.debug("Compile: the recompile limit is reached (guard=%s)", hit.guard)
        self.limit_reasons[name] = f"torch compiled it {hit.value} times, and no more ({guard})"
        part = "" if hit.code.startswith(f"{code.co_name!r} ") else f", as far as it is the code of {hit.code},"
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.warning(
                "%s%s runs eagerly from now on: torch has compiled it %d times, its limit "
                "(torch._dynamo.config.%s). The last reason: %s. Keep a value that changes in each step in "
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
        """Return a context for a backward that replaces torch's errors about unsupported differentiation.

        Raises:
            UnsupportedError: compiled code was differentiated twice or kept its graph; names what to do.
        """
        try:
            yield
        except Exception as error:
            if (instead := failure_of_untested_torch(error)) is not None:
                raise instead from error
            if not isinstance(error, RuntimeError):
                raise
            if (unsupported := explain_unsupported(error)) is not None:
                raise unsupported from error
            if not any(words in str(error) for words in ("support double backward", "non-empty donated")):
                raise
            which = ", ".join(self._show(name, module) for name, module in list(self.modules.items())[:4])
            raise UnsupportedError(
                "Compiled code was differentiated twice (create_graph=True), or its graph was kept for another "
                f"backward (retain_graph=True), which it was not compiled for. Compiled: {which}. Modules "
                "that do so in the first training step are recognized; this began later. Decorate its forward with "
                "torch.compiler.disable, or pass compile=False to the strategy (strategy='zero3')."
            ) from error

    @contextmanager
    def dynamo_settings(self) -> Iterator[None]:
        """Return a context that sets Dynamo's options for a step after the first."""
        # Otherwise torch 2.11 would not notice that a parameter was unfrozen if its module still holds the same object,
        # and would run code that computes no gradient. (``config.patch`` takes milliseconds.)
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
            del failure  # its traceback references this frame

    def compile(self, name: str, module: nn.Module) -> None:
        """Compile calls of ``module`` from now on.

        The module, its class and its state dict keys do not change.
        """
        self.limit_reasons.pop(name, None)
        plain = self._plain_call(module)
        compiled = torch.compile(plain, **self._arguments)
        on_limit = partial(self._on_recompile_limit, name, module, plain.__code__)
        notes, described, first = self.call_info, self._show(name, module), True
        arguments, tasks = argument_names(module), self._tasks
        hooks = ModuleHooks(module)
        ignorable = (
            [] if name in self._needs_input_gradients else requires_grad_hooks.find_requires_grad_hooks(hooks.all)
        )
        # Modules differ if compiled code ignores these hooks of one module and guards those of another of its class.
        ignored = () if self._needs_input_gradients else ignorable
        self._guards_hooks = self._guards_hooks or needs_hook_guards(self._root, ignored)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            if not torch.compiler.is_compiling():
                notes.begin(described, arguments)
            # Compiled code cannot run inside a transform.
            run = module._call_impl if inside_functorch() else compiled
            if not self._guards_hooks and hooks.changed():
                self._guards_hooks = True
                torch.compiler.reset()  # earlier code has no guards on hooks
            ignores = ignorable and not torch.compiler.is_compiling()
            ignoring = requires_grad_hooks.ignore_hooks(ignorable) if ignores else nullcontext()
            guarding = guard_hooks() if self._guards_hooks else nullcontext()
            traced = torch.compiler.is_compiling()
            noticing = nullcontext() if traced else watch_recompile_limits(on_limit)
            compiling = nullcontext() if traced else CompileContexts(self._compile_contexts)
            # In a training step dynamo_settings() does so, too.
            finishing = nullcontext() if traced else notes.pending_compiles.finish_on_failure()
            try:
                with finishing, guarding, ignoring, noticing, compiling:
                    if not first:
                        return run(*args, **kwargs)
                    first = False
                    if self._arguments.get("dynamic") is None and not traced:
                        self._sizes.mark(name, args, kwargs)
                    purpose = "training" if torch.is_grad_enabled() else "evaluation"
                    with tasks.task(f"Compiling {described} for {purpose}"), collect_young_only():
                        tasks.stage("tracing")
                        return run(*args, **kwargs)
            except Exception as error:
                if (instead := failure_of_untested_torch(error)) is None:
                    raise
                raise instead from error

        module._compiled_call_impl = call
        self.modules[name] = module
        log.debug("compiling calls of %s (%s)", name or "the root module", type(module).__name__)

    def _compile_contexts(self) -> Iterator[AbstractContextManager[Any]]:
        """Yield the contexts of each compilation."""
        yield ignore_grad_leaves()
        yield reuse_layer_traces()
        yield fake_weights_from_sizes(ShardParameter)
        yield self._ints.mark_as_inputs()

    def compile_again(self, arguments: dict[str, Any]) -> None:
        """Compile the same modules with other arguments at their next call."""
        self._arguments = arguments
        for name, module in self.modules.items():
            self.compile(name, module)

    def restart(self, arguments: dict[str, Any]) -> CompiledModules:
        """Restore eager calls and return a copy that discovers modules again with other arguments."""
        self.restore()
        return CompiledModules(self._root, arguments, self._skip, self._report, self.call_info.quota, self._tasks)

    def restore(self) -> None:
        """Restore eager calls."""
        for module in self.modules.values():
            module._compiled_call_impl = None
        self.modules.clear()
        self.eager_reasons.clear()
        self.limit_reasons.clear()

    def _plain_call(self, module: nn.Module) -> Any:
        # A frame of ours around the module: Dynamo does not compile outermost frames of torch.nn's own modules.
        def call(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        # Dynamo counts compilations per code object and stops after eight. Modules of equal parameters share one code
        # object and its graphs; others have their own.
        looks = tuple((name, param.shape, param.dtype) for name, param in module.named_parameters())
        code = call.__code__.replace(co_name=f"{FRAME}{type(module).__name__}")
        call.__code__ = self._codes.setdefault((type(module), looks), code)
        return call


class _LogOnceMethods(list[Any]):
    """Functions that Dynamo ignores: the user's, and logger methods such as ``warning_once``.

    These have logged in the first, eager step, and would break graphs. It is not a set, because torch 2.11 writes it as
    JSON after each compilation.
    """

    def __init__(self, ignored: Collection[Any]) -> None:
        super().__init__()
        self._ignored = ignored

    def __contains__(self, function: object) -> bool:
        return function in self._ignored or (hasattr(function, "cache_info") and _is_logger_method(function))


def _is_logger_method(function: object) -> bool:
    return any(function is method for method in vars(logging.Logger).values())


_OURS = str(Path(__file__).parents[2])


def explain_unsupported(error: Exception) -> UnsupportedError | None:
    """Return the error to raise instead of Dynamo's if it cannot trace our code inside user-compiled code.

    Only ``fullgraph=True`` fails; otherwise Dynamo breaks the graph. Errors about user code are returned as None.
    """
    frames = re.findall(r'File "(.+)", line (\d+), in (.+)', str(error))
    if not isinstance(error, Unsupported) or not any(path.startswith(_OURS) for path, _, _ in frames):
        return None
    users = [frame for frame in frames if not frame[0].startswith(_OURS) and "torch" not in Path(frame[0]).parts]
    where = " ({2} in {0}, line {1})".format(*users[0]) if users else ""
    return UnsupportedError(
        f"A function that you compiled with torch.compile(fullgraph=True) calls sharded modules or reads their "
        f"weights{where}, which torch.compile cannot trace into one graph under this strategy. Leave torch.compile out "
        "there: the strategy compiles the modules that a training step calls. Or leave fullgraph=True out."
    )
