"""Define all options of a strategy, in :class:`Options` and :class:`Tuning`.

The strategies' arguments, checks, docstrings, command line and the tables of the documentation follow from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import ClassVar, Literal

from torch.distributed.constants import default_pg_timeout

from lightning_zero.config.schema import (
    OnChange,
    check_count,
    check_fraction,
    check_memory,
    check_mib,
    check_offload,
    check_options,
    check_positive,
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
        "MiB of unsharded parameters, in the dtype of their use, that each rank keeps from forward to backward instead "
        "of gathering them twice. Between ``reshard_after_forward=True`` (0) and ``False`` (all). Default None: "
        "``reshard_after_forward`` decides.",
        default=None,
        check=check_mib,
        on_change=OnChange.RECOMPILE,
    )
    unsharded_cache_until: Literal["backward", "step"] = _memory(
        "End of the lifetime of parameters that are not resharded after forward. Default ``'backward'``. ``'step'``: "
        "the optimizer step, so that accumulated micro-batches gather them once. Writes to ``param.data`` between "
        "micro-batches then take effect at the next optimizer step, as with ``stage`` 1 and 2.",
        default="backward",
        on_change=OnChange.RECOMPILE,
    )
    recompute: RecomputePolicy | None = _memory(
        "Function that decides for single activations of compiled code, given an op's name, the bytes of its result "
        "and the module path. It returns True to recompute in backward, False to save, None for no preference. Default "
        "None: ``activation_memory_budget`` decides for all.",
        default=None,
        on_change=OnChange.RECOMPILE,
    )
    offload_buffer_mb: float = _memory(
        "MiB of device memory through which state in host memory is copied. As much optimizer state is copied both "
        "ways during forward and backward. Default 256; with ``memory`` a plan may choose more.",
        default=256.0,
        check=_mib(256),
    )
    state_dtype: Literal["bf16"] | None = _memory(
        "``'bf16'`` stores optimizer state (Adam's moments) of parameters with at least 4096 elements in bfloat16, "
        "with stochastic rounding. This halves its memory and its offload traffic; single elements of Adam's steps "
        "differ by 2 to 4 %. Only for optimizers with a known rule. Default None: as the optimizer makes it.",
        default=None,
        default_text="as the optimizer makes it",
    )
    offload_activations_mb: float | None = _memory(
        "MiB of activations that a pass offloads at most with ``offload=('activations',)``; each graph first offloads "
        "those that are unused for longest. Compute waits if the copies take longer. Default None: the amount whose "
        "copies overlap with compute.",
        default=None,
        check=check_mib,
        on_change=OnChange.RECOMPILE,
        default_text="as much as overlaps",
    )
    free_reduce_buckets: bool = _memory(
        "Free the memory of reduce buckets after each backward. Default False: keep it for the next one.", default=False
    )
    grad_aliasing: bool | None = _memory(
        "Store reduced gradients, in bfloat16, in the memory of the compute shards. Saves 4 bytes per element of a "
        "rank's shards. Requires ``precision='bf16-mixed'``, one host and one micro-batch per step; reading weights "
        "between backward and the step may raise. ``param.grad`` is bfloat16 until the step, then None. Default None: "
        "if ``memory`` needs it.",
        default=None,
        on_change=OnChange.REFUSE,
        default_text="if `memory` needs it",
    )

    prefetch: bool = _communication(
        "Gather parameters in groups, ahead of their use. Default True; False gathers each at its use, which exposes "
        "communication.",
        default=True,
        on_change=OnChange.RECOMPILE,
    )
    prefetch_mb: float | None = _communication(
        "MiB of unsharded parameters in flight or in use at most, for groups that start more than one ahead of their "
        "use. Default None: two groups. More hides more communication of small batches and takes memory.",
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
        "Transport of parameters. ``'auto'`` (default): between GPUs of one host, with CUDA 13, compiled code copies "
        "from peers' memory, which takes no SMs; CPU processes of one host always copy; everything else is "
        "all-gathered. ``'copy'``: copy, or raise if that is impossible. ``'collective'``: always all-gather.",
        default="auto",
        on_change=OnChange.NEGOTIATE,
    )
    reduce_transport: Transport = _communication(
        "Transport of gradients. ``'auto'`` (default): between GPUs of one host, with CUDA 13, copy to peers' memory "
        "and add in float32; everything else is reduce-scattered. ``'copy'``: copy, or raise if that is impossible. "
        "``'collective'``: always reduce-scatter.",
        default="auto",
        on_change=OnChange.NEGOTIATE,
    )
    ranks_per_host: int | None = _communication(
        "Number of consecutive ranks that count as one host. Default None: ranks detect their hosts. The number of all "
        "ranks makes one host of them, and every collective spans all ranks.",
        default=None,
        check=check_count,
        on_change=OnChange.REFUSE,
        default_text="detected",
    )
    compute_shard_group: Literal["host", "all"] = _communication(
        "With several hosts, the ranks that compute weights are sharded over. ``'host'`` (default): the ranks of each "
        "host, which exchange weights with other hosts once per optimizer step. ``'all'``: all ranks, which takes less "
        "memory, and every gather crosses hosts.",
        default="host",
        on_change=OnChange.REFUSE,
    )
    replicate_over: Literal["hosts"] | None = _communication(
        "``'hosts'`` replicates the model and the optimizer state on every host and shards them over its ranks, as "
        "``HYBRID_SHARD``. Weights do not cross hosts, and reduced gradients are all-reduced. Helps eager code, whose "
        "every gather otherwise crosses hosts; compiled code sends as much, or more with micro-batches. Default None.",
        default=None,
        on_change=OnChange.REFUSE,
    )
    cross_host_reduce: Literal["micro-batch", "step"] = _communication(
        "With several hosts, when these reduce gradients of accumulated micro-batches. ``'micro-batch'`` (default): in "
        "each backward. ``'step'``: in the last backward, which uses the network once per step and takes one float32 "
        "gradient of the weights that a rank holds for its host. ``param.grad`` is zero until then.",
        default="micro-batch",
    )
    consensus_timeout_s: float = _communication(
        "Seconds that a rank with a newly compiled graph waits for ranks that are not compiling, before it raises "
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

    compile_dynamic: bool | None = _compile(
        "As in ``torch.compile(dynamic=...)``. Default None: sizes become dynamic when they change.",
        default=None,
        on_change=OnChange.RECOMPILE,
    )
    compile_whole_graphs: bool = _compile(
        "Trace and compile each graph in one piece. Default False: repeated layers are differentiated and compiled "
        "once, so that compile time hardly grows with depth.",
        default=False,
        on_change=OnChange.RECOMPILE,
    )

    report_stall_after_s: float = _debugging(
        "Seconds of waiting after which every rank prints on stderr which rank is missing, where it was last and where "
        "the others wait. Default 30. The job ends with that text after ``timeout``.",
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
        "With several hosts, delay weights and gradients that cross hosts to this many GB/s for each rank. Emulates a "
        "slow network, for example between two GPUs as two hosts (``ranks_per_host``). Default None: no delay.",
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
        "Replay the optimizer step, and forward and backward of compiled code, as CUDA graphs. Removes launch overhead "
        "for small batches. ``'auto'`` (default): where possible. True: raise where it is not. False: never. Graphs "
        "keep their memory; evaluation frees it.",
        default="auto",
    )
    stage: Literal[1, 2, 3] = option(
        "State that is sharded in addition to optimizer state. 3 (default): gradients and weights. 2: gradients; every "
        "rank gathers all weights once per optimizer step. 1: neither; gradients of micro-batches accumulate in "
        "float32 and are reduced in the last backward, and ``param.grad`` is zero until then. 1 and 2 are faster and "
        "take more memory.",
        default=3,
        on_change=OnChange.RECOMPILE,
    )
    reshard_after_forward: bool | Literal["auto"] = option(
        "As in ``fully_shard``. Default True. False: keep unsharded parameters from compiled forward to backward "
        "instead of gathering them twice, which is faster and takes memory. ``'auto'``: after a few steps, keep as "
        "many as fit on the device and compile once more.",
        default=True,
        on_change=OnChange.RECOMPILE,
    )
    memory: float | Literal["auto"] | None = option(
        "Limit of used memory on each device at the peak, in GiB, for all processes; ``'auto'``: 90 % of the device. A "
        "planner then chooses recompute, unsharded parameters and offload by seconds lost per byte saved, at setup and "
        "after the first steps, and ``grad_aliasing`` if nothing else fits. Options other than their defaults stay. "
        "The limit holds in the first step and from about the 20th on, when the memory of CUDA graphs is measured and "
        "planned for; a warning says so if it cannot be held. Default None: no limit.",
        default=None,
        check=check_memory,
    )
    activation_memory_budget: float = option(
        "Share, from 0 to 1, of the activations that compiled code saves for backward; the rest is recomputed, "
        "cheapest first. Default 1: save everything that makes backward fastest.",
        default=1.0,
        check=check_fraction,
        on_change=OnChange.RECOMPILE,
    )
    offload: tuple[Literal["optimizer", "activations", "parameters"], ...] = option(
        "State in host memory, copied to the device for its use. ``'optimizer'``: state as large as the weights "
        "(Adam's moments); the step takes as long as the copies. ``'activations'``: large tensors that compiled "
        "forward saves, copied during compute. ``'parameters'``, with ``'optimizer'`` and mixed precision on one host: "
        "float32 master weights; gathers then use collectives. Default ``()``.",
        default=(),
        check=check_offload,
    )
    reduce_dtype: Literal["bf16", "16", "32"] | None = option(
        "Dtype of gradients in collectives. Default ``'bf16'`` for ``precision='bf16-mixed'``, otherwise each "
        "parameter's dtype. Wider types take more bandwidth.",
        default=None,
    )
    broadcast_buffers: bool = option(
        "As in ``DistributedDataParallel``: before the first forward after each optimizer step, broadcast rank 0's "
        "buffers (running statistics, codebooks) of modules in which one changes. Default True.",
        default=True,
    )
    state_dict_type: Literal["full", "sharded"] = option(
        "As in ``FSDPStrategy``. ``'full'`` (default) saves one file with full values, as a single process does. "
        "``'sharded'`` saves a folder to which all ranks write their shards in parallel. Either can be loaded, with "
        "either setting, on any number of ranks.",
        default="full",
    )
    async_save: bool = option(
        "Save checkpoints concurrently with training. A copy in host memory is made during the next forward and "
        "backward, and another process writes it. One save runs at a time; its errors are raised at the next save and "
        "at the end of ``fit``. Default False.",
        default=False,
    )
    timeout: timedelta | None = option(
        "Time that ranks wait for each other. Default 30 minutes.",
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
        if isinstance(self.offload, list):  # from command lines and YAML
            object.__setattr__(self, "offload", tuple(self.offload))
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
                "unsharded_cache_until='step' keeps nothing without a budget and the passes. Pass "
                "reshard_after_forward=False for all parameters or set unsharded_cache_mb, and leave prefetch on."
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
