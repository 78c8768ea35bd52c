"""What a step would take on many hosts, by lightning_zero's model of scale: arithmetic, nothing is run.

    python examples/benchmarks/scale_model.py                            tables of 8, 64 and 512 hosts
    python examples/benchmarks/scale_model.py --measured                 the model beside what was measured on one host
    python examples/benchmarks/scale_model.py --across 12.5 --tokens 1024

Bandwidths are those that are reached, in GB/s of one GPU in one direction.
"""

import argparse

from lightning_zero.profiling.scale.compare import Choice, compare
from lightning_zero.profiling.scale.estimate import Estimate, estimate
from lightning_zero.profiling.scale.given import Cluster, Decoder, Model
from lightning_zero.profiling.scale.sharding import BEFORE, SHARDINGS

# Llama 3's shapes, all of which have keys and values of 1024.
SHAPES = {
    "8B": Decoder(8_030_261_248, 32, 4096, 14336, 1024, 128_256),
    "70B": Decoder(70_553_706_496, 80, 8192, 28672, 1024, 128_256),
    "405B": Decoder(405_853_388_800, 126, 16384, 53248, 1024, 128_256),
}
RECOMPUTED = {"70B", "405B"}
BENCH = {
    "1.36B": Decoder(1_364_297_728, 24, 2048, 5632, 2048, 32_000),
    "6.7B": Decoder(6_738_415_616, 32, 4096, 11008, 4096, 32_000),
}
# What one step took on two H200s, in milliseconds and GiB (2026-11-22-whole-table-2xh200.md), beside the flops that the
# model alone reaches in a second: its step on one GPU without communication took 69.6, 19.9, 84.9 and 171 ms, a quarter
# of the optimizer's work among it, which is taken off.
MEASURED = [
    ("1.36B", 2, 2048, 1, "no", 543e12, "75.6 to 80.2", 77.9, 19.73),
    ("1.36B", 1, 512, 1, "backward", 254e12, "23.9", 23.9, 15.53),
    ("1.36B", 1, 1024, 4, "step", 424e12, "106.4", 106.4, 16.72),
    ("6.7B", 1, 2048, 1, "no", 549e12, "200 to 209.3", 204.7, 68.03),
]


def cluster_of(arguments: argparse.Namespace, hosts: int, gpus: int = 8, flops: float | None = None) -> Cluster:
    memory = arguments.memory * 1e9 * 0.9  # the rest is for fragments, libraries, and what the model does not know
    flops = flops or arguments.tflops * 1e12
    return Cluster(hosts, gpus, memory, flops, 4.2e12, arguments.inside * 1e9, arguments.across * 1e9)


def cell(found: Estimate) -> str:
    nbytes = f"{found.memory.total / 1e9:.0f}"
    return f"{found.seconds * 1e3:.0f} ({found.exposed_s * 1e3:.0f}), {nbytes if found.fits else nbytes + '!'}"


def chosen(choices: list[Choice]) -> str:
    best, *others = choices
    if not best.estimate.fits:
        return f"nothing fits; the least is {best.name}"
    worse = [f"{one.name} +{one.slower:.0%}" for one in others if one.estimate.fits and one.slower >= 0.01]
    return best.name + (f" ({', '.join(worse)})" if worse else "")


def show_tables(arguments: argparse.Namespace) -> None:
    shardings = [one for one in SHARDINGS if arguments.accumulate > 1 or one.name != "host, step"]
    names = [shardings[0].name, BEFORE.name, *(one.name for one in shardings[1:])]
    for tokens in arguments.tokens:
        print(f"\n{tokens} tokens per GPU, {arguments.accumulate} micro-batches, {arguments.across:g} GB/s across:\n")
        print(f"| model | hosts of 8 | {' | '.join(names)} | choose |\n|---|---:|{'---:|' * len(names)}---|")
        for name, shape in SHAPES.items():
            model = shape.model(1, tokens, name in RECOMPUTED, arguments.accumulate)
            for hosts in arguments.hosts:
                cluster = cluster_of(arguments, hosts)
                choices = compare(model, cluster, shardings)
                cells = {choice.name: cell(choice.estimate) for choice in choices}
                cells[BEFORE.name] = cell(estimate(model, cluster, BEFORE))
                print(f"| {name} | {hosts} | {' | '.join(cells[one] for one in names)} | {chosen(choices)} |")


def show_roles(arguments: argparse.Namespace) -> None:
    roles = ["masters", "optimizer", "gradients", "compute_copy", "gathered", "buckets", "activations"]
    print(f"\nGB of one rank, 4096 tokens:\n\n| model | hosts of 8 | | {' | '.join(roles)} | all |")
    print(f"|---|---:|---|{'---:|' * (len(roles) + 1)}".replace("_", " "))
    for name, shape in SHAPES.items():
        for hosts in arguments.hosts:
            for sharding in (one for one in SHARDINGS if one.name in ("host", "all", "hybrid")):
                model = shape.model(1, 4096, name in RECOMPUTED)
                memory = estimate(model, cluster_of(arguments, hosts), sharding).memory
                cells = [f"{getattr(memory, role) / 1e9:.1f}" for role in roles]
                print(f"| {name} | {hosts} | {sharding.name} | {' | '.join(cells)} | {memory.total / 1e9:.1f} |")


def show_measured(arguments: argparse.Namespace) -> None:
    print("| model, tokens | measured ms | the model says | off by | measured GiB | the model says |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, batch, length, accumulate, kept, flops, words, ms, gib in MEASURED:
        given = BENCH[name].model(batch, length, micro_batches=accumulate)
        model = Model(**{**vars(given), "kept": kept})
        found = estimate(model, cluster_of(arguments, 1, 2, flops), SHARDINGS[0])
        says, whole = found.seconds * 1e3, found.memory.total / 2**30
        what = f"{name}, {f'{accumulate} accumulated ' if accumulate > 1 else ''}{batch}x{length}"
        print(f"| {what} | {words} | {says:.1f} | {says / ms - 1:+.0%} | {gib} | {whole:.1f} |")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192], help="of a GPU in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--inside", type=float, default=265.0, help="GB/s; H200: 332 of 450 alone, 265 beside compute")
    parser.add_argument("--across", type=float, default=45.0, help="GB/s; a card of 400 Gb/s for each GPU has 50")
    parser.add_argument("--tflops", type=float, default=545.0, help="that a GPU reaches in forward and backward")
    parser.add_argument("--memory", type=float, default=141.0, help="GB of a GPU; a tenth is left free")
    parser.add_argument("--measured", action="store_true", help="compare with what was measured on one host")
    parser.add_argument("--roles", action="store_true", help="what the bytes of a rank are for")
    arguments = parser.parse_args(argv)
    if arguments.measured:
        show_measured(arguments)
    elif arguments.roles:
        show_roles(arguments)
    else:
        show_tables(arguments)


if __name__ == "__main__":
    main()
