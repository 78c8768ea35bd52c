"""Entries of an optimizer's state that are sharded like their parameter, and those that are equal on every rank."""

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.optimizer_state import (
    OptimizerStateEntries,
    StateEntry,
    gather_value,
    shard_optimizer_state,
)
from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.update_rules import state_names
from lightning_zero.sharding.layout import ShardLayout
from lightning_zero.sharding.param_record import Records, Role, ShardedParameter
from tests.helpers.lion import Lion
from tests.helpers.wrapping import Renaming, Stacking, Wrapping

WORLD = 2


class Sharder:
    """Return parameters of these shapes, on one rank of two."""

    def __init__(self, *shapes: tuple[int, ...], rank: int = 0) -> None:
        self.records = Records()
        for index, shape in enumerate(shapes):
            layout = ShardLayout.from_shape(torch.Size(shape), torch.float32, WORLD)
            param = nn.Parameter(torch.zeros(layout.visible_shape))
            spec: Any = MagicMock(shard_index=rank)
            memory = {Role.MASTER_SHARD: param.data.view(-1)}
            self.records.add(ShardedParameter(index, f"p{index}", param, layout, memory, spec))
        self.find = self.records.find
        self.params = [record.param for record in self.records]


class NoRule(Lion):
    pass


def held(optimizer: torch.optim.Optimizer, sharder: Any) -> dict[int, dict[str, bool]]:
    """Return for each entry True if it is sharded."""
    return _cut(OptimizerStateEntries(optimizer, sharder).local(optimizer.state_dict()))


def _cut(found: dict[int, list[StateEntry]]) -> dict[int, dict[str, bool]]:
    return {number: {entry.key: entry.record is not None for entry in entries} for number, entries in found.items()}


def whole(cls: Any, *shapes: tuple[int, ...], **options: Any) -> dict[str, Any]:
    """The state dict of a plain optimizer after two steps."""
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = cls(params, **options)
    for _ in range(2):
        for param in params:
            param.grad = torch.full_like(param, 0.5)
        optimizer.step()
    return optimizer.state_dict()


def stepped(cls: Any, sharder: Sharder, **options: Any) -> torch.optim.Optimizer:
    optimizer = cls(sharder.params, **options)
    for param in sharder.params:
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    return optimizer


CUT: dict[Any, set[str]] = {
    torch.optim.Adadelta: {"square_avg", "acc_delta"},
    torch.optim.Adagrad: {"sum"},
    torch.optim.AdamW: {"exp_avg", "exp_avg_sq"},
    torch.optim.Adamax: {"exp_avg", "exp_inf"},
    torch.optim.ASGD: {"ax"},
    torch.optim.NAdam: {"exp_avg", "exp_avg_sq"},
    torch.optim.RAdam: {"exp_avg", "exp_avg_sq"},
    torch.optim.RMSprop: {"square_avg"},
    torch.optim.Rprop: {"prev", "step_size"},
    Lion: {"exp_avg"},
    NoRule: {"exp_avg"},
}


@pytest.mark.parametrize("shapes", [[()], [(), (1,), (7, 10)]], ids=["scalar", "mixed"])
@pytest.mark.parametrize("cls", CUT, ids=lambda cls: cls.__name__)
def test_moments_are_cut_and_counters_are_not(cls: Any, shapes: list[tuple[int, ...]]) -> None:
    sharder: Any = Sharder(*shapes)
    optimizer, saved = stepped(cls, sharder), whole(cls, *shapes)
    for found in (held(optimizer, sharder), _cut(OptimizerStateEntries(optimizer, sharder).full(saved))):
        assert list(found) == list(range(len(shapes)))
        for entries in found.values():
            assert {key for key, cut in entries.items() if cut} == CUT[cls]


def test_what_a_state_dict_wraps_or_renames_is_cut() -> None:
    sharder: Any = Sharder((7, 10), rank=1)
    for cls, path in ((Wrapping, ("wrapped", "more", "exp_avg")), (Renaming, ("momentum",))):
        optimizer, saved = stepped(cls, sharder), whole(cls, (7, 10))
        inventory = OptimizerStateEntries(optimizer, sharder)
        for found in (inventory.local(optimizer.state_dict()), inventory.full(saved)):
            assert [entry.path for entry in found[0] if entry.record is not None] == [path]
        optimizer.load_state_dict(shard_optimizer_state(saved, optimizer, sharder))
        part = optimizer.state[sharder.params[0]]["exp_avg"]
        assert part.shape == sharder.records[0].layout.visible_shape


class Grouped(NoRule):
    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        return packed | {"param_groups": [group | {"slow": torch.zeros(64)} for group in packed["param_groups"]]}


class ByName(NoRule):
    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        return packed | {"state": {f"p{n}": entries for n, entries in packed["state"].items()}}


class Inside(NoRule):
    def state_dict(self) -> dict[str, Any]:
        return {"slow": {}, "fast": super().state_dict()}


class Ruled(Renaming):
    _zero_rule = Lion.__dict__["_zero_rule"]


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Stacking, r"'both' of shape \(2, 1, 64\) for 'p0'"),
        (Ruled, r"'momentum' of shape \(1, 64\) for 'p0'"),
        (Grouped, "'slow' with a tensor"),
        (ByName, "'p0' with a tensor"),
        (Inside, r"\{'slow', 'fast'\}"),
    ],
)
def test_a_state_dict_that_no_rank_can_put_together_is_refused_by_name(cls: Any, words: str) -> None:
    sharder: Any = Sharder((7, 10))
    with pytest.raises(UnsupportedError, match=f"^The state_dict\\(\\) of {cls.__name__} .*{words}"):
        held(stepped(cls, sharder), sharder)


def test_an_entry_knows_how_it_is_cut() -> None:
    sharder: Any = Sharder((7, 10), rank=1)
    saved = whole(torch.optim.AdamW, (7, 10))
    [entries] = OptimizerStateEntries(stepped(torch.optim.AdamW, sharder), sharder).full(saved).values()
    entry = next(entry for entry in entries if entry.key == "exp_avg")
    assert entry.value is saved["state"][0]["exp_avg"]
    assert entry.record is sharder.records[0]
    assert entry.record.layout.shape == (7, 10)
    assert entry.record.layout.shard_range(1) == (64, 70)


def test_a_rank_loads_its_part_and_what_all_have() -> None:
    sharder: Any = Sharder((), (7, 10), rank=1)
    saved = whole(torch.optim.NAdam, (), (7, 10))
    saved["state"]["of the user's"] = {"seen": 3}
    loaded = shard_optimizer_state(saved, stepped(torch.optim.NAdam, sharder), sharder)["state"]
    assert loaded["of the user's"] == {"seen": 3}
    for number in (0, 1):
        for key in ("step", "mu_product"):
            assert loaded[number][key] is saved["state"][number][key]
    assert loaded[0]["exp_avg"].shape == (32,)
    assert not loaded[0]["exp_avg"].any(), "rank 0 has the scalar"
    part = loaded[1]["exp_avg_sq"].view(-1)
    assert part[:6].equal(saved["state"][1]["exp_avg_sq"].view(-1)[64:])
    assert not part[6:].any()


def test_a_table_that_looks_like_a_shard_is_told_by_the_rule_that_does_not_name_it() -> None:
    sharder: Any = Sharder((64,))
    for cls, cut in ((Lion, False), (NoRule, True), (torch.optim.AdamW, True)):
        optimizer = stepped(cls, sharder)
        optimizer.state[sharder.params[0]]["table"] = torch.zeros(32)
        assert held(optimizer, sharder)[0]["table"] is cut, "without such a rule shapes must do"


def test_moments_that_a_setting_left_behind_are_cut() -> None:
    sharder: Any = Sharder((7, 10), ())
    optimizer = stepped(torch.optim.SGD, sharder, momentum=0.9)
    saved = whole(torch.optim.SGD, (7, 10), (), momentum=0.9)
    for group in (*optimizer.param_groups, *saved["param_groups"]):
        group["momentum"] = 0.0
    assert held(optimizer, sharder) == {0: {"momentum_buffer": True}, 1: {"momentum_buffer": True}}
    assert _cut(OptimizerStateEntries(optimizer, sharder).full(saved)) == held(optimizer, sharder)


def test_names_follow_the_settings_that_are_loaded() -> None:
    def by_setting(group: Any) -> Any:
        return MagicMock(state=("second",) if group["second"] else (), counts=())

    class Own(NoRule):
        _zero_rule = staticmethod(by_setting)

    sharder: Any = Sharder((7, 10))
    optimizer = Own(sharder.params)
    optimizer.param_groups[0]["second"] = False
    saved: Any = {"state": {0: {"second": torch.ones(7, 10)}}, "param_groups": [{"params": [0], "second": True}]}
    assert _cut(OptimizerStateEntries(optimizer, sharder).full(saved)) == {0: {"second": True}}


@pytest.mark.parametrize("cls", [torch.optim.AdamW, NoRule])
def test_moments_of_another_shape_are_refused(cls: Any) -> None:
    sharder: Any = Sharder((7, 10), (3,))
    for shapes in ([(10, 7), (3,)], [(3,), (7, 10)], [(), (3,)], [(7, 10), ()]):
        with pytest.raises(
            ValueError, match=r"state 'exp_avg' for parameter 'p[01]' has shape .*but the parameter has"
        ):
            OptimizerStateEntries(stepped(cls, sharder), sharder).full(whole(cls, *shapes))


def counted(shapes: list[tuple[int, ...]], **seen: Any) -> dict[int, dict[str, bool]]:
    """Return the sharded part of full moments, and of entries by other names: one value for each parameter."""
    sharder: Any = Sharder(*shapes)
    saved = whole(NoRule, *shapes)
    for key, values in seen.items():
        for number, value in enumerate(values):
            saved["state"][number][key] = value
    return _cut(OptimizerStateEntries(stepped(NoRule, sharder), sharder).full(saved))


def test_what_is_one_number_for_a_larger_parameter_is_a_counter_for_scalars_too() -> None:
    shapes: list[tuple[int, ...]] = [(), (7, 10)]
    number, table = torch.zeros(()), torch.zeros(7, 10)
    names = counted(shapes, seen=[number, number], mean=[number, table], note=["x", None])
    assert names == {
        0: {"exp_avg": True, "seen": False, "mean": True, "note": False},
        1: {"exp_avg": True, "seen": False, "mean": True, "note": False},
    }
    with pytest.raises(ValueError, match=r"state 'seen' for parameter 'p0' has shape \(3,\), but"):
        counted(shapes, seen=[torch.zeros(3), number])


def test_a_single_number_is_no_counter_where_the_rule_says_otherwise() -> None:
    sharder: Any = Sharder((7, 10))
    with pytest.raises(ValueError, match="'exp_avg'"):
        OptimizerStateEntries(stepped(torch.optim.AdamW, sharder), sharder).full(whole(torch.optim.AdamW, ()))


def test_of_whole_values_those_of_others_parameters_are_left_out() -> None:
    sharder: Any = Sharder((7, 10), (3,))
    optimizer, saved = stepped(NoRule, sharder), whole(NoRule, (7, 10), (3,))
    sharder.find = lambda param: sharder.records.find(param) if param is sharder.params[1] else None
    assert list(OptimizerStateEntries(optimizer, sharder).full(saved)) == [1]


def test_what_is_cut_is_gathered_in_its_parameters_shape_and_its_own_dtype() -> None:
    record = Sharder((7, 10)).records[0]
    mesh: Any = MagicMock()
    all_ranks = torch.arange(WORLD * record.layout.shard_numel, dtype=torch.float64)

    def all_gather_shard(shard: Tensor) -> Tensor:
        assert shard.equal(all_ranks[: record.layout.shard_numel])
        return all_ranks

    mesh.all_gather_shard = all_gather_shard
    shard = all_ranks[: record.layout.shard_numel].view(record.layout.visible_shape)
    assert gather_value(shard, record, mesh).equal(all_ranks[:70].view(7, 10))
    assert gather_value(shard, None, mesh) is shard


def test_what_is_no_tensor_and_what_is_no_shard_stay_as_they_are() -> None:
    sharder: Any = Sharder((7, 10))
    optimizer = stepped(NoRule, sharder)
    state = optimizer.state[sharder.params[0]]
    state["note"], state["none"], state["seen"] = "x", None, torch.zeros(())
    sharder.find = lambda param: None
    assert not any(held(optimizer, sharder)[0].values())
    sharder.find = sharder.records.find
    assert held(optimizer, sharder)[0] == {"exp_avg": True, "note": False, "none": False, "seen": False}


def test_a_subclass_counts_by_the_names_of_its_base_and_may_keep_more() -> None:
    class Mine(torch.optim.NAdam):
        pass

    class Bare(torch.optim.NAdam):
        """Whose groups have not the settings that the base's rule reads."""

    mine = Mine([nn.Parameter(torch.zeros(()))])
    names = state_names(mine, mine.param_groups[0])
    told = {key: names.elementwise(key) for key in ("step", "mu_product", "exp_avg", "more")}
    assert told == {"step": False, "mu_product": False, "exp_avg": None, "more": None}
    assert state_names(Bare([nn.Parameter(torch.zeros(()))]), {}).elementwise("mu_product") is None


def test_names_of_torchs_optimizers_are_those_in_their_state() -> None:
    scalar: Tensor = nn.Parameter(torch.zeros(()))
    for cls in (torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW):
        state = whole(cls, ())["state"][0]
        optimizer = cls([scalar])
        names = state_names(optimizer, optimizer.param_groups[0])
        assert {key: names.elementwise(key) for key in state} == {key: key in CUT[cls] for key in state}
