"""Train with captured steps that write copies of weights, with edits of weights between steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.sharding.param_record import Role
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from tests.helpers.models import Batch, Case, build, make_batches
from tests.helpers.sharded import engine_for

STEPS, SAMPLES = 10, 12
EDIT_AFTER = 5  # steps
PASSES = "compute_shard_passes"  # counts kernels that write all copies

Edit = Callable[[Engine, Any, torch.optim.Optimizer], None]


class Three(Case):
    """A part that only some steps train, and one that another optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(a, b) for a, b in ((23, 25), (25, 31), (31, 19)))
        self.skips = False

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, 23, generator=rng), torch.randn(n, 19, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        middle = self.second(hidden)
        return self.third(torch.tanh(middle.detach() if self.skips else middle))


def clamp_data(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.05, 0.05)


def multiply_several(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch._foreach_mul_([param.data for param in model.parameters()], 1.5)


def write_to_what_was_read(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.second.weight.mul_(1.5)


def write_full_parameters(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    with engine.full_parameters(), torch.no_grad():
        model.third.weight.add_(0.1)


def load_other_values(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: value * 0.75 for name, value in model.state_dict().items()})


def assign_data(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    param = dict(model.named_parameters())["second.weight"]
    param.data = param.detach() * 1.25


def initialize(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    nn.init.normal_(dict(model.named_parameters())["first.weight"])


def write_in_later_hooks(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> None:
    def hook(*_: Any) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.data.mul_(0.9)

    optimizer.register_step_post_hook(hook)


EDITS: list[Edit] = [
    clamp_data,
    multiply_several,
    write_to_what_was_read,
    write_full_parameters,
    load_other_values,
    assign_data,
    initialize,
    write_in_later_hooks,
]
WAYS: dict[str, dict[str, Any]] = {
    "gradients in their own memory": {},
    "gradients over copies": {"grad_aliasing": True},
    "replays": {"emulate_cuda_graph_model": True, "grad_aliasing": True},
    "float16": {"compute_dtype": torch.float16},
    "8-bit state": {"state_dtype": "8bit", "grad_aliasing": True},
}


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-2, weight_decay=0.1)


def copies_differ(engine: Engine, dtype: torch.dtype) -> list[str]:
    """Return the weights whose copy differs from the master weight."""
    with no_shard_dispatch():
        return [
            record.name
            for record in engine.sharder.live
            if not torch.equal(record.memory[Role.COMPUTE_SHARD], record.shard.to(dtype))
        ]


def train(
    edit: Edit | None,
    options: dict[str, Any],
    groups: int = 1,
    clip: float | None = 0.5,
    backend: str = "aot_eager",
    device: str = "cpu",
) -> dict[str, Any]:
    """Return the numbers of steps whose forward found other copies than master weights, and the passes of each step."""
    model: Any = build(Three)
    options = {"compute_dtype": torch.bfloat16, "emulate_cuda_graph_step": device == "cpu"} | options
    narrow = torch.autocast(device.split(":")[0], options["compute_dtype"])
    wrong, passes = [], []
    with engine_for(model, backend, device=device, **options) as engine:
        parts = [model] if groups == 1 else [model.first, nn.ModuleList([model.second, model.third])]
        optimizers = [adamw(part.parameters()) for part in parts]
        for step, on_cpu in enumerate(make_batches(Three, STEPS, SAMPLES)):
            batch = on_cpu[0].to(device), on_cpu[1].to(device)
            before = engine.executor.counters().get(PASSES, 0)
            model.skips = edit is None and step % 3 == 2
            with engine.train_step(), narrow:
                loss = model.loss(batch)
                wrong += [step] if copies_differ(engine, options["compute_dtype"]) else []
            loss.backward()
            for optimizer in optimizers[: 1 + (step != 4)]:
                with engine.optimizers.stepping(optimizer, clip=clip):
                    optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if edit is not None and step == EDIT_AFTER:
                edit(engine, model, optimizers[0])
            engine.eval_step()
            with torch.no_grad(), narrow:
                model.loss(batch)
            passes.append(engine.executor.counters().get(PASSES, 0) - before)
        replays = sum(engine.optimizers.stepper(optimizer).replays for optimizer in optimizers)
    return {"wrong": wrong, "passes": passes, "replays": replays}
