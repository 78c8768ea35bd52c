"""Optimizers of whole parameters in plain torch: oracles for the rules on shards.

All but the last have the names and options of classes of ``pytorch_optimizer``, by which their rules are found. They are
written from the papers, and ``examples/benchmarks/optimizer_rules.py`` compares the rules with the package itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zero import MatrixRule, register_matrix_rule
from lightning_zero.optim.matrix_rules import _muon
from lightning_zero.optim.normuon import with_neuron_norms
from tests.helpers.muon import orthogonalize

__all__ = ["LARS", "SOAP", "Lamb", "NorMuon"]


class Oracle(torch.optim.Optimizer):
    """Steps each parameter with a gradient by :meth:`change`."""

    maximize = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                grad = -param.grad if self.maximize else param.grad
                self.change(param, grad, group, self.state[param])
        return loss

    def change(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(Oracle):
    """LAMB with bias correction of the first moment only, and with a limit for the norm of the weights."""

    clamp = 10.0
    pre_norm = False

    def __init__(self, params: Any, lr: float = 0.02, weight_decay: float = 0.0, **options: Any) -> None:
        defaults = {"betas": (0.9, 0.99), "eps": 1e-4, "weight_decouple": True, "fixed_decay": False, "rectify": False}
        defaults |= {"grad_averaging": True, "adam": False}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay} | defaults | options)

    def change(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        (beta1, beta2), eps = group["betas"], group["eps"]
        if not state:
            state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1 if group["grad_averaging"] else 1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        param.mul_(1 - group["weight_decay"] * (1 if group["fixed_decay"] else group["lr"]))
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + eps)
        weight, size = min(float(param.norm()), self.clamp), float(update.norm())
        ratio = 1.0 if group["adam"] or not weight or not size else weight / (size + eps)
        param.sub_(update, alpha=group["lr"] * ratio / (1 - beta1 ** float(state["step"])))


class LARS(Oracle):
    """LARS with weight decay in the divisor of the ratio."""

    def __init__(self, params: Any, lr: float = 0.5, momentum: float = 0.9, **options: Any) -> None:
        defaults = {"weight_decay": 0.1, "dampening": 0.2, "trust_coefficient": 0.02, "nesterov": False}
        super().__init__(params, {"lr": lr, "momentum": momentum} | defaults | options)

    def change(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        way = grad
        if param.ndim > 1:
            weight, size = float(param.norm()), float(grad.norm())
            divisor = size + group["weight_decay"] * weight
            ratio = group["trust_coefficient"] * weight / divisor if weight and divisor else 1.0
            way = (grad + group["weight_decay"] * param) * ratio
        if group["momentum"]:
            average = state.setdefault("momentum_buffer", torch.zeros_like(param))
            average.mul_(group["momentum"]).add_(way, alpha=1 - group["dampening"])
            way = way + group["momentum"] * average if group["nesterov"] else average
        param.sub_(way, alpha=group["lr"])


class SOAP(Oracle):
    """SOAP for matrices and batches of matrices, one by one."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.1, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "betas": (0.9, 0.95),
            "shampoo_beta": None,
            "precondition_frequency": 3,
            "eps": 1e-4,
        }
        defaults |= {"max_precondition_dim": 10, "merge_dims": False, "correct_bias": True, "normalize_gradient": False}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay} | defaults | options)

    def change(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        shape = (-1, *param.shape[1:]) if param.ndim == 3 else (1, param.shape[0], param.numel() // param.shape[0])
        if not state:
            state.update(steps=-1, own=[{} for _ in param.view(shape)])
        state["steps"] += 1
        for one, matrix, own in zip(param.view(shape), grad.view(shape), state["own"], strict=True):
            self._change(one, matrix, group, own, state["steps"])

    def _change(self, param: Tensor, grad: Tensor, group: dict[str, Any], own: dict[str, Any], steps: int) -> None:
        (beta1, beta2), eps = group["betas"], group["eps"]
        gram_beta = beta2 if group["shampoo_beta"] is None else group["shampoo_beta"]
        used = [dim for dim, size in enumerate(grad.shape) if size <= group["max_precondition_dim"]]
        if not own:
            own.update(average=torch.zeros_like(grad), squares=torch.zeros_like(grad))
            own["grams"] = {dim: torch.zeros(grad.shape[dim], grad.shape[dim]) for dim in used}

        def turned(value: Tensor, back: bool = False) -> Tensor:
            for dim, basis in own["bases"].items():
                factor = basis if back else basis.T
                value = factor @ value if dim == 0 else value @ factor.T
            return value

        if steps:
            own["average"].lerp_(grad, 1 - beta1)
            own["squares"].lerp_(turned(grad) ** 2, 1 - beta2)
            update = turned(turned(own["average"]) / (own["squares"].sqrt() + eps), back=True)
            if group["normalize_gradient"]:
                update = update / ((update * update).mean().sqrt() + eps)
            rate = group["lr"]
            if group["correct_bias"]:
                rate *= (1 - beta2**steps) ** 0.5 / (1 - beta1**steps)
            param.sub_(update, alpha=rate).mul_(1 - group["lr"] * group["weight_decay"])
        for dim, gram in own["grams"].items():
            gram.lerp_(grad @ grad.T if dim == 0 else grad.T @ grad, 1 - gram_beta)
        if not steps:
            own["bases"] = {dim: torch.linalg.eigh(gram)[1].flip(1) for dim, gram in own["grams"].items()}
        elif steps % group["precondition_frequency"] == 0:
            for dim, gram in own["grams"].items():
                product = gram @ own["bases"][dim]
                order = (own["bases"][dim] * product).sum(0).argsort(descending=True)
                own["squares"] = own["squares"].index_select(dim, order)
                own["bases"][dim] = torch.linalg.qr(product[:, order])[0]


class NorMuon(torch.optim.Muon):
    """NorMuon without bfloat16, also for parameters of more than two dimensions."""

    def __init__(self, params: Any, muon_beta2: float = 0.9, **options: Any) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(1, 1))], **options)
        defaults = {key: value for key, value in self.param_groups[0].items() if key != "params"}
        self.param_groups.clear()
        for group in params:
            self.add_param_group(defaults | {"muon_beta2": muon_beta2} | group)

    def add_param_group(self, param_group: Any) -> None:
        torch.optim.Optimizer.add_param_group(self, param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                self._change(param, param.grad, group, self.state[param])
        return loss

    def _change(self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        matrices = param.shape if param.ndim == 3 else (1, param.shape[0], param.numel() // param.shape[0])
        if not state:
            shape = (*param.shape[:2], 1) if param.ndim == 3 else (param.shape[0], 1)
            state.update(momentum_buffer=torch.zeros_like(param), variance_neuron=torch.zeros(shape))
        average = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        updates = grad.lerp(average, group["momentum"]).reshape(matrices)
        variance = state["variance_neuron"].view(*matrices[:2], 1)
        for update, rows in zip(updates, variance, strict=True):
            sizes = group.get("split_sizes") or (update.shape[0],)
            for part, own in zip(update.split(sizes), rows.split(sizes), strict=True):
                done = orthogonalize(part.clone(), group["ns_coefficients"], group["ns_steps"], group["eps"])
                done *= max(1, part.shape[0] / part.shape[1]) ** 0.5
                own.lerp_((done * done).mean(1, keepdim=True), 1 - group["muon_beta2"])
                even = done / (own.sqrt() + 1e-8)
                part.copy_(even * done.norm() / even.norm().clamp(min=1e-8))
        param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(updates.view(param.shape), alpha=group["lr"])


def _normuon(group: Mapping[str, Any]) -> MatrixRule:
    sizes = tuple(group.get("split_sizes") or ())
    settings = tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"], "original"
    return with_neuron_norms(_muon(True, *settings, torch.float32, False, sizes), sizes)


register_matrix_rule(NorMuon, _normuon)

for _cls in (Lamb, LARS, SOAP):  # the names by which rules of libraries are found
    _cls.__module__ = f"pytorch_optimizer.optimizer.{_cls.__name__.lower()}"
