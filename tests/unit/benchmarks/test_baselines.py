"""Changes of models, and the parts of jobs."""

import torch
from torch import nn

from compare.baselines import outermost, repeated, zero_strategy
from compare.job import Job, built_in
from lightning_zero import ZeroStrategy
from lightning_zero.cli.models import Decoder, Tokens

JOB = Job("zero3_compile", "tiny", 2, 8, 6, 2, "32-true", "inductor", 1.0, ("a=1",))


def test_layers_are_what_repeats() -> None:
    model = nn.ModuleDict({"net": Decoder(32, 3, 2, 48), "loss": nn.CrossEntropyLoss()})
    assert repeated(model) == list(model["net"].blocks)
    assert list(outermost(model)) == [model["net"]]
    assert list(outermost(nn.ModuleList([nn.Linear(1, 1), nn.ReLU()])))[0].in_features == 1


def test_a_job_survives_its_command_line() -> None:
    assert Job.from_json(JOB.to_json()) == JOB


def test_built_in_models_are_the_same_for_the_same_seed() -> None:
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        weights.append(built_in(JOB)().net.head.weight)
    assert torch.equal(*weights)
    assert torch.equal(Tokens(8)[3], Tokens(8)[3])
    assert len(Tokens(8)[3]) == 9


def test_options_reach_the_strategy() -> None:
    assert zero_strategy("zero3_compile", []) == "zero3_compile"
    strategy = zero_strategy("zero3_compile", ["tuning.prefetch=false", "cuda_graphs=false"], "aot_eager")
    assert isinstance(strategy, ZeroStrategy)
    options = strategy._options
    assert (options.compile_backend, options.tuning.prefetch, options.cuda_graphs) == ("aot_eager", False, False)
