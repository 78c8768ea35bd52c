"""The helpers must be right before they can judge: oracle and models."""

import ast
import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.models import CASES, OddMLP, build, make_batches
from tests.helpers.oracle import assert_close_relative, batches_for_rank, train_reference

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters())


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_close_passes_within_the_norm() -> None:
    expected = torch.tensor([1e-8, 1.0])
    assert_close_relative(expected + torch.tensor([1e-6, 0.0]), expected, 1e-5)
    assert_close_relative({"a": [1.0, None]}, {"a": [1.0, None]}, 0.0)
    assert_close_relative(torch.empty(0), torch.empty(0), 0.0)


@pytest.mark.parametrize(
    ("actual", "expected", "words"),
    [
        (torch.tensor([1.0, 2.1]), torch.tensor([1.0, 2.0]), r"relative error 4\.\d+e-02.*\(1,\)"),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), "1 of 1 elements of the res"),
        (torch.tensor([1.0]), torch.tensor([float("inf")]), "expected value are NaN or infinite"),
        (torch.tensor(1e-30), torch.tensor(0.0), "relative error inf"),
        (torch.ones(2), torch.ones(2, 1), r"shape \(2,\), expected \(2, 1\)"),
        ({"a": 1.0}, {"b": 1.0}, "missing.*b"),
        ({"a": None}, {"a": 1.0}, r"\['a'\]: got nothing, expected a value"),
        ([1.0], [1.0, 2.0], "1 entries, expected 2"),
    ],
)
def test_close_fails(actual: Any, expected: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        assert_close_relative(actual, expected, 1e-5)


def test_batches_split_evenly_and_pass_other_values() -> None:
    batch = (torch.arange(6), {"x": torch.arange(12).view(6, 2), "n": 5}, torch.tensor(3))
    [(first, rest, scalar)] = batches_for_rank([batch], 1, 3)
    assert first.tolist() == [2, 3]
    assert rest["x"].tolist() == [[4, 5], [6, 7]]
    assert rest["n"] == 5
    assert scalar.item() == 3
    with pytest.raises(ValueError, match="6 does not divide by 4"):
        batches_for_rank([batch], 0, 4)


@pytest.mark.parametrize("name", CASES)
def test_case_is_deterministic_and_splits(name: str) -> None:
    before = torch.get_rng_state()
    first, second = build(name), build(name)
    assert torch.equal(before, torch.get_rng_state())
    assert_close_relative(dict(first.named_parameters()), dict(second.named_parameters()), 0.0)
    batches = make_batches(name, 2, 12)
    whole = train_reference(first, batches, sgd)
    parts = train_reference(first, batches, sgd, world=3)
    if first.mean_of_parts:
        assert_close_relative(parts.losses, whole.losses, first.rtol / 10)
        assert_close_relative(parts.params, whole.params, first.rtol)
        assert_close_relative(parts.grads, whole.grads, first.rtol, atol=1e-7)
    else:
        assert abs(parts.losses[0] - whole.losses[0]) > 1e-4
    assert_close_relative(dict(first.named_parameters()), dict(second.named_parameters()), 0.0)


@pytest.mark.parametrize("name", CASES)
def test_case_compiles(name: str, fresh_dynamo: None) -> None:
    eager = build(name)
    compiled = copy.deepcopy(eager)
    runs = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            runs.append(graph)
            return graph.forward(*args)

        return run

    call = torch.compile(compiled, backend=backend)
    for batch in make_batches(name, 2, 6):
        expected, actual = eager.loss(batch), compiled.loss(batch, call=call)
        expected.backward()
        actual.backward()
        assert_close_relative(actual, expected, 1e-6)
    grads = [{n: p.grad for n, p in model.named_parameters()} for model in (compiled, eager)]
    assert_close_relative(*grads, rtol=1e-5, atol=1e-7)
    # per step; of LSTMNet, nothing is sure to be compiled
    least = {"TwelveBlocks": 24, "TiedAcrossBreak": 2, "CompilerDisabled": 2, "LSTMNet": 0}
    assert len(runs) >= 2 * least.get(name, 1)


def test_cases_hold_what_they_promise() -> None:
    numels = [p.numel() for p in build(OddMLP).parameters()]
    assert {0, 1, 2} <= set(numels)
    assert any(n % 2 and n % 3 for n in numels if n > 3)
    assert any(p.dim() == 0 for p in build(OddMLP).parameters())
    assert not build("NonContiguous").weight.is_contiguous()
    assert not copy.deepcopy(build("NonContiguous")).weight.is_contiguous()
    tied = build("TiedTransformer")
    assert tied.head.weight is tied.tokens.weight
    assert {p.dtype for p in build("MixedDtypes").parameters()} == {torch.float32, torch.bfloat16}
    branch = train_reference(build("BranchByStep"), make_batches("BranchByStep", 2, 6), sgd)
    assert [grads["a.weight"] is None for grads in branch.grads] == [False, True]


def test_reference_against_a_loop_by_hand() -> None:
    batches = make_batches(OddMLP, 4, 6)
    out = train_reference(
        build(OddMLP),
        batches,
        sgd,
        accumulate=2,
        clip_norm=0.5,
        make_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5),
    )
    model = build(OddMLP)
    optimizer = SGD(model.parameters())
    losses, norms = [], []
    for step in range(2):
        pair = [model.loss(batch) for batch in batches[2 * step : 2 * step + 2]]
        losses += [loss.item() for loss in pair]
        (sum(pair) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.5
        assert_close_relative(out.params[step], dict(model.named_parameters()), 1e-6)
    assert_close_relative(out.losses, losses, 1e-6)
    assert_close_relative(out.grad_norms, norms, 1e-6)
    assert len(out.grads) == len(out.params) == 2


def test_unused_parameters_are_skipped_or_decayed() -> None:
    model, batches = build("NeverUsed"), make_batches("NeverUsed", 1, 6)
    skipped = train_reference(model, batches, sgd).params[0]["idle.weight"]
    decayed = train_reference(model, batches, sgd, unused_as_zero=True).params[0]["idle.weight"]
    assert_close_relative(skipped, model.idle.weight, 0.0)
    assert_close_relative(decayed, model.idle.weight * 0.99, 1e-6)


def test_no_test_takes_anything_from_another() -> None:
    """Shared code of tests is in tests/helpers, or next to them in a module without tests."""
    tests = Path(__file__).resolve().parents[1]
    taken = []
    for path in sorted(tests.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            taken += [f"{path}:{node.lineno}: {name}" for name in names if "tests." in name and ".test_" in name]
    assert not taken, "\n".join(taken)
