"""No pass sends more than was named, whichever graphs its calls share, and whatever these have to send."""

import random

import pytest

from lightning_zero.offload.amount import OffloadQuota

MOST = 1000.0


def run_pass(amount: OffloadQuota, calls: list[list[str]], wanted: dict[str, int], graphs: dict[str, int]) -> int:
    """Of graphs by name, compiled where they are called first; returns bytes that it sent."""
    amount.begin_pass(MOST)
    for names in calls:
        amount.begin_call(" and ".join(names))
        for name in names:
            if name not in graphs:
                graphs[name] = int(min(wanted[name], amount.left(MOST)))
            amount.send(graphs[name])
    return amount.sent


@pytest.mark.parametrize("seed", range(200))
def test_passes_keep_to_the_amount(seed: int) -> None:
    rng = random.Random(seed)
    wanted = {name: rng.choice([0, 50, 400, 2000]) for name in "abcdef"}
    kinds = [["a", "b"], ["c"], ["d", "e", "f"]]  # what modules run, of which some look alike
    calls = [rng.choice(kinds) for _ in range(rng.randint(1, 6))]
    amount, graphs = OffloadQuota(calls=len(calls)), dict[str, int]()
    for _ in range(2):
        assert run_pass(amount, calls, wanted, graphs) <= MOST
        assert amount.beyond == ""


def test_one_call_may_send_all_of_it_and_what_a_call_leaves_over_goes_to_later_ones() -> None:
    assert run_pass(OffloadQuota(), [["a", "b", "c"]], {"a": 700, "b": 700, "c": 700}, {}) == MOST
    graphs: dict[str, int] = {}
    run_pass(OffloadQuota(calls=2), [["a"], ["b"]], {"a": 100, "b": 2000}, graphs)
    assert graphs == {"a": 100, "b": 900}
    run_pass(OffloadQuota(calls=2), [["a"], ["b"]], {"a": 2000, "b": 2000}, again := {})
    assert again == {"a": 500, "b": 500}


def test_who_goes_beyond_it_is_named() -> None:
    amount = OffloadQuota()
    run_pass(amount, [["a"], ["a"]], {"a": 700}, {})
    assert (amount.sent, amount.beyond) == (1400, "a")
    amount.begin_pass(MOST)
    assert (amount.sent, amount.beyond) == (0, "")
