"""Share the constructor, the engine's creation and the sharding of modules between the two strategies.

:func:`options_init` gives a constructor the signature of a class of options. :class:`ZeroStrategyBase` is the base of
``ZeroStrategy`` and ``FabricZeroStrategy``.
"""

from __future__ import annotations

import inspect
import textwrap
import time
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Concatenate, ParamSpec

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torchmetrics import Metric

from lightning_zero.compile.async_compile import start_compile_workers
from lightning_zero.compile.events import GraphObserver, PassObserver
from lightning_zero.config import EngineConfig, Options
from lightning_zero.config.schema import option_fields
from lightning_zero.config.text import args_section
from lightning_zero.engine import Engine
from lightning_zero.errors import UnsupportedError
from lightning_zero.integrations.console import show_info
from lightning_zero.integrations.introspection import EngineIntrospectionMixin
from lightning_zero.integrations.processes import ProcessGroupMixin, without_nccl_abort
from lightning_zero.integrations.uncompile import accept_compiled_names, save_compiled_names, uncompile_modules
from lightning_zero.native import load
from lightning_zero.native.build import build, is_built
from lightning_zero.sharding.sharder import explain_shard_error
from lightning_zero.task_progress import TaskProgress

P = ParamSpec("P")


def engine_config(options: Options) -> EngineConfig:
    """Return the engine's configuration for a strategy's arguments.

    Raises:
        MisconfigurationException: An option or a combination of options is not supported.
    """
    try:
        return EngineConfig(**{name: getattr(options, name) for name in option_fields(Options)})
    except UnsupportedError as error:
        raise MisconfigurationException(str(error)) from error


def options_init(
    options_type: Callable[P, Any],
) -> Callable[[Callable[[Any, Any], None]], Callable[Concatenate[Any, P], None]]:
    """Decorate an ``__init__(self, arguments)`` whose argument is an instance of ``options_type``.

    Callers pass the arguments of ``options_type``. The signature shows them to type checkers, to ``help()`` and to the
    command line of LightningCLI.
    """

    def decorate(init: Callable[[Any, Any], None]) -> Callable[Concatenate[Any, P], None]:
        def __init__(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, options_type(*args, **kwargs))

        assert isinstance(options_type, type)
        hints = typing.get_type_hints(options_type)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name])
            for f in fields(options_type)
        ]
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        __init__.__signature__ = inspect.Signature([own, *parameters], return_annotation=None)  # type: ignore[attr-defined]
        __init__.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        __init__.__module__, __init__.__qualname__ = init.__module__, init.__qualname__
        indented = textwrap.indent(args_section(options_type), " " * 8)
        __init__.__doc__ = f"""
{indented}

        Raises:
            TypeError: A name is no option; the message suggests one.
            ValueError: A value is invalid; the message says which, and what to pass.
            MisconfigurationException: A combination of options is not supported.
        """
        return __init__

    return decorate


def add_error_notes(error: BaseException, engine: Engine) -> None:
    """Add notes about memory and replaced parameters to an error. Not collective."""
    engine.memory.explain(error)
    if engine.module is not None:
        explain_shard_error(error, engine.module, engine.sharder)


class ZeroStrategyBase(EngineIntrospectionMixin, ProcessGroupMixin):
    """Create engines and shard modules for a strategy."""

    _engine: Engine | None
    _options: EngineConfig

    def _init_engine(self, options: Options) -> None:
        """Check and store the options. Call it before the constructor of Lightning's strategy."""
        self._options = engine_config(options)
        self._engine = None
        self._observers: list[GraphObserver] = []
        self._pass_observers: list[PassObserver] = []

    def _begin(self) -> None:
        """Set up the process group options. Call it after the constructor of Lightning's strategy."""
        options = self._options
        self._init_processes(options.process_group_backend, options.timeout, options.tuning.report_stall_after_s)

    @property
    def _sharded(self) -> bool:
        return self._options.state_dict_type == "sharded"

    def _create_engine(self, config: EngineConfig) -> tuple[Engine, float]:
        """Create an engine; also return the seconds of waiting for the C++ executor to be built."""
        start_compile_workers(config.compiled, self.root_device)
        begun, built, tasks = time.monotonic(), is_built(), TaskProgress(show_info)
        if not built:
            with tasks.task("Building the C++ executor"):
                build(report=lambda text, *args: show_info(text % args))
        load()
        waited_s = 0.0 if built else time.monotonic() - begun
        with without_nccl_abort():
            engine = Engine(self.root_device, config, skip_modules=(Metric,), report=show_info, tasks=tasks)
        self._observe_engine(engine)
        return engine, waited_s

    def _move_metrics(self, module: nn.Module) -> None:
        for child in module.modules():
            if isinstance(child, Metric):
                child.to(self.root_device)

    def _shard_uncompiled(self, engine: Engine, module: nn.Module, convert: Callable[[], None] | None = None) -> None:
        """Shard a module without the user's own ``torch.compile``, and keep names in its state dicts."""
        compiled = uncompile_modules(module)
        accept_compiled_names(module, compiled)
        if convert is not None:
            convert()
        engine.shard(module)
        save_compiled_names(compiled)
