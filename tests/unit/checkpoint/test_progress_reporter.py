"""Long tasks report their progress, and short ones do not."""

import pytest

from lightning_zero.checkpoint import progress_reporter
from lightning_zero.checkpoint.progress_reporter import ProgressReporter


def test_only_what_takes_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress_reporter.time, "monotonic", lambda: now[0])
    said: list[str] = []
    wrote = ProgressReporter("Saving x.ckpt", "written", said.append, total_bytes=20 << 30)
    for _ in range(25):
        now[0] += 1.0
        wrote(2**29)
    assert said == [
        "Saving x.ckpt: 5 s (this rank has written 2.50 GiB of 20.00 GiB)",
        "Saving x.ckpt: 15 s (this rank has written 7.50 GiB of 20.00 GiB)",
        "Saving x.ckpt: 25 s (this rank has written 12.50 GiB of 20.00 GiB)",
    ]
    ProgressReporter("Saving x.ckpt", "written", None)(5)
