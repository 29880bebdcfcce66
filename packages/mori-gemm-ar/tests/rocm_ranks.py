"""Programs of several ranks on the simulated node; the tests run them below `mori-sim run`.

    rocm_ranks.py WORLD_SIZE NAME ...     prints what each rank found as one line of JSON, rank 0 first

Every rank is a process with one simulated device, and uses the op as a caller does. On a machine with GPUs
the same functions run on them (test_rocm_op.py).
"""

import ctypes
import json
import os
import signal
import sys
import time
from unittest.mock import patch

import mori_shmem
import torch
from flydsl.compiler.jit_function import JitFunction
from mori_gemm_ar import GemmAllReduce, quantize, reference
from mori_gemm_ar.options import MODES, QUANTS
from mori_gemm_ar.plan import Plan
from mori_gemm_ar.problem import Problem
from mori_gemm_ar.quant.quantize import dequantize
from mori_gemm_ar.targets.rocm.compile_variants import variants
from mori_gemm_ar.targets.rocm.gemm import shape_for
from mori_gemm_ar.testing import gx, gx_want
from mori_shmem.errors import ArgumentError, MoriError, UnsupportedShape
from mori_shmem.testing import run_ranks_to_the_end

K, M_MAX = 160, 70  # K: not a multiple of a block of scales
# Two columns of tiles, the second ragged; one for more than two ranks, which have tiles enough.
N = 120 if sys.argv[1:] and sys.argv[1].isdigit() and int(sys.argv[1]) > 2 else 136
WHOLE_K = 256  # operands that kernels take as they are, and no copies
# Two Ms in turn, a ragged last slice, no rows, fewer rows than ranks. What does not depend on the order in
# which the node runs them is tried in one order alone.
IN_ORDER = os.environ.get("MORI_SIM_SCHEDULE", "rr") == "rr"
ROWS = (70, 17, 70, 0, 3) if IN_ORDER else (70, 17, 70)
FUSED = ("fused-sdma", "fused-lsa")
WIRES = {
    "bf16": {},
    "fp8 lsa": {"gather_dtype": "fp8", "gather_transport": "lsa"},
    "fp8 sdma": {"gather_dtype": "fp8", "gather_transport": "sdma"},
}
OPTIONS = {
    "bf16 other way": {"gather_transport": "other"},
    "one chunk": {"chunks": 1},
    "pull blocks": {"gather_dtype": "fp8", "pull_blocks": 7},
    "fused quantize lsa": {"gather_dtype": "fp8", "fuse_quantize": True},
    "fused quantize sdma": {"gather_dtype": "fp8", "gather_transport": "sdma", "fuse_quantize": True},
    "pushed": {"gather_transport": "sdma", "fuse_reduce_push": True},
    **{
        f"pushed {bands} {publish}": {
            "gather_transport": "sdma",
            "fuse_reduce_push": True,
            "gather_bands": bands,
            "publish": publish,
        }
        for bands, publish in ((1, "writethrough"), (3, "writethrough"), (1, "fence"), (8, "fence"))
    },
    "pushed fp8": {
        "gather_dtype": "fp8",
        "gather_transport": "sdma",
        "fuse_quantize": True,
        "fuse_reduce_push": True,
        "gather_bands": 2,
    },
    "pushed fp8 fence": {
        "gather_dtype": "fp8",
        "gather_transport": "sdma",
        "fuse_quantize": True,
        "fuse_reduce_push": True,
        "publish": "fence",
    },
}


def on_device(comm, *tensors):
    """The same where kernels of this rank find them."""
    return [x.to(comm.device) for x in tensors]


def made(comm, mode, options=None, *, n=N, k=K, m_max=M_MAX, **more):
    tests_itself = IN_ORDER and comm.world_size not in (4, 8)
    options = {"self_test": tests_itself, **(options or {}), **more}
    if options.get("gather_transport") == "other":
        options["gather_transport"] = "lsa" if mode.endswith("sdma") else "sdma"
    return GemmAllReduce(comm, n=n, k=k, m_max=m_max, mode=mode, **options)


def wanted(m, world_size, quant, dtype, turn, n=N, k=K):
    return gx_want(m, n, k, world_size, quant, dtype, turn=turn)


def call(comm, op, m, turn, n=N, k=K):
    """[] if one call is right bit for bit, else what is wrong; the result is spoiled afterwards."""
    g = gx(m, n, k, comm.rank, op.options.quant, turn=turn)
    out = op(*on_device(comm, g.a, g.b, g.a_scale, g.b_scale))
    if op.options.communicates:
        want = wanted(m, comm.world_size, op.options.quant, op.options.gather_dtype, turn, n, k)
    else:
        want = g.exact().to(torch.bfloat16)
    wrong = (out.cpu() != want).any(1).nonzero().flatten().tolist()
    out.fill_(torch.nan)  # who still reads it, or leaves it, shows
    return [f"rank {comm.rank}, m={m}, turn {turn}: rows {wrong[:8]} of {len(wrong)}"] if wrong else []


def modes(world_size):
    """Every mode, quantisation and wire, as bytes: GX is exact, so they are the host target's."""
    found, rows = {}, ROWS if world_size <= 2 else ROWS[:3]
    with mori_shmem.init("rocm") as comm:
        for mode in MODES:
            for quant in QUANTS if IN_ORDER else QUANTS[:1]:
                for wire, options in WIRES.items() if mode != "gemm-only" else [("bf16", {})]:
                    with made(comm, mode, options, quant=quant) as op:
                        found[f"{mode} {quant} {wire}"] = [
                            w for turn, m in enumerate(rows) for w in call(comm, op, m, turn)
                        ]
    return found


def fused(world_size):
    """The fused modes, for numbers of ranks that divide nothing."""
    found = {}
    with mori_shmem.init("rocm") as comm:
        for mode in FUSED:
            for wire in ("bf16", "fp8 lsa"):
                with made(comm, mode, WIRES[wire]) as op:
                    found[f"{mode} {wire}"] = [
                        w for turn, m in enumerate(ROWS) for w in call(comm, op, m, turn)
                    ]
    return found


def option_cases(world_size):
    """Every option in every mode that takes it."""
    found, rows = {}, ROWS if world_size <= 2 else ROWS[:3]
    with mori_shmem.init("rocm") as comm:
        for mode in MODES[1:]:
            for name, options in OPTIONS.items():
                try:
                    op = made(comm, mode, options)
                except ArgumentError:
                    continue  # this mode would ignore it
                with op:
                    found[f"{mode} {name}"] = [
                        w for turn, m in enumerate(rows) for w in call(comm, op, m, turn)
                    ]
    return found


def many_calls(world_size):
    """Twenty calls in a row of two Ms in turn, with nothing between them but the check."""
    found = {}
    with mori_shmem.init("rocm") as comm:
        for mode in MODES[1:]:
            for wire, options in WIRES.items():
                with made(comm, mode, options) as op:
                    found[f"{mode} {wire}"] = [
                        w for i in range(20) for w in call(comm, op, (70, 17)[i % 2], i % 3)
                    ]
    return found


def queued_calls(world_size):
    """Twenty calls queued at once, as a captured graph is replayed: the host looks at the last result alone.

    Operands lie in a window, so that nothing but the stream orders the calls.
    """
    found = {}
    with mori_shmem.init("rocm") as comm:
        for mode in MODES[1:] if world_size <= 4 else FUSED:
            for wire, options in WIRES.items():
                with made(comm, mode, options, k=WHOLE_K) as op:
                    found[f"{mode} {wire}"] = queue_and_check(comm, op)
    return found


def queue_and_check(comm, op):
    rows, turns, runner = (70, 17, 64), 2, op._runner
    held = {}
    for m in rows:
        for turn in range(turns):
            g = gx(m, N, WHOLE_K, comm.rank, "blockscale", turn=turn)
            held[m, turn] = op._gemm.partials(*in_window(comm, g.a, g.b), *scales_in_window(comm, g))
    for m in rows:
        runner.run(op.plan(m), 1, held[m, 0])
    order = [(rows[i % 3], i % turns) for i in range(20)]
    comm.barrier()
    for m, turn in order:
        runner._launch(runner._prepared[m], held[m, turn], None)
    runner._wait()
    m, turn = order[-1]
    want = wanted(m, comm.world_size, "blockscale", op.options.gather_dtype, turn, k=WHOLE_K)
    return [] if torch.equal(runner.output(m).cpu(), want) else [f"rank {comm.rank}"]


def replayed_graphs(world_size):
    """GA-5: graphs of three Ms on one op, replayed in any order with new operands, an eager call in
    between."""
    found = {}
    with mori_shmem.init("rocm") as comm:
        for mode in MODES[1:]:
            for wire, options in WIRES.items():
                with made(comm, mode, options, k=WHOLE_K) as op:
                    found[f"{mode} {wire}"] = replay_and_check(comm, op)
    return found


def replay_and_check(comm, op):
    rows, runner, hip = (70, 17, 64), op._runner, ctypes.CDLL("libamdhip64.so")
    stream, held, graphs, wrong = ctypes.c_void_p(), {}, {}, []
    hip.hipStreamCreateWithFlags(ctypes.byref(stream), ctypes.c_uint(1))
    for m in rows:
        g = gx(m, N, WHOLE_K, comm.rank, "blockscale")
        a, b = in_window(comm, g.a, g.b)
        held[m] = b, op._gemm.partials(a, b, *scales_in_window(comm, g))
        runner.run(op.plan(m), 1, held[m][1])
        comm.barrier()
        graphs[m] = captured(
            comm, hip, stream, lambda m=m: runner._launch(runner._prepared[m], held[m][1], None)
        )
    for turn in range(3):
        for m in rows:
            held[m][0].copy_(gx(m, N, WHOLE_K, comm.rank, "blockscale", turn=turn).b)
        for m in (70, 17, 64, 17, 70):
            hip.hipGraphLaunch(graphs[m], stream)
            hip.hipStreamSynchronize(stream)
            want = wanted(m, comm.world_size, "blockscale", op.options.gather_dtype, turn, k=WHOLE_K)
            wrong += [] if torch.equal(runner.output(m).cpu(), want) else [f"rank {comm.rank}, m={m}, {turn}"]
        wrong += call(comm, op, 64, turn, k=WHOLE_K)
    return wrong


def captured(comm, hip, stream, queue):
    """What `queue` launches, as a graph."""
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    with patch.object(comm.core, "callers_stream", lambda: stream.value):
        assert hip.hipStreamBeginCapture(stream, ctypes.c_int(0)) == 0
        queue()
        assert hip.hipStreamEndCapture(stream, ctypes.byref(graph)) == 0
    assert hip.hipGraphInstantiate(ctypes.byref(executable), graph, None, None, ctypes.c_size_t(0)) == 0
    return executable


def in_window(comm, *tensors):
    """Copies in memory of this rank's device."""
    copies = []
    for x in tensors:
        copies.append(comm.alloc(max(16, x.numel() * x.element_size())).tensor(x.shape, x.dtype))
        copies[-1].copy_(x)
    return copies


def scales_in_window(comm, g):
    a_grid, b_grid = g.grids()
    a_rows, b = in_window(comm, a_grid.t().contiguous(), b_grid)
    return a_rows.t(), b


def random_operands(world_size):
    """Standard normal operands. The collective's bytes follow from the ranks' own partial sums (gemm-only),
    and the whole is within the bound of its dtype against float64."""
    found = {}
    m, n, k = 45, 136, 384
    with mori_shmem.init("rocm") as comm:
        for quant in QUANTS:
            x, weight = (
                torch.randn(rows, k, generator=torch.Generator().manual_seed(17 * comm.rank + seed))
                for seed, rows in ((1, m), (2, n))
            )
            (a, a_scale), (b, b_scale) = quantize(x, quant, "a"), quantize(weight, quant, "b")
            given = on_device(comm, a, b, a_scale, b_scale)
            mine = (
                dequantize(a, a_scale, quant, "a").double() @ dequantize(b, b_scale, quant, "b").double().t()
            )
            exact = sum(comm.all_gather(mine))
            with made(comm, "gemm-only", n=n, k=k, quant=quant) as op:
                partials = comm.all_gather(op(*given).cpu().clone())
            summed = reference.reduced(partials)
            for mode in MODES[1:]:
                for wire, options in WIRES.items():
                    with made(comm, mode, options, n=n, k=k, quant=quant) as op:
                        out, dtype = op(*given).cpu(), op.options.gather_dtype
                    want = reference.fp8_wire(summed) if dtype == "fp8" else summed
                    allowed = reference.tolerance(dtype, k, world_size)
                    errors = reference.errors_of(out, exact, allowed)
                    found[f"{mode} {quant} {wire}"] = [
                        text
                        for text, right in (
                            ("not the collective's bytes", torch.equal(out, want)),
                            (f"relL2 {errors.rel_l2:.3g}", errors.within(allowed)),
                        )
                        if not right
                    ]
    return found


def stages(world_size):
    """split-lsa adds up small matrices in one stage and larger ones in two: the same bytes."""
    from mori_gemm_ar.targets.rocm import limits

    found, limit = {}, limits.ONE_STAGE_BYTES
    with mori_shmem.init("rocm") as comm:
        for name, limits.ONE_STAGE_BYTES in (("one stage", limit), ("two stages", 0)):
            with made(comm, "split-lsa") as op:
                launches = op._runner._launches
                one = launches.one_stage(Plan(Problem(70, N, K, world_size), op.options, 256))
                wrong = [w for turn, m in enumerate(ROWS) for w in call(comm, op, m, turn)]
                found[name] = wrong if one == (name == "one stage") else [*wrong, f"one_stage() is {one}"]
    return found


def degenerate_rows(world_size):
    """GA-3: zero rows stay zero, rows with a NaN or an infinity are NaN, all others keep their bits."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    x[5], x[6, 128:] = 0, 0
    clean = x.clone()
    x[9, 77], x[10, 200] = torch.nan, torch.inf
    others = [row for row in range(64) if row not in (9, 10)]
    found = {}
    with mori_shmem.init("rocm") as comm:
        weight = torch.randn(136, 256, generator=torch.Generator().manual_seed(comm.rank))
        for quant in QUANTS:
            for wire, options in WIRES.items():
                with made(comm, "fused-sdma", options, quant=quant, k=256) as op:
                    b, b_scale = quantize(weight, quant, "b")
                    out, want = (
                        op(*on_device(comm, a, b, a_scale, b_scale)).cpu().clone()
                        for a, a_scale in (quantize(x, quant, "a"), quantize(clean, quant, "a"))
                    )
                checks = {
                    "other rows changed": torch.equal(out[others], want[others]),
                    "zero row": bool((out[5] == 0).all()),
                    "finite": not bool(out[9].isfinite().any() | out[10].isfinite().any()),
                    "not finite": bool(out[others].isfinite().all()),
                }
                found[f"{quant} {wire}"] = [name for name, right in checks.items() if not right]
    return found


def strides_and_capacity(world_size):
    """GA-2, GA-7: padded rows by their stride; m_max with both numbers; windows of the size told before."""
    found = {}
    with mori_shmem.init("rocm") as comm:
        for mode in MODES[1:]:
            g = gx(70, N, K, comm.rank, "blockscale")
            with made(comm, mode) as op:
                buffers = [torch.full((x.shape[0], K + 64), 3.0).to(x.dtype) for x in (g.a, g.b)]
                for buffer, x in zip(buffers, (g.a, g.b), strict=True):
                    buffer[:, :K] = x
                out = torch.full((70, N + 64), 7.0, dtype=torch.bfloat16).to(comm.device)
                a, b, a_scale, b_scale = on_device(comm, *buffers, g.a_scale, g.b_scale)
                op(a[:, :K], b[:, :K], a_scale, b_scale, out=out[:, :N])
                want = wanted(70, world_size, "blockscale", "bf16", 0)
                found[f"{mode} strides"] = (
                    [] if torch.equal(out[:, :N].cpu(), want) and bool((out[:, N:] == 7).all()) else ["wrong"]
                )
                refusal = ""
                try:
                    call(comm, op, M_MAX + 1, 0)
                except UnsupportedShape as error:
                    refusal = str(error)
                asked = GemmAllReduce.window_bytes_for(
                    n=N, m_max=M_MAX, world_size=world_size, backend="rocm", mode=mode
                )
                found[f"{mode} capacity"] = [
                    *([] if "M=71" in refusal and "m_max=70" in refusal else [refusal or "not refused"]),
                    *(
                        []
                        if abs(op.window_bytes - asked) <= 4096
                        else [f"{op.window_bytes} bytes, told {asked}"]
                    ),
                    *call(comm, op, M_MAX, 1),
                ]
    return found


def second_call(world_size):
    """A call of an M that was there before traces nothing, and reads no environment."""
    found = {}
    with mori_shmem.init("rocm") as comm:
        for mode in MODES[1:]:
            with made(comm, mode) as op:
                given = {}
                for m in (70, 17):
                    g = gx(m, N, K, comm.rank, "blockscale")
                    given[m] = on_device(comm, g.a, g.b, g.a_scale, g.b_scale)
                    op(*given[m])
                traced, read = [], []
                with (
                    patch.object(
                        JitFunction, "_compile_or_execute", lambda *a, noted=traced, **k: noted.append(1)
                    ),
                    patch.object(os, "environ", Recorded(os.environ, read)),
                ):
                    outs = [op(*given[m]).cpu().clone() for m in (70, 17, 70)]
                right = torch.equal(outs[2], wanted(70, world_size, "blockscale", "bf16", 0))
                found[mode] = [*(["traced"] if traced else []), *read, *([] if right else ["wrong"])]
    return found


class Recorded(dict):
    """An environment that notes who is asked for."""

    def __init__(self, real, read):
        super().__init__(real)
        self._read = read

    def __getitem__(self, name):
        self._read.append(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self._read.append(name)
        return super().get(name, default)


def different_m(world_size):
    """All ranks find out, and the op is unusable afterwards."""
    found = {}
    for mode in MODES[1:]:
        with mori_shmem.init("rocm", timeout_s=20) as comm:
            op = made(comm, mode)
            try:
                call(comm, op, 60 + comm.rank, 0)
                found[mode] = "the call returned"
            except MoriError as error:
                found[mode] = f"{type(error).__name__}: {error}"
            comm.barrier()
    return found


def missing_rank(world_size):
    """The last rank stays away from the second call for longer than the others wait."""
    found, limit_s = {}, float(os.environ.get("LIMIT_S", "2"))
    for mode in MODES[1:]:
        with mori_shmem.init("rocm", name=mode, timeout_s=limit_s) as comm:
            op = made(comm, mode, self_test=False)
            call(comm, op, 70, 0)
            comm.barrier(30)
            began = time.monotonic()
            found[mode] = "away"
            if comm.rank != world_size - 1:
                try:
                    call(comm, op, 70, 1)
                    found[mode] = "the call returned"
                except MoriError as error:
                    found[mode] = f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}"
            comm.all_gather(mode, 60)  # the last rank has been away until here
    return found


def die_in_the_middle(world_size):
    """Pairs of ranks, one for each mode. The second of a pair kills itself when it should make its second
    call; the first tells what it saw, how late, and how long it took to close."""
    pair, rank = divmod(int(os.environ["RANK"]), 2)
    store = torch.distributed.FileStore(f"{os.environ['PAIRS']}/{pair}", 2)
    comm = mori_shmem.init("rocm", rank=rank, world_size=2, store=store, name=str(pair))
    op = made(comm, MODES[1 + pair], self_test=False)
    call(comm, op, 70, 0)
    comm.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    times, text = [time.monotonic()], "the call returned"
    try:
        call(comm, op, 70, 1)
    except MoriError as error:
        text = f"{type(error).__name__}: {error}"
    times.append(time.monotonic())
    op.close()
    comm.close()
    times.append(time.monotonic())
    return {
        "mode": op.options.mode,
        "seen": text,
        "late_s": times[1] - times[0],
        "close_s": times[2] - times[1],
    }


def refusals(world_size):
    """What this target cannot do is said when the op is made."""
    found = {}
    with mori_shmem.init("rocm") as comm:
        for name, given in {
            "n": {"n": 130},
            "k": {"k": 64},
            "queues": {"mode": "fused-sdma", "sdma_queues": 2},
            "triton": {"kernels": "triton"},
        }.items():
            try:
                made(comm, **{"mode": "split-lsa", **given}).close()
                found[name] = "made"
            except MoriError as error:
                found[name] = f"{type(error).__name__}: {error}"
        with made(comm, "fused-sdma") as op:  # and nothing was harmed
            found["afterwards"] = call(comm, op, 70, 0)
    return found


def warm(world_size):
    """Trace the kernels that most functions use, so that ranks forked from here have them."""
    for variant in variants(N, world_size):
        if not variant.name.startswith("gemm ") or f" {shape_for(M_MAX, N, world_size)} " in variant.name:
            variant.compile()


def in_turn(functions, world_size):
    """What each of them finds, by name; kernels are compiled once for all."""
    return {function.__name__: function(world_size) for function in functions}


def main():
    functions, world_size = [globals()[name] for name in sys.argv[2:]], int(sys.argv[1])
    if world_size > 1:
        warm(world_size)
    outcomes = run_ranks_to_the_end(in_turn, world_size, functions, world_size, timeout_s=550, from_here=True)
    print("FOUND " + json.dumps([outcome.value for outcome in outcomes]), flush=True)
    errors = [outcome.error for outcome in outcomes if outcome.error]
    print("\n".join(f"{type(error).__name__}: {error}" for error in errors), flush=True)


if __name__ == "__main__":
    main()
