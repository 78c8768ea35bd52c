"""The kernel that adds the ranks' values has the results of torch's mean, for any part of a row at any address."""

import pytest
import torch

from tests.helpers.sharded import engine_for
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(2)


def compare() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with engine_for(torch.nn.Linear(8, 8), device=str(device)) as engine:
        executor = engine.executor
        executor.transport.compile_means()
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for n in (1, 7, 8, 1027, 1 << 20, (1 << 22) + 5):
                for offset, shift in ((0, 0), (8, 0), (3, 0), (0, 1)):
                    memory = torch.randn(2, offset + n + 64, device=device).to(dtype)
                    rows = memory[:, offset : offset + n]
                    before = torch.randn(n + shift, device=device)[shift:]
                    expected = rows.float().mean(0)
                    for add in (False, True):
                        to = before.clone() if shift == 0 else torch.cat((before[:1], before))[1:]
                        assert executor.transport._native.mean_rows(to, rows, add)
                        wanted = expected + before if add else expected
                        torch.testing.assert_close(to, wanted, rtol=1e-6, atol=1e-6)
                    if dtype is not torch.bfloat16:
                        continue
                    for add in (False, True):
                        to = (before if shift == 0 else torch.cat((before[:1], before))).to(dtype)[shift:]
                        wanted = (rows.float().mean(0) + to.float() if add else rows.float().mean(0)).to(dtype)
                        assert executor.transport._native.mean_rows(to, rows, add)
                        torch.testing.assert_close(
                            to, wanted, rtol=8e-3, atol=1e-6
                        )  # sums end at the other side of a tie
        rows = torch.ones(2, 8, device=device)
        assert not executor.transport._native.mean_rows(torch.empty(8, device=device), rows.double(), False)
        assert not executor.transport._native.mean_rows(
            torch.empty(8, device=device), torch.ones(3, 8, device=device), False
        )
        assert not executor.transport._native.mean_rows(
            torch.empty(8, device=device, dtype=torch.bfloat16), rows, False
        )


def test_means_are_torchs(ranks: Ranks) -> None:
    ranks.run(2, compare, backend="nccl", deadline=120)
