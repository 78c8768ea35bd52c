"""The session decides which modules are compiled, by which passes and options, and when again."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.fx import Graph

from lightning_zero.compile.graph_plan import Gather, GraphPlan
from lightning_zero.compile.passes import MINIMAL_PASSES, PassSpec
from lightning_zero.compile.session import CompileSession
from lightning_zero.errors import RankMismatchError
from lightning_zero.memory_planner.inputs import MemoryConfig
from lightning_zero.memory_planner.planner import PlanUpdate
from lightning_zero.native import load
from lightning_zero.profiling.cost_model import NOMINAL_COSTS, CostModel
from lightning_zero.profiling.node_costs import DeviceSpeed
from tests.helpers.options import config

MINIMAL = [spec.name for spec in MINIMAL_PASSES]
EXACT: dict[str, Any] = {"compile_backend": "aot_eager"}
PLAN = GraphPlan("forward", 3, (Gather(("w",), "float32", 64, 0, "mm", 1, "mm"),), ())
X = torch.ones(2, 3)

pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


class Executor:
    def __init__(self) -> None:
        self.turns = False
        self.weights = SimpleNamespace(uses_epoch_lock=lambda: self.turns)

    def counters(self) -> dict[str, int]:
        return {}

    def keep_activations(self, where: Any) -> None:
        pass


class CUDAGraphManager:
    """Wrap nothing, and count how often captures are dropped."""

    def __init__(self, wrap: Any = lambda compiled: compiled) -> None:
        self.wrap, self.drops = wrap, 0

    def drop(self) -> None:
        self.drops += 1

    def static_tensors(self) -> tuple[()]:
        return ()


class Store(dict[str, bytes]):
    """Another rank waits with the plan ``theirs``, or arrives with the same one."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


class Alone(CompileSession):
    """A session of one rank on a CPU, without an engine."""

    def __init__(self, options: dict[str, Any] = EXACT, world_size: int = 1, begin: bool = True) -> None:
        load()
        self.lines: list[str] = []
        self.waits: list[str] = []
        self.store = Store()
        self.executor: Any = Executor()
        self.transports: Any = SimpleNamespace(weight_memory=None, zero_copy_gradients=False)
        mesh: Any = SimpleNamespace(
            device=torch.device("cpu"),
            rank=0,
            world_size=world_size,
            shard_group=SimpleNamespace(rank=0, size=world_size),
            timeout_s=1.0,
            control_group=None,
            store=lambda prefix: self.store,
        )
        watchdog: Any = SimpleNamespace(
            check=lambda: None, native=SimpleNamespace(busy=lambda what: None), waiting=self._waiting
        )
        chosen = config(**options, consensus_timeout_s=0.2)
        super().__init__(chosen, mesh, self.executor, watchdog, self.transports, report=self.lines.append)
        if begin:
            self.begin(CUDAGraphManager())  # type: ignore[arg-type]

    def _waiting(self, what: str) -> Any:
        self.waits.append(what)
        return nullcontext()

    def train(self, model: nn.Module, steps: int = 1) -> list[float]:
        losses = []
        for _ in range(steps):
            self.next_pass()
            first = self.is_discovering
            with self.step():
                loss = model(X).square().sum()
            if first:
                self.set_last_read(None)
            with self.explain_errors():
                loss.backward()
            losses.append(loss.item())
        return losses


def attached(session: Alone) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    session.attach(model)
    return model


def test_the_first_step_is_eager_and_the_next_one_compiles_what_it_called() -> None:
    session = Alone()
    model = attached(session)
    assert session.is_discovering
    (eager,) = session.train(model)
    assert session.lines == []
    assert not session.is_discovering
    assert session.train(model, 2) == [eager] * 2
    assert session.lines == [], "a first compilation is shown by its progress"
    assert session.progress.compiled == 2


def test_what_is_called_instead_of_compiled_code_is_what_the_engine_wraps() -> None:
    session, ran = Alone(begin=False), []

    def wrap(compiled: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append("wrapped")
            return compiled(*args)

        return run

    session.begin(CUDAGraphManager(wrap))  # type: ignore[arg-type]
    session.train(attached(session), 3)
    assert ran == ["wrapped"] * 2


def test_without_compilation_every_step_is_eager() -> None:
    session = Alone(dict(EXACT, compile=False))
    model = attached(session)
    session.train(model, 2)
    assert not session.is_discovering
    assert session.compiled_modules is not None
    assert session.compiled_modules.modules == {}


def test_links_are_measured_once_where_passes_need_it_and_again_when_they_change() -> None:
    speed = DeviceSpeed({torch.float32: 1e9}, 1e9, 1e-6)
    measured = CostModel(((1, 1.0),), speed)
    with patch("lightning_zero.compile.session.measure_costs", return_value=measured) as measure:
        assert Alone(dict(EXACT, prefetch=False)).costs is None
        assert Alone(dict(EXACT, compile=False)).costs is None
        measure.assert_not_called()
        session = Alone()
        assert session.costs is measured
        session.configure(config(**EXACT, unsharded_cache_mb=1.0))
        assert [call.args[1] for call in measure.mock_calls] == [False]
        session.transports.weight_memory = object()
        session.remeasure_links()
        assert [call.args[1] for call in measure.mock_calls] == [False, True]
    with patch("lightning_zero.compile.session.measure_costs", return_value=NOMINAL_COSTS):
        assert Alone().costs is None, "nothing was measured"


def test_graphs_hold_gradients_that_are_sent_from_where_they_lie() -> None:
    session = Alone()
    assert "zero_copy_gradients" not in session.known_passes
    session.transports.zero_copy_gradients = True
    session.remeasure_links()
    assert "zero_copy_gradients" in session.known_passes


def test_other_passes_compile_again_and_the_same_ones_do_not() -> None:
    session, graphs = Alone(), []
    session.progress.observe(lambda what, graph: graphs.append(what))
    model = attached(session)
    losses = session.train(model, 2)
    compiled = session.progress.compiled
    assert session.use_passes(MINIMAL)
    replays: Any = session._cuda_graphs
    assert replays.drops == 1
    losses += session.train(model)
    assert session.progress.compiled == 2 * compiled
    assert not session.use_passes(MINIMAL)
    losses += session.train(model)
    assert session.progress.compiled == 2 * compiled
    assert replays.drops == 1
    assert len(set(losses)) == 1
    assert graphs.count("joint") == 2


def test_passes_that_are_switched_off_do_not_run_and_are_told() -> None:
    session, seen = Alone(), []
    session.progress.observe_passes(lambda trace: seen.append(trace.name))
    model = attached(session)
    assert session.disable_passes(["merge_reduces"])
    assert not session.disable_passes(["merge_reduces"])
    session.train(model, 2)
    assert "group_gathers" in seen
    assert "merge_reduces" not in seen
    with pytest.raises(ValueError, match=r"cannot do without 'group_gathers'"):
        session.disable_passes(["group_gathers"])


def test_options_that_need_a_pass_which_is_switched_off_are_refused() -> None:
    session = Alone()
    session.disable_passes(["split_gathers"])
    with pytest.raises(ValueError, match=r"cannot do without 'split_gathers'"):
        session.check(config(**EXACT, consensus_timeout_s=0.2, prefetch=False))
    session.check(config(**EXACT, gather_group_mb=7.0))


def test_ones_own_passes_run_on_what_is_compiled() -> None:
    session, ran = Alone(), []

    def look(graph: Graph) -> Graph:
        ran.append(len(graph.nodes))
        return graph

    session.register_pass(PassSpec("look", look, version="1"))
    assert "look" in session.known_passes
    session.use_passes(["look", *MINIMAL])
    session.train(attached(session), 2)
    assert len(ran) == 2  # forward and backward
    with pytest.raises(ValueError, match=r"There is a pass named 'publish_plan' already"):
        session.register_pass(PassSpec("publish_plan", look))


def test_options_about_compiling_begin_anew_and_others_do_not() -> None:
    session = Alone()
    model = attached(session)
    session.train(model, 2)
    compiled_modules = session.compiled_modules
    session.configure(config(**EXACT, consensus_timeout_s=3.0))
    assert session.compiled_modules is compiled_modules
    assert session._consensus.patience_s == 3.0
    session.plans.add(PLAN)
    session.configure(config(**EXACT, consensus_timeout_s=3.0, gather_group_mb=7.0))
    assert session.is_discovering, "the next step runs eagerly"
    assert model._compiled_call_impl is None
    assert session.plans.agreed_plans == ()
    session.train(model, 2)
    assert session.progress.compiled == 4


def test_chosen_passes_stay_chosen_with_other_options() -> None:
    session = Alone()
    session.use_passes(MINIMAL)
    session.configure(config(**EXACT, consensus_timeout_s=3.0, gather_group_mb=7.0))
    assert not session.use_passes(MINIMAL)


def test_a_budget_that_is_measured_compiles_again_with_a_share_to_keep() -> None:
    session = Alone()
    model = attached(session)
    session.train(model, 2)
    session.plans.add(PLAN)
    with patch.object(session.planner, "update", side_effect=[PlanUpdate(MemoryConfig(), 0.25), None]):
        assert session.next_pass() == 0.0
        assert session._compiler.context().saved_share == 0.25
        assert session.plans.agreed_plans == (), "graphs that keep other weights follow other plans"
        session.train(model)
    assert session.progress.compiled == 4


def test_gradients_that_a_plan_has_laid_over_copies_lie_apart_once_a_later_trainer_says_so() -> None:
    planned = EXACT | {"memory": 1.0, "compute_dtype": torch.bfloat16}
    session, applied = Alone(planned), []
    attached(session)
    session.planner.connect(lambda config, chosen: applied.append(config.tuning.grad_aliasing), lambda: False)
    session.apply_update(PlanUpdate(MemoryConfig(grad_aliasing=True)))
    session.planner._current = MemoryConfig(grad_aliasing=True)
    session.configure(config(**planned, consensus_timeout_s=3.0))
    session.configure(config(**planned, consensus_timeout_s=3.0, grad_aliasing=False))
    assert applied == [True, True, False]


def test_weights_that_stay_until_the_step_are_told_in_bytes() -> None:
    assert Alone(dict(EXACT, unsharded_cache_mb=3.0, unsharded_cache_until="step")).next_pass() == 3 * 2**20
    assert Alone(dict(EXACT, unsharded_cache_mb=3.0)).next_pass() == 0.0


def test_a_plan_is_kept_once_the_ranks_have_agreed_on_it() -> None:
    session = Alone(world_size=2)
    with pytest.raises(RankMismatchError, match=r"rank 1 did not reach"):
        session.check_plan(PLAN.digest, PLAN.to_json())
    assert session.plans.count == 0
    assert session.waits == ["the agreement on a newly compiled graph"]
    session.executor.turns = True  # ranks never run concurrently, and need not agree
    session.check_plan(PLAN.digest, PLAN.to_json())
    assert session.plans.agreed_plans == (PLAN,)


def test_other_ranks_know_when_this_one_compiles() -> None:
    session = Alone(world_size=2)
    session.progress.compiling("a module", True, 0.0)
    assert session.store["busy/0"] == b"1"
    session.progress.compiling("a module", False, 1.0)
    assert session.store["busy/0"] == b"0"


def test_the_graph_that_reads_the_last_weight_is_the_one_that_backward_follows() -> None:
    session = Alone()
    attached(session)
    weight = torch.ones(3)
    session.set_last_read(weight)
    assert session._compiler.last_weight is weight
    assert session.compiled_modules is not None
    assert session._compiler.call_info is session.compiled_modules.call_info


def test_a_compiler_that_torch_keeps_does_not_keep_the_executor() -> None:
    session = Alone()
    compiler, executor = session._compiler, weakref.ref(session.executor)
    del session
    gc.collect()
    assert executor() is None
    assert compiler.passes()
