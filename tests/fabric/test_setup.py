"""Test decisions at the setup: precisions, construction as shards, loss scalers, startup lines."""

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from lightning_zero import FabricZeroStrategy, full_parameters, unshard
from lightning_zero.engine import engine_of
from tests.helpers.fabric import closing, loss_of, make_fabric, network, set_up, train, whole_state
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL, make_loader, mlp, seeded
from tests.ranks.pool import Ranks

TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


def test_names_are_known_to_fabric() -> None:
    for name, compiles, stage in (("zero3", False, 3), ("zero3_compile", True, 3), ("zero1_compile", True, 1)):
        strategy = Fabric(accelerator="cpu", devices=1, strategy=name).strategy
        assert type(strategy) is FabricZeroStrategy
        assert (strategy._options.compile, strategy._options.stage) == (compiles, stage)
        assert STRATEGY_REGISTRY[name]["description"]


def train_in(kind: str, precision: str) -> dict[str, Any]:
    fabric = make_fabric(
        kind, precision, **({} if kind == "ddp" else {"reduce_dtype": "32"} if "mixed" in precision else {})
    )
    with fabric.init_module(), seeded():
        model = mlp()
    before = engine_of(model[0])
    model, optimizer = set_up(fabric, model)
    with closing(model):
        engine = engine_of(model.module)
        assert before is engine, "it was not built as shards"
        losses, norms = train(fabric, model, optimizer, 6, {"max_norm": 0.3})
        with fabric.autocast(), torch.no_grad():
            ones = torch.ones(3, 3)
            seen = (ones @ ones).dtype
        state = whole_state(model)
        return {
            "found": {"losses": losses, "norms": norms, "state": state},
            "dtypes": {value.dtype for value in state.values()},
            "autocast": seen,
            "compute": engine is not None and engine.config.compute_dtype,
        }


def train_in_each(precisions: list[str]) -> dict[str, list[dict[str, Any]]]:
    return {precision: [train_in(kind, precision) for kind in ("ddp", "eager")] for precision in precisions}


def test_each_precision_trains_what_ddp_trains_from_what_was_built_as_shards(ranks: Ranks) -> None:
    for found in ranks.run(2, train_in_each, ["32-true", "bf16-mixed", "bf16-true", "64-true"], deadline=120):
        for precision, (ddp, ours) in found.items():
            rtol = {"bf16-mixed": 2e-3, "bf16-true": 2e-2}.get(precision, RTOL)
            assert_close_relative(ours["found"], ddp["found"], rtol, what=precision)
            assert ours["dtypes"] == ddp["dtypes"] == {TRUE.get(precision, torch.float32)}
            assert ours["autocast"] == ddp["autocast"]
            assert ours["compute"] == (torch.bfloat16 if precision == "bf16-mixed" else None)


def scaled(kind: str) -> dict[str, Any]:
    scaler = (ShardedGradScaler if kind != "ddp" else torch.amp.GradScaler)("cpu", init_scale=2.0**8, growth_interval=3)
    if kind == "flat":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    strategy = "ddp" if kind == "ddp" else FabricZeroStrategy(compile=False, reduce_dtype="32")
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[plugin])
    fabric.launch()
    model, optimizer = set_up(fabric, network())
    scales, losses = [], []
    with closing(model):
        for number, batch in enumerate(make_loader("ddp", 8)):
            loss = loss_of(model, batch)
            # One rank's gradients overflow, and all skip the step.
            fabric.backward(loss * (1e30 if number == 4 and (kind == "ddp" or fabric.global_rank) else 1.0))
            fabric.clip_gradients(model, optimizer, max_norm=0.3, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            scales.append(fabric.strategy.precision.scaler.get_scale())
            losses.append(loss.item())
        return {"scales": scales, "losses": losses, "state": whole_state(model)}


def scaled_under(kinds: list[str]) -> list[dict[str, Any]]:
    return [scaled(kind) for kind in kinds]


def test_a_loss_scaler_skips_a_step_on_all_ranks(ranks: Ranks) -> None:
    for ddp, *others in ranks.run(2, scaled_under, ["ddp", "flat", "sharded"]):
        assert min(ddp["scales"][4:6]) < ddp["scales"][3]
        for ours in others:
            assert_close_relative(ours, ddp, 1e-3)


class Odd(nn.Module):
    """Builds its layer twice, and owns a parameter and a buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 40)
        self.scale = nn.Parameter(torch.full((40,), 2.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.scale


def construct() -> None:
    fabric = make_fabric("eager")
    with fabric.init_module(empty_init=True), seeded():
        model = Odd()
    expected = {key: torch.randn(value.shape) for key, value in seeded_state().items()}
    model = fabric.setup_module(model)
    with closing(model):
        model.load_state_dict(expected)
        assert_close_relative(whole_state(model), expected, 0)
        with full_parameters(model):
            assert model.layer.weight.shape == (40, 40)
        assert "Engine(rank" in repr(fabric.strategy)
        plain = model.module
        unshard(model)
        assert engine_of(plain) is None
        assert_close_relative(dict(plain.state_dict()), expected, 0)
        # A plain module again: the wrapper calls it as it is, and another Fabric may have it.
        assert model(torch.ones(2, 40)).shape == (2, 40)
        again = make_fabric("eager").setup_module(plain)
        with closing(again):
            assert engine_of(plain) is not None


def seeded_state() -> dict[str, Tensor]:
    with seeded(3):
        return dict(Odd().state_dict())


def meta() -> None:
    fabric = make_fabric("eager")
    with torch.device("meta"):
        model = mlp()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    with closing(model):
        losses, _ = train(fabric, model, optimizer, 8)
        assert losses[-1] < 10


@pytest.mark.parametrize("what", [construct, meta])
def test_a_model_is_built_and_taken_back(ranks: Ranks, what: Any) -> None:
    ranks.run(2, what)
