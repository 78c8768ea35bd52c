"""Define all options of a strategy, in :class:`Options` and :class:`Tuning`.

The strategies' arguments, checks, docstrings, command line and the tables of the documentation follow from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import ClassVar, Literal

from torch.distributed.constants import default_pg_timeout

from lightning_zero.config.schema import (
    FP8_PRODUCT_CHOICES,
    OFFLOAD_CHOICES,
    OnChange,
    check_count,
    check_fraction,
    check_memory,
    check_mib,
    check_options,
    check_patterns,
    check_positive,
    check_ratio,
    check_subset,
    option,
    option_fields,
    options,
)
from lightning_zero.config.text import document_options

RecomputePolicy = Callable[[str, int, str], bool | None]
Transport = Literal["auto", "collective", "copy"]
CaptureMode = bool | Literal["auto"]

GROUPS = {
    "memory": "Memory",
    "communication": "Communication",
    "cuda_graphs": "CUDA graphs",
    "compile": "Compilation",
    "debugging": "Debugging",
}
_memory, _communication, _cuda_graphs, _compile, _debugging = (partial(option, group=group) for group in GROUPS)
_mib = partial(check_positive, "MiB")


def _make_tuples(options: object, *names: str) -> None:
    """Accept lists: command lines and YAML give a list, Hydra a sequence of its own."""
    for name in names:
        value = getattr(options, name)
        if isinstance(value, Sequence) and not isinstance(value, str):
            object.__setattr__(options, name, tuple(value))


@document_options
@options
class Tuning:
    """Options for memory, communication, CUDA graphs, compilation and debugging that few trainings need.

    Pass ``ZeroStrategy(tuning=Tuning(unsharded_cache_mb=2000))``, or a dict of the options.

    Examples:
        >>> from lightning_zero import Tuning, ZeroStrategy
        >>> strategy = ZeroStrategy(tuning=Tuning(unsharded_cache_mb=2000))
    """

    owner: ClassVar[str] = "Tuning"

    unsharded_cache_mb: float | None = _memory(
        "MiB of unsharded parameters that each rank keeps from forward to backward. Sizes count in the dtype of their "
        "use. Default None: ``reshard_after_forward`` decides.",
        default=None,
        check=check_mib,
        on_change=OnChange.RECOMPILE,
    )
    unsharded_cache_until: Literal["backward", "step"] = _memory(
        "End of the lifetime of parameters in the unsharded cache. ``'step'`` keeps them until the optimizer step, so "
        "accumulated micro-batches gather them once. Default ``'backward'``.",
        default="backward",
        on_change=OnChange.RECOMPILE,
    )
    recompute: RecomputePolicy | None = _memory(
        "Function of an op's name, the bytes of its result and the module path. It returns True to recompute, False to"
        " save, None for no preference. Default None: ``activation_memory_budget`` decides.",
        default=None,
        on_change=OnChange.RECOMPILE,
    )
    offload_buffer_mb: float = _memory(
        "MiB of device memory through which offloaded optimizer state is copied. Larger buffers hide more of the "
        "copies. Default 256; with ``memory`` a plan may choose more.",
        default=256.0,
        check=_mib(256),
    )
    state_dtype: Literal["bf16", "8bit"] | None = _memory(
        "``'bf16'`` or ``'8bit'`` stores optimizer state of parameters with at least 4096 elements in bfloat16, or in "
        "8 bits with a scale for 256 elements, rounded stochastically. The optimizer needs a known rule. Default None: "
        "as the optimizer makes it.",
        default=None,
        default_text="as the optimizer makes it",
    )
    bf16_stochastic_round: bool = _memory(
        "Round bfloat16 weights stochastically after each step, which is computed in float32, with "
        "``precision='bf16-true'``. Optimizer state in bfloat16 is rounded alike. Default False: to the nearest value, "
        "which loses small updates.",
        default=False,
    )
    matrix_bucket_mb: float = _memory(
        "MiB of full updates that an optimizer of matrices, such as Muon, has in memory at once on each rank. Default "
        "256; at least one matrix. With several ranks, half of it is exchanged while the other half is computed. One "
        "rank alone has twice as much. More makes larger batches of matrices of one shape.",
        default=256.0,
        check=_mib(256),
    )
    offload_activations_mb: float | None = _memory(
        "MiB of activations that a pass offloads at most, with ``offload=('activations',)``. Default None: the amount "
        "whose copies overlap with compute.",
        default=None,
        check=check_mib,
        on_change=OnChange.RECOMPILE,
        default_text="as much as overlaps",
    )
    free_reduce_buckets: bool = _memory(
        "Free the memory of reduce buckets after each backward. Default False: keep it for the next one.", default=False
    )
    grad_aliasing: bool | None = _memory(
        "Store reduced gradients in bfloat16 in the memory of the compute shards, with ``precision='bf16-mixed'`` and "
        "one micro-batch per step. Default None: if ``memory`` needs it, and on one rank if no user code reads them.",
        default=None,
        on_change=OnChange.REFUSE,
        default_text="automatic",
    )

    prefetch: bool = _communication(
        "Gather parameters in groups, ahead of their use. Default True; False gathers each at its use, which exposes "
        "communication.",
        default=True,
        on_change=OnChange.RECOMPILE,
    )
    prefetch_mb: float | None = _communication(
        "MiB of unsharded parameters in flight or in use at most, for groups that start more than one ahead of their "
        "use. Default None: two groups.",
        default=None,
        check=_mib(256, none=True),
        on_change=OnChange.RECOMPILE,
        default_text="two groups",
    )
    gather_group_mb: float = _communication(
        "MiB of unsharded parameters in a gather group, and in a chunk of the exchange between hosts, at most. Default "
        "128; two groups are in memory at once.",
        default=128.0,
        check=_mib(128),
        on_change=OnChange.RECOMPILE,
    )
    reduce_group_mb: float = _communication(
        "MiB of gradients that compiled code collects at most before it enqueues them for reduction. Default 64; they "
        "stay in memory until then.",
        default=64.0,
        check=_mib(64),
        on_change=OnChange.RECOMPILE,
    )
    reduce_bucket_mb: float = _communication(
        "Capacity of a reduce bucket in MiB, for the gradients of all ranks' shards. A larger gradient gets its own "
        "bucket. Default 64; larger buckets need fewer collectives and more memory.",
        default=64.0,
        check=_mib(64),
    )
    reduce_double_buffer: bool = _communication(
        "Fill one reduce bucket while the other is reduced. Default True; takes the memory of a second bucket.",
        default=True,
    )
    gather_transport: Transport = _communication(
        "Transport of parameters. ``'auto'`` (default): peer copies where possible, else all-gathers. ``'copy'``: peer"
        " copies, or raise. ``'collective'``: always all-gather.",
        default="auto",
        on_change=OnChange.NEGOTIATE,
    )
    reduce_transport: Transport = _communication(
        "Transport of gradients. ``'auto'`` (default): peer copies where possible, else reduce-scatters. ``'copy'``: "
        "peer copies, or raise. ``'collective'``: always reduce-scatter.",
        default="auto",
        on_change=OnChange.NEGOTIATE,
    )
    ranks_per_host: int | None = _communication(
        "Number of consecutive ranks that count as one host. The number of all ranks makes one host of them. Default "
        "None: ranks detect their hosts.",
        default=None,
        check=check_count,
        on_change=OnChange.REFUSE,
        default_text="detected",
    )
    compute_shard_group: Literal["host", "all"] = _communication(
        "With several hosts, the ranks over which compute shards are spread. ``'host'`` (default): the ranks of each "
        "host. ``'all'``: all ranks, which takes less memory, and every gather crosses hosts.",
        default="host",
        on_change=OnChange.REFUSE,
    )
    replicate_over: Literal["hosts"] | None = _communication(
        "``'hosts'`` replicates the model on every host and shards it over the host's ranks, as ``HYBRID_SHARD``. "
        "Weights then do not cross hosts; reduced gradients are all-reduced. Default None.",
        default=None,
        on_change=OnChange.REFUSE,
    )
    cross_host_reduce: Literal["micro-batch", "step"] = _communication(
        "Time at which gradients of accumulated micro-batches cross hosts. ``'micro-batch'`` (default): in each "
        "backward. ``'step'``: in the last backward, summed in float32.",
        default="micro-batch",
    )
    consensus_timeout_s: float = _communication(
        "Seconds that a rank with a newly compiled graph waits for the other ranks before it raises "
        "``RankMismatchError``. Default 25.",
        default=25.0,
        check=check_positive("seconds", 25),
    )

    cuda_graph_step: CaptureMode | None = _cuda_graphs(
        "``cuda_graphs`` for norm, clipping and the optimizer step only. Default None: as ``cuda_graphs``.",
        default=None,
        default_text="as `cuda_graphs`",
    )
    cuda_graph_model: CaptureMode | None = _cuda_graphs(
        "``cuda_graphs`` for compiled forward and backward only. Default None: as ``cuda_graphs``.",
        default=None,
        default_text="as `cuda_graphs`",
    )
    share_capture_memory: bool = _cuda_graphs(
        "Let the backwards of all captured graphs allocate from one pool, share the gradients of outputs, and reuse "
        "the memory of outputs. Default True.",
        default=True,
    )

    compile_dynamic: bool | None = _compile(
        "As in ``torch.compile(dynamic=...)``. Default None: sizes become dynamic when they change.",
        default=None,
        on_change=OnChange.RECOMPILE,
    )
    compile_whole_graphs: bool = _compile(
        "Trace and compile each graph in one piece. Default False: repeated layers are differentiated and compiled "
        "once.",
        default=False,
        on_change=OnChange.RECOMPILE,
    )

    frozen_exclude: tuple[str, ...] = _compile(
        "With ``frozen_dtype``, names of frozen weights that stay as they are, with ``*`` for any text. Default "
        "``('*lm_head.weight',)``.",
        default=("*lm_head.weight",),
        check=check_patterns,
        on_change=OnChange.REFUSE,
    )
    fp8_products: tuple[Literal["forward", "input_gradient", "weight_gradient"], ...] = _compile(
        "With ``linear_dtype='fp8'``, the products of each layer that may be in fp8. Default all three.",
        default=FP8_PRODUCT_CHOICES,
        check=check_subset(FP8_PRODUCT_CHOICES, "forward", empty=False),
        on_change=OnChange.RECOMPILE,
        default_text="all three",
    )
    fp8_exclude: tuple[str, ...] = _compile(
        "With ``linear_dtype='fp8'``, names of weights that stay in 16 bits, with ``*`` for any text, such as "
        "``('*.router.weight',)``. Default ``()``.",
        default=(),
        check=check_patterns,
        on_change=OnChange.RECOMPILE,
    )
    fp8_min_gain: float = _compile(
        "With ``linear_dtype='fp8'``, a layer is in fp8 if that saves at least this many times the estimated time of "
        "its casts. Default 1; 0 converts every product whose sizes fit.",
        default=1.0,
        check=check_ratio,
        on_change=OnChange.RECOMPILE,
    )
    fp8_gradient_format: Literal["e5m2", "e4m3"] = _compile(
        "With ``linear_dtype='fp8'``, the format of gradients of activations. ``'e5m2'`` has more range, ``'e4m3'`` "
        "more precision. Default ``'e5m2'``.",
        default="e5m2",
        on_change=OnChange.RECOMPILE,
    )
    fp8_recipe: Literal["tensorwise", "rowwise"] = _compile(
        "With ``linear_dtype='fp8'``, the scales of a product. ``'tensorwise'`` has one for each matrix, ``'rowwise'`` "
        "one for each row of the left and column of the right operand. Default ``'tensorwise'``.",
        default="tensorwise",
        on_change=OnChange.RECOMPILE,
    )
    fp8_health_every: int | None = _compile(
        "With ``linear_dtype='fp8'``, reads amax, underflow and overflow of each layer's matrices after so many "
        "optimizer steps, and warns of infinity and NaN. Default None: never.",
        default=None,
        check=check_count,
        on_change=OnChange.RECOMPILE,
        default_text="never",
    )
    fp8_shards: bool = _compile(
        "With ``linear_dtype='fp8'`` on one host, casts float32 weights whose products are all in fp8 once per "
        "optimizer step, and gathers them in fp8. Default False.",
        default=False,
        on_change=OnChange.RECOMPILE,
    )

    report_stall_after_s: float = _debugging(
        "Seconds of waiting after which every rank prints which rank is missing, and where. The job ends after "
        "``timeout``. Default 30.",
        default=30.0,
        check=check_positive("seconds", 30),
    )
    sync_collectives: bool = _debugging(
        "Wait on the host before and after every collective. Default False; disables overlap.", default=False
    )
    nan_fill: bool = _debugging(
        "On a CPU, fill parameters and gradients with NaN before they arrive and after their release, and run ranks at "
        "random speeds. Results stay the same. Default False.",
        default=False,
    )
    emulate_cross_host_gb_per_s: float | None = _debugging(
        "With several hosts, delay transfers that cross hosts to this many GB/s for each rank, which emulates a slow "
        "network. Default None: no delay.",
        default=None,
        check=check_positive("GB/s", 50, none=True),
    )
    emulate_cuda_graph_step: bool = _debugging(
        "On any device, run the optimizer step as its capture does, without the graph. Default False.", default=False
    )
    emulate_cuda_graph_model: bool = _debugging(
        "On any device, run compiled forward and backward as their replay does, without the graphs. Default False.",
        default=False,
    )

    def __post_init__(self) -> None:
        _make_tuples(self, "fp8_products", "fp8_exclude", "frozen_exclude")
        check_options(self)
        if self.replicate_over == "hosts" and self.compute_shard_group == "all":
            raise ValueError(
                "replicate_over='hosts' and compute_shard_group='all' contradict each other: if each host holds the "
                "model, no gather crosses hosts. Pass one of them."
            )

    @classmethod
    def suggestions(cls) -> dict[str, str]:
        """Return known names and how each is written."""
        outside = {name: f"ZeroStrategy({name}=...)" for name in option_fields(Options)}
        return outside | {name: name for name in option_fields(cls)}


@document_options
@options
class Options:
    """Options of a strategy in addition to the Trainer's arguments."""

    owner: ClassVar[str] = "ZeroStrategy"

    compile: bool = option(
        "Compile the outermost modules that the training step calls. Default True; False runs everything eagerly.",
        default=True,
        on_change=OnChange.RECOMPILE,
    )
    compile_backend: Literal["inductor", "aot_eager"] = option(
        "Backend of compiled graphs. Default ``'inductor'``. ``'aot_eager'`` runs the same graphs and passes without "
        "generated code, for debugging.",
        default="inductor",
        on_change=OnChange.RECOMPILE,
    )
    cuda_graphs: CaptureMode = option(
        "Replay the optimizer step, and compiled forward and backward, as CUDA graphs. ``'auto'`` (default): where "
        "possible. True: raise where it is not possible. False: never.",
        default="auto",
    )
    stage: Literal[1, 2, 3] = option(
        "State that is sharded in addition to optimizer state. 3 (default): gradients and parameters. 2: gradients. 1:"
        " neither. Lower stages communicate less and take more memory.",
        default=3,
        on_change=OnChange.RECOMPILE,
    )
    reshard_after_forward: bool | Literal["auto"] = option(
        "Free unsharded parameters after forward, as in ``fully_shard``. False: keep them until backward instead of "
        "gathering twice. ``'auto'``: keep as many as fit. Default True.",
        default=True,
        on_change=OnChange.RECOMPILE,
    )
    memory: float | Literal["auto"] | None = option(
        "Limit of the device's memory at its peak, in GiB, for all processes; ``'auto'`` is 90 % of the device. A "
        "planner chooses recomputation, unsharded cache and offload. Default None: no limit.",
        default=None,
        check=check_memory,
    )
    activation_memory_budget: float = option(
        "Share, from 0 to 1, of activations that compiled code saves for backward. The rest is recomputed, cheapest "
        "first: any share just below 1 recomputes elementwise ops only. Default 1: save everything that makes backward "
        "fastest.",
        default=1.0,
        check=check_fraction,
        on_change=OnChange.RECOMPILE,
    )
    offload: tuple[Literal["optimizer", "activations", "parameters"], ...] = option(
        "State in pinned host memory: ``'optimizer'`` (Adam's moments), ``'activations'`` (saved by compiled forward),"
        " ``'parameters'`` (float32 master weights; needs ``'optimizer'``). Default ``()``.",
        default=(),
        check=check_subset(OFFLOAD_CHOICES, "optimizer"),
    )
    reduce_dtype: Literal["bf16", "16", "32"] | None = option(
        "Dtype of gradients in collectives. Default ``'bf16'`` for ``precision='bf16-mixed'``, otherwise each "
        "parameter's dtype. Wider types take more bandwidth.",
        default=None,
    )
    broadcast_buffers: bool = option(
        "Before the first forward after each optimizer step, broadcast rank 0's buffers of modules in which one "
        "changes, as in ``DistributedDataParallel``. Default True.",
        default=True,
    )
    state_dict_type: Literal["full", "sharded"] = option(
        "``'full'`` (default) saves one file with full values. ``'sharded'`` saves a folder to which all ranks write "
        "in parallel. Either loads with either setting, on any number of ranks.",
        default="full",
    )
    async_save: bool = option(
        "Save checkpoints concurrently with training. Ranks copy them to host memory during the next forward and "
        "backward, and other processes write them. Default False.",
        default=False,
    )
    linear_dtype: Literal["fp8"] | None = option(
        "``'fp8'`` computes the products of weights and activations in 8-bit floating point, forward and backward, in "
        "compiled code. Needs ``precision='bf16-mixed'`` or ``'bf16-true'``. Default None: as ``precision``.",
        default=None,
        on_change=OnChange.RECOMPILE,
        default_text="as `precision`",
    )
    frozen_dtype: Literal["nf4", "int8"] | None = option(
        "Stores frozen weights of linear layers in 4 or 8 bits each, and gathers them so. Products compute in the "
        "Trainer's precision, or in fp8 with ``linear_dtype``. Default None: as the module has them.",
        default=None,
        on_change=OnChange.REFUSE,
        default_text="as the module has them",
    )
    timeout: timedelta | None = option(
        "Time that a rank waits for the other ranks before the job ends. Default 30 minutes.",
        default=default_pg_timeout,
        on_change=OnChange.REFUSE,
        default_text="30 minutes",
    )
    process_group_backend: str | None = option(
        "Backend of ``torch.distributed``. Default ``'nccl'`` on CUDA and ``'gloo'`` on the CPU.",
        default=None,
        on_change=OnChange.REFUSE,
    )
    tuning: Tuning = option(
        "A ``Tuning``, or a dict of its options. Default ``Tuning()``.",
        default=Tuning(),
        default_text="`Tuning()`",
    )

    def __post_init__(self) -> None:
        if isinstance(self.tuning, Mapping):
            object.__setattr__(self, "tuning", Tuning(**self.tuning))
        _make_tuples(self, "offload")
        check_options(self)
        tuning = self.tuning
        if not isinstance(tuning, Tuning):
            raise ValueError(f"tuning={tuning!r} must be a lightning_zero.Tuning, or a dict of its options.")
        self._check_unsharded_cache(tuning)

    def _check_unsharded_cache(self, tuning: Tuning) -> None:
        auto = self.reshard_after_forward == "auto"
        if self.stage < 3 and (auto or tuning.unsharded_cache_mb is not None):
            other = "reshard_after_forward='auto'" if auto else f"unsharded_cache_mb={tuning.unsharded_cache_mb!r}"
            raise ValueError(
                f"stage={self.stage} and {other} contradict each other: stages 1 and 2 keep all weights. Pass one of "
                "them."
            )
        if self.stage < 3 and not tuning.prefetch:
            raise ValueError(f"stage={self.stage} needs the passes that prefetch=False turns off. Leave prefetch on.")
        if tuning.unsharded_cache_mb is not None and self.reshard_after_forward is not True:
            raise ValueError(
                f"unsharded_cache_mb={tuning.unsharded_cache_mb!r} and "
                f"reshard_after_forward={self.reshard_after_forward!r} contradict each other. Pass one of them."
            )
        if self.unsharded_cache_until == "step" and not (self.unsharded_cache_mb and tuning.prefetch):
            raise ValueError(
                "unsharded_cache_until='step' keeps nothing, because the unsharded cache is empty or prefetch is off. "
                "Pass reshard_after_forward=False for all parameters or set unsharded_cache_mb, and leave prefetch on."
            )

    @classmethod
    def suggestions(cls) -> dict[str, str]:
        """Return known names and how each is written."""
        inside = {name: f"tuning=Tuning({name}=...)" for name in option_fields(Tuning)}
        return inside | {f.name: f.name for f in fields(cls)}

    @property
    def unsharded_cache_mb(self) -> float | Literal["auto"]:
        """MiB of parameters that are not resharded after forward; ``"auto"`` if they are measured later."""
        if self.stage < 3:
            return float("inf")
        if self.reshard_after_forward == "auto":
            return "auto"
        return float("inf") if not self.reshard_after_forward else self.tuning.unsharded_cache_mb or 0.0

    @property
    def unsharded_cache_until(self) -> Literal["backward", "step"]:
        return "step" if self.stage < 3 else self.tuning.unsharded_cache_until

    @property
    def cuda_graph_step(self) -> CaptureMode:
        own = self.tuning.cuda_graph_step
        return self.cuda_graphs if own is None else own

    @property
    def cuda_graph_model(self) -> CaptureMode:
        """Return the mode for compiled code; eager code is never captured, even if it is True."""
        own = self.tuning.cuda_graph_model
        if own is None:
            return self.cuda_graphs if self.compile else False
        return own

    def controlling_option(self, name: Literal["cuda_graph_step", "cuda_graph_model"]) -> str:
        """Return the option that decides ``name``: itself if it is set, otherwise ``cuda_graphs``."""
        return "cuda_graphs" if getattr(self.tuning, name) is None else name
