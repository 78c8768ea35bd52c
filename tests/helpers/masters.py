"""A training in mixed precision in which everything happens to master weights that can, between steps and inside."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.report.engine_report import memory_by_role
from lightning_zero.sharding.param_record import Role
from lightning_zero.step.runners import CapturedRunner
from tests.helpers.options import config
from tests.helpers.sharded import engine_for, mean_over_ranks, whole_params, whole_state

BF16 = torch.bfloat16
CONFIG: dict[str, Any] = {"compute_dtype": BF16, "compile_backend": "aot_eager", "reduce_bucket_mb": 0.01}
STEPS = 15
SAMPLES = 12  # which 1, 2 and 3 ranks divide
AWAY: dict[str, Any] = {"offload": ("optimizer", "parameters"), "offload_buffer_mb": 0.0001}  # several stretches
HERE: dict[str, Any] = {"gather_transport": "collective"}  # as weights travel where masters are away


class Mixed(nn.Module):
    """Matrices whose masters move, one of them frozen, and parameters in float32 under autocast, which stay."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.first, self.norm = nn.Embedding(13, 19), nn.Linear(19, 25), nn.LayerNorm(25)
        self.frozen = nn.Linear(25, 23).requires_grad_(False)
        self.second, self.last = nn.Linear(23, 21, bias=False), nn.Linear(21, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(self.embed(tokens))))
        return self.last(torch.tanh(self.second(self.frozen(x))))


LEAVE = ["first.weight", "frozen.weight", "second.weight", "last.weight"]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the moved and the other parameters, so that both are stepped, and their norms added, in the same parts."""
    named = dict(model.named_parameters())
    return [
        {"params": [named[name] for name in LEAVE], "weight_decay": 0.1},
        {"params": [param for name, param in named.items() if name not in LEAVE], "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(two_groups(m), lr=0.02, eps=1e-4),
    "SGD": lambda m: torch.optim.SGD(two_groups(m), lr=0.1),  # which asks for no state
}


def after_backward(model: Any, engine: Engine, step: int) -> None:
    """The times at which masters may have arrived for the step."""
    if step == 8:
        model._modules["first"]._parameters["weight"].data.mul_(1.1)
    if step == 9:
        with torch.no_grad():
            model.last.weight.mul_(0.9)  # the read weight, and its shard


def between_steps(model: Any, engine: Engine, step: int) -> None:
    if step == 3:
        model.second.weight.data.mul_(1.5)
    if step == 4:
        with torch.no_grad():
            model._modules["frozen"]._parameters["weight"].add_(0.01)
    if step == 5:
        with engine.full_parameters(), torch.no_grad():
            model.first.weight[3] = 0.1
    if step == 6:  # as averages are exchanged
        engine.cycle.before_step()
        with torch.no_grad():
            for param in model.parameters():
                param.data.mul_(0.99)
        engine.sharder.sync.invalidate_copies()
        engine.sharder.sync.after_writing()
    if step == 10:
        model.load_state_dict({key: 0.98 * value for key, value in model.state_dict().items()})


# Steps before which compute copies are stale: an edit is visible where it reaches the shard, and
# an evaluation writes them, too.
ANEW = [0, 1, 5, 6, 9, 10]


def away_names(engine: Engine) -> set[str]:
    return {record.name for record in engine.sharder.live if record.is_on_host}


def written_names(engine: Engine) -> set[str]:
    return {engine.sharder.records[index].name for index in engine.executor.weights.valid_compute_shards()}


def check_copies(engine: Engine) -> None:
    """Compute copies are their masters, rounded, as far as the executor says so."""
    written = engine.executor.weights.valid_compute_shards()
    for record in engine.sharder.live:
        if record.index in written:
            assert torch.equal(record.memory[Role.COMPUTE_SHARD], record.shard.to(BF16)), record.name


def least_with_masters(name: str = "AdamW", **options: Any) -> float:
    """Return GiB that are just too few with master weights on the device, with all other state on the host."""
    model = Mixed()
    with engine_for(model, compute_dtype=BF16, memory=1.0, **options) as engine:
        with engine.registered_parameters():
            optimizer = OPTIMIZERS[name](model)
        engine.optimizers.arrange([optimizer])
        assert engine.memory.plan is not None
        return (engine.memory.plan.peak - engine.session.planner.known.states - 1) / 2**30


def planned(name: str = "AdamW", **options: Any) -> dict[str, Any]:
    """Options with which a plan puts them on the host: no other ones do."""
    buffer = {"offload_buffer_mb": AWAY["offload_buffer_mb"], "gather_transport": "auto"}
    return {"memory": least_with_masters(name, **buffer, **options), **buffer}


def train(
    away: bool,
    name: str = "AdamW",
    backend: str = "aot_eager",
    device: str = "cpu",
    later: dict[str, Any] | None = None,
    steps: int = STEPS,
    **options: Any,
) -> Any:
    """Return all results of a training, and records on the way.

    ``later``: options from the second step on, as of another Trainer.
    """
    torch._dynamo.reset()
    model, record, stale = Mixed(), [], []
    chosen = {"compute_dtype": BF16} | (AWAY if away else HERE) | options
    with engine_for(model, backend, device=device, **chosen) as engine:
        kind = engine.device.type
        autocast = partial(torch.autocast, kind, BF16, cache_enabled=False)
        with engine.registered_parameters():
            optimizer = OPTIMIZERS[name](model)
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        for step in range(steps):
            if step == 1 and later is not None:
                engine.configure(config(**{**CONFIG, **later}))
                engine.optimizers.arrange([optimizer])
            stale.append(sorted(away_names(engine) - written_names(engine)))
            tokens = torch.randint(13, (SAMPLES,), generator=torch.Generator().manual_seed(step)).to(engine.device)
            share = SAMPLES // engine.world_size
            with engine.train_step(), autocast():
                out = model(tokens[engine.rank * share :][:share])
                loss = out.float().square().mean()
            engine.cycle.before_backward()
            loss.backward()
            engine.cycle.after_backward()
            after_backward(model, engine, step)
            with engine.optimizers.stepping(optimizer, clip=0.2) as norm:
                optimizer.step()
            optimizer.zero_grad()
            check_copies(engine)
            between_steps(model, engine, step)
            if step % 4 == 2:
                engine.eval_step()
                with torch.no_grad(), autocast():
                    record.append(model(tokens).float().cpu())
                engine.cycle.after_eval()
            record.append((mean_over_ranks(loss), float(norm)))
        stepper = engine.optimizers.stepper(optimizer)
        return {
            "record": record,
            "params": {key: value.cpu() for key, value in whole_params(engine, model).items()},
            "state": {key: value.cpu() for key, value in whole_state(engine, optimizer).items()},
            "stale": stale,
            "away": sorted(away_names(engine)),
            "offload": engine.optimizers.config.offload,
            "plan": engine.memory.plan,
            "roles": memory_by_role(engine, [optimizer]),
            "captured": isinstance(stepper.runner, CapturedRunner),
            "replays": stepper.replays,
        }


def train_both_ways(*args: Any, **options: Any) -> list[Any]:
    return [train(away, *args, **options) for away in (False, True)]


def check(here: Any, away: Any) -> None:
    """Check that results are equal to the last bit, and that moved state exists once."""
    for what in ("record", "params", "state"):
        torch.testing.assert_close(away[what], here[what], rtol=0, atol=0)
    assert away["away"] == sorted(LEAVE)
    assert here["away"] == []
    moved = away["roles"]["master_shard_on_host"]
    assert moved > 0
    assert here["roles"]["master_shard"] == away["roles"]["master_shard"] + moved
    assert here["roles"]["compute_shard"] == away["roles"]["compute_shard"]
