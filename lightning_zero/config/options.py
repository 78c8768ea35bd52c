"""All options, each defined once: the strategy's arguments, their checks, docstrings, the README's tables and what the
command line takes follow from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import ClassVar, Literal

from torch.distributed.constants import default_pg_timeout

from lightning_zero.config.option import (
    Change,
    at_least_one,
    at_least_zero,
    check_options,
    offloaded,
    option,
    option_fields,
    options,
    positive,
    share,
)
from lightning_zero.config.text import documented

__all__ = ["GROUPS", "Options", "RecomputePolicy", "Transport", "Tuning"]

RecomputePolicy = Callable[[str, int, str], bool | None]
Transport = Literal["auto", "collective", "copy"]
WhereCaptured = bool | Literal["auto"]

GROUPS = {
    "memory": "Memory",
    "communication": "Communication",
    "cuda_graphs": "CUDA graphs",
    "compile": "Compilation",
    "debugging": "Debugging",
}
_memory, _communication, _cuda_graphs, _compile, _debugging = (partial(option, group=group) for group in GROUPS)
_mib = partial(positive, "MiB")


@documented
@options
class Tuning:
    """Options for memory, communication, CUDA graphs, compilation and debugging that few trainings need.

    ``ZeroStrategy(tuning=Tuning(resident_mb=2000))``, or a dict of the same.
    """

    owner: ClassVar[str] = "Tuning"

    resident_mb: float | None = _memory(
        "so many MiB of whole parameters, in the dtype they are used in, stay from forward to backward on every rank "
        "instead of being gathered twice: between ``reshard_after_forward=True`` (0) and ``False`` (all)",
        default=None,
        check=at_least_zero,
        change=Change.COMPILED,
    )
    resident_until: Literal["backward", "step"] = _memory(
        "how long parameters stay that are not resharded after forward. ``'step'``: until the optimizer steps, so that "
        "accumulated micro-batches gather them once; what is written to ``param.data`` between micro-batches counts "
        "from the next optimizer step on",
        default="backward",
        change=Change.COMPILED,
    )
    recompute: RecomputePolicy | None = _memory(
        "decides for single activations of compiled code: called with an op's name, the bytes of its result and the "
        "path of the module that it belongs to; True: compute it again in backward, False: save it, None: no opinion",
        default=None,
        change=Change.COMPILED,
    )
    offload_buffer_mb: float = _memory(
        "so many MiB of the device through which passes what ``offload`` has put on the host; as much of it comes "
        "beside backward and leaves beside the next forward",
        default=256.0,
        check=_mib(256),
        change=Change.APPLIED,
    )
    free_reduce_buckets: bool = _memory(
        "give the reduce buckets' memory back after each backward", default=False, change=Change.APPLIED
    )

    prefetch: bool = _communication(
        "gather parameters in groups, ahead of their use; otherwise one by one, where they are used",
        default=True,
        change=Change.COMPILED,
    )
    prefetch_mb: float | None = _communication(
        "at most so many MiB of whole parameters in flight or in use at once, as far as groups are started more than "
        "one ahead of their use; by default two groups. More hides more of the transfers where batches are small, for "
        "memory",
        default=None,
        check=_mib(256, none=True),
        change=Change.COMPILED,
        shown="two groups",
    )
    gather_group_mb: float = _communication(
        "at most so many MiB of whole parameters in a group", default=128.0, check=_mib(128), change=Change.COMPILED
    )
    reduce_group_mb: float = _communication(
        "at most so many MiB of gradients wait until compiled code hands them over together",
        default=64.0,
        check=_mib(64),
        change=Change.COMPILED,
    )
    reduce_bucket_mb: float = _communication(
        "capacity of a reduce bucket in MiB, over all ranks' parts; a larger gradient gets a bucket of its own",
        default=64.0,
        check=_mib(64),
        change=Change.APPLIED,
    )
    reduce_double_buffer: bool = _communication(
        "fill one bucket while the other is reduced", default=True, change=Change.APPLIED
    )
    gather_transport: Transport = _communication(
        "how parameters travel. ``'auto'``: between GPUs of one host, with CUDA 13, compiled code copies "
        "them out of its peers' memory, which takes no SMs; between CPU processes of one host all code does; "
        "elsewhere they are all-gathered. ``'copy'``: copy, or raise where that cannot be. ``'collective'``: always "
        "all-gather",
        default="auto",
        change=Change.NEGOTIATED,
    )
    reduce_transport: Transport = _communication(
        "how gradients travel. ``'auto'``: between GPUs of one host, with CUDA 13, they are copied into their peers' "
        "memory and added up there in float32; elsewhere they are reduce-scattered. ``'copy'`` and ``'collective'`` as "
        "above",
        default="auto",
        change=Change.NEGOTIATED,
    )
    ranks_per_host: int | None = _communication(
        "so many neighbouring ranks are taken for those of one host; by default ranks find out where they run. The "
        "number of all ranks: there is one host, and every collective is one of all ranks",
        default=None,
        check=at_least_one,
        change=Change.REFUSED,
        shown="found out",
    )
    shard_compute_copy: Literal["host", "all"] = _communication(
        "with several hosts, over which ranks the weights are sharded that compiled code reads. ``'host'``: over those "
        "of each host, which exchange them with other hosts once per optimizer step; ``'all'``: over all, which takes "
        "less memory, and every gather crosses hosts",
        default="host",
        change=Change.REFUSED,
    )
    reduce_across: Literal["micro-batch", "step"] = _communication(
        "with several hosts, when these reduce the gradients of accumulated micro-batches. ``'micro-batch'``: in each "
        "backward; ``'step'``: in the last one, so that the network is used once per optimizer step, for the memory of "
        "one float32 gradient of the weights that a rank holds of its host's. Until then ``param.grad`` holds zeros",
        default="micro-batch",
        change=Change.APPLIED,
    )
    agreement_timeout_s: float = _communication(
        "a rank that has compiled a graph waits so many seconds for ranks that are not compiling before it raises "
        "``RankMismatchError``",
        default=25.0,
        check=positive("seconds", 25),
        change=Change.APPLIED,
    )

    cuda_graph_step: WhereCaptured | None = _cuda_graphs(
        "``cuda_graphs`` for norm, clipping and the optimizer's step alone",
        default=None,
        change=Change.APPLIED,
        shown="as `cuda_graphs`",
    )
    cuda_graph_model: WhereCaptured | None = _cuda_graphs(
        "``cuda_graphs`` for forward and backward of compiled code alone",
        default=None,
        change=Change.APPLIED,
        shown="as `cuda_graphs`",
    )

    compile_dynamic: bool | None = _compile(
        "as in ``torch.compile(dynamic=...)``: None lets sizes become dynamic when they change",
        default=None,
        change=Change.COMPILED,
    )
    compile_whole_graphs: bool = _compile(
        "compile each graph in one piece; otherwise what repeats in it (layers) is compiled once, in seconds however "
        "many there are",
        default=False,
        change=Change.COMPILED,
    )

    report_stall_after_s: float = _debugging(
        "after so many seconds of waiting every rank says on stderr which rank is missing, where it was last and where "
        "the others wait; after ``timeout`` the job ends with that text",
        default=30.0,
        check=positive("seconds", 30),
        change=Change.APPLIED,
    )
    sync_collectives: bool = _debugging(
        "wait on the host before and after every collective", default=False, change=Change.APPLIED
    )
    poison: bool = _debugging(
        "on a CPU: parameters and gradients are NaN until they have been waited for and after they have been released, "
        "and ranks run at random speeds; results stay the same",
        default=False,
        change=Change.APPLIED,
    )
    emulate_bandwidth_across_gbs: float | None = _debugging(
        "with several hosts: weights and gradients that cross them arrive no sooner than at so many GB/s for each "
        "rank, to try a slow network where there is none (two GPUs as two hosts, by ``ranks_per_host``)",
        default=None,
        check=positive("GB/s", 50, none=True),
        change=Change.APPLIED,
    )
    emulate_cuda_graph_step: bool = _debugging(
        "on any device, do what a captured optimizer step does, without the graph",
        default=False,
        change=Change.APPLIED,
    )
    emulate_cuda_graph_model: bool = _debugging(
        "on any device, do what a replay of compiled code does, without the graphs",
        default=False,
        change=Change.APPLIED,
    )

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def nearest(cls) -> dict[str, str]:
        """Names that may have been meant, and how they are written."""
        outside = {name: f"ZeroStrategy({name}=...)" for name in option_fields(Options)}
        return outside | {name: name for name in option_fields(cls)}


@documented
@options
class Options:
    """What a user chooses besides a Trainer's arguments."""

    owner: ClassVar[str] = "ZeroStrategy"

    compile: bool = option(
        "compile the outermost modules that the training step calls; otherwise everything runs eagerly",
        default=True,
        change=Change.COMPILED,
    )
    compile_backend: Literal["inductor", "aot_eager"] = option(
        "``'aot_eager'`` has the same graphs and passes and generates no code, to debug",
        default="inductor",
        change=Change.COMPILED,
    )
    cuda_graphs: WhereCaptured = option(
        "replay the optimizer's step, and forward and backward of compiled code, as CUDA graphs, so that the host is "
        "not what limits small batches: ``'auto'`` where that is possible; True, or raise where it is not; False "
        "never. Their memory serves nothing else; evaluation gives it back",
        default="auto",
        change=Change.APPLIED,
    )
    stage: Literal[1, 2, 3] = option(
        "what is sharded besides optimizer state. 3: gradients and weights. 2: gradients; weights to compute with are "
        "whole on every rank, gathered once after each optimizer step. 1: neither: gradients of accumulated "
        "micro-batches are added up whole, in float32, and reduced in the last one's backward; until then "
        "``param.grad`` holds zeros. 1 and 2 are faster, for memory, and what is written to ``param.data`` between "
        "micro-batches counts from the next optimizer step on",
        default=3,
        change=Change.COMPILED,
    )
    reshard_after_forward: bool | Literal["auto"] = option(
        "as in ``fully_shard``: False: whole parameters stay from compiled forward to backward instead of being "
        "gathered twice: faster, for memory. ``'auto'``: none at first, and after a few steps as many as the device "
        "has room for; everything is then compiled once more",
        default=True,
        change=Change.COMPILED,
    )
    activation_memory_budget: float = option(
        "share, from 0 to 1, of the memory for activations that compiled code would like to save for backward; what "
        "does not fit is computed again, the cheapest first",
        default=1.0,
        check=share,
        change=Change.COMPILED,
    )
    offload: tuple[Literal["optimizer", "activations", "parameters"], ...] = option(
        "what lies in the host's memory and comes to the device when it is needed. ``'optimizer'``: the state of "
        "optimizers that is as large as the weights (Adam's moments); the step, computed on the device as ever, takes "
        "as long as it takes to copy it there and back. ``'activations'`` and ``'parameters'`` do not exist yet, and "
        "are refused",
        default=(),
        check=offloaded,
        change=Change.APPLIED,
    )
    reduce_dtype: Literal["bf16", "16", "32"] | None = option(
        "dtype of gradients on the wire; by default ``'bf16'`` for ``precision='bf16-mixed'`` and otherwise each "
        "parameter's own",
        default=None,
        change=Change.APPLIED,
    )
    broadcast_buffers: bool = option(
        "as in ``DistributedDataParallel``: before the first forward after each optimizer step rank 0's buffers "
        "(running statistics, codebooks) are sent to all ranks: those of modules in which one changes",
        default=True,
        change=Change.APPLIED,
    )
    state_dict_type: Literal["full", "sharded"] = option(
        "as in ``FSDPStrategy``: ``'full'`` saves one file with whole values, as a single process would; ``'sharded'`` "
        "a folder, into which all ranks write their parts at once. Either can be loaded, whatever is chosen here, on "
        "any number of ranks",
        default="full",
        change=Change.APPLIED,
    )
    async_save: bool = option(
        "save checkpoints beside training: a copy in the host's memory is made beside the next forward and backward, "
        "and another process writes it. One at a time; errors show at the next save and at the end of ``fit``",
        default=False,
        change=Change.APPLIED,
    )
    timeout: timedelta | None = option(
        "how long ranks wait for each other", default=default_pg_timeout, change=Change.REFUSED, shown="30 minutes"
    )
    process_group_backend: str | None = option(
        "of ``torch.distributed``; by default ``'nccl'`` on CUDA and ``'gloo'`` on the CPU",
        default=None,
        change=Change.REFUSED,
    )
    tuning: Tuning = option(
        "a ``Tuning``, or a dict of its options; see there",
        default=Tuning(),
        change=Change.APPLIED,
        shown="`Tuning()`",
    )

    def __post_init__(self) -> None:
        if isinstance(self.tuning, Mapping):
            object.__setattr__(self, "tuning", Tuning(**self.tuning))
        if isinstance(self.offload, list):  # as command lines and YAML have it
            object.__setattr__(self, "offload", tuple(self.offload))
        check_options(self)
        tuning = self.tuning
        if not isinstance(tuning, Tuning):
            raise ValueError(f"tuning={tuning!r} must be a lightning_zero.Tuning, or a dict of its options.")
        self._check_resident(tuning)

    def _check_resident(self, tuning: Tuning) -> None:
        auto = self.reshard_after_forward == "auto"
        if self.stage < 3 and (auto or tuning.resident_mb is not None):
            other = "reshard_after_forward='auto'" if auto else f"resident_mb={tuning.resident_mb!r}"
            raise ValueError(
                f"stage={self.stage} and {other} contradict each other: stages 1 and 2 keep all weights. Pass one of "
                "them."
            )
        if self.stage < 3 and not tuning.prefetch:
            raise ValueError(f"stage={self.stage} needs the passes that prefetch=False turns off. Leave prefetch on.")
        if tuning.resident_mb is not None and self.reshard_after_forward is not True:
            raise ValueError(
                f"resident_mb={tuning.resident_mb!r} and reshard_after_forward={self.reshard_after_forward!r} "
                "contradict each other. Pass one of them."
            )
        if self.resident_until == "step" and not (self.resident_mb and tuning.prefetch):
            raise ValueError(
                "resident_until='step' keeps nothing without a budget and the passes. Pass "
                "reshard_after_forward=False for all parameters or set resident_mb, and leave prefetch on."
            )

    @classmethod
    def nearest(cls) -> dict[str, str]:
        """Names that may have been meant, and how they are written."""
        inside = {name: f"tuning=Tuning({name}=...)" for name in option_fields(Tuning)}
        return inside | {f.name: f.name for f in fields(cls)}

    @property
    def resident_mb(self) -> float | Literal["auto"]:
        """MiB of whole parameters that are not resharded after forward; ``"auto"``: to be measured."""
        if self.stage < 3:
            return float("inf")
        if self.reshard_after_forward == "auto":
            return "auto"
        return float("inf") if not self.reshard_after_forward else self.tuning.resident_mb or 0.0

    @property
    def resident_until(self) -> Literal["backward", "step"]:
        """How long they stay."""
        return "step" if self.stage < 3 else self.tuning.resident_until

    @property
    def cuda_graph_step(self) -> WhereCaptured:
        """Whether the optimizer's step is captured."""
        own = self.tuning.cuda_graph_step
        return self.cuda_graphs if own is None else own

    @property
    def cuda_graph_model(self) -> WhereCaptured:
        """Whether forward and backward of compiled code are captured. What is not compiled cannot be, and is not
        asked for by ``cuda_graphs=True``."""
        own = self.tuning.cuda_graph_model
        if own is None:
            return self.cuda_graphs if self.compile else False
        return own

    def named(self, name: Literal["cuda_graph_step", "cuda_graph_model"]) -> str:
        """Which option the user has set to choose this: itself, or ``cuda_graphs``."""
        return "cuda_graphs" if getattr(self.tuning, name) is None else name
