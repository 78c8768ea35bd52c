"""What takes long says how far it is, and nothing else does."""

import pytest

from lightning_zero.checkpoint import progress_reporter
from lightning_zero.checkpoint.progress_reporter import ProgressReporter


def test_only_what_takes_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress_reporter.time, "monotonic", lambda: now[0])
    said: list[str] = []
    wrote = ProgressReporter("Saving x.ckpt", "written", said.append)
    for _ in range(25):
        now[0] += 1.0
        wrote(2**29)
    assert said == [
        "Saving x.ckpt: this rank has written 5.0 GiB in 10 s.",
        "Saving x.ckpt: this rank has written 10.0 GiB in 20 s.",
    ]
    ProgressReporter("Saving x.ckpt", "written", None)(5)
