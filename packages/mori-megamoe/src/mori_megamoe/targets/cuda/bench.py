"""GEMM1 + SwiGLU + requantise on one GPU, bodies R and A, beside what torch and Triton do.

    python -m mori_megamoe.targets.cuda.bench [--shape v4_pro|flash] [--tokens 2048,4096,8192] [--rounds 7]
        [--tile-rows 128]

How it measures: all cases in one process, in a random order in each round, three launches between two events
each; the median over the rounds (loop), and once more a single launch behind a pause of 30 ms (single: the
clocks are higher). Rows of an expert are uneven (weights exp(0.25 randn)); TFLOP/s counts real rows only,
padding is not counted. Inputs are random: a GPU that multiplies zeros is faster. Two different experts'
weights are repeated, rows repeat every 8192.

torch does dense products of as many rows: no experts, no scales of 32, no SwiGLU: ceilings, not competitors.
R and A are checked against float64 in the same run: their hidden rows, requantised, within 5 % (e4m3 alone
costs 3.3 %).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mori_megamoe import mx
from mori_megamoe.targets.cuda.gemm1 import Buffers, Gemm1
from mori_megamoe.targets.cuda.limits import TILE_ROWS
from mori_megamoe.targets.cuda.operand_rows import OperandRows
from mori_megamoe.targets.cuda.tiles import HostTile, TileArrays
from mori_megamoe.targets.cuda.triton_baseline import grouped_dot_scaled
from mori_megamoe.targets.cuda.weights import prepare_weights

SHAPES = {"v4_pro": (7168, 3072, 48), "flash": (4096, 2048, 32)}
TOPK, LIMIT, DISTINCT = 6, 10.0, 2
# Loop medians of the prototype that this kernel grew out of, on an H200: to be reached.
PROTOTYPE_US = {
    ("v4_pro", "A"): {2048: 1910, 4096: 3451, 8192: 6438},
    ("v4_pro", "R"): {2048: 1457, 4096: 2597, 8192: 4838},
    ("flash", "A"): {2048: 624, 4096: 1227, 8192: 2428},
    ("flash", "R"): {2048: 501, 4096: 962, 8192: 1932},
}
MOST_ERROR = 0.05
Launch = Callable[[], object]


@dataclass
class Weights:
    """Of all experts, as each contender wants them."""

    codes: torch.Tensor  # [E, 2 I, D / 2] row-major
    scales: torch.Tensor  # [E, 2 I, D / 32]
    stored: torch.Tensor
    stored_scales: torch.Tensor

    @classmethod
    def random(cls, experts: int, inter_dim: int, model_dim: int) -> Weights:
        generator = torch.Generator("cuda").manual_seed(9000)
        shape = (2 * inter_dim, model_dim)
        form, scale_form = (
            mx.W1Bytes(2 * inter_dim, model_dim // 2),
            mx.W1Scales(2 * inter_dim, model_dim // 32),
        )
        made = []
        for _ in range(DISTINCT):
            w = torch.randn(shape, device="cuda", generator=generator) * model_dim**-0.25
            codes, scales = mx.quantize_weight(w)
            made.append((codes, scales, form.shuffle(codes), scale_form.shuffle(scales)))
        return cls(*[torch.stack([made[e % DISTINCT][i] for e in range(experts)]) for i in range(4)])

    def exact(self, expert: int) -> torch.Tensor:
        """[2 I, D] float64."""
        values = mx.decode_e2m1(mx.unpack_e2m1(self.codes[expert]), torch.float64)
        factors = mx.decode_e8m0(self.scales[expert], torch.float64).repeat_interleave(32, dim=1)
        return values * factors


@dataclass
class Rows:
    """Routed rows, expert after expert, padded to tiles."""

    counts: list[int]
    tile_rows: int
    tiles: list[HostTile]
    codes: torch.Tensor  # [rows, D] uint8 e4m3
    scales: torch.Tensor  # [rows, D / 32] uint8

    @classmethod
    def random(cls, tokens: int, experts: int, model_dim: int, tile_rows: int) -> Rows:
        generator = torch.Generator().manual_seed(3)
        likely = torch.exp(0.25 * torch.randn(experts, generator=generator))
        chosen = torch.multinomial(likely, tokens * TOPK, replacement=True, generator=generator)
        counts = torch.bincount(chosen, minlength=experts).tolist()
        tiles: list[HostTile] = []
        for expert, count in enumerate(counts):
            for _ in range(0, count, tile_rows):
                tiles.append(HostTile(expert, len(tiles) * tile_rows, len(tiles) * tile_rows))
        rows = len(tiles) * tile_rows
        on_gpu = torch.Generator("cuda").manual_seed(1)
        x = torch.randn(min(rows, 8192), model_dim, device="cuda", generator=on_gpu)
        x *= 0.5 + torch.rand(len(x), 1, device="cuda", generator=on_gpu)
        codes, scales = mx.quantize_input(x.bfloat16())
        repeat = -(-rows // len(x))
        return cls(
            counts,
            tile_rows,
            tiles,
            codes.repeat(repeat, 1)[:rows].contiguous(),
            scales.to(torch.uint8).repeat(repeat, 1)[:rows].contiguous(),
        )


def our_cases(body: str, weights: Weights, rows: Rows, inter_dim: int) -> tuple[dict[str, Launch], Buffers]:
    """The body, and the pass that makes its rows of quantised ones."""
    count, model_dim = rows.codes.shape
    prepared = prepare_weights(
        weights.stored, weights.stored_scales, model_dim=model_dim, inter_dim=inter_dim, body=body
    )

    def codes(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device="cuda")

    operand = (
        codes(count, model_dim)
        if body == "R"
        else torch.empty(count, model_dim, dtype=torch.bfloat16, device="cuda")
    )
    row_scale = codes(count) if body == "R" else None
    columns = inter_dim // 32
    buffers = Buffers(
        operand, row_scale, codes(count, inter_dim), codes(count, columns), codes(count * columns)
    )
    made = OperandRows(body, rows.codes.view(torch.float8_e4m3fn), rows.scales, operand, row_scale)
    tiles = TileArrays.of_plan(rows.tiles, inter_dim // 256, rows.tile_rows, "cuda")
    gemm = Gemm1(prepared, buffers, tiles, limit=LIMIT, tile_rows=rows.tile_rows)
    made.launch(torch.cuda.current_stream().cuda_stream)
    passes = "rebase rows" if body == "R" else "rows to bf16"
    return {
        body: lambda: gemm.launch(torch.cuda.current_stream().cuda_stream),
        passes: lambda: made.launch(torch.cuda.current_stream().cuda_stream),
    }, buffers


def other_cases(weights: Weights, rows: Rows, inter_dim: int, *, triton: bool) -> dict[str, Launch]:
    """Dense products of torch with as many rows, and the grouped one that Triton emulates."""
    n, model_dim, real = 2 * inter_dim, rows.codes.shape[1], sum(rows.counts)
    x = torch.randn(real, model_dim, device="cuda")
    w = torch.randn(n, model_dim, device="cuda")
    x16, w16 = x.bfloat16(), w.bfloat16()
    x8, w8 = (x * 60).to(torch.float8_e4m3fn), (w * 60).to(torch.float8_e4m3fn)
    by_row, by_column = torch.ones(real, 1, device="cuda"), torch.ones(1, n, device="cuda")
    by_block = torch.ones(model_dim // 128, real, device="cuda").t()
    w_by_block = torch.ones(n // 128, model_dim // 128, device="cuda").t()
    cases: dict[str, Launch] = {
        "torch bf16": lambda: x16 @ w16.t(),
        "torch fp8 rowwise": lambda: torch._scaled_mm(
            x8, w8.t(), by_row, by_column, out_dtype=torch.bfloat16, use_fast_accum=True
        ),
        "torch fp8 blockwise": lambda: torch._scaled_mm(
            x8, w8.t(), by_block, w_by_block, out_dtype=torch.bfloat16
        ),
    }
    if triton and rows.tile_rows == 128:
        out = torch.empty(len(rows.codes), n, dtype=torch.bfloat16, device="cuda")
        experts = torch.tensor([tile.expert for tile in rows.tiles], dtype=torch.int32, device="cuda")
        cases["Triton dot_scaled"] = lambda: grouped_dot_scaled(
            rows.codes.view(torch.float8_e4m3fn), rows.scales, weights.codes, weights.scales, experts, out
        )
    return cases


def error_of(weights: Weights, rows: Rows, buffers: Buffers) -> float:
    """Of hidden rows as Stage2 reads them, against float64: the first and the last tile, real rows."""
    assert buffers.scales is not None
    errors = []
    for tile in (rows.tiles[0], rows.tiles[-1]):
        before = sum(t.expert == tile.expert and t.row_base < tile.row_base for t in rows.tiles)
        real = min(rows.tile_rows, rows.counts[tile.expert] - before * rows.tile_rows)
        here = slice(tile.row_base, tile.row_base + real)
        x = mx.decode_e4m3(rows.codes[here], torch.float64)
        x = x * mx.decode_e8m0(rows.scales[here], torch.float64).repeat_interleave(32, dim=1)
        gate, up = (x @ weights.exact(tile.expert).T).chunk(2, dim=1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        want = torch.nn.functional.silu(gate) * up
        got = mx.dequantize(buffers.out[here], buffers.scales[here]).double()
        errors.append(float((got - want).norm() / want.norm()))
    return max(errors)


def timed(launch: Launch, calls: int) -> float:
    """Microseconds of one call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        launch()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / calls


def measure(cases: dict[str, Launch], rounds: int) -> dict[str, tuple[list[float], float]]:
    """By case: times in a loop, and the median of single launches."""
    for launch in cases.values():
        launch()
    torch.cuda.synchronize()
    loop: dict[str, list[float]] = {name: [] for name in cases}
    single: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name in random.sample(list(cases), len(cases)):
            took = timed(cases[name], 3)
            if number:  # the first round warms up
                loop[name].append(took)
    for _ in range(rounds):
        for name in random.sample(list(cases), len(cases)):
            time.sleep(0.03)
            single[name].append(timed(cases[name], 1))
    return {name: (loop[name], statistics.median(single[name])) for name in cases}


def bench(shape: str, tokens: int, weights: Weights, rounds: int, tile_rows: int, *, triton: bool) -> bool:
    """One table; whether the bodies were right."""
    model_dim, inter_dim, experts = SHAPES[shape]
    rows = Rows.random(tokens, experts, model_dim, tile_rows)
    cases, right = other_cases(weights, rows, inter_dim, triton=triton), True
    errors = {}
    for body in ("R", "A"):
        ours, buffers = our_cases(body, weights, rows, inter_dim)
        ours[body]()
        errors[body] = error_of(weights, rows, buffers)
        right = right and errors[body] <= MOST_ERROR
        cases |= ours
    real, padded = sum(rows.counts), len(rows.codes)
    flops = 4 * real * model_dim * inter_dim
    print(f"\n{shape}, {tokens} tokens: {real} rows of {experts} experts, {padded} in tiles of {tile_rows}")
    print(f"{'':22}{'loop us':>9}{'min':>8}{'max':>8}{'TFLOP/s':>9}{'single us':>11}{'prototype':>11}  error")
    results: list[dict[str, object]] = []
    for name, (times, once) in measure(cases, rounds).items():
        us, prototype = statistics.median(times), PROTOTYPE_US.get((shape, name), {}).get(tokens)
        line = f"{name:22}{us:9.0f}{min(times):8.0f}{max(times):8.0f}{flops / us / 1e6:9.0f}{once:11.0f}"
        error = f"  {errors[name]:.1e}" if name in errors else ""
        print(f"{line}{prototype or '':>11}{error}")
        found: dict[str, object] = {
            "op": "megamoe-gemm1",
            "backend": "cuda",
            "device": torch.cuda.get_device_name(),
            "shape": {"name": shape, "tokens": tokens, "rows": real, "padded": padded, "tile": tile_rows},
            "mode": name,
            "median_us": round(us, 1),
            "min_us": round(min(times), 1),
            "max_us": round(max(times), 1),
            "single_us": round(once, 1),
            "reps": rounds,
            "rel_l2": errors.get(name),
            "validated": errors[name] <= MOST_ERROR if name in errors else None,
        }
        results.append(found)
    for found in results:
        print("RESULT_JSON " + json.dumps(found))
    return right


def main(argv: list[str] | None = None) -> int:
    """0: all bodies were right."""
    parser = argparse.ArgumentParser(description="GEMM1 of the layer on one GPU, beside torch and Triton")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="v4_pro")
    parser.add_argument("--tokens", default="2048,4096,8192", help="tokens per rank, several with commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--tile-rows", default="128", help=f"several with commas, of {TILE_ROWS}; Triton's are 128"
    )
    parser.add_argument("--no-triton", action="store_true", help="leave the slowest contender out")
    args = parser.parse_args(argv)
    model_dim, inter_dim, experts = SHAPES[args.shape]
    weights = Weights.random(experts, inter_dim, model_dim)
    sizes = [int(tokens) for tokens in args.tokens.split(",")]
    tiles = [int(rows) for rows in args.tile_rows.split(",")]
    triton = not args.no_triton
    right = [bench(args.shape, n, weights, args.rounds, t, triton=triton) for n in sizes for t in tiles]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
