"""Where ranks copy instead of calling collectives."""

import pytest
import torch

from lightning_zero.sharding.peers import _wanted

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("choice", "device", "cuda", "usable", "expected"),
    [
        ("auto", GPU, "13.0", True, True),
        ("auto", GPU, "12.8", True, False),
        ("auto", GPU, None, True, False),
        ("auto", GPU, "13.0", False, False),
        ("auto", CPU, "13.0", True, False),
        ("copy", CPU, None, False, True),  # what is impossible is refused later, with its reason
        ("collective", GPU, "13.0", True, False),
    ],
)
def test_copies_are_chosen_where_one_call_makes_many(
    monkeypatch: pytest.MonkeyPatch, choice: str, device: torch.device, cuda: str | None, usable: bool, expected: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert _wanted(choice, device, usable) is expected
