"""Constructors whose signature is a class of options, and what an engine is given of these."""

from __future__ import annotations

import inspect
import textwrap
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Concatenate, ParamSpec

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_zero.config import EngineConfig, Options
from lightning_zero.config.option import option_fields
from lightning_zero.config.text import arguments
from lightning_zero.errors import UnsupportedError

__all__ = ["engine_config", "options_init"]

P = ParamSpec("P")


def engine_config(options: Options) -> EngineConfig:
    """What an engine is given of a strategy's arguments.

    Raises:
        MisconfigurationException: a choice that does not exist yet.
    """
    try:
        return EngineConfig(**{name: getattr(options, name) for name in option_fields(Options)})
    except UnsupportedError as error:
        raise MisconfigurationException(str(error)) from error


def options_init(made: Callable[P, Any]) -> Callable[[Callable[[Any, Any], None]], Callable[Concatenate[Any, P], None]]:
    """Decorates an ``__init__(self, arguments)`` with a class of :func:`~lightning_zero.config.option.options`: callers
    pass the arguments of ``made``, which the signature shows, to type checkers, to ``help()`` and to the command line
    of LightningCLI."""

    def decorate(init: Callable[[Any, Any], None]) -> Callable[Concatenate[Any, P], None]:
        def __init__(self: Any, *args: P.args, **given: P.kwargs) -> None:
            init(self, made(*args, **given))

        assert isinstance(made, type)
        hints = typing.get_type_hints(made)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name]) for f in fields(made)
        ]
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        __init__.__signature__ = inspect.Signature([own, *parameters], return_annotation=None)  # type: ignore[attr-defined]
        __init__.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        __init__.__module__, __init__.__qualname__ = init.__module__, init.__qualname__
        indented = textwrap.indent(arguments(made), " " * 8)
        __init__.__doc__ = f"""
{indented}

        Raises:
            TypeError: a name that is no option; the message says which is meant.
            ValueError: a value that makes no sense; the message says which, and what to pass.
            MisconfigurationException: a choice that does not exist yet.
        """
        return __init__

    return decorate
