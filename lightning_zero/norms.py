"""Norms of gradients for logging.

``param.grad`` is this rank's shard, so a norm that is taken of it is none of the gradient's. Inside the hooks in which
gradients are looked at, Lightning's own ``grad_norm`` gets norms over all ranks, by one collective; any other function
that takes the norm of a shard gets what it asks for, and the user a warning. What cannot be seen from there is
:func:`grad_norm`'s job.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import grad_norm as lightnings_grad_norm
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_zero.engine import Engine, engine_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["WholeNorms", "grad_norm"]


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Any]:
    """The p-norm of each parameter's gradient and, as ``grad_<p>_norm_total``, that of all together: what
    ``lightning.pytorch.utilities.grad_norm`` returns under DDP.

    Collective where the module is sharded: call it on every rank, wherever gradients are complete. Nothing is read on
    the host. A module that is not sharded is left to Lightning's function.

    Args:
        module: whose parameters' gradients are looked at.
        norm_type: p, at least 1, or ``"inf"``.
        group_separator: between a key's prefix and the parameter's name.

    Raises:
        ValueError: ``norm_type`` is no norm.
    """
    engine = next(filter(None, map(engine_of, module.modules())), None)
    if engine is None:
        return lightnings_grad_norm(module, norm_type, group_separator)
    p = float(norm_type)
    named = [(name, param, engine.sharder.find(param)) for name, param in module.named_parameters()]
    found = engine.grad_norms(p)
    norms: dict[str, Any] = {
        f"grad_{p}_norm{group_separator}{name}": found[record.index]
        for name, param, record in named
        if record is not None and param.grad is not None
    }
    if norms:
        each = torch.stack([norm.float() for norm in norms.values()])
        norms[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(each, p)
    return norms


class WholeNorms(Precision):
    """The part of a precision plugin that calls the hooks in which users look at gradients."""

    engine: Callable[[], Engine]
    _warned = False

    @override
    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        with _Watch(self.engine(), self._warn):
            return super().post_backward(tensor, module)

    @override
    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        with _Watch(self.engine(), self._warn):
            super()._after_closure(model, optimizer)

    def _warn(self, function: str) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{function}() was called on a gradient, in a hook of the LightningModule or a callback. Gradients are "
                "shards here, so that was the norm of this rank's part only. For the norms that DDP has, call "
                "lightning_zero.grad_norm(module, norm_type) on every rank; to clip, use "
                "Trainer(gradient_clip_val=...) or self.clip_gradients()."
            )


_NORMS = {
    Tensor.norm: "Tensor.norm",
    torch.norm: "torch.norm",
    torch.linalg.norm: "torch.linalg.norm",
    torch.linalg.vector_norm: "torch.linalg.vector_norm",
    torch._foreach_norm: "torch.nn.utils.get_total_norm",
}


class _Watch(TorchFunctionMode):
    """Sees norms that are taken of gradients."""

    def __init__(self, engine: Engine, warn: Callable[[str], None]) -> None:
        super().__init__()
        self._engine = engine
        self._warn = warn
        self._call: FrameType | None = None  # of Lightning's grad_norm, for which the norms were computed
        self._norms: dict[int, Tensor] = {}  # by the gradients' addresses

    @override
    def __exit__(self, *error: Any) -> None:
        self._call = None
        super().__exit__(*error)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS and args:
            of = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
            caller = _outside_torch(sys._getframe(1))
            where = "" if caller is None else caller.f_globals.get("__name__", "")
            if caller is not None and where == lightnings_grad_norm.__module__:
                # until Python 3.12 a comprehension has a frame of its own
                call = caller if caller.f_code is lightnings_grad_norm.__code__ else caller.f_back
                if call is not self._call:
                    self._call, self._norms = call, self._measure(float(args[1] if len(args) > 1 else kwargs["p"]))
                norm = self._norms.get(of.data_ptr())
                if norm is not None:
                    return norm
            elif isinstance(of, Tensor) and not where.startswith("lightning_zero.") and self._is_gradient(of):
                self._warn(_NORMS[func])
        return func(*args, **kwargs)

    def _gradients(self) -> Iterator[tuple[int, Tensor]]:
        for record in self._engine.sharder.live:
            if record.param.grad is not None:
                yield record.index, record.param.grad

    def _measure(self, p: float) -> dict[int, Tensor]:
        found = self._engine.grad_norms(p)
        return {grad.data_ptr(): found[index] for index, grad in self._gradients()}

    def _is_gradient(self, tensor: Tensor) -> bool:
        return any(grad.data_ptr() == tensor.data_ptr() for _, grad in self._gradients())


def _outside_torch(frame: FrameType | None) -> FrameType | None:
    """Who called torch."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return frame
