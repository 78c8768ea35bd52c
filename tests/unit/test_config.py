"""Test that options check themselves, suggest values, and define strategies, engine and README."""

import dataclasses
import inspect
import math
import re
import typing
from inspect import signature
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_zero import FabricZeroStrategy, Tuning, ZeroStrategy
from lightning_zero.config import CompileConfig, EngineConfig, Options
from lightning_zero.config.engine_config import changed_options
from lightning_zero.config.migration_hints import MIGRATION_HINTS
from lightning_zero.config.options import GROUPS
from lightning_zero.config.schema import OnChange, option_fields
from lightning_zero.config.text import format_bytes
from lightning_zero.errors import UnsupportedError
from lightning_zero.integrations.fabric.strategy import FabricArguments
from lightning_zero.integrations.precision import with_precision
from lightning_zero.integrations.trainer.strategy import Arguments
from tests.helpers.options import OTHERS, arguments
from tests.helpers.readme import written

# A class, its arguments, and the words of the message.
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (Tuning, {"reduce_bucket_mb": 0}, r"reduce_bucket_mb=0 must be a positive number of MiB\. Try 64"),
    (Tuning, {"reduce_bucket_mb": -1.5}, r"reduce_bucket_mb=-1\.5 must be a positive"),
    (Tuning, {"reduce_bucket_mb": math.nan}, r"reduce_bucket_mb=nan must be a positive"),
    (Tuning, {"reduce_bucket_mb": math.inf}, r"reduce_bucket_mb=inf must be a positive"),
    (Tuning, {"reduce_bucket_mb": "64"}, r"reduce_bucket_mb='64' must be a positive"),
    (Tuning, {"reduce_bucket_mb": True}, r"reduce_bucket_mb=True must be a positive"),
    (Tuning, {"reduce_group_mb": 0}, r"reduce_group_mb=0 must be a positive number of MiB\. Try 64"),
    (Tuning, {"gather_group_mb": 0}, r"gather_group_mb=0 must be a positive number of MiB\. Try 128"),
    (Tuning, {"gather_group_mb": None}, r"gather_group_mb=None must be a positive"),
    (Tuning, {"prefetch_mb": 0}, r"prefetch_mb=0 must be a positive number of MiB\. Try 256"),
    (Tuning, {"prefetch_mb": math.inf}, r"prefetch_mb=inf must be a positive"),
    (Tuning, {"prefetch": "no"}, r"prefetch='no' must be True or False"),
    (Tuning, {"unsharded_cache_mb": -1}, r"unsharded_cache_mb=-1 must be a number of MiB, 0 or more"),
    (Tuning, {"unsharded_cache_mb": math.nan}, r"unsharded_cache_mb=nan must be a number of MiB"),
    (Tuning, {"unsharded_cache_mb": "all"}, r"unsharded_cache_mb='all' must be a number of MiB"),
    (Tuning, {"unsharded_cache_until": "epoch"}, r"unsharded_cache_until='epoch' must be 'backward' or 'step'"),
    (Tuning, {"gather_transport": "mail"}, r"gather_transport='mail' must be 'auto', 'collective' or 'copy'"),
    (Tuning, {"cuda_graph_step": "yes"}, r"cuda_graph_step='yes' must be True, False, 'auto' or None"),
    (Options, {"compile_backend": "cudagraphs"}, r"compile_backend='cudagraphs' must be 'inductor' or 'aot_eager'"),
    (Tuning, {"consensus_timeout_s": 0}, r"consensus_timeout_s=0 must be a positive number of seconds\. Try 25"),
    (Tuning, {"report_stall_after_s": math.inf}, r"report_stall_after_s=inf must be a positive number of seconds"),
    (Options, {"activation_memory_budget": 1.5}, r"activation_memory_budget=1\.5 must be between 0"),
    (Options, {"activation_memory_budget": -0.1}, r"activation_memory_budget=-0\.1 must be between 0"),
    (Options, {"linear_dtype": "fp4"}, r"linear_dtype='fp4' must be 'fp8' or None"),
    (Tuning, {"fp8_products": ("backward",)}, r"fp8_products=\('backward',\) must be a tuple of 'forward', .* Try"),
    (Tuning, {"fp8_products": ()}, r"fp8_products=\(\) must be a tuple of"),
    (Tuning, {"fp8_exclude": "head"}, r"fp8_exclude='head' must be a tuple of names, .* Try \('\*\.router"),
    (Tuning, {"fp8_min_gain": -1}, r"fp8_min_gain=-1 must be a number, 0 or more. Try 1."),
    (Tuning, {"fp8_gradient_format": "e5m3"}, r"fp8_gradient_format='e5m3' must be 'e5m2' or 'e4m3'"),
    (Options, {"reduce_dtype": "fp8"}, r"reduce_dtype='fp8' must be 'bf16', '16', '32' or None"),
    (Options, {"reduce_dtype": torch.bfloat16}, r"reduce_dtype=torch\.bfloat16 must be 'bf16'"),
    (Options, {"cuda_graphs": "yes"}, r"cuda_graphs='yes' must be True, False or 'auto'"),
    (Options, {"reshard_after_forward": "Auto"}, r"reshard_after_forward='Auto' must be True, False or 'auto'"),
    (Options, {"tuning": None}, r"tuning=None must be a lightning_zero\.Tuning, or a dict"),
    (Options, {"tuning": {"unsharded_cache_mb": -1}}, r"unsharded_cache_mb=-1 must be"),
    (Options, {"stage": 0}, r"stage=0 must be 1, 2 or 3"),
    (
        Options,
        {"stage": 2, "tuning": {"unsharded_cache_mb": 3}},
        r"stage=2 and unsharded_cache_mb=3 contradict each other",
    ),
    (Options, {"stage": 1, "reshard_after_forward": "auto"}, r"stage=1 and reshard_after_forward='auto' contradict"),
    (Options, {"stage": 2, "tuning": {"prefetch": False}}, r"stage=2 needs the passes.*Leave prefetch on"),
    (
        Options,
        {"tuning": Tuning(unsharded_cache_until="step")},
        r"unsharded_cache_until='step' keeps.*reshard_after_forward=False",
    ),
    (
        Options,
        {"tuning": Tuning(unsharded_cache_until="step", prefetch=False), "reshard_after_forward": False},
        r"leave prefetch on",
    ),
    (
        Options,
        {"tuning": Tuning(unsharded_cache_mb=1), "reshard_after_forward": "auto"},
        r"unsharded_cache_mb=1 and reshard_after_forward='auto' contradict each other",
    ),
]


@pytest.mark.parametrize(
    ("make", "given", "words"),
    [*WRONG, *((ZeroStrategy, given, words) for make, given, words in WRONG if make is Options)],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_wrong_value_is_refused_by_name_with_the_remedy(make: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**given)


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        (
            ZeroStrategy,
            "unsharded_mb",
            r"ZeroStrategy has no option 'unsharded_mb'\. Did .*tuning=Tuning\(unsharded_cache_mb",
        ),
        (ZeroStrategy, "capture_graphs", r"Did you mean cuda_graphs"),
        (ZeroStrategy, "gather_by", r"tuning=Tuning\(gather_transport=\.\.\.\)"),
        (ZeroStrategy, "gather_group_mb", r"Did you mean tuning=Tuning\(gather_group_mb=\.\.\.\)"),
        (Tuning, "compile_backend", r"ZeroStrategy\(compile_backend=\.\.\.\)"),
        (ZeroStrategy, "cluster_env", r"Did you mean .*cluster_environment"),
        (ZeroStrategy, "zzz", r"There are .*reshard_after_forward, .*timeout"),
        (Tuning, "unsharded_until", r"Tuning has no option 'unsharded_until'\. Did you mean unsharded_cache_until"),
        (Tuning, "cuda_graphs", r"ZeroStrategy\(cuda_graphs=\.\.\.\)"),
        (Tuning, "gather_grp_mb", r"Did you mean gather_group_mb"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(make: Any, name: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make(**{name: 1})


COMMON = {
    "self",
    "kwargs",
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
}
# Arguments of DeepSpeed without effect on a training's result.
LEFT = {"sub_group_size", "allgather_partitions", "reduce_scatter", "logging_level", "contiguous_memory_optimization"}
LEFT |= {"synchronize_checkpoint_boundary"}


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy, DDPStrategy])
def test_arguments_of_other_strategies_are_refused_with_what_they_are_here(strategy: Any) -> None:
    """Not with the option of ours that happens to be spelt like them."""
    for name in set(signature(strategy.__init__).parameters) - COMMON - LEFT - set(option_fields(Options)):
        with pytest.raises(
            TypeError, match=rf"ZeroStrategy has no option '{name}'\. (?!Did you mean|There are [a-z_]+,)"
        ):
            ZeroStrategy(**{name: 1})


def test_what_stands_for_other_strategies_arguments_exists() -> None:
    ours = {cls: set(option_fields(cls)) for cls in (Options, Tuning)}
    for name, text in MIGRATION_HINTS.items():
        assert name not in ours[Options] | ours[Tuning], name
        for inside in re.findall(r"Tuning\((.*?)\)", text):
            assert set(re.findall(r"(\w+)=", inside)) <= ours[Tuning], text
        outside = re.sub(r"Tuning\(.*?\)|plugins=\w+\(.*", "", text)
        assert set(re.findall(r"(\w+)=", outside)) <= ours[Options] | {"precision"}, text


def test_tuning_may_be_a_dict() -> None:
    assert Options(tuning={"unsharded_cache_mb": 3}).tuning == Tuning(unsharded_cache_mb=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Tuning has no option 'unshard_cache_mb'. Did you mean unsharded_cache_mb"):
        Options(tuning={"unshard_cache_mb": 3})  # type: ignore[arg-type]


def test_options_cannot_be_changed_behind_the_engines_back() -> None:
    for made in (EngineConfig(), Tuning(), CompileConfig()):
        for field in dataclasses.fields(made):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(made, field.name, None)


def test_what_is_shown_of_options_is_what_was_chosen() -> None:
    assert (
        repr(Options(compile=False, tuning=Tuning(prefetch=False)))
        == "Options(compile=False, tuning=Tuning(prefetch=False))"
    )


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_fp8_products_need_16_bit_numbers(precision: str) -> None:
    with pytest.raises(MisconfigurationException, match=r"Pass precision='bf16-mixed'"):
        with_precision(precision, EngineConfig(linear_dtype="fp8"))
    assert with_precision("bf16-mixed", EngineConfig(linear_dtype="fp8")).linear_dtype == "fp8"


def test_fp8_products_need_compiled_code() -> None:
    with pytest.raises(UnsupportedError, match="only compiled code has fp8 products"):
        EngineConfig(linear_dtype="fp8", compile=False)


def test_fp8_shards_have_no_scales_for_rows() -> None:
    tuning = Tuning(fp8_recipe="rowwise", fp8_shards=True)
    with pytest.raises(UnsupportedError, match=r"Leave fp8_shards out, or pass Tuning\(fp8_recipe='tensorwise'"):
        EngineConfig(linear_dtype="fp8", tuning=tuning)
    EngineConfig(tuning=tuning)  # neither option has an effect


def test_lists_of_fp8_options_are_tuples() -> None:
    tuning: Any = Tuning(fp8_exclude=["a"], fp8_products=["forward"])  # type: ignore[arg-type]
    assert (tuning.fp8_exclude, tuning.fp8_products) == (("a",), ("forward",))


# -- one definition


def test_there_are_few_options_that_users_meet() -> None:
    assert len(option_fields(Options)) <= 17
    assert {option.group for _, option in option_fields(Tuning).values()} == set(GROUPS)


@pytest.mark.parametrize(("strategy", "made"), [(ZeroStrategy, Arguments), (FabricZeroStrategy, FabricArguments)])
def test_the_strategy_takes_the_options_and_what_lightning_gives(strategy: Any, made: Any) -> None:
    signature = inspect.signature(strategy)
    hints = typing.get_type_hints(made)
    assert {p.name: p.default for p in signature.parameters.values()} == {
        f.name: f.default for f in dataclasses.fields(made)
    }
    assert {p.name: p.annotation for p in signature.parameters.values()} == {
        f.name: hints[f.name] for f in dataclasses.fields(made)
    }


def test_both_strategies_take_the_same_options() -> None:
    assert [f.name for f in dataclasses.fields(Arguments)][:10] == [
        f.name for f in dataclasses.fields(FabricArguments)
    ][:10]
    assert option_fields(Arguments) == option_fields(FabricArguments)


@pytest.mark.parametrize(
    ("where", "cls"), [(ZeroStrategy.__init__, Options), (FabricZeroStrategy.__init__, Options), (Tuning, Tuning)]
)
def test_each_option_is_described(where: Any, cls: Any) -> None:
    assert where.__doc__ is not None
    words = " ".join(where.__doc__.replace("micro- batches", "micro-batches").split())
    for name, (_, option) in option_fields(cls).items():
        assert f"{name}: " in words
        assert option.text.split(". ")[0][:40] in words, name


def test_the_readmes_tables_are_the_options() -> None:
    assert all(page.read_text() == text for page, text in written().items()), "run `python -m tests.helpers.readme`"


# -- derived configuration


def test_every_option_says_what_a_later_trainer_may_do_to_it() -> None:
    """Those and only those that compiled code depends on are compiled again for."""
    before = Options()
    for name, value in OTHERS.items():
        after = Options(
            **arguments(**{"reshard_after_forward": False} if name == "unsharded_cache_until" else {}, **{name: value})
        )
        start = Options(reshard_after_forward=False) if name == "unsharded_cache_until" else before
        [(found, change, old, new)] = changed_options(start, after)
        assert (found, new) == (name, value)
        assert old != new
        compiled = CompileConfig.from_options(start) != CompileConfig.from_options(after)
        assert compiled == (change is OnChange.RECOMPILE), (
            f"{name} is {change} and compiled code depends on it: {compiled}"
        )
    assert set(OTHERS) == {*option_fields(Options), *option_fields(Tuning)} - {"tuning"}


def test_unsharded_cache_options() -> None:
    assert CompileConfig.from_options(Options(reshard_after_forward="auto")).unsharded_cache_bytes == 0
    assert CompileConfig.from_options(Options(reshard_after_forward="auto")).unsharded_cache_mb == "auto"
    assert CompileConfig.from_options(Options(reshard_after_forward=False)).unsharded_cache_mb == math.inf
    assert (
        CompileConfig.from_options(Options(tuning=Tuning(unsharded_cache_mb=1.5))).unsharded_cache_bytes == 1.5 * 2**20
    )
    until_step = Options(reshard_after_forward="auto", tuning=Tuning(unsharded_cache_until="step"))
    assert CompileConfig.from_options(until_step).unsharded_cache_until == "step"
    assert CompileConfig.from_options(Options()) == CompileConfig()
    for again in (True, False):
        kept = CompileConfig.from_options(Options(stage=1, reshard_after_forward=again))
        assert (kept.unsharded_cache_bytes, kept.unsharded_cache_until) == (math.inf, "step")


@pytest.mark.parametrize(
    ("chosen", "step", "model", "named"),
    [
        (Options(), "auto", "auto", "cuda_graphs"),
        (Options(cuda_graphs=False), False, False, "cuda_graphs"),
        (Options(cuda_graphs=True, compile=False), True, False, "cuda_graphs"),
        (Options(cuda_graphs=False, tuning=Tuning(cuda_graph_step=True)), True, False, "cuda_graph_step"),
        (Options(cuda_graphs=True, tuning=Tuning(cuda_graph_model="auto")), True, "auto", "cuda_graphs"),
    ],
)
def test_what_is_captured(chosen: Options, step: Any, model: Any, named: str) -> None:
    assert (chosen.cuda_graph_step, chosen.cuda_graph_model) == (step, model)
    assert chosen.controlling_option("cuda_graph_step") == named


@pytest.mark.parametrize(
    ("word", "dtype"), [(None, None), ("bf16", torch.bfloat16), ("16", torch.float16), ("32", torch.float32)]
)
def test_the_dtype_of_gradients_on_the_wire(word: Any, dtype: torch.dtype | None) -> None:
    assert EngineConfig(reduce_dtype=word).wire_dtype == dtype


def test_what_compiled_code_depends_on_is_made_once_for_each_choice() -> None:
    first = EngineConfig(compile_backend="aot_eager", tuning=Tuning(gather_group_mb=7.0))
    assert first.compiled is first.compiled
    assert (first.compiled.backend, first.compiled.gather_group_mb) == ("aot_eager", 7.0)
    other = dataclasses.replace(first, tuning=Tuning(gather_group_mb=8.0))
    assert other.compiled.gather_group_mb == 8.0
    same = dataclasses.replace(other, tuning=first.tuning)
    assert same == first
    assert hash(same) == hash(first)


def test_on_hosts_of_one_rank_weights_stay_where_they_lie() -> None:
    chosen = EngineConfig(tuning={"unsharded_cache_mb": 5.0})
    whole = chosen.for_hosts(2, 1)
    assert (whole.unsharded_cache_mb, whole.unsharded_cache_until) == (math.inf, "step")
    assert chosen.for_hosts(2, 2) is chosen
    assert chosen.for_hosts(1, 1) is chosen, "one rank alone gathers as ever"
    assert whole.for_hosts(2, 1) == whole
    for other in ({"compile": False}, {"stage": 2}, {"tuning": {"compute_shard_group": "all"}}):
        assert EngineConfig(**other).for_hosts(2, 1) == EngineConfig(**other)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1.5 * 2**20, "1.5 MiB"), (2**30, "1.00 GiB"),
        (79.2 * 2**30, "79.20 GiB"), (-3 * 2**20, "-3.0 MiB"),
    ],
)  # fmt: skip
def test_sizes_have_the_largest_unit_that_they_fill(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text
    assert format_bytes(2**19, largest=2**30) == "0.00 GiB"
