"""ZeRO-3 for Lightning: sharded, compiled training of an unmodified LightningModule.

    import lightning_zero
    Trainer(strategy="zero3_compile", precision="bf16-mixed", devices=4)
    Fabric(strategy="zero3_compile", precision="bf16-mixed", devices=4)

Importing registers the strategies ``zero3_compile``, ``zero2_compile``, ``zero1_compile`` and ``zero3`` for both.
:class:`Engine` is for loops without either.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_zero.cli.invocation import is_command_line
from lightning_zero.version import __version__

if TYPE_CHECKING or not is_command_line(sys.argv, sys.orig_argv):
    from lightning_zero import api
    from lightning_zero.api import *  # noqa: F403

    __all__ = ["__version__"]
    __all__ += api.__all__
else:

    def __getattr__(name: str) -> Any:
        """Import the names on demand: help and wrong arguments need neither torch nor Lightning."""
        if not name.startswith("_") or name == "__all__":
            names = import_module("lightning_zero.api")
            if name in ("__all__", *names.__all__):
                return getattr(names, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
