"""Compute gradient norms for logging.

``param.grad`` is this rank's shard, and its norm is a collective over all ranks. :func:`grad_norm` needs one collective
for all parameters, and so does Lightning's function in the hooks in which users look at gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import grad_norm as lightnings_grad_norm
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_zero.engine import Engine, engine_of
from lightning_zero.sharding.shard_tensor import no_shard_dispatch


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Any]:
    """Return the p-norm of each parameter's gradient, and the norm of all as ``grad_<p>_norm_total``.

    The values equal those of ``lightning.pytorch.utilities.grad_norm`` under DDP. For a sharded module this is
    collective: call it on every rank, with complete gradients. The host does not wait for the device. Lightning's
    function handles other modules.

    Args:
        module: The module whose gradients are measured.
        norm_type: Number p above 0, or ``"inf"``.
        group_separator: Separator between a key's prefix and the parameter's name.

    Returns:
        Tensors without dimensions on the module's device, by key: ``grad_2_norm/weight`` and so on, and
        ``grad_2_norm_total``, which is float32.

    Raises:
        ValueError: ``norm_type`` is not positive.

    Examples:
        In a LightningModule::

            def on_before_optimizer_step(self, optimizer):
                self.log_dict(lightning_zero.grad_norm(self, norm_type=2))
    """
    engine = next(filter(None, map(engine_of, module.modules())), None)
    if engine is None:
        return lightnings_grad_norm(module, norm_type, group_separator)
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type={norm_type!r} is no norm. Pass a positive number or 'inf'.")
    named = [(name, param, engine.sharder.find(param)) for name, param in module.named_parameters()]
    found = engine.optimizers.grad_norms(p)
    norms: dict[str, Any] = {
        f"grad_{p}_norm{group_separator}{name}": found[record.index]
        for name, param, record in named
        if record is not None and param.grad is not None
    }
    if norms:
        each = torch.stack([norm.float() for norm in norms.values()])
        norms[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(each, p)
    return norms


class GlobalNormPrecision(Precision):
    """Take norms over all ranks in the hooks in which users look at gradients."""

    engine: Callable[[], Engine]

    @override
    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        with _GradNormMode(self.engine()):
            return super().post_backward(tensor, module)

    @override
    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        with _GradNormMode(self.engine()):
            super()._after_closure(model, optimizer)


class _GradNormMode(TorchFunctionMode):
    """Answer the norms of a call of Lightning's ``grad_norm``, which are all computed at the first one."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._call: FrameType | None = None  # the call of grad_norm that _norms belong to
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
        if func is Tensor.norm:
            caller = _caller_of_torch(sys._getframe(1))
            if caller is not None and caller.f_globals.get("__name__", "") == lightnings_grad_norm.__module__:
                # Until Python 3.12 a comprehension has its own frame.
                call = caller if caller.f_code is lightnings_grad_norm.__code__ else caller.f_back
                if call is not self._call:
                    self._call, self._norms = call, self._measure(float(args[1] if len(args) > 1 else kwargs["p"]))
                norm = self._norms.get(args[0].data_ptr())
                if norm is not None:
                    return norm
        return func(*args, **kwargs)

    def _measure(self, p: float) -> dict[int, Tensor]:
        found = self._engine.optimizers.grad_norms(p)
        with no_shard_dispatch():
            grads = [(record.index, record.param.grad) for record in self._engine.sharder.live]
            return {grad.data_ptr(): found[index] for index, grad in grads if grad is not None}


def _caller_of_torch(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return frame
