"""The guard that failed, in Dynamo's words, and in no more of them than fit into a line."""

from types import SimpleNamespace

import pytest

from lightning_zero.compile.capture import discovery as recompile_reason
from lightning_zero.compile.capture.discovery import LONGEST, find_recompile_reason


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (None, None),
        ("0/0: BACKEND_MATCH failure: torch.compile detected different backend callables.", None),
        ("3/12_1: tensor 'x' size mismatch\nUser stack trace:\n  ...", "tensor 'x' size mismatch"),
        ("0/0: ", "Dynamo does not say which guard failed"),
        ("0/0: " + "s" * 1000, "s" * LONGEST + " ..."),
    ],
)
def test_one_guard_is_told(monkeypatch: pytest.MonkeyPatch, reason: str | None, told: str | None) -> None:
    notes = {} if reason is None else {"recompile_reason": reason}
    monkeypatch.setattr(recompile_reason, "metrics_context", lambda: SimpleNamespace(_metrics=notes))
    assert find_recompile_reason() == told
