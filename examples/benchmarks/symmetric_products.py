"""Time and error of symmetric products beside torch's, for the matrices of Llama; prints one line per shape.

    python examples/benchmarks/symmetric_products.py
    python examples/benchmarks/symmetric_products.py --sweep

Columns: `product` is `X X^T`, `polynomial` is `b A + c A A + a I`, `muon` is Newton-Schulz with five steps. Each has
torch's time in ms, ours, and torch's divided by ours. For `muon`, torch's is the loop of `torch.optim.Muon` in batches.
Errors are Frobenius norms relative to float32, of torch and ours, for each of the three. `--sweep` times block sizes.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_zero.optim import symmetric_products
from lightning_zero.optim.descriptor_kernel import symmetric_product as with_blocks
from lightning_zero.optim.newton_schulz import newton_schulz
from lightning_zero.optim.symmetric_kernel import Blocks
from lightning_zero.optim.symmetric_products import symmetric_product

# Number, rows, columns.
SHAPES = [
    (1, 2048, 2048),
    (8, 2048, 2048),
    (8, 2048, 5632),
    (8, 5632, 2048),
    (16, 512, 2048),
    (4, 1024, 4096),
    (1, 4096, 4096),
    (4, 4096, 4096),
    (2, 4096, 14336),
    (2, 14336, 4096),
]
A, B, C = COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SWEEP = [
    Blocks(rows=128, inner=64, warps=warps, stages=stages, ratio=ratio)
    for ratio, warps, stages in ((2, 8, 3), (2, 8, 4), (1, 8, 3), (1, 8, 4), (1, 4, 3), (1, 4, 4))
]


def time_ms(fn: Callable[[], Tensor], times: int) -> float:
    for _ in range(2):
        fn()
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


def torchs_loop(updates: Tensor) -> Tensor:
    x = updates.mT if updates.size(-2) > updates.size(-1) else updates
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if updates.size(-2) > updates.size(-1) else x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="time all block sizes")
    parser.add_argument("--times", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernel: {symmetric_products.can_launch(device)}")
    print(f"{'number x rows x columns':24} {'product':>22} {'polynomial':>22} {'muon':>24}   errors")
    for shape in SHAPES:
        updates = torch.randn(shape, device=device).bfloat16()
        x = updates / updates.float().norm(dim=(-2, -1), keepdim=True).bfloat16()
        x = x.mT if shape[1] > shape[2] else x
        gram = symmetric_product(x)
        pairs = [
            (lambda x=x: torch.bmm(x, x.mT), lambda x=x: symmetric_product(x)),
            (
                lambda gram=gram: torch.baddbmm(gram, gram, gram, beta=B, alpha=C),
                lambda gram=gram: symmetric_product(gram, base=gram, alpha=C, beta=B, shift=A),
            ),
            (
                lambda updates=updates: torchs_loop(updates),
                lambda updates=updates: newton_schulz(updates, COEFFICIENTS, 5, 1e-7),
            ),
        ]
        line = f"{' x '.join(map(str, shape)):24}"
        for torchs, ours in pairs:
            before, after = time_ms(torchs, arguments.times), time_ms(ours, arguments.times)
            line += f" {before:8.3f} {after:8.3f} {before / after:5.2f}"
        wide = x.float() @ x.float().mT
        polynomial = B * gram.float() + C * gram.float() @ gram.float()
        eye = A * torch.eye(gram.size(-1), device=device)
        errors = [error(pairs[0][0](), wide), error(pairs[0][1](), wide), error(pairs[1][0](), polynomial)]
        errors.append(error(pairs[1][1]() - eye, polynomial))
        expected = torchs_loop(updates.float())
        errors += [error(fn(), expected) for fn in pairs[2]]
        print(line + "  " + " ".join(f"{value:.1e}" for value in errors), flush=True)
        assert torch.equal(gram, gram.mT), "not symmetric"
        assert errors[1] < 0.01, "the product is wrong"
        if arguments.sweep:
            sweep(x, arguments.times)


def sweep(x: Tensor, times: int) -> None:
    found = []
    for blocks in SWEEP:
        try:
            found.append((time_ms(lambda b=blocks: with_blocks(x, None, None, 1.0, 0.0, 0.0, None, b), times), blocks))
        except Exception as reason:  # such as too much shared memory
            print(f"    {tuple(blocks)}: {type(reason).__name__}")
    for ms, blocks in sorted(found)[:4]:
        print(f"    {ms:8.3f} ms: {blocks}", flush=True)


if __name__ == "__main__":
    main()
