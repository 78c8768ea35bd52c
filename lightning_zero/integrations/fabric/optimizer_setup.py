"""Prepare optimizers to step shards: find their model, check them, and shard their state."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.compat.lightning_private import optimizer_to_device
from lightning_zero.engine import Engine
from lightning_zero.errors import UnsupportedError
from lightning_zero.integrations.fabric.loop import LoopTracker
from lightning_zero.optim.state_placement import register_placement_hooks
from lightning_zero.sharding.shard_tensor import no_shard_dispatch


def find_loop(optimizer: Optimizer, loops: list[LoopTracker]) -> LoopTracker:
    """Return the tracker of the model whose parameters the optimizer has.

    Raises:
        UnsupportedError: It has other parameters, or those of several models.
    """
    name = type(optimizer).__name__
    if not loops:
        raise UnsupportedError(
            f"{name} was set up before its model. Call fabric.setup(model, optimizer), or model = "
            "fabric.setup_module(model) before optimizer = fabric.setup_optimizers(optimizer)."
        )
    for loop in loops:
        if any(known is optimizer for known in loop.optimizers):
            return loop
    found: dict[int, LoopTracker] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            owner = next((loop for loop in loops if loop.engine.sharder.find(param) is not None), None)
            if owner is None:
                raise UnsupportedError(_unknown_parameter(name, number, position, param))
            found[id(owner)] = owner
    if len(found) > 1:
        raise UnsupportedError(
            f"{name} has parameters of {len(found)} models that were set up one by one, each with shards of its own. "
            "Put them into one module (nn.ModuleList) and set that up, or give each an optimizer of its own."
        )
    return next(iter(found.values()), loops[-1])


def _unknown_parameter(name: str, number: int, position: int, param: nn.Parameter) -> str:
    where = f"Parameter {position} of group {number} in {name} (shape {tuple(param.shape)})"
    if param.is_meta:
        return (
            f"{where} is on the meta device, where it had no value; setup replaced the model's parameters. Create the "
            "optimizer from model.parameters() after model = fabric.setup_module(model), then call "
            "fabric.setup_optimizers(optimizer)."
        )
    return (
        f"{where} belongs to no model that was set up, so its gradients would not be reduced over ranks. Register it "
        "as a parameter of the model before fabric.setup(model, optimizer), or step it by an optimizer that Fabric "
        "does not know of."
    )


def prepare_optimizer(optimizer: Optimizer, loop: LoopTracker) -> None:
    """Make an optimizer step shards. Repeated calls do nothing."""
    engine = loop.engine
    engine.optimizers.check(optimizer)
    if any(known is optimizer for known in loop.optimizers):
        return
    loop.add(optimizer)
    engine.optimizers.arrange(loop.optimizers)  # first, since a plan may place state on the host
    if _has_full_state(optimizer, engine):  # from the constructor, as Adagrad's, or loaded before
        engine.load_optimizer_state(optimizer, optimizer.state_dict())

    def to_shards(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if not state:
            raise ValueError(
                f"There is nothing in the state that {type(optimizer).__name__} is to load: state_dict() of a sharded "
                "optimizer is empty on all ranks but the first. Write files with fabric.save() and read them with "
                "fabric.load(), which give every rank its part."
            )
        own = loop.engine  # this closure also keeps the loop alive
        steps = own.optimizers
        return own.checkpoints.local_optimizer_state(optimizer, state, steps.empty_state, steps.stored_dtypes_of)

    optimizer.register_load_state_dict_pre_hook(to_shards)
    if (placer := engine.optimizers.make_placer) is not None:
        register_placement_hooks(optimizer, placer)
    else:
        optimizer.register_load_state_dict_post_hook(lambda loaded: optimizer_to_device(loaded, engine.device))


def _has_full_state(optimizer: Optimizer, engine: Engine) -> bool:
    """Return True if the optimizer's state has full shapes, and none has the shape of a shard."""
    full = False
    with no_shard_dispatch():
        for param, entries in optimizer.state.items():
            record = engine.sharder.find(param)
            values = [value for value in entries.values() if isinstance(value, Tensor)]
            if record is None or any(record.has_shard_shape(value) for value in values):
                return False
            full = full or any(value.shape == record.layout.shape for value in values)
    return full
