"""When compiled code is replayed and when it runs."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from lightning_zero.compile.cuda_graphs import CUDAGraphManager
from lightning_zero.compile.cuda_graphs.graph_pairs import CaptureSpec
from lightning_zero.compile.cuda_graphs.manager import (
    MAX_CAPTURE_WAITS,
    MAX_CAPTURED_SIZES,
    MAX_FAILED_CAPTURES,
    MAX_PENDING_CALLS,
    MAX_REPLACEMENTS,
    MIN_REPLAYS,
    WARMUP_RUNS,
)
from lightning_zero.config import EngineConfig
from lightning_zero.errors import UnsupportedError
from tests.helpers.options import config
from tests.unit.compile.cuda_graphs.fakes import Training, captured


def accumulated(training: Training, micro_batches: int = 3) -> None:
    for micro_batch in range(micro_batches):
        loss, _ = training.call(training.weight, torch.full((2,), float(micro_batch)))
        training.backward(loss)
    training.books.steps += 1


def test_the_run_after_warm_up_is_captured_and_later_ones_are_replays() -> None:
    training = Training()
    for count in range(1, 8):
        training.step()
        assert len(training.made) == (count > WARMUP_RUNS)
    assert training.made[0].replays == 7 - WARMUP_RUNS


def test_a_step_that_adds_to_gradients_is_another_capture_beside_the_first() -> None:
    training = Training()
    for _ in range(6):
        accumulated(training)
    assert sorted(pair.accumulates for pair in training.made) == [False, True]
    assert training.made[1].shared is training.made[0]
    assert all(pair.replays > 2 for pair in training.made)


def test_a_first_call_after_another_graphs_backward_is_another_capture() -> None:
    training = Training()
    for number in range(4 * WARMUP_RUNS):
        if number % 2:
            training.books.passes += 1  # a backward of other code since the optimizer step
        training.step()
        training.replays.accumulates(training.books.steps, training.books.passes)
    assert sorted(pair.accumulates for pair in training.made) == [False, True]
    assert all(pair.replays >= WARMUP_RUNS for pair in training.made)


def test_nothing_is_captured_before_it_is_settled_what_is_compiled() -> None:
    training = Training()
    training.settled = False
    for _ in range(WARMUP_RUNS + 5):
        training.step()
    assert not training.made
    training.settled = True
    training.step()
    assert len(training.made) == 1


def test_without_gradients_it_runs() -> None:
    training = captured(Training())
    with torch.no_grad():
        training.call(training.weight, torch.ones(2))
    assert training.made[0].replays == 1


def test_two_calls_before_a_backward_have_captures_of_their_own() -> None:
    training = Training()
    for number in range(WARMUP_RUNS + 4):
        first, _ = training.call(training.weight, torch.ones(2))
        second, _ = training.call(training.weight, torch.full((2,), float(number)))
        assert (first.item(), second.item()) == (18, 18 * number**2)
        training.backward(first + second)
        training.books.steps += 1
    grads = [pair.job.inputs[0].grad for pair in training.made]
    assert grads == [12 * 4, 12 * sum(n**2 for n in range(WARMUP_RUNS, WARMUP_RUNS + 4))]
    assert [(pair.replays, pair.shared) for pair in training.made] == [(4, None), (4, None)]
    assert not any(pair.accumulates for pair in training.made), "no backward has ended before"
    assert not training.said


class LayersOfOneGraph(Training):
    layers = [torch.nn.Parameter(torch.tensor(float(number))) for number in range(3)]

    def static_tensors(self) -> list[torch.Tensor]:
        return [*self.layers]


def test_backwards_share_memory_where_a_step_has_several() -> None:
    alone = captured(Training())
    assert [pair.job.several for pair in alone.made] == [False]
    twice, calls = Training(), Training()
    other = calls.replays.wrap(calls.compiled)
    for _ in range(WARMUP_RUNS + 2):
        losses = [twice.call(twice.weight, torch.ones(2))[0] for _ in range(2)]
        twice.backward(sum(losses))  # type: ignore[arg-type]
        twice.books.steps += 1
    made = list(twice.made)
    assert [pair.job.several for pair in made] == [True, True]
    assert all(pair.job.memory is twice.replays.memory for pair in made)
    before = twice.replays.memory
    twice.replays.drop()
    assert twice.replays.memory is not before
    made.clear()
    for _ in range(WARMUP_RUNS + 2):
        loss = calls.call(calls.weight, torch.ones(2))[0] + other(calls.weight, torch.ones(3))[0]
        calls.backward(loss)
        calls.books.steps += 1
    assert [pair.job.several for pair in calls.made[2:]] == [True, True]


def test_layers_that_share_a_graph_keep_their_captures_if_a_step_skips_one() -> None:
    training = LayersOfOneGraph()
    layers = training.layers
    for step in range(WARMUP_RUNS + 6):
        called = [layer for number, layer in enumerate(layers) if step < WARMUP_RUNS + 2 or number != step % 3]
        losses = [training.call(layer, torch.ones(2))[0] for layer in called]
        assert [loss.item() for loss in losses] == [2 * layer.item() ** 2 for layer in called]
        training.backward(torch.stack(losses).sum())
        training.books.steps += 1
    assert {pair.job.inputs[0].item() for pair in training.made} == {0.0, 1.0, 2.0}
    assert not any(pair.closed for pair in training.made)
    assert not training.said


def hold(training: Training, calls: int) -> list[torch.Tensor]:
    return [training.call(training.weight, torch.ones(2))[0] for _ in range(calls)]


def test_outputs_that_are_kept_without_a_backward_end_the_captures() -> None:
    training = Training()
    losses = hold(training, MAX_PENDING_CALLS)
    assert not training.said
    losses += hold(training, 1)
    assert f"called {MAX_PENDING_CALLS} times before the backward" in training.said[0]
    assert [loss.item() for loss in losses] == [18] * (MAX_PENDING_CALLS + 1)
    for _ in range(WARMUP_RUNS + 1):
        training.step()
    assert not training.made


def test_a_capture_is_of_the_gradients_that_the_graph_brought() -> None:
    training = captured(Training())
    assert training.books.asked == training.made[0].job.segment == len(training.books.marks) - 2
    assert training.books.marks == [n for n in range(WARMUP_RUNS + 1) for _ in range(2)]


def test_what_runs_without_gradients_in_a_step_is_replayed_too() -> None:
    training = Training()

    def look() -> torch.Tensor:
        training.books.steps += 1
        with torch.no_grad():
            return training.call(training.weight, torch.ones(2))[0]

    for _ in range(WARMUP_RUNS + 2):
        look()
    assert not training.made, "that is an evaluation"
    training.replays.in_step = True
    for _ in range(WARMUP_RUNS + 2):
        assert look() == 18
    assert [pair.replays for pair in training.made] == [2]
    training.replays.in_step = False
    look()
    assert [pair.replays for pair in training.made] == [2]


def test_a_batch_that_is_skipped_ends_no_replays() -> None:
    training = captured(Training())
    for _ in range(3):
        training.call(training.weight, torch.ones(2))  # the loss is dropped
        training.books.steps += 1
        training.step()
    assert [(pair.closed, pair.replays) for pair in training.made] == [(False, 7)]
    assert not training.said


def test_a_batch_that_is_skipped_warms_nothing_up() -> None:
    training = Training()
    for _ in range(WARMUP_RUNS + 2):
        training.call(training.weight, torch.ones(2))
        training.books.steps += 1
    assert not training.made
    for _ in range(WARMUP_RUNS):
        training.step()
    assert not training.made
    training.step()
    assert [pair.replays for pair in training.made] == [1]
    assert not training.said


def test_a_backward_through_one_of_several_outputs_warms_up() -> None:
    training = Training()

    def compiled(weight: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple((weight * batch * factor).sum() for factor in range(8))

    call = training.replays.wrap(compiled)
    for _ in range(WARMUP_RUNS + 2):
        outputs = call(training.weight, torch.ones(2))
        training.backward(outputs[training.books.steps % 8])
        training.books.steps += 1
    assert [pair.replays for pair in training.made] == [2]


def test_a_backward_that_gives_no_weight_a_gradient_ends_no_replays() -> None:
    training = captured(Training())
    for _ in range(3):
        loss, _ = training.call(training.weight, torch.ones(2))
        loss.backward()  # the executor counts none
        training.books.steps += 1
    assert [(pair.closed, pair.replays) for pair in training.made] == [(False, 4)]


def test_sizes_are_captured_in_one_memory_and_the_largest_first() -> None:
    training = Training()
    for _ in range(4):
        for size in range(1, 9):
            assert training.step(torch.ones(size), size) == 9 * size
    # The first sizes warm up all; the largest is captured at its next call, and the others after it.
    assert [pair.job.inputs[2] for pair in training.made] == [8, *range(1, 8)]
    assert [pair.replays for pair in training.made] == [3] + [2] * 7
    assert all(pair.shared is not None for pair in training.made[1:])
    assert not any(pair.closed for pair in training.made)


def test_a_larger_size_takes_the_memory_of_few_smaller_ones_which_are_captured_again() -> None:
    training = Training()
    for size in (1, 2, 3):
        for _ in range(WARMUP_RUNS + 1):
            training.step(torch.ones(size), size)
    assert [(pair.job.inputs[2], pair.closed) for pair in training.made] == [(1, True), (2, True), (3, False)]
    assert training.made[-1].shared is None
    for size in (1, 2, 3):
        assert training.step(torch.ones(size), size) == 9 * size
    assert [(pair.job.inputs[2], pair.closed) for pair in training.made[3:]] == [(1, False), (2, False)]
    assert all(pair.shared is training.made[2] for pair in training.made[3:])


def test_a_large_size_that_does_not_return_is_awaited_for_a_while() -> None:
    training = Training()
    training.step(torch.ones(9), 9)
    for _ in range(WARMUP_RUNS - 1 + MAX_CAPTURED_SIZES):
        training.step(torch.ones(1), 1)
        assert not training.made
    training.step(torch.ones(1), 1)
    assert [pair.replays for pair in training.made] == [1]


def test_sizes_that_were_not_needed_for_longest_make_room() -> None:
    training = Training()
    for _ in range(3):
        for size in range(1, MAX_CAPTURED_SIZES + 1):
            training.step(torch.ones(size), size)
    training.step(torch.ones(1), 1)
    for _ in range(2):
        training.step(torch.ones(99), 99)
    assert [pair.job.inputs[2] for pair in training.made if pair.closed] == [2]


def test_sizes_that_vary_all_the_time_end_the_captures() -> None:
    training = Training()
    for size in range(1, MAX_REPLACEMENTS + MAX_CAPTURED_SIZES + MAX_FAILED_CAPTURES + 3):
        for _ in range(WARMUP_RUNS + 1):
            training.step(torch.ones(size), size)
    assert len(training.made) == MAX_REPLACEMENTS + MAX_CAPTURED_SIZES + MAX_FAILED_CAPTURES
    assert all(pair.closed for pair in training.made)
    assert "batch sizes vary" in training.said[0]


def disturb(training: Training, rounds: int, replays: int) -> None:
    """Capture with this many replays each; other code ends each capture."""
    for _ in range(rounds):
        for _ in range(WARMUP_RUNS + replays):
            training.step()
        training.step(call=training.replays.wrap(training.compiled))


def test_a_capture_that_was_worth_it_makes_up_for_those_before() -> None:
    training = Training()
    training.replays.free_bytes = lambda: 0  # type: ignore[method-assign]
    for count in range(1, 4):
        disturb(training, MAX_FAILED_CAPTURES, 1)
        disturb(training, 1, MIN_REPLAYS + 1)
        assert len(training.made) == count * (MAX_FAILED_CAPTURES + 1)
    assert not training.said
    disturb(training, MAX_FAILED_CAPTURES + 3, MIN_REPLAYS)
    assert len(training.made) == 4 * (MAX_FAILED_CAPTURES + 1), "one replay less is not worth it"
    assert "other code needs the memory" in training.said[0]


@pytest.mark.parametrize("spare", [99, 100])
def test_another_graph_in_its_stead_gets_the_memory_where_little_is_left(spare: int) -> None:
    training = captured(Training())
    training.replays.free_bytes = lambda: spare  # type: ignore[method-assign]
    training.step(call=training.replays.wrap(training.compiled))
    assert training.made[0].closed == (spare < training.made[0].nbytes)
    training.step()


def test_no_micro_batch_runs_beside_captures_of_others_once_each_kind_has_run() -> None:
    # Otherwise a step needs memory for two while its first call is not captured.
    training = Training()
    for _ in range(2):
        accumulated(training)
    assert training.runs == WARMUP_RUNS + 3  # a replay of an emulated capture is a run here
    assert [pair.replays for pair in training.made] == [1, 2]
    assert sorted(pair.accumulates for pair in training.made) == [False, True]


@pytest.mark.parametrize("spare", [99, 100])
def test_another_run_of_the_same_graph_gets_the_memory_where_little_is_left(spare: int) -> None:
    training = captured(Training())
    training.replays.free_bytes = lambda: spare  # type: ignore[method-assign]
    accumulated(training, 2)  # the second call is of a kind that was never captured
    assert training.made[0].replays == 2
    assert training.made[0].closed == (spare < training.made[0].nbytes)
    for _ in range(4):
        accumulated(training, 2)
    assert not training.said
    assert all(pair.replays > 1 for pair in training.made[-2:])


def test_each_kind_of_the_same_graph_gets_the_memory_once_and_is_captured_then() -> None:
    training = captured(Training())
    training.replays.free_bytes = lambda: 0  # type: ignore[method-assign]
    sizes = range(2, 2 + 2 * MAX_FAILED_CAPTURES)
    for size in sizes:
        training.step(torch.ones(size), size)
        assert all(pair.closed for pair in training.made)
        training.step()  # warm, for memory of any code
        assert not training.made[-1].closed
    runs, replays = training.runs, sum(pair.replays for pair in training.made)
    for size in sizes:
        training.step(torch.ones(size), size)
    assert training.runs - runs == sum(pair.replays for pair in training.made) - replays == len(sizes)
    assert not training.said


def test_ever_other_kinds_of_the_same_graph_end_the_captures_where_little_is_left() -> None:
    training = captured(Training())
    training.replays.free_bytes = lambda: 0  # type: ignore[method-assign]
    for size in range(2, 2 + 2 * MAX_CAPTURED_SIZES):
        training.step(torch.ones(size), size)
        training.step()
    assert len(training.made) == MAX_CAPTURED_SIZES + MAX_FAILED_CAPTURES
    assert len(training.said) == 1
    assert "other code needs the memory" in training.said[0]


def test_captures_whose_backward_is_to_come_stay_where_little_is_left() -> None:
    training = captured(Training())
    training.replays.free_bytes = lambda: 0  # type: ignore[method-assign]
    loss, _ = training.call(training.weight, torch.ones(2))
    other, _ = training.call(training.weight, torch.ones(2))  # in addition to the first, so that no memory is free
    training.backward(loss + other)
    assert not training.made[0].closed


def test_an_evaluation_gets_the_memory_where_little_is_left() -> None:
    training = captured(Training())
    training.replays.release_memory()
    assert not training.made[0].closed
    training.replays.free_bytes = lambda: 0  # type: ignore[method-assign]
    training.replays.release_memory()
    assert training.made[0].closed


def test_a_capture_that_lacks_memory_takes_that_of_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    training = captured(Training())
    other, made = training.replays.wrap(training.compiled), training.replays.pair
    refusals = iter([torch.OutOfMemoryError("there is no more"), None])

    def pair(job: CaptureSpec) -> Any:
        if error := next(refusals):
            raise error
        return made(job)

    training.replays.pair = pair  # type: ignore[assignment]
    for _ in range(WARMUP_RUNS + 1):
        training.step(call=other)
    assert [pair.closed for pair in training.made] == [True, False]
    assert not training.said


def test_a_graph_of_the_same_step_does_not() -> None:
    training = Training()
    other = training.replays.wrap(lambda x: (x * 2,))
    for _ in range(WARMUP_RUNS + 4):
        training.books.reason = ""
        loss, _ = training.call(training.weight, torch.ones(2))
        training.books.reason = "not yet"
        (doubled,) = other(loss)
        training.backward(doubled)
        training.books.steps += 1
    assert len(training.made) == 1
    assert training.made[0].replays == 4


def test_a_graph_of_the_same_step_that_comes_first_does_not_either() -> None:
    training = Training()
    other = training.replays.wrap(lambda x: (x * 2,))
    for _ in range(WARMUP_RUNS + 4):
        training.books.reason = "not yet"
        (doubled,) = other(torch.ones(2, requires_grad=True))
        training.books.reason = ""
        loss, _ = training.call(training.weight, doubled.detach())
        training.backward(loss + 0 * doubled.sum())
        training.books.steps += 1
    assert len(training.made) == 1
    assert training.made[0].replays == 4
    assert not training.made[0].closed


def test_parameters_that_move_are_not_replayed() -> None:
    training = captured(Training())
    training.weight.data = training.weight.data.clone()
    before = training.runs
    assert training.step() == 18
    assert training.runs == before + 1
    assert training.made[0].closed


@pytest.mark.parametrize("reason", ["refuse", "refuse later"])  # emulated pairs run only when they are replayed
def test_what_cannot_be_captured_is_said_once_and_runs(reason: str) -> None:
    training = Training()
    for _ in range(WARMUP_RUNS):
        training.step()
    training.books.disabled_reason = lambda segment: ""  # type: ignore[method-assign]
    training.books.reason = reason
    for _ in range(5):
        assert training.step() == 18
    assert training.said == ["Compiled code is not replayed as a CUDA graph: an input is changed in place."]


def test_what_can_never_be_captured_is_said_after_a_while() -> None:
    training = Training()
    training.books.reason = "eager code holds weights"
    for _ in range(WARMUP_RUNS + MAX_CAPTURE_WAITS + 1):
        training.step()
    assert len(training.said) == 1
    assert training.books.synced == MAX_CAPTURE_WAITS, "weights that eager code has released count no more"
    assert "eager code holds weights" in training.said[0]


@pytest.mark.parametrize("partial", [False, True])
def test_a_backward_that_could_not_be_replayed_is_noticed_before_a_capture(partial: bool) -> None:
    training = Training()
    training.books.partial = partial
    for _ in range(WARMUP_RUNS + 3):
        loss, _ = training.call(training.weight, torch.ones(2))
        loss.backward(retain_graph=not partial)
        if not partial:
            loss.backward()
        training.books.passes += 1
        training.books.steps += 1
    assert not training.made
    assert len(training.said) == 1
    assert "retains its graph" in training.said[0]
    assert training.weight.grad == 12 * (WARMUP_RUNS + 3) * (1 if partial else 2)


def test_what_is_computed_again_within_a_backward_is_not_captured() -> None:
    training = Training()

    def block(batch: torch.Tensor) -> torch.Tensor:
        return training.call(training.weight, batch)[0]

    for _ in range(WARMUP_RUNS + 3):
        batch = torch.ones(2, requires_grad=True)
        training.backward(torch.utils.checkpoint.checkpoint(block, batch, use_reentrant=True))
        training.books.steps += 1
        assert batch.grad.tolist() == [18, 18]
    assert not training.made
    assert training.weight.grad == 12 * (WARMUP_RUNS + 3)


def test_one_reason_is_told_once() -> None:
    training = Training()
    for call in (training.call, training.replays.wrap(training.compiled)):
        loss, _ = call(training.weight, torch.ones(2))
        loss.backward(retain_graph=True)
    assert len(training.said) == 1


def test_where_replays_were_asked_for_it_raises() -> None:
    training = Training(capture=True)
    training.step()
    loss, _ = training.call(training.weight, torch.ones(2))
    with pytest.raises(UnsupportedError, match="retains its graph.*cuda_graph_model='auto'"):
        loss.backward(retain_graph=True)


def test_asking_for_replays_on_a_cpu_raises_at_once() -> None:
    training = Training()
    with pytest.raises(UnsupportedError, match="cuda_graph_model=True, but.*the device is cpu.*'auto'"):
        training.replays.configure(config(cuda_graph_model=True))


def test_options_are_checked_before_anything_is_dropped() -> None:
    training = captured(Training())
    with pytest.raises(UnsupportedError, match="cuda_graphs=True, but.*the device is cpu"):
        training.replays.check(config(cuda_graphs=True))
    assert not training.made[0].closed
    training.replays.check(config(cuda_graphs=True, emulate_cuda_graph_model=True))
    training.replays.check(config(cuda_graphs="auto"))


def test_what_has_become_impossible_on_a_gpu_is_refused_or_not_tried() -> None:
    training = Training()
    training.replays.device = torch.device("cuda")
    training.replays.configure(EngineConfig(), "weights travel by collectives")
    assert not training.replays.enabled
    training.replays.configure(config(cuda_graph_step=True))
    assert not training.replays.enabled, "it stays so"
    with pytest.raises(UnsupportedError, match="weights travel by collectives"):
        training.replays.configure(config(cuda_graph_model=True))


@pytest.mark.parametrize("name", ["sync_collectives", "nan_fill"])
def test_what_looks_at_each_collective_excludes_replays_and_says_so(name: str) -> None:
    training = Training()
    training.replays.device, training.replays._unsupported_here = torch.device("cuda"), ""
    training.replays.configure(config(cuda_graphs=True))
    assert training.replays.enabled
    with pytest.raises(UnsupportedError, match=f"cuda_graphs=True, but.*{name} checks each collective"):
        training.replays.check(config(cuda_graphs=True, **{name: True}))
    training.replays.configure(config(**{name: True}))
    assert not training.replays.enabled


def test_the_end_closes_captures_whose_backward_may_still_come() -> None:
    training = captured(Training())
    held = training.call(training.weight, torch.ones(2))
    training.replays.drop()
    assert not training.made[0].closed, "its backward may come"
    training.replays.close()
    assert training.made[0].closed
    assert held is not None


def test_what_torch_keeps_does_not_keep_the_engine() -> None:
    training = Training()
    call = training.replays.wrap(lambda weight, batch: ((weight * batch).square().sum(), batch))
    for _ in range(WARMUP_RUNS + 1):
        training.step(call=call)
    pair, weight = training.made[0], training.weight
    engine, replays = weakref.ref(training), weakref.ref(training.replays)
    del training
    gc.collect()
    assert engine() is None
    assert replays() is None
    assert pair.closed
    loss, _ = call(weight, torch.ones(2))
    assert loss == 18


def test_dropped_captures_are_made_again_at_the_next_step() -> None:
    training = captured(Training())
    training.replays.drop()
    assert training.made[0].closed
    training.step()
    assert len(training.made) == 2


def test_off_is_off() -> None:
    training = Training()
    training.replays.configure(EngineConfig())
    for _ in range(WARMUP_RUNS + 3):
        training.step()
    assert not training.made
    assert isinstance(training.replays, CUDAGraphManager)


def test_replays_are_declined_until_options_change_unless_they_are_demanded() -> None:
    training = captured(Training())
    assert training.replays.disable("they would take too much")
    assert training.made[0].closed
    assert training.said == ["Compiled code is not replayed as a CUDA graph: they would take too much."]
    assert (training.replays.enabled, training.replays.disabled_reason()) == (False, "they would take too much")
    assert not training.replays.disable("once more")
    for _ in range(WARMUP_RUNS + 1):
        training.step()
    assert len(training.made) == 1
    training.replays.configure(config(cuda_graph_model="auto", emulate_cuda_graph_model=True))
    assert training.replays.enabled
    demanded = captured(Training(capture=True))
    assert not demanded.replays.disable("they would take too much")
    assert not demanded.made[0].closed
