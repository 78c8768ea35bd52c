"""Test that neighboring shards are one flat parameter, whose state is that of the optimizer's own parameters."""

from collections import defaultdict
from typing import Any

import pytest
import torch

from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.bf16_state import ROUNDING_COUNT
from lightning_zero.optim.flat_runs import FlatRun, State, make_flat_runs
from tests.helpers.one_rank import OneRank

SHAPES = [(8, 4), (32,), (4, 8), (64,)]  # multiples of the alignment unit: no padding


def segments_of(
    bench: OneRank, groups: list[list[int]] | None = None, kinds: dict[int, int] | None = None, mix: bool = True
) -> list[FlatRun]:
    records: Any = bench.live
    chosen = [[records[index] for index in group] for group in groups or [list(range(len(SHAPES)))]]
    return make_flat_runs(chosen, kinds or {}, mix_dimensions=mix)


def members(runs: list[FlatRun]) -> list[list[int]]:
    return [[record.index for record in run.members] for run in runs]


@pytest.fixture
def bench() -> OneRank:
    bench = OneRank(SHAPES)
    bench.bring(1)
    return bench


def test_neighbours_are_one_tensor_that_shares_their_memory(bench: OneRank) -> None:
    (run,) = segments_of(bench)
    assert run.param.shape == (160,)
    with torch.no_grad():
        run.param.fill_(2.0)
        run.grad.fill_(3.0)
    for param in bench.params:
        assert param.eq(2.0).all()
        assert param.grad.eq(3.0).all()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"groups": [[3, 1, 0, 2]]}, [[0, 1, 2, 3]]),
        ({"groups": [[0, 1], [2, 3]]}, [[0, 1], [2, 3]]),
        ({"groups": [[0, 1, 3]]}, [[0, 1], [3]]),
        ({"kinds": {0: 0, 1: 1, 2: 1, 3: 1}}, [[0], [1, 2, 3]]),
        ({"mix": False}, [[0], [1], [2], [3]]),
    ],
    ids=["in the order of memory", "groups", "a gap", "kinds", "dimensions"],
)
def test_what_is_joined(bench: OneRank, options: dict[str, Any], expected: list[list[int]]) -> None:
    assert members(segments_of(bench, **options)) == expected


def test_a_segment_has_its_members_dimensions(bench: OneRank) -> None:
    matrix, vector, *_ = segments_of(bench, mix=False)
    assert (matrix.param.shape, vector.param.shape) == ((1, 32), (32,))


def loaded(bench: OneRank, step: float = 3.0) -> State:
    state: State = defaultdict(dict)
    for index, param in enumerate(bench.params):
        state[param] = {"step": torch.tensor(step), "average": torch.full_like(param, float(index)), "times": 4}
    return state


def test_state_that_was_loaded_is_taken_in_and_shown_as_views(bench: OneRank) -> None:
    (run,), state = segments_of(bench), loaded(bench)
    assert run.join_state(state)
    assert run.state["average"].tolist() == [0.0] * 32 + [1.0] * 32 + [2.0] * 32 + [3.0] * 64
    assert run.state["times"] == 4
    run.state["average"].add_(1)
    run.state["step"].add_(1)
    run.broadcast_counts()
    for index, param in enumerate(bench.params):
        assert state[param]["average"].shape == param.shape
        assert state[param]["average"].eq(index + 1).all()
        assert state[param]["step"] == 4
    (again,) = segments_of(bench)
    assert not again.join_state(state), "it is in one piece already"


def test_state_that_the_optimizer_makes_is_given_out(bench: OneRank) -> None:
    (run,), state = segments_of(bench), loaded(bench)
    state.clear()
    run.state = {"step": torch.tensor(1.0), "average": torch.arange(160.0), "times": 1}
    run.export_state(state)
    assert [float(state[param]["step"]) for param in bench.params] == [1.0] * 4
    assert state[bench.params[2]]["average"].flatten().tolist() == list(range(64, 96))
    run.state["times"] = 2
    run.export_state(state)
    assert {state[param]["times"] for param in bench.params} == {2}


def test_numbers_that_somebody_changed_are_read_again(bench: OneRank) -> None:
    (run,), state = segments_of(bench), loaded(bench)
    run.join_state(state)
    state[bench.params[0]]["times"] = 9
    run.read_non_tensor_state(state)
    assert run.state["times"] == 9


def test_state_for_more_than_single_elements_is_refused(bench: OneRank) -> None:
    (run,), state = segments_of(bench), loaded(bench)
    run.state = {"rows": torch.zeros(8, 2)}
    with pytest.raises(UnsupportedError, match=r"'rows' of shape \(8, 2\) for 'p0'"):
        run.export_state(state)


def test_a_count_that_torch_has_rounded_to_a_parameters_dtype_goes_on_counting(bench: OneRank) -> None:
    (run,), state = segments_of(bench), loaded(bench)
    for entries in state.values():
        entries[ROUNDING_COUNT] = torch.tensor(256.0, dtype=torch.bfloat16)
    run.join_state(state)
    run.counts[ROUNDING_COUNT].add_(1)
    assert [float(state[param][ROUNDING_COUNT]) for param in bench.params] == [257] * 4


def test_narrow_state_is_rounded_as_it_is_taken_in_and_is_no_neighbour_of_other_state(bench: OneRank) -> None:
    records: Any = bench.live
    wide, narrow = make_flat_runs(
        [records],
        {},
        mix_dimensions=True,
        stored_dtypes={2: {"average": torch.bfloat16}, 3: {"average": torch.bfloat16}},
    )
    assert members([wide, narrow]) == [[0, 1], [2, 3]]
    state = loaded(bench)
    for entries in state.values():
        entries["average"].fill_(1.0 + 2.0**-8 + 2.0**-9)  # between 1 and 1 + 2**-7, nearer to that
    assert wide.join_state(state)
    assert narrow.join_state(state)
    assert wide.state["average"].unique().tolist() == [1.0 + 2.0**-8 + 2.0**-9]
    assert narrow.state["average"].dtype is state[bench.params[3]]["average"].dtype is torch.bfloat16
    assert narrow.state["average"].unique().tolist() == [1.0 + 2.0**-7]
