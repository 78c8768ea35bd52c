"""``64-true``: everything in float64, on the wire, too."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    INPUTS,
    OUTPUTS,
    Regression,
    close,
    global_losses,
    make_loader,
    make_strategy,
    make_trainer,
    seeded,
    whole_state,
)
from tests.ranks.pool import Ranks

WIDTH = 64


class Double(Regression):
    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.net = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))
            self.register_buffer("table", torch.rand(OUTPUTS))
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.table

    def loss(self, batch: Any) -> Tensor:
        made = torch.ones(())  # the default dtype
        loss = F.mse_loss(self(batch[0]), batch[1]) * made
        self.dtypes |= {batch[0].dtype, loss.dtype, made.dtype, self.dtype}
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.dtypes |= {param.grad.dtype for param in self.parameters()}


class Late(Double):
    """Is built partly in configure_model in float64, with other values, so it is compared with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.more: Any = None

    def configure_model(self) -> None:
        if self.more is None:
            with seeded(2):
                self.more = nn.Linear(OUTPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.more(super().forward(x))


def _trained(kind: str, make: Any, **arguments: Any) -> dict[str, Any]:
    module = make()
    trainer = make_trainer(kind, precision="64-true", max_epochs=2, **arguments)
    trainer.fit(module, make_loader(kind), make_loader(kind, 2, seed=1))
    out = {
        "losses": global_losses(kind, module),
        "state": whole_state(module),
        "val": trainer.callback_metrics["val_loss"],
    }
    trainer.save_checkpoint(f"{kind}-double.ckpt")
    file = torch.load(f"{kind}-double.ckpt", weights_only=True)
    out["file"] = file["state_dict"], [entry for _, entry in sorted(file["optimizer_states"][0]["state"].items())]
    assert module.dtypes == {torch.float64}
    assert {value.dtype for value in out["state"].values()} == {torch.float64}
    again = make_trainer(kind, precision="64-true")
    (out["tested"],) = again.test(module, make_loader(kind), verbose=False)
    close(module)
    return out


def _trained_under(kinds: list[str], *args: Any, **arguments: Any) -> dict[str, Any]:
    return {kind: _trained(kind, *args, **arguments) for kind in kinds}


@pytest.mark.parametrize(
    ("make", "kind", "arguments"),
    [
        (Double, "eager", {"gradient_clip_val": 0.1}),
        (Double, "compiled", {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
        (Late, "eager", {}),
    ],
)
def test_training_in_float64_equals_ddps(ranks: Ranks, make: Any, kind: str, arguments: dict[str, Any]) -> None:
    for result in ranks.run(2, _trained_under, ["ddp", kind], make, **arguments):
        assert_close_relative(result[kind], result["ddp"], 1e-12)


def _another_dtype() -> list[str]:
    messages = []
    for first, second in (("32-true", "64-true"), ("64-true", "bf16-true")):
        module = Double()
        for _ in range(2):
            make_trainer("eager", precision=first).validate(module, make_loader("eager", 1), verbose=False)
        with pytest.raises(MisconfigurationException, match="cannot be converted") as refusal:
            make_trainer("eager", precision=second).validate(module, make_loader("eager", 1), verbose=False)
        messages.append(str(refusal.value))
        close(module)
    return messages


def test_a_module_that_is_sharded_in_another_dtype_is_refused(ranks: Ranks) -> None:
    for to_double, to_half in ranks.run(2, _another_dtype):
        assert "in torch.float32, and cannot be converted for Trainer(precision='64-true')" in to_double
        assert "in torch.float64, and cannot be converted for Trainer(precision='bf16-true')" in to_half


def _captured() -> None:
    module = Double()
    with pytest.raises(
        MisconfigurationException, match="replays compute in float32, and it steps parameters of float64"
    ):
        trainer = make_trainer("eager", precision="64-true", strategy=make_strategy("captured", cuda_graph_step=True))
        trainer.fit(module, make_loader("eager"))
    close(module)


def test_steps_in_float64_are_not_captured(ranks: Ranks) -> None:
    ranks.run(2, _captured)
