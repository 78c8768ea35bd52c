"""Fakes for tests of CUDA graphs: an executor, a graph pair that runs its code, and a training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_zero.compile.cuda_graphs import CUDAGraphManager
from lightning_zero.compile.cuda_graphs.graph_pairs import CaptureSpec, KnownOutputs
from lightning_zero.compile.cuda_graphs.manager import WARMUP_RUNS
from tests.helpers.options import config


class Books:
    graphs = weights = gradients = property(lambda self: self)

    def __init__(self) -> None:
        self.steps = self.passes = 0
        self.reason = ""
        self.partial = False
        self.synced = 0
        self.marks: list[int] = []  # number of gradients at each mark

    def shard_version(self) -> int:
        return self.steps

    def completed_backwards(self) -> int:
        return self.passes

    def defers(self) -> bool:
        return False

    def has_deferred(self) -> bool:
        return False

    def is_full_backward(self) -> bool:
        return not self.partial

    def disabled_reason(self, segment: int = -1) -> str:
        self.asked = segment
        return self.reason

    def sync_user_writes(self) -> None:
        self.synced += 1

    def mark(self) -> bool:
        self.marks.append(self.passes)
        return True

    def segment(self) -> int:
        return len(self.marks)


class FakePair:
    """Computes from its inputs at each replay, like a graph."""

    made: list[FakePair] = []
    known = KnownOutputs()

    def __init__(self, job: CaptureSpec) -> None:
        if job.executor.reason == "refuse":  # type: ignore[attr-defined]
            raise NotImplementedError("an input is changed in place\nand much more")
        self.job, self.accumulates, self.shared = job, job.accumulates, job.shared
        self.nbytes = 100
        self.fit, self.closed, self.replays = True, False, 0
        self.differentiable: Sequence[bool] = ()
        FakePair.made.append(self)

    def fits(self) -> bool:
        return self.fit

    def forward(self) -> Sequence[Tensor]:
        assert not self.closed
        if self.job.executor.reason == "refuse later":  # type: ignore[attr-defined]
            raise NotImplementedError("an input is changed in place")
        self.replays += 1
        with torch.enable_grad():
            self.outputs = self.job.compiled(*self.job.inputs)
        self.differentiable = [output.requires_grad for output in self.outputs]
        return self.outputs

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        assert not self.closed
        for tensor in self.job.copied:
            tensor.grad = None
        pairs = [(o, g) for o, g in zip(self.outputs, grads, strict=True) if o.requires_grad and g is not None]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return [tensor.grad for tensor in self.job.copied]

    def close(self) -> None:
        self.closed = True


class Training:
    """One weight, and compiled code that scales a batch by it."""

    def __init__(self, capture: bool | str = "auto") -> None:
        FakePair.made = []
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.books = Books()
        self.said: list[str] = []
        self.settled = True
        self.runs = 0
        chosen = config(cuda_graph_model="auto", emulate_cuda_graph_model=True)
        self.replays = CUDAGraphManager(
            self.books,
            torch.device("cpu"),
            chosen,
            self.ready,
            self.static_tensors,
            self.said.append,  # type: ignore[arg-type]
        )
        self.replays.pair = FakePair  # type: ignore[assignment]
        self.replays._required = capture is True
        self.call = self.replays.wrap(self.compiled)

    def ready(self) -> bool:
        return self.settled

    def static_tensors(self) -> list[Tensor]:
        return [self.weight]

    def compiled(self, weight: Tensor, batch: Tensor, *sizes: int) -> tuple[Tensor, Tensor]:
        self.runs += 1
        return (weight * batch).square().sum(), batch.detach() + 1

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.books.passes += 1

    def step(self, batch: Tensor | None = None, *sizes: int, call: Callable[..., Any] | None = None) -> Tensor:
        """Run forward, backward and an optimizer step."""
        loss, _ = (call or self.call)(self.weight, torch.ones(2) if batch is None else batch, *sizes)
        self.backward(loss)
        self.books.steps += 1
        return loss.detach()

    @property
    def made(self) -> list[FakePair]:
        return FakePair.made


def captured(training: Training) -> Training:
    for _ in range(WARMUP_RUNS + 1):
        training.step()
    assert training.made[-1].replays == 1
    return training
