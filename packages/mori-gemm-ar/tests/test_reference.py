"""The judge itself: what passes, what does not, and the collective's arithmetic to the byte."""

import math

import mori_shmem
import pytest
import torch
from mori_bench import Fault
from mori_bench.faults import FAULTS
from mori_gemm_ar import GemmAllReduce, quantize
from mori_gemm_ar.options import MODES
from mori_gemm_ar.reference import Errors, errors_of, fingerprint, fp8_wire, reduced, rel_l2, tolerance


def sums(m, n, world_size=8, seed=3):
    random = torch.Generator().manual_seed(seed)
    partials = [torch.randn(m, n, generator=random, dtype=torch.float64) for _ in range(world_size)]
    return partials, sum(partials)


@pytest.mark.parametrize("shape", [(1, 130), (17, 7168), (257, 320)], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_an_honest_result_passes(shape, dtype):
    partials, exact = sums(*shape)
    out = reduced(partials) if dtype == "bf16" else fp8_wire(reduced(partials))
    errors = errors_of(out, exact, tolerance(dtype, 2048, 8))
    assert errors.within(tolerance(dtype, 2048, 8)), errors
    assert errors.rel_l2 > 1e-3


@pytest.mark.parametrize("shape", [(2, 130), (17, 7168), (257, 320)], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("name", [name for name in FAULTS if name != "drop_peer"])
def test_BE_1_a_broken_result_does_not_pass(shape, dtype, name):
    fault, allowed = Fault(name), tolerance(dtype, 2048, 8)
    for seed in (1, 2):
        partials, exact = sums(*shape, seed=seed)
        out = fault.output(reduced(partials) if dtype == "bf16" else fp8_wire(reduced(partials)))
    assert not errors_of(out, exact, allowed).within(allowed)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_BE_1_a_missing_rank_does_not_pass(dtype):
    partials, exact = sums(17, 320)
    out = reduced(partials[:-1])
    allowed = tolerance(dtype, 2048, 8)
    assert not errors_of(out, exact, allowed).within(allowed)


def test_parts_pool_to_the_whole():
    partials, exact = sums(64, 130)
    out, allowed = reduced(partials), tolerance("bf16", 128, 8)
    rms = exact.square().mean().sqrt().item()
    parts = [errors_of(out[i : i + 10], exact[i : i + 10], allowed, rms=rms) for i in range(0, 70, 10)]
    whole, pooled = errors_of(out, exact, allowed), Errors.pool(parts)
    assert math.isclose(pooled.rel_l2, whole.rel_l2, rel_tol=1e-9)
    assert math.isclose(pooled.worst_element, whole.worst_element, rel_tol=1e-9)
    assert Errors.pool([]).within(allowed)


def test_zero_and_non_finite():
    zero, allowed = torch.zeros(4, 4), tolerance("bf16", 128, 1)
    assert errors_of(zero, zero, allowed).within(allowed)
    assert not errors_of(zero + 1e-30, zero, allowed).within(allowed)
    assert not errors_of(torch.full((4, 4), torch.nan), zero + 1, allowed).within(allowed)
    assert not errors_of(torch.full((4, 4), torch.inf), zero + 1, allowed).within(allowed)
    assert rel_l2(zero, zero + 2) == 1.0


def test_fingerprints_tell_bits_apart():
    x = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert fingerprint(x) == fingerprint(x.clone())
    assert fingerprint(x) != fingerprint(-x)  # -0.0
    assert fingerprint(x[:0]) == fingerprint(torch.empty(0))


def order_of_additions(m, n, k):
    """Partial sums from gemm-only, then every mode against the reference's bytes.

    The last two ranks hold large opposite numbers: added last they swallow the low bits of the others' sum,
    added first they are gone before those come.
    """
    with mori_shmem.init("host", timeout_s=20) as comm:
        large = comm.rank >= comm.world_size - 2
        random = torch.Generator().manual_seed(99 if large else comm.rank)
        sign = -1.0 if comm.rank == comm.world_size - 1 else 1.0
        weight = torch.randn(n, k, generator=random) * (sign * 2.0**14 if large else 1.0)
        a, a_scale = quantize(torch.randn(m, k, generator=random), "blockscale", "a")
        b, b_scale = quantize(weight, "blockscale", "b")
        found = {}
        with GemmAllReduce(comm, n=n, k=k, m_max=m, mode="gemm-only") as op:
            partials = comm.all_gather(op(a, b, a_scale, b_scale).clone())
        want = reduced(partials)
        backwards = reduced(partials[::-1])
        for mode in MODES[1:]:
            for dtype in ("bf16", "fp8"):
                with GemmAllReduce(comm, n=n, k=k, m_max=m, mode=mode, gather_dtype=dtype) as op:
                    out = op(a, b, a_scale, b_scale)
                    found[mode, dtype] = torch.equal(out, want if dtype == "bf16" else fp8_wire(want))
        return found, not torch.equal(want, backwards)


def test_sums_are_added_in_rank_order_and_rounded_once():
    for found, order_matters in mori_shmem.run_ranks(order_of_additions, 5, 67, 200, 256, timeout_s=60):
        assert order_matters
        assert all(found.values()), found


def test_a_scale_of_128_columns_is_the_maximum_of_these_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(7, 320, generator=generator).bfloat16()
    rows[1, 200] = torch.nan
    rows[2, 5] = torch.inf
    rows[3] = 0
    rows[4, :128] = 1e-37
    got = fp8_wire(rows, "1x128")
    for first in (0, 128, 256):
        block = rows[[0, 5, 6], first : first + 128]
        scales = block.float().abs().amax(1, keepdim=True) / 448
        codes = (block.float() * (1 / scales)).to(torch.float8_e4m3fn)
        assert torch.equal(got[[0, 5, 6], first : first + 128], (codes.float() * scales).bfloat16())
    nan = got.isnan()
    assert nan[1, 128:256].all()
    assert nan[2, :128].all()
    assert int(nan.sum()) == 256  # and no other block
    assert not got[3].any()
    assert not got[4, :128].any()  # its scale would have no finite inverse
