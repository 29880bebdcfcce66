"""What fp8 costs, in numbers: by scale granularity, and on the two wires at the k of a real layer.

The first table is arithmetic alone: a [2048, 7168] standard normal, quantised and widened again. The second
is the whole path on one process: A [rows, k] and B [n, k] standard normal on each of W ranks, quantised,
multiplied in float64, and taken through the collective's own roundings.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass

import mori_bench
import torch
from mori_bench import seed_for

from mori_gemm_ar import reference
from mori_gemm_ar.quant.operands import a_scale_grid, b_scale_grid
from mori_gemm_ar.quant.quantize import Blocks, dequantize_blocks, quantize, quantize_blocks

PAYLOAD = (2048, 7168)
GRANULARITIES = (None, 512, 256, 128, 32)  # columns under one scale; None is the whole row
SCALE_BYTES = 4
WIRE_SAMPLE = (128, 1024)  # m, n
WIRE_RANKS = 8
SLAB_ROWS = 256  # rows worked on at once, so that a float64 copy of everything is never needed


@dataclass(frozen=True)
class Granularity:
    """One line of the first table."""

    columns_per_scale: int
    rel_l2: float
    scale_bytes: int
    scale_pct: float  # of the bytes of the codes


@functools.cache
def granularities(seed: int = 0) -> tuple[Granularity, ...]:
    """The error of e4m3fn at each granularity of its fp32 scales."""
    rows, columns = PAYLOAD
    x = torch.randn(PAYLOAD, generator=torch.Generator().manual_seed(seed_for(seed, "payload")))
    found = []
    for width in GRANULARITIES:
        blocks = Blocks(1, width, "fp32")
        error = sum(_squared_error(slab, blocks) for slab in torch.split(x, SLAB_ROWS))
        num_scales = rows * blocks.grid(rows, columns)[1]
        found.append(
            Granularity(
                columns_per_scale=width or columns,
                rel_l2=(error / x.double().square().sum().item()) ** 0.5,
                scale_bytes=num_scales * SCALE_BYTES,
                scale_pct=100 * num_scales * SCALE_BYTES / x.numel(),
            )
        )
    return tuple(found)


def _squared_error(x: torch.Tensor, blocks: Blocks) -> float:
    widened = dequantize_blocks(*quantize_blocks(x, blocks), blocks)
    return float((widened.double() - x.double()).square().sum())


def wire_errors(quant: str, m: int, n: int, k: int, num_ranks: int, seed: int = 0) -> dict[str, float]:
    """relL2 against float64 on the same quantised operands: {"bf16": ..., "fp8": ...}."""
    exact = torch.zeros(m, n, dtype=torch.float64)
    partials = []
    for rank in range(num_ranks):
        random = torch.Generator().manual_seed(seed_for(seed, "operands", rank))
        a, a_scale = quantize(torch.randn(m, k, generator=random), quant, "a")
        b, b_scale = quantize(torch.randn(n, k, generator=random), quant, "b")
        a_grid = a_scale_grid(a_scale, quant, m, k, a.device)
        part = reference.partial(a, b, a_grid, b_scale_grid(b_scale, quant, n, k, b.device), quant)
        exact += part
        partials.append(part.to(torch.bfloat16))
    summed = reference.reduced(partials)
    return {
        "bf16": reference.rel_l2(summed, exact),
        "fp8": reference.rel_l2(reference.fp8_wire(summed), exact),
    }


def print_accuracy(args: argparse.Namespace) -> None:
    """Both tables. k, the quantisation and the ranks are those of the command line."""
    print(f"e4m3fn with fp32 scales, a {list(PAYLOAD)} standard normal, by columns under one scale")
    lines = [
        {
            "columns": line.columns_per_scale,
            "rel_l2": line.rel_l2,
            "scale_bytes": line.scale_bytes,
            "scale_pct": f"{line.scale_pct:.2f} %",
        }
        for line in granularities(args.seed)
    ]
    print(mori_bench.table(lines, ["columns", "rel_l2", "scale_bytes", "scale_pct"]))
    m, n, k, num_ranks = WIRE_SAMPLE[0], WIRE_SAMPLE[1], args.k, args.world_size or WIRE_RANKS
    errors = wire_errors(args.quant, m, n, k, num_ranks, args.seed)
    print(f"\nerror of the two wires against float64, {args.quant}, k={k}, {num_ranks} ranks, [{m}, {n}]")
    print(
        mori_bench.table(
            [{"wire": wire, "rel_l2": error} for wire, error in errors.items()], ["wire", "rel_l2"]
        )
    )
