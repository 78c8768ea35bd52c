"""Two engines in one process know nothing of each other."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from lightning_zero.engine import Engine
from lightning_zero.mesh import Mesh
from tests.helpers.models import build, make_batches
from tests.helpers.options import config
from tests.helpers.oracle import Reference, assert_close_relative
from tests.helpers.sharded import EAGER, adamw, engine_for, sgd, train_plain, train_sharded
from tests.ranks.pool import Ranks

STEPS, SAMPLES = 4, 12
CASES = ("OddMLP", "TiedAcrossBreak")


def train_in_turn(backend: str) -> list[list[Reference]]:
    first, second, third = build(CASES[0]), build(CASES[1]), build(CASES[0], seed=1)
    out: list[list[Reference]] = [[], [], []]
    # Other options for each, and two models of the same classes.
    with (
        engine_for(first, backend) as one,
        engine_for(second, backend, reduce_bucket_mb=0.001) as two,
        engine_for(third, backend, reduce_bucket_mb=1.0) as three,
    ):
        jobs = ((one, first, adamw(first)), (two, second, sgd(second)), (three, third, sgd(third)))
        assert type(first.first) is not type(third.first)
        for step in range(STEPS):
            for number, (engine, model, optimizer) in enumerate(jobs):
                batches = make_batches(CASES[number % 2], STEPS, SAMPLES)
                out[number].append(train_sharded(engine, model, batches[step : step + 1], optimizer))
        # One may go without the others noticing.
        two.close()
        for number, (engine, model, optimizer) in ((0, jobs[0]), (2, jobs[2])):
            batches = make_batches(CASES[number % 2], 1, SAMPLES)
            out[number].append(train_sharded(engine, model, batches, optimizer))
    return out


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [(3, EAGER), pytest.param(2, "aot_eager", marks=pytest.mark.slow)],
    ids=["W=3-eager", "W=2-aot_eager"],
)
@pytest.mark.exhaustive_variants("W=3-eager")
def test_two_engines_trained_in_turn(ranks: Ranks, world_size: int, backend: str) -> None:
    outs = ranks.run(world_size, train_in_turn, backend)[0]
    for number, (case, seed, make) in enumerate([(CASES[0], 0, adamw), (CASES[1], 0, sgd), (CASES[0], 1, sgd)]):
        model = build(case, seed=seed)
        batches = make_batches(case, STEPS, SAMPLES)
        batches += batches[:1] if number != 1 else []
        expected = train_plain(model, batches, make(model), world=world_size)
        assert len(outs[number]) == len(batches)
        for step, out in enumerate(outs[number]):
            assert_close_relative(out.losses[0], expected.losses[step], 1e-6, what=f"loss of {number} in {step}")
            assert_close_relative(out.grads[0], expected.grads[step], 3e-6, what=f"grads of {number} in {step}")
            assert_close_relative(out.params[0], expected.params[step], 1e-6, 2e-8, what=f"params of {number}")


def teacher_and_student() -> None:
    """One step reads weights of both; only one of them learns."""
    teacher, student = build("OddMLP"), build("OddMLP", seed=1)
    plain_teacher, plain = build("OddMLP"), build("OddMLP", seed=1)
    (x, _), *_ = make_batches("OddMLP", 1, SAMPLES)
    with engine_for(teacher, "aot_eager") as one, engine_for(student, "aot_eager") as two:
        optimizer, plain_optimizer = sgd(student), sgd(plain)
        for _ in range(STEPS):
            one.eval_step()
            with torch.no_grad():
                target = teacher(x)
            with two.train_step():
                loss = (student(x) - target).square().mean()
            loss.backward()
            with two.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                target = plain_teacher(x)
            expected = (plain(x) - target).square().mean()
            expected.backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            assert_close_relative(loss, expected, 1e-5, what="loss")
        assert one.executor.counters().get("reduces", 0) == 0


def test_a_teacher_of_another_engine_only_teaches(ranks: Ranks) -> None:
    ranks.run(2, teacher_and_student)


def a_model_for_each_part(parts: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    mesh = Mesh.from_parts(parts, torch.device("cpu"))
    number = next(n for n, part in enumerate(parts) if dist.get_rank() in part)
    model = build("NeverUsed", seed=number)
    engine = Engine(mesh.device, config(compile_backend="aot_eager"), mesh=mesh)
    try:
        engine.shard(model)
        return train_sharded(engine, model, make_batches("NeverUsed", STEPS, SAMPLES), sgd(model)).params
    finally:
        engine.close()


def test_parts_of_the_world_train_models_of_their_own(ranks: Ranks) -> None:
    parts = [[0, 2], [1]]
    found = ranks.run(3, a_model_for_each_part, parts)
    for number, part in enumerate(parts):
        model = build("NeverUsed", seed=number)
        expected = train_plain(model, make_batches("NeverUsed", STEPS, SAMPLES), sgd(model), world=len(part))
        for rank in part:
            for step, params in enumerate(found[rank]):
                assert_close_relative(params, expected.params[step], 1e-6, 2e-8, what=f"params of rank {rank}")


def what_stays_of_a_closed_engine(backend: str) -> list[str]:
    model = build("NeverUsed")
    with engine_for(model, backend) as engine:
        train_sharded(engine, model, make_batches("NeverUsed", 2, SAMPLES), sgd(model))
        # a group is threads and sockets: thousands of them, in a process that trains often
        gone = {
            "engine": weakref.ref(engine),
            "executor": weakref.ref(engine.executor),
            "group": weakref.ref(engine.mesh.gather_group),
        }
        for group in (engine.mesh.gather_group, engine.mesh.reduce_group, engine.mesh.control_group):
            dist.destroy_process_group(group)
    del engine, model, group
    torch._dynamo.reset()
    gc.collect()
    return [name for name, reference in gone.items() if reference() is not None]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_nothing_keeps_a_closed_engine(ranks: Ranks, backend: str) -> None:
    assert ranks.run(2, what_stays_of_a_closed_engine, backend) == [[], []]
