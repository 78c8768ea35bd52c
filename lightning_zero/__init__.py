"""ZeRO-3 for Lightning: sharded, compiled training of an unmodified LightningModule.

    import lightning_zero
    Trainer(strategy="zero3_compile", precision="bf16-mixed", devices=4)
    Fabric(strategy="zero3_compile", precision="bf16-mixed", devices=4)

Importing registers the strategies ``zero3_compile``, ``zero2_compile``, ``zero1_compile`` and ``zero3`` for both.
:class:`Engine` is for loops without either.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lightning_zero.cli.invocation import is_command_line
from lightning_zero.version import __version__

if TYPE_CHECKING or not is_command_line(sys.argv, sys.orig_argv):
    from lightning_zero.api import (
        CheckpointError,
        CommMonitor,
        Device,
        Engine,
        EngineConfig,
        FabricZeroStrategy,
        NativeBuildError,
        PassSchedule,
        PassSpec,
        Plan,
        PlanReport,
        RankFailedError,
        RankMismatchError,
        Rule,
        Training,
        TrainingPlan,
        Tuning,
        UnsupportedError,
        ZeroStrategy,
        export_safetensors,
        full_parameters,
        grad_norm,
        load_safetensors,
        plan,
        register_rule,
        unshard,
    )
else:

    def __getattr__(name: str) -> Any:
        """Import the names on demand: help and wrong arguments need neither torch nor Lightning."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from lightning_zero import api

        return getattr(api, name)


__all__ = [
    "CheckpointError",
    "CommMonitor",
    "Device",
    "Engine",
    "EngineConfig",
    "FabricZeroStrategy",
    "NativeBuildError",
    "PassSchedule",
    "PassSpec",
    "Plan",
    "PlanReport",
    "RankFailedError",
    "RankMismatchError",
    "Rule",
    "Training",
    "TrainingPlan",
    "Tuning",
    "UnsupportedError",
    "ZeroStrategy",
    "__version__",
    "export_safetensors",
    "full_parameters",
    "grad_norm",
    "load_safetensors",
    "plan",
    "register_rule",
    "unshard",
]
