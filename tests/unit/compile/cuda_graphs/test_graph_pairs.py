"""Failed captures and released memory, with a fake of CUDA."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import MagicMock, call, patch

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.compat import cuda
from lightning_zero.compile.cuda_graphs.graph_pairs import (
    BackwardMemory,
    CaptureSpec,
    CUDAGraphPair,
    EmulatedGraphPair,
    GradientBuffers,
    KnownOutputs,
)


class Graph:
    """A CUDA graph that logs its calls."""

    made: list["Graph"] = []
    end_fails = False

    def __init__(self) -> None:
        self.log: list[str] = []
        Graph.made.append(self)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        self.pool = pool
        self.log.append("begin")

    def capture_end(self) -> None:
        self.log.append("end")
        if Graph.end_fails:
            Graph.end_fails = False
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> None:
        self.log.append("replay")

    def reset(self) -> None:
        self.log.append("reset")


class Executor:
    device = torch.device("cpu")
    # All parts share one log.
    graphs = weights = gradients = property(lambda self: self)

    def __init__(self, refuse: int = 0) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.recorded = 0
        self.refuse = refuse

    activations: Any = None

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self.log.append((name, *args, *named.values()))

    def uses_epoch_lock(self) -> bool:
        return True

    def end(self) -> int:
        self.recorded += 1
        if self.recorded == self.refuse:
            raise NotImplementedError("some of its gradients share buckets with those of other graphs")
        self.log.append(("end",))
        return self.recorded


@pytest.fixture
def allocator() -> Iterator[MagicMock]:
    Graph.made, Graph.end_fails = [], False
    stands_in = {
        "CUDAGraph": Graph,
        "Stream": MagicMock(),
        "current_stream": MagicMock(),
        "stream": lambda stream: nullcontext(),
        "empty_cache": lambda: None,
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: (0, 7),
        "current_device": lambda: 3,
    }
    freed = MagicMock()
    with ExitStack() as stack:
        for name, value in stands_in.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(cuda, "clear_cublas_workspaces", lambda: None))
        stack.enter_context(patch.object(cuda, "end_allocate_to_pool", freed.end))
        stack.enter_context(patch.object(cuda, "release_pool", freed.release))
        yield freed


class Scaled(torch.autograd.Function):
    """The gradient of the weight goes to the executor, as in compiled code."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, batch: Tensor) -> Tensor:
        return weight * batch

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def scaled(weight: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    return Scaled.apply(weight, batch), batch + 1


def capture(executor: Executor, compiled: Any = scaled, shared: Any = None, **memory: Any) -> CUDAGraphPair:
    batch = torch.ones(2)
    inputs = [nn.Parameter(torch.tensor(3.0)), batch]
    spec = CaptureSpec(compiled, inputs, [batch], executor, False, shared, 5, **memory)  # type: ignore[arg-type]
    return CUDAGraphPair(spec)


def test_a_capture_is_replayed_between_entries_in_the_books(allocator: MagicMock) -> None:
    executor = Executor()
    pair = capture(executor)
    assert executor.log == [
        ("sync_compute_shards", True),  # a wait for the epoch lock must not be captured
        ("begin", False, False, -1),
        ("end",),
        ("begin", True, False, 5),
        ("end",),
        ("mark_not_run", 2),
        ("mark_not_run", 1),
    ]
    executor.log.clear()
    assert pair.forward()[0].tolist() == [3, 3]
    pair.backward([torch.full((2,), 2.0), None])
    assert executor.log == [("before_replay", 1), ("after_replay", 1), ("before_replay", 2), ("after_replay", 2)]
    assert [graph.log for graph in Graph.made] == [["begin", "end", "replay"]] * 2
    assert pair.differentiable == [True, False]


def test_a_refused_backward_leaves_nothing_that_the_forward_was_to_bring(allocator: MagicMock) -> None:
    executor = Executor(refuse=2)
    with pytest.raises(NotImplementedError, match="share buckets"):
        capture(executor)
    assert executor.log[-3:] == [("abort",), ("mark_not_run", 1), ("drop", 1)]
    # Released graphs hold no collectives, for which process groups would wait at their end.
    assert [graph.log for graph in Graph.made] == [["begin", "end", "reset"]] * 2
    assert not allocator.mock_calls


@pytest.mark.parametrize("refuse", [0, 1, 2])
def test_the_callers_stream_goes_on_after_the_capture(allocator: MagicMock, refuse: int) -> None:
    """Also after a failed capture: copies in flight write to memory of the caller's stream."""
    with nullcontext() if refuse == 0 else pytest.raises(NotImplementedError):
        capture(Executor(refuse))
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    assert current.wait_stream.mock_calls == [call(stream)]  # type: ignore[attr-defined]
    assert stream.wait_stream.mock_calls == [call(current)]  # type: ignore[attr-defined]


def test_what_no_graph_can_hold_gives_the_allocator_back(allocator: MagicMock) -> None:
    def waits(weight: Tensor, batch: Tensor) -> Any:
        Graph.end_fails = True
        raise RuntimeError("operation not permitted when stream is capturing")

    executor = Executor()
    with pytest.raises(RuntimeError, match="not permitted"):
        capture(executor, waits)
    assert executor.log[-1] == ("abort",)
    assert allocator.mock_calls == [call.end(3, (0, 7)), call.release(3, (0, 7))]
    # the second frees the generator
    assert [graph.log for graph in Graph.made] == [["begin", "end", "reset"], ["begin", "end"]]


def test_a_gradient_that_the_executor_does_not_get_is_a_bug(allocator: MagicMock) -> None:
    with pytest.raises(AssertionError, match="past the executor"):
        capture(Executor(), lambda weight, batch: (weight * batch,))


@pytest.mark.parametrize(
    ("compiled", "reason"),
    [
        (lambda weight, batch: (weight * batch.mul_(2),), "changed in place"),
        (lambda weight, batch: (weight * batch, batch.view(1, 2)), "a view of an input"),
        (lambda weight, batch: (weight * batch, weight), "an input that requires grad"),
        (lambda weight, batch: (weight * batch, 4), "not a tensor"),
    ],
)
def test_what_a_replay_would_not_do_is_refused(allocator: MagicMock, compiled: Any, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        capture(Executor(), compiled)


def test_pairs_of_one_graph_share_memory_and_give_it_back(allocator: MagicMock) -> None:
    executor = Executor()
    first = capture(executor)
    second = capture(executor, shared=first)
    assert second._pool is first._pool
    assert second._stream is first._stream
    executor.log.clear()
    first.close()
    assert [graph.log[-1] for graph in Graph.made] == ["reset", "reset", "end", "end"]
    assert executor.log == [("drop", 1), ("drop", 2)]


def test_gradients_of_outputs_share_memory_from_the_largest_on() -> None:
    buffers = GradientBuffers()
    outputs = [torch.ones(4, 6, requires_grad=True).t(), torch.ones(3), torch.ones(5, dtype=torch.bfloat16)]
    outputs[2].requires_grad_()
    large = buffers.like(outputs)
    assert large[1] is None
    assert large[0] is not None
    assert large[2] is not None
    assert (large[0].stride(), large[0].dtype, large[2].dtype) == ((1, 6), torch.float32, torch.bfloat16)
    assert large[0].data_ptr() != large[2].data_ptr()
    small = buffers.like([torch.ones(2, requires_grad=True)])[0]
    larger = buffers.like([torch.ones(99, requires_grad=True)])[0]
    assert small is not None
    assert larger is not None
    assert small.data_ptr() == large[0].data_ptr() != larger.data_ptr()
    large[0].fill_(2.0)  # earlier captures go on using theirs
    assert larger.eq(0).all()


@pytest.mark.parametrize("several", [False, True])
def test_backwards_of_one_step_share_memory(allocator: MagicMock, several: bool) -> None:
    handles = iter([(0, 1), (0, 2), (0, 3)])
    with patch.object(torch.cuda, "graph_pool_handle", lambda: next(handles)):
        executor, memory = Executor(), BackwardMemory(shared=True)
        first, second = (capture(executor, memory=memory, several=several) for _ in range(2))
    assert first._grads[0] is not None
    assert second._grads[0] is not None
    assert first._grads[0].data_ptr() == second._grads[0].data_ptr()
    assert first._grads[1] is second._grads[1] is None
    pools = [graph.pool for graph in Graph.made]
    assert pools == ([(0, 1), (0, 2), (0, 3), (0, 2)] if several else [(0, 1), (0, 1), (0, 2), (0, 2)])
    assert first._stream is second._stream


@pytest.mark.parametrize("shared", [False, True])
def test_a_backward_on_another_stream_waits_if_memory_is_shared(allocator: MagicMock, shared: bool) -> None:
    executor, memory = Executor(), BackwardMemory(shared)
    pairs = [capture(executor, memory=memory, several=True) for _ in range(2)]
    streams = [MagicMock(), MagicMock()]
    for stream, pair in zip(streams, pairs, strict=True):
        with patch.object(torch.cuda, "current_stream", lambda device, stream=stream: stream):
            for _ in range(2):
                pair.backward([torch.ones(2), None])
    assert not streams[0].wait_stream.mock_calls
    assert streams[1].wait_stream.mock_calls == ([call(streams[0])] if shared else [])


def test_captures_have_memory_of_their_own_on_request(allocator: MagicMock) -> None:
    handles = iter([(0, 1), (0, 2)])
    with patch.object(torch.cuda, "graph_pool_handle", lambda: next(handles)):
        executor, memory = Executor(), BackwardMemory(shared=False)
        first, second = (capture(executor, memory=memory, several=True) for _ in range(2))
    assert first._grads[0] is not None
    assert second._grads[0] is not None
    assert first._grads[0].data_ptr() != second._grads[0].data_ptr()
    assert [graph.pool for graph in Graph.made] == [(0, 1), (0, 1), (0, 2), (0, 2)]


def test_a_tensor_without_owner_is_the_same_memory() -> None:
    owned = torch.arange(12.0).view(3, 4)[1:, ::2]
    other = cuda.without_owner(owned)
    assert (other.tolist(), other.stride()) == (owned.tolist(), owned.stride())
    other.fill_(7.0)
    assert owned.eq(7.0).all()
    assert owned.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_an_input_that_requires_grad_and_is_changed_is_refused_by_the_same_reason() -> None:
    batch = torch.ones(2, requires_grad=True)
    spec = CaptureSpec(lambda x: (x.add_(1), x), [batch], [batch], Executor(), False, None)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="an input is changed in place"):
        spec.run()


def test_an_input_that_is_an_output_is_left_to_the_caller(allocator: MagicMock) -> None:
    pair = capture(Executor(), lambda weight, batch: (batch, weight.detach() * batch, batch))
    assert len(pair.forward()) == 1
    assert pair.known.inputs == {0: 1, 2: 1}


def outputs_of(compiled: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[list[Tensor], KnownOutputs]:
    weight = nn.Parameter(torch.ones(4, 6))
    return CaptureSpec(compiled, [weight], [], Executor(), False, None).run()  # type: ignore[arg-type]


def test_a_detached_output_goes_on_sharing_its_memory() -> None:
    outputs, known = outputs_of(lambda w: ((h := w * 2).detach(), h, h.detach(), w + 1))
    assert len(outputs) == 2
    assert {n: (view.of, view.differentiable) for n, view in known.views.items()} == {0: (1, False), 2: (1, False)}


def test_outputs_that_share_no_element_are_copied() -> None:
    outputs, known = outputs_of(lambda w: (w * 2).chunk(3, -1))
    assert len(outputs) == 3
    assert not known.views


@pytest.mark.parametrize(
    "view",
    [lambda h: h.t(), lambda h: h.view(-1), lambda h: h[1:], lambda h: h[:, 2].detach(), lambda h: h[1].expand(3, 6)],
)
def test_an_output_that_is_a_view_of_another_one_is_made_from_its_copy(view: Callable[[Tensor], Tensor]) -> None:
    [output], known = outputs_of(lambda w: (h := w * 2, view(h)))
    copy = output.detach().clone().requires_grad_()
    found, expected = known.views[1].make(copy), view(copy)
    assert known.views[1].of == 0
    assert torch.equal(found, expected)
    assert found.requires_grad == expected.requires_grad
    assert found.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr()
    if expected.requires_grad:
        weights = torch.randn(expected.shape)
        grads = [torch.autograd.grad((values * weights).sum(), copy)[0] for values in (found, expected)]
        torch.testing.assert_close(*grads)


def test_the_larger_one_of_two_outputs_is_copied() -> None:
    outputs, known = outputs_of(lambda w: ((h := (w * 2).t())[2], h))
    assert [(output.shape, output.stride()) for output in outputs] == [((6, 4), (1, 6))]
    assert known.views[0].of == 1


@pytest.mark.parametrize("views", [lambda h: (h[1:], h[:-1]), lambda h: (h, h.view(torch.int32))])
def test_outputs_that_share_memory_in_other_ways_are_refused(views: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    with pytest.raises(NotImplementedError, match="two outputs share memory"):
        outputs_of(lambda w: views(w * 2))


@pytest.mark.parametrize("refused", [True, False])
def test_a_run_that_cannot_be_captured_leaves_buffers_and_random_numbers(refused: bool) -> None:
    buffer, weight = torch.zeros(2), nn.Parameter(torch.ones(2))

    def compiled(weight: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        buffer += 1
        return weight * torch.rand(2), buffer[:1] if refused else buffer

    torch.manual_seed(0)
    pair = EmulatedGraphPair(CaptureSpec(compiled, [weight, buffer], [], Executor(), False, None))  # type: ignore[arg-type]
    expected = torch.get_rng_state()
    with pytest.raises(NotImplementedError, match="a view of an input") if refused else nullcontext():
        pair.forward()
    assert buffer.tolist() == ([0, 0] if refused else [1, 1])
    assert torch.equal(torch.get_rng_state(), expected) == refused
