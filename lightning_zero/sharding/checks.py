"""What is looked at before parameters are cut."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from lightning_zero.errors import RankMismatchError, UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.sharding.layout import is_strided

__all__ = ["check_module", "check_parameter", "check_same_model"]


def check_module(name: str, module: nn.Module) -> None:
    """Raises :class:`UnsupportedError` for a module whose forward writes to its weight: what it writes to is gathered,
    and ranks would write different things."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        raise UnsupportedError(
            f"Module {name!r} ({type(module).__name__}) has max_norm={module.max_norm}: its forward scales rows of the "
            "weight in place, on each rank those of its own batch. Leave max_norm out, and scale all rows behind the "
            "step, on every rank: in on_train_batch_end, `with torch.no_grad(): module.weight.renorm_("
            f"{module.norm_type:g}, 0, {module.max_norm:g})`."
        )


def check_parameter(name: str, param: nn.Parameter) -> None:
    """Raises :class:`UnsupportedError` for a parameter that cannot be sharded."""
    if torch.nn.parameter.is_lazy(param):
        raise UnsupportedError(
            f"Parameter {name!r} has no shape yet (a lazy module). Run one batch through the model, or give it its "
            "sizes, before training."
        )
    if not is_strided(param):
        raise UnsupportedError(
            f"Parameter {name!r} has dtype {param.dtype} and layout {param.layout}; only dense parameters can be "
            "sharded. Store its dense values."
        )
    if param.dtype is torch.complex32:
        raise UnsupportedError(
            f"Parameter {name!r} has dtype torch.complex32, for which torch lacks most functions. Store it as "
            "torch.complex64."
        )
    if hasattr(param, "device_mesh"):
        raise UnsupportedError(
            f"Parameter {name!r} is a DTensor: the module was sharded by something else (fully_shard, "
            "parallelize_module). "
            "Remove that call from configure_model()."
        )


def check_same_model(root: nn.Module, mesh: Mesh) -> None:
    """Raises :class:`RankMismatchError` on every rank when ranks hold different models. Collective."""
    mine = [
        f"{name} {_shape(param)} {param.dtype} {param.requires_grad}"
        for name, param in root.named_parameters(remove_duplicate=False)
    ]
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    if len(set(mesh.all_gather_values(digest))) == 1:
        return
    models = mesh.all_gather_values(mine)
    other = next(rank for rank, model in enumerate(models) if model != models[0])
    pairs = list(zip(models[0] + ["(nothing)"], models[other] + ["(nothing)"], strict=False))
    first = next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])
    raise RankMismatchError(
        f"Ranks hold different models. The first difference between rank 0 and rank {other}: {first[0]!r} against "
        f"{first[1]!r} "
        "(name, shape, dtype, requires_grad). Build the same model on every rank; data may differ, parameters may "
        "not."
    )


def _shape(param: nn.Parameter) -> str:
    lazy = torch.nn.parameter.is_lazy(param)
    return "(not known yet)" if lazy else str(tuple(param.shape))
