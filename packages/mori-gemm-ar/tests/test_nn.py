"""The row-parallel layer: what it computes, how its weights come, who may share its window."""

import logging
import os

import mori_shmem
import pytest
import torch
from mori_gemm_ar import GemmAllReduce, dequantize, quantize
from mori_gemm_ar.nn import RowParallelLinear, gemm_all_reduce
from mori_gemm_ar.reference import rel_l2
from mori_shmem.errors import ArgumentError, UnsupportedShape

N, K_OF_RANK = 136, 256
NO_VALUES = (torch.int64, torch.bool, torch.float64)  # what x may not be
QUANTS = ("blockscale", "ptpc", "mxfp8")


def linear_of(num_ranks: int, device: torch.device, seed: int = 0) -> torch.nn.Linear:
    """The whole layer, the same on every rank. Its bias is so large that adding it twice would show."""
    torch.manual_seed(seed)
    linear = torch.nn.Linear(K_OF_RANK * num_ranks, N, dtype=torch.bfloat16)
    linear.bias.data = 20 * torch.randn(N, dtype=torch.bfloat16)
    return linear.to(device)


def share(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x[..., rank * K_OF_RANK : (rank + 1) * K_OF_RANK]


def every_quant(backend: str, mode: str) -> list[tuple[float, float, bool, tuple[int, ...]]]:
    """For each: error against the layer in float64; error of the weight alone; whether bits are as said."""
    found = []
    with mori_shmem.init(backend, timeout_s=30) as comm:
        for quant in QUANTS:
            linear = linear_of(comm.world_size, comm.device)
            x = torch.randn(3, 5, linear.in_features, dtype=torch.bfloat16).to(comm.device)
            with RowParallelLinear.from_linear(linear, comm, m_max=64, quant=quant, mode=mode) as layer:
                mine = share(x, comm.rank)
                y = layer(mine)
                want = x.double() @ linear.weight.double().t() + linear.bias.double()
                a, a_scale = quantize(mine.reshape(15, -1), quant, "a")
                total = layer.op(a, layer.weight, a_scale, layer.weight_scale)
                exact = (total.float() + linear.bias.float()).to(torch.bfloat16).view(3, 5, N)
                codes = layer(a, a_scale)  # quantised by who came before
                weight = dequantize(layer.weight, layer.weight_scale, quant, "b")
                right = torch.equal(y, exact) and torch.equal(codes, exact.view(15, N))
                of_weight = rel_l2(weight, share(linear.weight, comm.rank))
                found.append((rel_l2(y, want), of_weight, right, tuple(layer(mine[:0]).shape)))
    return found


def assert_whole_layer(ranks):
    for of_rank in ranks:
        for error, of_weight, right, shape_of_nothing in of_rank:
            assert error < 1e-2  # the bias is exact, and most of the result
            assert of_weight < 4e-2
            assert right
            assert shape_of_nothing == (0, 5, N)


@pytest.fixture(scope="module")
def alone():
    """What needs one rank, in one start: every_quant, refusals, compiled, whole_or_not, cast."""
    what = lambda: (every_quant("host", "fused-sdma"), refusals(), compiled(), whole_or_not(), cast())  # noqa: E731
    return mori_shmem.run_ranks(what, 1, timeout_s=200)[0]


@pytest.fixture(scope="module")
def pair():
    """What needs two: ways_to_load, watched (last, since it sets the switch)."""
    return mori_shmem.run_ranks(lambda: (ways_to_load(), watched()), 2, timeout_s=200)


def test_it_is_the_whole_layer_with_its_bias_added_once(alone):
    assert_whole_layer([alone[0]])
    assert_whole_layer(mori_shmem.run_ranks(every_quant, 3, "host", "fused-sdma", timeout_s=120))


@pytest.mark.gpu(2)
def test_on_gpus_it_is_the_whole_layer_with_its_bias_added_once():
    assert_whole_layer(mori_shmem.run_ranks(every_quant, 2, "cuda", "fused-lsa", timeout_s=120))


def ways_to_load() -> list[bool]:
    """Whole or share, floats or codes, by call or by state dict: the same layer; then layers with one op."""
    same = []
    with mori_shmem.init("host", timeout_s=30) as comm:
        linear, rank = linear_of(comm.world_size, comm.device), comm.rank
        x = share(torch.randn(7, linear.in_features, dtype=torch.bfloat16), rank)
        whole, bias = linear.weight.detach(), linear.bias.detach()
        mine = share(whole, rank)
        codes, scale = quantize(mine, "blockscale", "b")
        all_codes, all_scales = quantize(whole, "blockscale", "b")
        with RowParallelLinear.from_linear(linear, comm, m_max=8) as first:
            want = first(x)
            again = RowParallelLinear(linear.in_features, N, op=first.op)
            states = [
                first.state_dict(),
                {"weight": whole, "bias": bias},
                {"weight": mine, "bias": bias},
                {"weight": whole.float(), "bias": bias.float()},
                {"weight": codes, "weight_scale": scale, "bias": bias},
                {"weight": all_codes, "weight_scale_inv": all_scales, "bias": bias},
            ]
            for state in states:
                again.weight.view(torch.uint8).zero_()
                again.weight_scale.fill_(torch.nan)
                again.load_state_dict(state)
                same.append(torch.equal(again(x), want))
            for given in ((whole, None, bias), (mine, None, bias), (all_codes, all_scales, bias)):
                again.weight_scale.fill_(torch.nan)
                again.load(*given)
                same.append(torch.equal(again(x), want))
            same.append(set(first.state_dict()) == {"weight", "weight_scale", "bias"})
            bare = RowParallelLinear(linear.in_features, N, bias=False, op=first.op, copy=False)
            bare.load(2 * whole)
            view = bare(x)
            same.append(view.data_ptr() == first.op(*operands(bare, x)).data_ptr())
            kept = view.clone()
            bare.copy = True
            copied = bare(x)
            same.append(torch.equal(again(x), want))  # overwrites the window of all that share the op
            same.append(torch.equal(copied, kept) and not torch.equal(view, kept))
            again.close()  # not the owner: the op goes on
            same.append(torch.equal(first(x), want))
            same.append("in_features=512, out_features=136, bias=True, ranks=2, m_max=8" in repr(first))
        with pytest.raises(Exception, match="closed"):
            first(x)
    return same


def operands(layer, x):
    a, a_scale = quantize(x, "blockscale", "a")
    return a, layer.weight, a_scale, layer.weight_scale


def test_weights_come_whole_or_as_a_share_in_floats_or_as_codes(pair):
    for same, _ in pair:
        assert same == [True] * len(same)


def refusals() -> list[str]:
    said = []

    def refused(kind, call, *arguments, **named):
        with pytest.raises(kind) as caught:
            call(*arguments, **named)
        said.append(str(caught.value))

    with mori_shmem.init("host", timeout_s=30) as comm, GemmAllReduce(comm, n=N, k=256, m_max=8) as op:
        refused(ArgumentError, RowParallelLinear, 256, N)
        refused(ArgumentError, RowParallelLinear, 256, N, op=op, m_max=8)
        refused(ArgumentError, RowParallelLinear, 256, N, op=op, quant="ptpc")
        refused(UnsupportedShape, RowParallelLinear, 384, N, op=op)
        refused(ArgumentError, RowParallelLinear, 256, N, comm=comm, m_max=8, mode="gemm-only")
        layer = RowParallelLinear(256, N, bias=False, op=op)
        refused(UnsupportedShape, layer, torch.zeros(2, 128))
        refused(UnsupportedShape, layer, torch.zeros(9, 256))
        refused(UnsupportedShape, layer.load, torch.zeros(N, 255))
        refused(ArgumentError, layer.load, torch.zeros(N, 256), bias=torch.zeros(N))
        codes, scale = quantize(torch.randn(N, 256), "blockscale", "b")
        refused(ArgumentError, layer.load, codes)
        refused(UnsupportedShape, layer.load, codes.view(torch.float8_e4m3fnuz), scale)
        refused(ArgumentError, layer.load, torch.zeros(N, 256), scale)
        x, x_scale = quantize(torch.randn(2, 256), "blockscale", "a")
        for wrong in (
            x,
            x.view(torch.float8_e4m3fnuz),
            *(torch.zeros(2, 256).to(kind) for kind in NO_VALUES),
        ):
            refused(UnsupportedShape, layer, wrong)
        refused(UnsupportedShape, layer, torch.zeros(2, 256), x_scale)
    return said


def test_what_does_not_fit_is_refused_with_both_sides_named(alone):
    said = alone[1]
    words = (
        *("op=, or comm=", "m_max beside op=", "quant beside op=", "N=136, K=384", "gemm-only"),
        *("share of 256 is 256", "M=9", "[136, 256]", "no bias, one was given"),
        *("with its scales", "convert_fnuz", "takes no scales"),
        *(
            "x is torch.float8_e4m3fn, without x_scale: allowed are bf16, fp16 or fp32",
            "x is torch.float8_e4m3fnuz",
        ),
        *(f"x is {kind}, without x_scale" for kind in NO_VALUES),
        "x is torch.float32, with x_scale",
    )
    assert [word for word, text in zip(words, said, strict=True) if word not in text] == []


def whole_or_not() -> tuple[list[str], bool]:
    """(what is said of biases that do not fit; whether the layer is as before, though the weight would)."""
    said = []
    with mori_shmem.init("host", timeout_s=30) as comm:
        linear = linear_of(1, comm.device)
        with RowParallelLinear.from_linear(linear, comm, m_max=8) as layer:
            before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
            for bias in (None, torch.ones(1), torch.ones(()), torch.ones(N + 1), torch.ones(1, N)):
                with pytest.raises(ArgumentError) as caught:
                    layer.load(torch.ones(N, K_OF_RANK), bias=bias)
                said.append(str(caught.value))
            same = all(same_bytes(layer.state_dict()[name], tensor) for name, tensor in before.items())
    return said, same


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_a_bias_that_does_not_fit_leaves_the_layer_as_it_was(alone):
    said, same = alone[3]
    assert same
    assert "a bias, none was given" in said[0]
    for shape, text in zip(("(1,)", "()", "(137,)", "(1, 136)"), said[1:], strict=True):
        assert f"bias has shape {shape}: wanted [136]" in text


def cast() -> list[tuple[bool, torch.dtype, bool]]:
    """After each cast: whether codes and scales are as before; the bias's dtype; whether the call works."""
    found = []
    casts = (
        *(lambda layer: layer.half(), lambda layer: layer.bfloat16(), lambda layer: layer.float()),
        *(lambda layer: layer.to(torch.float16), lambda layer: torch.nn.Sequential(layer).bfloat16()[0]),
    )
    with mori_shmem.init("host", timeout_s=30) as comm:
        linear = linear_of(1, comm.device)
        x = torch.randn(4, K_OF_RANK, dtype=torch.bfloat16)
        with RowParallelLinear.from_linear(linear, comm, m_max=8) as layer:
            weight, scale = layer.weight.clone(), layer.weight_scale.clone()
            want = (layer(x).float() - linear.bias.float()).detach()
            for change in casts:
                layer = change(layer)
                same = same_bytes(layer.weight, weight) and same_bytes(layer.weight_scale, scale)
                near = rel_l2(layer(x).float() - layer.bias.float(), want) < 0.1
                found.append((same, layer.bias.dtype, near))
            there = RowParallelLinear(K_OF_RANK, N, op=layer.op).to("meta", torch.float16)
            dtypes = there.weight.dtype, there.weight_scale.dtype
            found.append((there.weight.is_meta, there.bias.dtype, dtypes == (weight.dtype, scale.dtype)))
    return found


def test_casts_leave_codes_and_scales_alone(alone):
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    assert alone[4] == [(True, kind, True) for kind in (half, brain, single, half, brain, half)]


def compiled() -> tuple[list[bool], int]:
    """(whether relu(layer) is what it is eagerly for each number of rows; how often it was compiled)."""
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    with mori_shmem.init("host", timeout_s=60) as comm:
        linear = linear_of(comm.world_size, comm.device)
        with RowParallelLinear.from_linear(linear, comm, m_max=200) as layer:
            whole = torch.compile(
                lambda x: torch.relu(layer(x)), fullgraph=True, dynamic=True, backend=backend
            )
            right = []
            for m in (16, 129, 16):
                x = share(torch.randn(m, linear.in_features, dtype=torch.bfloat16), comm.rank)
                right.append(torch.equal(whole(x), torch.relu(layer(x))))
            compiled_once = len(compilations)
            codes, scale = quantize(x, "blockscale", "a")
            both = torch.compile(lambda x, scale: layer(x, scale), fullgraph=True, backend=backend)
            right.append(torch.equal(both(codes, scale), layer(codes, scale)))
            for wrong in (codes, x.double()):
                torch.compiler.reset()
                with pytest.raises(Exception, match="without x_scale: allowed are bf16"):
                    torch.compile(lambda x: layer(x), fullgraph=True, backend=backend)(wrong)
    return right, compiled_once


def test_GA_9_the_layer_compiles_whole(alone):
    right, compilations = alone[2]  # test_compile.py has 2 ranks
    assert right == [True] * 4
    assert compilations <= 2


def watched() -> list[str]:
    """What is logged for a call of the layer, for one of the operator, and for a result without a peer."""
    from mori_gemm_ar.nn.watch import watch

    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logging.getLogger("mori_gemm_ar").addHandler(Kept())
    os.environ["MORI_GEMM_AR_DEBUG_REL_L2"] = "1"
    with mori_shmem.init("host", timeout_s=30) as comm:
        linear = linear_of(comm.world_size, comm.device)
        for options in ({}, {"gather_dtype": "fp8"}):
            with RowParallelLinear.from_linear(linear, comm, m_max=32, **options) as layer:
                x = share(torch.randn(9, linear.in_features, dtype=torch.bfloat16), comm.rank)
                layer(x)
                given = operands(layer, x)
                gemm_all_reduce(layer.op, *operands(layer, x[:4]))
                right = layer.op(*given).clone()
                watch(layer.op, right - right * (comm.rank == 1), *given)
    return lines


def test_the_debug_switch_tells_how_far_a_call_is_from_the_unfused_path(pair):
    first, second = (lines for _, lines in pair)
    assert second == []  # one rank speaks, of the worst of all
    assert [line.split(":")[0] for line in first] == [
        f"fused-sdma call {call}, M={m}" for _ in range(2) for call, m in ((1, 9), (2, 4), (3, 9))
    ]
    assert [word for line in first for word in line.split() if word in ("within", "OUTSIDE")] == [
        *("within", "within", "OUTSIDE") * 2
    ]
    assert all(float(line.split("rel_l2 ")[1].split()[0]) < 1e-4 for line in first[:2])
    assert 1e-2 < float(first[3].split("rel_l2 ")[1].split()[0]) < 3e-2
