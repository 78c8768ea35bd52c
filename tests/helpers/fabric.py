"""Fabrics that differ only in their strategy, and a loop as users write it, on the same data as the Trainer's tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_zero import FabricZeroStrategy
from lightning_zero.engine import engine_of
from tests.helpers.options import arguments
from tests.helpers.spread import check_spread
from tests.helpers.trainer import make_loader, mean_over_ranks, mlp, seeded

WINDOW, NORM, VALUE = 2, 0.3, 0.02


def make_fabric(kind: str, precision: str = "32-true", **options: Any) -> Fabric:
    """Return ``compiled``, ``eager`` and ``replayed`` (compiled, and run as in CUDA graphs) of ours, or ``ddp``.

    Fabric is launched, on the ranks that call this.
    """
    strategy: Any = "ddp"
    if kind != "ddp":
        chosen = {"compile": kind != "eager", "compile_backend": "aot_eager"} | options
        if kind == "replayed":
            chosen |= {"emulate_cuda_graph_model": True, "emulate_cuda_graph_step": True}
        strategy = FabricZeroStrategy(**arguments(**chosen))
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


def network() -> nn.Module:
    with seeded():
        return mlp()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # The usual eps of 1e-8 makes a full step out of a gradient that is rounding noise; no oracle could be followed.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


def set_up(fabric: Fabric, model: nn.Module, separately: bool = False, make: Callable[..., Any] = adamw) -> Any:
    """The model and its optimizer, as ``fabric.setup`` gives them; or one after the other."""
    if separately:
        model = fabric.setup_module(model)
        return model, fabric.setup_optimizers(make(model))
    return fabric.setup(model, make(model))


def loss_of(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1].float())


def train(
    fabric: Fabric, model: Any, optimizer: Any, batches: int = 8, clip: dict[str, Any] | None = None, seed: int = 0
) -> tuple[list[float], list[float]]:
    """Accumulates over windows, clips; returns the global losses and the norms before clipping."""
    losses, norms = [], []
    for index, batch in enumerate(make_loader("ddp", batches, seed)):
        ends = (index + 1) % WINDOW == 0
        with fabric.no_backward_sync(model, enabled=not ends):
            loss = loss_of(model, batch)
            fabric.backward(loss / WINDOW)
        losses.append(loss.item())
        if ends:
            if clip is not None:
                norm = fabric.clip_gradients(model, optimizer, **clip)
                norms += [] if norm is None else [norm.item()]
            optimizer.step()
            optimizer.zero_grad()
    return mean_over_ranks(losses), norms


def whole_state(model: Any) -> dict[str, Tensor]:
    """As a plain module has them, on every rank. Collective for a sharded one."""
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


@contextmanager
def closing(*models: Any) -> Iterator[None]:
    """Frees the engines at the end. Fails where a model was too narrow for its ranks."""
    try:
        yield
    finally:
        for model in models:
            engine = engine_of(model.module)
            if engine is not None:
                engine.close()
                check_spread(engine, model.module)
