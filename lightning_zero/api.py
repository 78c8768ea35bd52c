"""Names of the package. Importing this module registers the strategies with Lightning."""

from __future__ import annotations

from contextlib import AbstractContextManager

from lightning.fabric.strategies import STRATEGY_REGISTRY as FabricRegistry
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

from lightning_zero.compat.versions import warn_of_untested
from lightning_zero.compile.graph_plan import Plan
from lightning_zero.compile.passes import PassSpec
from lightning_zero.config import EngineConfig, Tuning
from lightning_zero.engine import Engine, engine_of
from lightning_zero.errors import (
    CheckpointError,
    NativeBuildError,
    RankFailedError,
    RankMismatchError,
    UnsupportedError,
)
from lightning_zero.integrations.fabric.strategy import FabricZeroStrategy
from lightning_zero.integrations.hf_weights import export_safetensors, load_safetensors
from lightning_zero.integrations.trainer.checkpoint_lookup import install_checkpoint_lookup
from lightning_zero.integrations.trainer.grad_norm import grad_norm
from lightning_zero.integrations.trainer.pass_schedule import PassSchedule
from lightning_zero.integrations.trainer.strategy import ZeroStrategy
from lightning_zero.optim.reduction_rules import Reduction, ReductionRule
from lightning_zero.optim.update_rules import MatrixRule, Rule, register_matrix_rule, register_rule
from lightning_zero.planning.estimate_training import Training, plan
from lightning_zero.planning.training_plan import TrainingPlan
from lightning_zero.profiling.devices import Device
from lightning_zero.report.comm_monitor import CommMonitor
from lightning_zero.report.plan_report import PlanReport

__all__ = [
    "CheckpointError",
    "CommMonitor",
    "Device",
    "Engine",
    "EngineConfig",
    "FabricZeroStrategy",
    "MatrixRule",
    "NativeBuildError",
    "PassSchedule",
    "PassSpec",
    "Plan",
    "PlanReport",
    "RankFailedError",
    "RankMismatchError",
    "Reduction",
    "ReductionRule",
    "Rule",
    "Training",
    "TrainingPlan",
    "Tuning",
    "UnsupportedError",
    "ZeroStrategy",
    "export_safetensors",
    "full_parameters",
    "grad_norm",
    "load_safetensors",
    "plan",
    "register_matrix_rule",
    "register_rule",
    "unshard",
]


def full_parameters(module: nn.Module, writeback: bool = True) -> AbstractContextManager[None]:
    """Give the module and its children full parameters in this context.

    Collective: enter it on every rank and make the same edits on every rank. Each rank takes the memory of the full
    parameters, in their own dtypes.

    Args:
        module: A sharded module, or a child of one.
        writeback: Write edits to the shards on exit. False discards them, and saves that time.

    Returns:
        The context.

    Raises:
        UnsupportedError: The module is not sharded.

    Examples:
        In a hook of a LightningModule, on every rank::

            with lightning_zero.full_parameters(self.head, writeback=False):
                print(self.head.weight.norm())
    """
    return _engine(module).full_parameters(module, writeback)


def unshard(module: nn.Module) -> None:
    """Make the module a plain one again, with full parameters on every rank. Collective.

    The parameters are on this rank's device, in their own dtypes. Optimizers of the sharded module are of no use
    afterwards.

    Args:
        module: A sharded module, in place.

    Raises:
        UnsupportedError: The module is not sharded.

    Examples:
        After a training, on every rank::

            trainer.fit(model)
            lightning_zero.unshard(model)
            torch.save(model.state_dict(), "model.pt")
    """
    _engine(module).unshard()


def _engine(module: nn.Module) -> Engine:
    for child in module.modules():
        found = engine_of(child)
        if found is not None:
            return found
    raise UnsupportedError(
        f"{type(module).__name__} is not sharded. Sharding happens when trainer.fit(), validate(), test() or predict() "
        "sets up the model, or in fabric.setup()."
    )


for _name, _stage, _compile, _description in (
    ("zero3_compile", 3, True, "Parameters, gradients and optimizer state sharded over ranks; modules compiled"),
    ("zero2_compile", 2, True, "Gradients and optimizer state sharded over ranks; modules compiled"),
    ("zero1_compile", 1, True, "Optimizer state sharded over ranks; gradients reduced once per step; modules compiled"),
    ("zero3", 3, False, "Parameters, gradients and optimizer state sharded over ranks; for debugging: not compiled"),
):
    for _registry, _strategy in ((StrategyRegistry, ZeroStrategy), (FabricRegistry, FabricZeroStrategy)):
        if _name not in _registry:
            _registry.register(_name, _strategy, description=_description, stage=_stage, compile=_compile)

install_checkpoint_lookup()
warn_of_untested()
