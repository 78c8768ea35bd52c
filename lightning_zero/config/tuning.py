"""Options that few trainings need, each defined once, as those in ``options.py`` are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

from lightning_zero.config.option import (
    OnChange,
    check_count,
    check_mib,
    check_options,
    option,
    option_fields,
    options,
    check_positive,
)
from lightning_zero.config.text import document_options

__all__ = ["GROUPS", "RecomputePolicy", "Transport", "Tuning", "CaptureMode"]

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

    ``ZeroStrategy(tuning=Tuning(unsharded_cache_mb=2000))``, or a dict of the same.
    """

    owner: ClassVar[str] = "Tuning"

    unsharded_cache_mb: float | None = _memory(
        "so many MiB of whole parameters, in the dtype they are used in, stay from forward to backward on every rank "
        "instead of being gathered twice: between ``reshard_after_forward=True`` (0) and ``False`` (all)",
        default=None,
        check=check_mib,
        on_change=OnChange.RECOMPILE,
    )
    unsharded_cache_until: Literal["backward", "step"] = _memory(
        "how long parameters stay that are not resharded after forward. ``'step'``: until the optimizer steps, so that "
        "accumulated micro-batches gather them once; what is written to ``param.data`` between micro-batches counts "
        "from the next optimizer step on",
        default="backward",
        on_change=OnChange.RECOMPILE,
    )
    recompute: RecomputePolicy | None = _memory(
        "decides for single activations of compiled code: called with an op's name, the bytes of its result and the "
        "path of the module that it belongs to; True: compute it again in backward, False: save it, None: no opinion",
        default=None,
        on_change=OnChange.RECOMPILE,
    )
    offload_buffer_mb: float = _memory(
        "so many MiB of the device through which passes what ``offload`` has put on the host; as much of optimizers' "
        "state goes both ways beside forward and backward. With ``memory`` a plan may choose more of them",
        default=256.0,
        check=_mib(256),
        on_change=OnChange.APPLY,
    )
    state_dtype: Literal["bf16"] | None = _memory(
        "``'bf16'``: what optimizers keep for each element of a parameter of at least 4096 (Adam's moments) is "
        "bfloat16, rounded stochastically at each step: half the memory, and half of what ``offload`` copies, where "
        "memory is short; single elements' steps of Adam are off by 2 to 4 %. For optimizers whose formula is known",
        default=None,
        on_change=OnChange.APPLY,
        default_text="as the optimizer makes it",
    )
    offload_activations_mb: float | None = _memory(
        "``offload=('activations',)``: at most so many MiB of what compiled code saves leave in a pass, of each graph "
        "what is not needed for longest first; compute waits where copies take longer. None: what copies hide behind "
        "compute",
        default=None,
        check=check_mib,
        on_change=OnChange.RECOMPILE,
        default_text="what hides",
    )
    free_reduce_buckets: bool = _memory(
        "give the reduce buckets' memory back after each backward", default=False, on_change=OnChange.APPLY
    )
    grad_aliasing: bool | None = _memory(
        "reduced gradients lie, in bfloat16, where the weights' copies lay that were computed with, which nobody needs "
        "again before the step: 4 bytes less for each weight of a rank's shards. With ``precision='bf16-mixed'``, on "
        "one host, where each step has one micro-batch; what needs weights between a backward and the step may raise. "
        "``param.grad`` is bfloat16 until the step, and None from then on. None: with ``memory``, where a training "
        "does not fit otherwise and all of that is so for certain; otherwise not",
        default=None,
        on_change=OnChange.REFUSE,
        default_text="what `memory` needs",
    )

    prefetch: bool = _communication(
        "gather parameters in groups, ahead of their use; otherwise one by one, where they are used",
        default=True,
        on_change=OnChange.RECOMPILE,
    )
    prefetch_mb: float | None = _communication(
        "at most so many MiB of whole parameters in flight or in use at once, as far as groups are started more than "
        "one ahead of their use; by default two groups. More hides more of the transfers where batches are small, for "
        "memory",
        default=None,
        check=_mib(256, none=True),
        on_change=OnChange.RECOMPILE,
        default_text="two groups",
    )
    gather_group_mb: float = _communication(
        "at most so many MiB of whole parameters in a group, and in a part of what hosts exchange",
        default=128.0,
        check=_mib(128),
        on_change=OnChange.RECOMPILE,
    )
    reduce_group_mb: float = _communication(
        "at most so many MiB of gradients wait until compiled code hands them over together",
        default=64.0,
        check=_mib(64),
        on_change=OnChange.RECOMPILE,
    )
    reduce_bucket_mb: float = _communication(
        "capacity of a reduce bucket in MiB, over all ranks' parts; a larger gradient gets a bucket of its own",
        default=64.0,
        check=_mib(64),
        on_change=OnChange.APPLY,
    )
    reduce_double_buffer: bool = _communication(
        "fill one bucket while the other is reduced", default=True, on_change=OnChange.APPLY
    )
    gather_transport: Transport = _communication(
        "how parameters travel. ``'auto'``: between GPUs of one host, with CUDA 13, compiled code copies "
        "them out of its peers' memory, which takes no SMs; between CPU processes of one host all code does; "
        "elsewhere they are all-gathered. ``'copy'``: copy, or raise where that cannot be. ``'collective'``: always "
        "all-gather",
        default="auto",
        on_change=OnChange.NEGOTIATE,
    )
    reduce_transport: Transport = _communication(
        "how gradients travel. ``'auto'``: between GPUs of one host, with CUDA 13, they are copied into their peers' "
        "memory and added up there in float32; elsewhere they are reduce-scattered. ``'copy'`` and ``'collective'`` as "
        "above",
        default="auto",
        on_change=OnChange.NEGOTIATE,
    )
    ranks_per_host: int | None = _communication(
        "so many neighbouring ranks are taken for those of one host; by default ranks find out where they run. The "
        "number of all ranks: there is one host, and every collective is one of all ranks",
        default=None,
        check=check_count,
        on_change=OnChange.REFUSE,
        default_text="found out",
    )
    compute_shard_group: Literal["host", "all"] = _communication(
        "with several hosts, over which ranks the weights are sharded that compiled code reads. ``'host'``: over those "
        "of each host, which exchange them with other hosts once per optimizer step; ``'all'``: over all, which takes "
        "less memory, and every gather crosses hosts",
        default="host",
        on_change=OnChange.REFUSE,
    )
    replicate_over: Literal["hosts"] | None = _communication(
        "``'hosts'``: with several hosts, each holds all of the model and of the optimizer's state, sharded over its "
        "ranks (``HYBRID_SHARD``): no weights cross hosts, and gradients that a host has reduced are all-reduced. For "
        "code that is not compiled, whose every gather crosses hosts otherwise, where a host has the memory; what "
        "compiled code sends across is as much, and more of it with accumulated micro-batches",
        default=None,
        on_change=OnChange.REFUSE,
    )
    cross_host_reduce: Literal["micro-batch", "step"] = _communication(
        "with several hosts, when these reduce the gradients of accumulated micro-batches. ``'micro-batch'``: in each "
        "backward; ``'step'``: in the last one, so that the network is used once per optimizer step, for the memory of "
        "one float32 gradient of the weights that a rank holds of its host's. Until then ``param.grad`` holds zeros",
        default="micro-batch",
        on_change=OnChange.APPLY,
    )
    consensus_timeout_s: float = _communication(
        "a rank that has compiled a graph waits so many seconds for ranks that are not compiling before it raises "
        "``RankMismatchError``",
        default=25.0,
        check=check_positive("seconds", 25),
        on_change=OnChange.APPLY,
    )

    cuda_graph_step: CaptureMode | None = _cuda_graphs(
        "``cuda_graphs`` for norm, clipping and the optimizer's step alone",
        default=None,
        on_change=OnChange.APPLY,
        default_text="as `cuda_graphs`",
    )
    cuda_graph_model: CaptureMode | None = _cuda_graphs(
        "``cuda_graphs`` for forward and backward of compiled code alone",
        default=None,
        on_change=OnChange.APPLY,
        default_text="as `cuda_graphs`",
    )

    compile_dynamic: bool | None = _compile(
        "as in ``torch.compile(dynamic=...)``: None lets sizes become dynamic when they change",
        default=None,
        on_change=OnChange.RECOMPILE,
    )
    compile_whole_graphs: bool = _compile(
        "trace and compile each graph in one piece; otherwise what repeats in it (layers) is differentiated and "
        "compiled once, in seconds however many there are",
        default=False,
        on_change=OnChange.RECOMPILE,
    )

    report_stall_after_s: float = _debugging(
        "after so many seconds of waiting every rank says on stderr which rank is missing, where it was last and where "
        "the others wait; after ``timeout`` the job ends with that text",
        default=30.0,
        check=check_positive("seconds", 30),
        on_change=OnChange.APPLY,
    )
    sync_collectives: bool = _debugging(
        "wait on the host before and after every collective", default=False, on_change=OnChange.APPLY
    )
    poison: bool = _debugging(
        "on a CPU: parameters and gradients are NaN until they have been waited for and after they have been released, "
        "and ranks run at random speeds; results stay the same",
        default=False,
        on_change=OnChange.APPLY,
    )
    emulate_cross_host_gb_per_s: float | None = _debugging(
        "with several hosts: weights and gradients that cross them arrive no sooner than at so many GB/s for each "
        "rank, to try a slow network where there is none (two GPUs as two hosts, by ``ranks_per_host``)",
        default=None,
        check=check_positive("GB/s", 50, none=True),
        on_change=OnChange.APPLY,
    )
    emulate_cuda_graph_step: bool = _debugging(
        "on any device, do what a captured optimizer step does, without the graph",
        default=False,
        on_change=OnChange.APPLY,
    )
    emulate_cuda_graph_model: bool = _debugging(
        "on any device, do what a replay of compiled code does, without the graphs",
        default=False,
        on_change=OnChange.APPLY,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.replicate_over == "hosts" and self.compute_shard_group == "all":
            raise ValueError(
                "replicate_over='hosts' and compute_shard_group='all' contradict each other: where each host holds the "
                "model, no gather crosses hosts. Pass one of them."
            )

    @classmethod
    def suggestions(cls) -> dict[str, str]:
        """Names that may have been meant, and how they are written."""
        from lightning_zero.config.options import Options  # which holds a Tuning

        outside = {name: f"ZeroStrategy({name}=...)" for name in option_fields(Options)}
        return outside | {name: name for name in option_fields(cls)}
