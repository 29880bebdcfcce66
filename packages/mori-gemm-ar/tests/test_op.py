"""The op as its caller sees it: strides, degenerate rows, capacity, repeatability, questions."""

import subprocess
import sys
import threading

import mori_shmem
import pytest
import torch
from mori_gemm_ar import GemmAllReduce, dequantize, quantize
from mori_gemm_ar.options import MODES
from mori_gemm_ar.quant.padding import pad_rows
from mori_gemm_ar.reference import fingerprint, partial, rel_l2, tolerance
from mori_gemm_ar.testing import gx, gx_want
from mori_shmem.errors import ArgumentError, MoriError, SettingError, UnsupportedShape

WIRES = [("bf16", None), ("fp8", "lsa"), ("fp8", "sdma")]


def padded(x, columns, fill):
    """The same matrix as a view into rows that are `columns` longer."""
    buffer = torch.full((x.shape[0], x.shape[1] + columns), fill).to(x.dtype)
    buffer[:, : x.shape[1]] = x
    return buffer[:, : x.shape[1]], buffer


def strided_operands(m, n, k):
    with mori_shmem.init("host", timeout_s=20) as comm:
        found = []
        for mode in MODES[1:]:
            with GemmAllReduce(comm, n=n, k=k, m_max=m, mode=mode) as op:
                g = gx(m, n, k, comm.rank, "blockscale")
                want = gx_want(m, n, k, comm.world_size, "blockscale")
                b, _ = padded(g.b, 128, 3.0)
                a, _ = padded(g.a, 64, 3.0)
                out, buffer = padded(torch.zeros(m, n, dtype=torch.bfloat16), 64, 7.0)
                returned = op(a, b, g.a_scale, g.b_scale, out=out)
                found.append(
                    torch.equal(out, want)
                    and bool((buffer[:, n:] == 7).all())
                    and returned.data_ptr() == out.data_ptr()
                )
        return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_GA_2_padded_rows_are_read_and_written_by_their_stride(world_size):
    by_rank = mori_shmem.run_ranks(strided_operands, world_size, 129, 384, 2048, timeout_s=60)
    assert by_rank == [[True] * 4] * world_size


def degenerate_rows():
    """What GA-3 describes, through quantiser, product and every wire."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(64, 256, generator=random).to(torch.bfloat16)
    x[5], x[6, 128:] = 0, 0
    clean = x.clone()
    x[9, 77], x[10, 200] = torch.nan, torch.inf
    found = []
    with mori_shmem.init("host", timeout_s=20) as comm:
        weight = torch.randn(130, 256, generator=torch.Generator().manual_seed(comm.rank))
        for quant in ("blockscale", "ptpc", "mxfp8"):
            for dtype, transport in WIRES:
                with GemmAllReduce(
                    comm, n=130, k=256, m_max=64, quant=quant, gather_dtype=dtype, gather_transport=transport
                ) as op:
                    b, b_scale = quantize(weight, quant, "b")
                    out, want = (
                        op(a, b, a_scale, b_scale).clone()
                        for a, a_scale in (quantize(x, quant, "a"), quantize(clean, quant, "a"))
                    )
                others = [row for row in range(64) if row not in (9, 10)]
                fine = (
                    torch.equal(out[others], want[others])
                    and bool((out[5] == 0).all())
                    and not bool(out[9].isfinite().any())
                    and not bool(out[10].isfinite().any())
                    and bool(out[others].isfinite().all())
                )
                found.append((quant, dtype, transport, fine))
    return found


def test_GA_3_zero_rows_stay_zero_and_non_finite_rows_stay_alone():
    for rank in mori_shmem.run_ranks(degenerate_rows, 2, timeout_s=60):
        assert [case for case in rank if not case[-1]] == []


def capacity():
    with mori_shmem.init("host", timeout_s=20) as comm:
        asked = GemmAllReduce.window_bytes_for(n=256, k=128, m_max=1024, world_size=comm.world_size)
        with GemmAllReduce(comm, n=256, k=128, m_max=1024) as op:
            right = []
            for m in (1024, 1025, 1024, 1):
                g = gx(m, 256, 128, comm.rank, "blockscale")
                try:
                    out = op(g.a, g.b, g.a_scale, g.b_scale)
                except UnsupportedShape as refusal:
                    right.append("M=1025" in str(refusal) and "m_max=1024" in str(refusal))
                else:
                    right.append(torch.equal(out, gx_want(m, 256, 128, comm.world_size, "blockscale")))
            return right, abs(op.window_bytes - asked)


def test_GA_7_capacity_is_checked_with_both_numbers_and_known_beforehand():
    for right, difference in mori_shmem.run_ranks(capacity, 2, timeout_s=60):
        assert right == [True] * 4
        assert difference <= 4096


def random_calls(m, n, k):
    """Per wire: (checksum of the bytes, same bytes in 20 runs, relL2, relL2 allowed)."""
    with mori_shmem.init("host", timeout_s=30) as comm:
        made = [
            torch.randn(2, max(m, n), k, generator=torch.Generator().manual_seed(7 + rank))
            for rank in range(comm.world_size)
        ]
        operands = [
            (quantize(x[0, :m], "blockscale", "a"), quantize(x[1, :n], "blockscale", "b")) for x in made
        ]
        exact = sum(
            partial(a, b, a_scale.t(), b_scale, "blockscale") for (a, a_scale), (b, b_scale) in operands
        )
        (a, a_scale), (b, b_scale) = operands[comm.rank]
        found = {}
        for mode in MODES[1:]:
            for dtype, transport in WIRES:
                with GemmAllReduce(
                    comm, n=n, k=k, m_max=m, mode=mode, gather_dtype=dtype, gather_transport=transport
                ) as op:
                    first = op(a, b, a_scale, b_scale).clone()
                    runs = 20 if mode == "fused-sdma" else 2
                    same = all(torch.equal(op(a, b, a_scale, b_scale), first) for _ in range(runs))
                allowed = tolerance(dtype, k, comm.world_size).rel_l2
                found[mode, dtype, transport] = (
                    fingerprint(first),
                    same,
                    rel_l2(first, exact),
                    allowed,
                )
        return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_GA_10_all_ranks_and_runs_and_modes_hold_the_same_bits(world_size):
    by_rank = mori_shmem.run_ranks(random_calls, world_size, 513, 1024, 512, timeout_s=100)
    for key, (bits, same, error, allowed) in by_rank[0].items():
        assert same, key
        assert error <= min(allowed, 4.1e-3 if key[1] == "bf16" else 3.1e-2), key
        for rank in by_rank[1:]:
            assert rank[key][:2] == (bits, True), key
    for dtype in ("bf16", "fp8"):  # no mode, no transport makes a difference
        assert len({bits for (_, d, _), (bits, *_) in by_rank[0].items() if d == dtype}) == 1


def refused():
    """Every wrong call raises before it waits for a peer, and leaves the op as it was."""
    texts = {}
    with mori_shmem.init("host", timeout_s=20) as comm, GemmAllReduce(comm, n=256, k=384, m_max=64) as op:
        g = gx(40, 256, 384, comm.rank, "blockscale")

        def call(name, **other):
            arguments = {"a": g.a, "b": g.b, "a_scale": g.a_scale, "b_scale": g.b_scale, **other}
            try:
                op(**arguments)
            except MoriError as refusal:
                texts[name] = f"{type(refusal).__name__}: {refusal}"

        call("fnuz", a=g.a.view(torch.uint8).view(torch.float8_e4m3fnuz))
        call("row major", a_scale=g.a_scale.t().contiguous())
        call("b shape", b=g.b[:128])
        call("out dtype", out=torch.zeros(40, 256))
        call("out shape", out=torch.zeros(41, 256, dtype=torch.bfloat16))
        call("out stride", out=torch.zeros(256, 40, dtype=torch.bfloat16).t())
        call("out grad", out=torch.zeros(40, 256, dtype=torch.bfloat16, requires_grad=True))
        call("a stride", a=torch.zeros(384, 40, dtype=torch.uint8).view(torch.float8_e4m3fn).t())
        right = torch.equal(
            op(g.a, g.b, g.a_scale, g.b_scale), gx_want(40, 256, 384, comm.world_size, "blockscale")
        )
        return texts, right


def test_wrong_calls_are_refused_with_the_values_and_harm_nothing():
    for texts, right in mori_shmem.run_ranks(refused, 2, timeout_s=60):
        assert right
        for name, words in {
            "fnuz": "convert_fnuz",
            "row major": "a_scale.flatten()",
            "b shape": "b has shape (128, 384), wanted [256, 384]",
            "out dtype": "torch.float32 (40, 256) on cpu, wanted torch.bfloat16 (40, 256)",
            "out shape": "(41, 256) on cpu, wanted torch.bfloat16 (40, 256)",
            "out stride": "LayoutError: out has strides (1, 40)",
            "out grad": "ArgumentError: out requires grad",
            "a stride": "LayoutError: a has strides (1, 40)",
        }.items():
            assert words in texts[name]


def in_this_process(fn, **environment):
    """`fn(comm)` with a communicator of one rank, in a process of its own."""

    def rank_main():
        import os

        os.environ.update(environment)
        with mori_shmem.init("host", timeout_s=20) as comm:
            return fn(comm)

    return mori_shmem.run_ranks(rank_main, 1, timeout_s=60)[0]


def test_supports_profitable_and_sizes():
    assert GemmAllReduce.supports(n=320, k=320, m_max=1, world_size=8)
    for wrong, words in [
        ({"k": 127}, "k=127: at least 128"),
        ({"n": 0}, "n=0"),
        ({"n": 1.5}, "n=1.5: a whole number"),
        ({"m_max": 0}, "m_max=0: from 1 to 16777215"),
        ({"world_size": 0}, "world_size=0"),
        ({"mode": "warp"}, "mode='warp': allowed are"),
        ({"mode": "split-lsa", "chunks": 2}, "chunks=2 has no effect"),
        ({"tuned": "yes"}, "tuned='yes': allowed are None, True and False"),
        ({"tuned": 0}, "tuned=0: allowed are"),
        ({"backend": "tpu"}, "'tpu' is not part of this version of mori-gemm-ar; it has: host"),
    ]:
        answer = GemmAllReduce.supports(**{"n": 256, "k": 256, "m_max": 64, "world_size": 2, **wrong})
        assert not answer
        assert words in answer.reason
    assert not GemmAllReduce.profitable(4095)
    assert GemmAllReduce.profitable(4096)


def test_the_constructor_refuses_what_supports_refuses():
    def texts(comm):
        found = []
        for wrong in (
            {"k": 64},
            {"m_max": 1 << 24},
            {"publish": "fence"},
            {"pull_blocks": 0, "mode": "split-lsa"},
            {"tuned": "None"},
            {"self_test": "yes"},
        ):
            try:
                GemmAllReduce(comm, **{"n": 256, "k": 256, "m_max": 64, **wrong})
            except ArgumentError as refusal:
                found.append(str(refusal))
        return found

    k, m_max, publish, pull_blocks, tuned, self_test = in_this_process(texts)
    assert "k=64" in k
    assert "m_max=16777216" in m_max
    assert "publish='fence' has no effect" in publish
    assert pull_blocks.startswith("pull_blocks=0 is refused: it takes an integer from 1 to 4096")
    assert tuned.startswith("tuned='None': allowed are None, True and False")
    assert self_test.startswith("self_test='yes' is refused: it takes True or False")


def test_rows_are_padded_only_for_who_asks():
    def padding(comm):
        with GemmAllReduce(comm, n=128, k=256, m_max=64) as op:
            g = gx(17, 128, 256, 0, "blockscale")
            a, a_scale = op.pad_rows(g.a, g.a_scale)
            return op.padded_m(17), a is g.a, a_scale is g.a_scale

    assert in_this_process(padding) == (17, True, True)
    for quant in ("blockscale", "ptpc", "mxfp8"):
        codes, scales = quantize(torch.randn(17, 320), quant, "a")
        padded_codes, padded_scales = pad_rows(codes, scales, quant, 128)
        assert padded_codes.shape == (128, 320)
        back = dequantize(padded_codes, padded_scales, quant, "a")
        assert torch.equal(back[:17], dequantize(codes, scales, quant, "a"))
        assert (back[17:] == 0).all()
        assert pad_rows(padded_codes, padded_scales, quant, 128) == (padded_codes, padded_scales)


def test_products_are_fp32_whatever_the_program_asked_torch_for():
    def precision(comm):
        random = torch.Generator().manual_seed(1)
        a, a_scale = quantize(torch.randn(64, 512, generator=random), "blockscale", "a")
        b, b_scale = quantize(torch.randn(256, 512, generator=random), "blockscale", "b")
        with GemmAllReduce(comm, n=256, k=512, m_max=64) as op:
            want = op(a, b, a_scale, b_scale).clone()
            torch.set_float32_matmul_precision("medium")
            got = op(a, b, a_scale, b_scale).clone()
            return torch.equal(got, want), torch.get_float32_matmul_precision()

    assert in_this_process(precision) == (True, "medium")


def with_memory_that_starts_as_nan():
    """An op made and called where torch fills fresh memory with NaN; its operands are gone right after."""
    with mori_shmem.init("host", timeout_s=20) as comm:
        torch.use_deterministic_algorithms(True)
        found = []
        for mode in MODES[1:]:
            for dtype in ("bf16", "fp8"):
                with GemmAllReduce(comm, n=130, k=320, m_max=64, mode=mode, gather_dtype=dtype) as op:
                    g = gx(33, 130, 320, comm.rank, "blockscale")
                    operands = [g.a, g.b, g.a_scale, g.b_scale]
                    out = op(*operands)
                    for x in operands:
                        x.view(torch.uint8).fill_(0x7F)
                    found.append(
                        torch.equal(out, gx_want(33, 130, 320, comm.world_size, "blockscale", dtype))
                    )
        return found


def test_GA_8_fresh_memory_full_of_nan_and_operands_that_vanish_change_nothing():
    assert mori_shmem.run_ranks(with_memory_that_starts_as_nan, 2, timeout_s=60) == [[True] * 8] * 2


def test_PK_4_settings_are_checked_and_kept_and_shown():
    def refused_values(comm):
        import os

        texts = []
        for value in ("abc", "", "-1", "0", "1e9"):
            os.environ["MORI_GEMM_AR_PULL_BLOCKS"] = value
            try:
                GemmAllReduce(comm, n=128, k=128, m_max=8, mode="split-lsa")
            except SettingError as refusal:
                texts.append(f"{value!r} {refusal}")
        return texts

    texts = in_this_process(refused_values)
    assert len(texts) == 5
    assert all("MORI_GEMM_AR_PULL_BLOCKS" in text and "from 1 to 4096" in text for text in texts)

    def kept(comm):
        import os

        with GemmAllReduce(comm, n=128, k=128, m_max=8, mode="split-lsa") as op:
            os.environ["MORI_GEMM_AR_PULL_BLOCKS"] = "9"
            lines = {line.variable: line for line in mori_shmem.settings.effective()}
            shown = lines["MORI_GEMM_AR_PULL_BLOCKS"]
            return op.options.pull_blocks, shown.value, shown.origin, "MORI_GEMM_AR_SELF_TEST" in lines

    assert in_this_process(kept, MORI_GEMM_AR_PULL_BLOCKS="7") == (7, 9, "environment", True)


def test_PK_4_a_misspelt_variable_is_pointed_out_once_and_an_unused_one_is_not(capfd):
    def two_ops(comm):
        for _ in range(2):
            GemmAllReduce(comm, n=128, k=128, m_max=8).close()  # nothing is pulled: the variable is unused

    in_this_process(two_ops, MORI_GEMM_AR_PULL_BLOKS="64", MORI_GEMM_AR_PULL_BLOCKS="32")
    told = [line for line in capfd.readouterr().err.splitlines() if "MORI_GEMM_AR" in line]
    assert len(told) == 1
    assert "MORI_GEMM_AR_PULL_BLOKS" in told[0]
    assert "MORI_GEMM_AR_PULL_BLOCKS" in told[0]


def test_PK_1_importing_is_quick_and_starts_nothing():
    code = (
        "import os, sys, threading, time; began = time.time(); before = dict(os.environ)\n"
        "import mori_gemm_ar\n"
        "assert time.time() - began < 5, time.time() - began\n"
        "assert 'torch' not in sys.modules\n"
        "assert threading.active_count() == 1\n"
        "assert dict(os.environ) == before\n"
        "assert not any('/dev/' in os.readlink(f'/proc/self/fd/{fd}') and 'null' not in "
        "os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if int(fd) > 2 "
        "and os.path.exists(f'/proc/self/fd/{fd}'))\n"
        "print(sorted(mori_gemm_ar.__all__))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "GemmAllReduce" in done.stdout


def two_threads_with_out():
    """What a call is told while another thread copies to `out`, and whether that copy comes out right."""
    m, n, k = 64, 256, 256
    copying, go = threading.Event(), threading.Event()

    class Held(torch.Tensor):
        def copy_(self, source):
            copying.set()
            go.wait(10)
            return super().copy_(source)

    with mori_shmem.init("host", timeout_s=20) as comm, GemmAllReduce(comm, n=n, k=k, m_max=m) as op:
        g = gx(m, n, k, 0, "blockscale")
        out = torch.empty(m, n, dtype=torch.bfloat16).as_subclass(Held)
        first = threading.Thread(target=op, args=(g.a, g.b, g.a_scale, g.b_scale, out))
        first.start()
        assert copying.wait(10)
        told = "nothing"
        try:
            op(g.a, g.b, g.a_scale * -1, g.b_scale)
        except MoriError as busy:
            told = str(busy)
        go.set()
        first.join()
        return told, torch.equal(out.as_subclass(torch.Tensor), gx_want(m, n, k, 1, "blockscale"))


def test_a_result_is_copied_to_out_before_another_thread_may_call():
    ((told, right),) = mori_shmem.run_ranks(two_threads_with_out, 1, timeout_s=60)
    assert "in a call already, on another thread" in told
    assert right


def test_what_supports_says_is_what_the_constructor_does():
    sizes = {"n": 256, "k": 256, "m_max": 64, "world_size": 2}
    assert GemmAllReduce.supports(**sizes, self_test=False)
    assert "chunk" in GemmAllReduce.supports(**sizes, chunk=3).reason
    assert not GemmAllReduce.supports(**{**sizes, "n": 10**9, "m_max": 10**7})
    with pytest.raises(UnsupportedShape, match="world_size=0"):
        GemmAllReduce.window_bytes_for(n=256, m_max=64, world_size=0)
