"""`MegaMoE` on the cuda target, from Python down: on this machine with emulated kernels (ranks are threads,
and stand where a communicator would be), on GPUs with real ones.

On GPUs, all ways of Stage1, eager and in replayed graphs, must give the same bytes. The host target's, which
sums in another order, are near."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mori_shmem
import pytest
import torch
from mori_megamoe import MegaMoE, MegaMoEStage1Sdma, arithmetic, reference
from mori_megamoe.reference import RankInput
from mori_megamoe.targets.cuda import kernels, slots
from mori_megamoe.targets.cuda.gemm1 import Buffers
from mori_megamoe.targets.cuda.layout import Shape, layout_for
from mori_megamoe.targets.cuda.params import Gemm1Maps, Gemm1Params
from mori_megamoe.testing import Toy, wrong_rows
from mori_megamoe.weights import StoredWeights
from mori_shmem.errors import ArgumentError, LayoutError, MoriError, PeerTimeout, UnsupportedShape
from mori_shmem.targets.fault_record import FIELDS

sys.path.insert(0, str(Path(__file__).parent))
from cuda_cases import cpu_maps, library
from cuda_emulator import Library
from cuda_ranks import EmulatedProgram, EmulatedQueue, _aligned, dispatch_library, prepare_library
from test_cuda_layer import (
    back_library,
    combine_library,
    hidden_library,
    logical_weights,
    matmul_of,
    of_rank,
    whole_call,
)


class EmulatedKernels:
    """kernels.Kernels on the CPU: a launch is done when `launch` returns."""

    is_capturing = False  # of all of them
    stream, blocks = 0, 2

    def __init__(self, comm: Any, shape: Shape) -> None:
        self._rank, self._shape = comm.rank, shape
        self._sums: list[torch.Tensor] = []

    def finish(self) -> None:
        pass

    def load(self, *names: str) -> None:
        pass

    def maps(self, buffers: Buffers) -> Gemm1Maps:
        return cpu_maps(self._shape.body, buffers, self._shape.tile_rows)

    def launch(self, name: str, grid: int, args: Sequence[ctypes.Structure]) -> Any:
        made, kernel, threads = self._kernel(name)
        for given in args:
            if isinstance(given, Gemm1Params):  # the emulated GEMMs write their sums
                self._sums.append(torch.empty(self._shape.rows, given.width))
                given.sums = self._sums[-1].data_ptr()

        def launch(stream: int) -> None:
            made().of_rank(self._rank).run(kernel, args, min(grid, 4), threads)

        return SimpleNamespace(launch=launch)

    def _kernel(self, name: str) -> tuple[Callable[[], Library], str, int]:
        shape, (kind, _, which) = self._shape, name.partition("-")
        if kind == "prepare":
            return lambda: prepare_library(shape.body, which == "codes"), kind, 1024
        if kind in ("gemm1", "stage1"):
            return lambda: library(shape.body, shape.tile_rows, which or "never"), kind, 384
        if kind == "gemm2":
            return lambda: back_library(shape.body, shape.tile_rows, shape.partials), kind, 384
        if kind == "hidden":
            return lambda: hidden_library(shape.body), kind, 256
        return (lambda: combine_library(shape.partials)) if kind == "combine" else dispatch_library, kind, 256


class EmulatedRanks:
    """What a MegaMoE asks of its communicator, for ranks that are threads."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._met = threading.Barrier(world_size, timeout=60)
        self._given: list[Any] = [None] * world_size
        self.comms = [self._comm(rank) for rank in range(world_size)]

    def _comm(self, rank: int) -> Any:
        record = torch.zeros(len(FIELDS), dtype=torch.int32)
        core = SimpleNamespace(
            record=SimpleNamespace(address=record.data_ptr(), memory=record),
            peer_states=lambda: ["alive"] * self.world_size,
        )

        def all_gather(given: Any) -> list[Any]:
            self._given[rank] = given
            self._met.wait()
            gathered = list(self._given)
            self._met.wait()
            return gathered

        def alloc(nbytes: int) -> Any:
            part = _aligned(nbytes)
            addresses = tuple(all_gather(part.data_ptr()))

            def tensor(shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0) -> torch.Tensor:
                count = torch.Size(shape).numel() * dtype.itemsize
                return part[offset_bytes : offset_bytes + count].view(dtype).view(*shape)

            return SimpleNamespace(
                addresses=addresses,
                tensor=tensor,
                nbytes=nbytes,
                close=lambda: None,
                at=lambda offset, peer=rank: addresses[peer] + offset,
            )

        here = {
            "rank": rank,
            "world_size": self.world_size,
            "backend": "cuda",
            "device": torch.device("cpu"),
            "timeout_s": 60.0,
            "core": core,
            "closed": False,
            "all_gather": staticmethod(all_gather),
            "alloc": staticmethod(alloc),
            "queue": staticmethod(lambda peer: EmulatedQueue()),
            "barrier": staticmethod(lambda: all_gather(None)),
            "check": staticmethod(lambda: None),
            "check_open": staticmethod(lambda: None),
        }
        return object.__new__(type("EmulatedCommunicator", (mori_shmem.Communicator,), here))

    def run(self, job: Callable[[Any], Any]) -> list[Any]:
        """Every rank's result."""
        with ThreadPoolExecutor(self.world_size) as pool:
            return [done.result() for done in [pool.submit(job, comm) for comm in self.comms]]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "Kernels", EmulatedKernels)
    monkeypatch.setattr(slots, "PutProgram", EmulatedProgram)


SHAPE = Shape(2, 256, 256, 4, topk=2, max_tokens=16, body="R", partials="bf16")


def layer_of(comm: Any, weights: StoredWeights, **changes: Any) -> MegaMoE:
    given: dict[str, Any] = {
        "rank": comm.rank,
        "world_size": comm.world_size,
        "model_dim": SHAPE.model_dim,
        "inter_dim": SHAPE.inter_dim,
        "experts": SHAPE.num_experts * comm.world_size // 2,
        "topk": SHAPE.topk,
        "quant": "a8w4",
        "max_tok_per_rank": SHAPE.max_tokens,
        "swiglu_limit": 10.0,
        "partials": SHAPE.partials,
        "comm": comm,
        **weights._asdict(),
    }
    return MegaMoE(**{**given, **changes})


def exact_inputs(tokens: Sequence[int], seed: int) -> list[RankInput]:
    calls = [whole_call(SHAPE, n, 10 * seed + rank) for rank, n in enumerate(tokens)]
    return [RankInput(call.x, call.weights, call.ids) for call in calls]


def test_every_way_through_the_layer_gives_the_references_bytes(
    emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct stores, both orders of the fused kernel, quantised rows, other weights, copy engines with rows
    packed before and in the launch; with windows full of NaN before each call. In the second call and the
    fourth rank 0 has no tokens and rank 1, whose experts nobody names, no rows; some tokens name an expert
    twice."""
    monkeypatch.setenv("MORI_MEGAMOE_POISON", "1")
    torch.set_num_threads(1)
    logical = [logical_weights(SHAPE, sparse=True, seed=seed) for seed in (5, 6)]
    stored = [[of_rank(SHAPE, part, rank) for rank in range(2)] for part in logical]
    calls = [exact_inputs((9, 3), 0), exact_inputs((0, 16), 1)]
    calls[1][1].ids[calls[1][1].ids >= SHAPE.experts] -= SHAPE.experts
    assert (calls[1][1].ids[:, 0] == calls[1][1].ids[:, 1]).any()

    def rank(comm: Any) -> list[torch.Tensor]:
        with layer_of(comm, stored[0][comm.rank]) as moe:
            outs = [moe(*calls[0][comm.rank]).clone()]
            ready = MegaMoEStage1Sdma(moe, order="ready-first").install()
            outs += [moe(*calls[1][comm.rank]).clone()]
            ready.uninstall()
            stage = MegaMoEStage1Sdma(moe).install()
            moe.weights = stored[1][comm.rank]
            x, weights, ids = calls[0][comm.rank]
            outs += [moe.forward_prequant(*moe.quantize(x), weights, ids).clone()]
            stage.uninstall()
            stage = MegaMoEStage1Sdma(moe, mover="copies", slot_experts=1, slot_slack=1.0).install()
            outs += [moe(*calls[1][comm.rank]).clone()]
            stage.uninstall()
            MegaMoEStage1Sdma(
                moe, gemm1="in-launch", mover="copies", order="ready-first", packers=2
            ).install()
            outs += [moe(*calls[0][comm.rank]).clone()]
            return outs

    got = EmulatedRanks(2).run(rank)
    monkeypatch.setattr(arithmetic, "matmul", matmul_of("R"))
    problem = layout_for_shape().problem
    for number, (call, which) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1), (0, 1)]):
        want = reference.layer(calls[call], stored[which], problem)
        for r in range(2):
            assert wrong_rows(got[r][number], want[r].out) == [], (number, r)


def layout_for_shape() -> Any:
    from test_cuda_layer import problem_of

    return layout_for(problem_of(SHAPE), "R")


def test_stage1_alone_says_where_its_rows_are(emulated: None) -> None:
    """And the layer goes on after a call that ended there."""
    stored = [of_rank(SHAPE, logical_weights(SHAPE, sparse=True), rank) for rank in range(2)]
    inputs = exact_inputs((5, 2), 3)
    of_all = torch.cat([given.ids.flatten() for given in inputs])
    rows_of = [int(((of_all >= 2 * r) & (of_all < 2 * r + 2)).sum()) for r in range(2)]

    def rank(comm: Any) -> tuple[list[int], torch.Size, torch.Tensor]:
        with layer_of(comm, stored[comm.rank]) as moe:
            found = moe.stage1_only(*inputs[comm.rank])
            plan = found.launch.plan
            assert len(found.hidden) == plan.num_rows == 32 * len(plan.tiles)
            assert sum(section.rows for section in plan.sections) == rows_of[comm.rank]
            return [tile.expert for tile in plan.tiles], found.hidden.shape, moe(*inputs[comm.rank]).clone()

    got = EmulatedRanks(2).run(rank)
    named = {int(e) for given in inputs for e in given.ids.flatten() if e >= 0}
    assert sorted(got[0][0] + got[1][0]) == sorted(named)
    assert all(out.float().abs().max() > 0 for _, _, out in got)


def test_the_sizes_of_a_layer_and_its_tiles_change_no_byte(emulated: None) -> None:
    """Tiles of 32, 64 and 128 rows."""
    stored = [of_rank(SHAPE, logical_weights(SHAPE, sparse=True), rank) for rank in range(2)]
    inputs = exact_inputs((7, 3), 5)

    def rank(comm: Any) -> list[tuple[int, torch.Tensor]]:
        found = []
        for max_tokens in (16, 64, 128):
            with layer_of(comm, stored[comm.rank], max_tok_per_rank=max_tokens) as moe:
                tile_rows = moe.stage1_only(*inputs[comm.rank]).launch.plan.block_m
                found.append((tile_rows, moe(*inputs[comm.rank]).clone()))
        return found

    for found in EmulatedRanks(2).run(rank):
        assert [tile_rows for tile_rows, _ in found] == [32, 64, 128]
        assert all(torch.equal(out, found[0][1]) for _, out in found)


REFUSED: tuple[tuple[dict[str, Any], type[MoriError], str], ...] = (
    (
        {"fuse_quant": True, "workers": 3},
        UnsupportedShape,
        "fuse_quant=True: prepare quantises each row once.*workers=3",
    ),
    ({"scale_mode": "shuffler"}, UnsupportedShape, "scale_mode='shuffler': a row has one scale"),
    ({"shufflers": 2}, UnsupportedShape, "shufflers=2: a row has one scale"),
    ({"puts": "one"}, UnsupportedShape, "puts='one': a slot is one copy in any case"),
    ({"merge_rows": 64}, UnsupportedShape, "merge_rows=64: stored rows have no signal"),
    ({"packers": 3}, ArgumentError, "packers=3: an even number"),
    ({"slot_experts": 2}, ArgumentError, "slot_experts=2 with mover='auto': only mover='copies' has slots"),
    ({"slot_slack": 2.0, "mover": "stores"}, ArgumentError, "slot_slack=2.0 with mover='stores'"),
)


def test_weights_that_a_body_cannot_hold_are_refused_on_all_ranks(emulated: None) -> None:
    """Where the layer is made, by all; later by the rank that is given them, and the layer goes on."""
    logical = logical_weights(SHAPE, sparse=True)
    good = [of_rank(SHAPE, logical, rank) for rank in range(2)]
    logical.w1_scale[SHAPE.experts, 5, 0] += 40  # rank 1's first expert
    wide = [of_rank(SHAPE, logical, rank) for rank in range(2)]
    inputs = exact_inputs((4, 4), 3)
    words = r"w1 of expert 0: the scales of the gate row 5 are 2\^\d+ apart, body R"

    def rank(comm: Any) -> None:
        with pytest.raises(UnsupportedShape, match=f"layer's weights cannot be used on rank 1: .*{words}"):
            layer_of(comm, wide[comm.rank])
        with layer_of(comm, good[comm.rank]) as moe:
            before = moe(*inputs[comm.rank]).clone()
            if comm.rank:
                with pytest.raises(UnsupportedShape, match=words):
                    moe.weights = wide[comm.rank]
            assert torch.equal(moe(*inputs[comm.rank]), before)

    EmulatedRanks(2).run(rank)


def test_what_the_cuda_target_refuses(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = of_rank(SHAPE, logical_weights(SHAPE, sparse=True), 0)
    x, weights, ids = exact_inputs((4, 4), 3)[0]
    ids = torch.where(ids < 2, ids, -1).contiguous()

    def rank(comm: Any) -> None:
        with layer_of(comm, stored) as moe:
            for given, error, words in REFUSED:
                with pytest.raises(error, match=words):
                    MegaMoEStage1Sdma(moe, **given)
            before = moe(x, weights, ids).clone()
            alone = MegaMoEStage1Sdma(moe, mover="copies", gemm1="7001", scale_mode="ldsw").install()
            assert torch.equal(moe(x, weights, ids), before)  # one rank has nobody to copy to
            alone.uninstall()
            moe.weights.w1.add_(0)  # another version
            monkeypatch.setattr(EmulatedKernels, "is_capturing", True)
            with pytest.raises(MoriError, match="weights that are new, or were changed in place"):
                moe(x, weights, ids)
            monkeypatch.setattr(EmulatedKernels, "is_capturing", False)
        with layer_of(comm, stored) as moe:
            shifted = torch.zeros(x.numel() + 8, dtype=x.dtype)[1 : 1 + x.numel()].view(x.shape)
            with pytest.raises(LayoutError, match="a multiple of 16"):
                moe(shifted, weights, ids)

    EmulatedRanks(1).run(rank)
    monkeypatch.setenv("MORI_MEGAMOE_BODY", "B")
    with pytest.raises(MoriError, match="MORI_MEGAMOE_BODY"):
        EmulatedRanks(1).run(lambda comm: layer_of(comm, stored))


# ---- on GPUs ----

gpus = pytest.mark.parametrize(
    "world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2, 4, 8)], ids="{}-ranks".format
)
Outputs = list[torch.Tensor]
# The last has room in its slots for an even router's rows only: of a random one some are stored.
MODES: tuple[dict[str, Any] | None, ...] = (
    None,
    {},
    {"order": "ready-first"},
    {"mover": "copies"},
    {"mover": "copies", "gemm1": "in-launch", "slot_experts": 1, "slot_slack": 1.0},
)


def toy_for(world_size: int, partials: str) -> Toy:
    return Toy(world_size, 4, max_tokens=256, model_dim=768, inter_dim=512, partials=partials)


def layer_on_a_gpu(toy: Toy, calls: Sequence[Sequence[RankInput]]) -> list[Outputs]:
    """One rank: in each mode, outputs of eager calls that alternate, of graphs replayed in turns, and of an
    eager call after that."""
    with mori_shmem.init("cuda", timeout_s=20) as comm:
        torch.cuda.set_device(comm.device)
        weights = StoredWeights(*[part.to(comm.device) for part in toy.weights(comm.rank)])
        given = [[part.to(comm.device) for part in inputs[comm.rank]] for inputs in calls]
        with toy.layer(comm, **weights._asdict()) as moe:
            by_mode = []
            for mode in MODES:
                stage = None if mode is None else MegaMoEStage1Sdma(moe, **mode).install()
                by_mode.append(outputs_of(moe, given))
                if stage is not None:
                    stage.uninstall()
            comm.barrier()
        return by_mode


def outputs_of(moe: MegaMoE, calls: Sequence[Sequence[torch.Tensor]]) -> Outputs:
    outs = [moe(*call).clone() for call in list(calls) * 2]
    graphs = [torch.cuda.CUDAGraph() for _ in calls]
    views = []
    torch.cuda.synchronize()
    for graph, call in zip(graphs, calls, strict=True):
        with torch.cuda.graph(graph):
            views.append(moe(*call))
    for _ in range(3):
        for graph, view in zip(graphs, views, strict=True):
            view.fill_(torch.nan)
            graph.replay()
            outs.append(view.clone())
    outs.append(moe(*calls[0]).clone())
    torch.cuda.synchronize()
    moe.stage1_only(*calls[0])  # raises what a kernel has left
    torch.cuda.synchronize()
    return [out.cpu() for out in outs]


@gpus
@pytest.mark.parametrize("body", ["R", "A"])
@pytest.mark.parametrize("partials", ["bf16", "fp8_blockwise_1x32"])
def test_every_mode_gives_the_same_bytes_and_they_are_near_the_reference(
    world_size: int, body: str, partials: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORI_MEGAMOE_BODY", body)
    monkeypatch.setenv("MORI_MEGAMOE_POISON", "1")
    toy = toy_for(world_size, partials)
    tokens = [[200 - 7 * r for r in range(world_size)], [0, *[256] * (world_size - 1)]]
    calls = [toy.inputs(n, seed, invalid=0.1) for seed, n in enumerate(tokens)]
    by_rank = mori_shmem.run_ranks(layer_on_a_gpu, world_size, toy, calls, timeout_s=300)
    want = [toy.reference(inputs) for inputs in calls]
    for rank, by_mode in enumerate(by_rank):
        for mode, outs in zip(MODES, by_mode, strict=True):
            for number, out in enumerate(outs):
                first = by_mode[0][number % 2]
                assert wrong_rows(out, first) == [], (rank, mode, number)
        for number in range(2):
            if len(want[number][rank].out):
                assert reference.rel_l2(by_mode[0][number], want[number][rank].out) < 0.02


def layers_of_several_sizes(toy: Toy, inputs: Sequence[RankInput]) -> list[tuple[int, list[torch.Tensor]]]:
    """One rank: the same tokens through layers for more and more of them, in each mode."""
    found = []
    with mori_shmem.init("cuda", timeout_s=20) as comm:
        torch.cuda.set_device(comm.device)
        weights = StoredWeights(*[part.to(comm.device) for part in toy.weights(comm.rank)])
        given = [part.to(comm.device) for part in inputs[comm.rank]]
        for max_tokens in (16, 64, 256):
            with replace(toy, max_tokens=max_tokens).layer(comm, **weights._asdict()) as moe:
                tile_rows = moe.stage1_only(*given).launch.plan.block_m
                outs = [moe(*given).cpu()]
                for order in ("expert", "ready-first"):
                    stage = MegaMoEStage1Sdma(moe, order=order).install()
                    outs.append(moe(*given).cpu())
                    stage.uninstall()
                comm.barrier()
            found.append((tile_rows, outs))
    return found


@gpus
@pytest.mark.parametrize("body", ["R", "A"])
def test_on_gpus_too(world_size: int, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_MEGAMOE_BODY", body)
    toy = toy_for(world_size, "bf16")
    inputs = toy.inputs([9 + r for r in range(world_size)], 3)
    for found in mori_shmem.run_ranks(layers_of_several_sizes, world_size, toy, inputs, timeout_s=240):
        assert len({tile_rows for tile_rows, _ in found}) == 3
        for _, outs in found:
            assert all(wrong_rows(out, found[0][1][0]) == [] for out in outs)


def rank_1_stays_away(toy: Toy, inputs: Sequence[RankInput]) -> str:
    """What rank 0 is told by the call after the one that rank 1 did not make."""
    with mori_shmem.init("cuda", timeout_s=2) as comm:
        torch.cuda.set_device(comm.device)
        weights = StoredWeights(*[part.to(comm.device) for part in toy.weights(comm.rank)])
        given = [part.to(comm.device) for part in inputs[comm.rank]]
        said = ""
        with toy.layer(comm, **weights._asdict()) as moe:
            if comm.rank == 0:
                moe(*given)
                torch.cuda.synchronize()
                with pytest.raises(PeerTimeout) as late:
                    moe(*given)
                said = str(late.value)
            comm.all_gather(None, timeout_s=60)
        return said


@pytest.mark.gpu(2)
def test_a_rank_that_makes_no_call_is_named() -> None:
    toy = toy_for(2, "bf16")
    said, _ = mori_shmem.run_ranks(rank_1_stays_away, 2, toy, toy.inputs([10, 10]), timeout_s=120)
    assert "rank 0 waited more than 2 s for rank 1: its counts of call 1; seen 0, wanted 1" in said


def layer_on_two_streams(toy: Toy, inputs: Sequence[RankInput]) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank: a call on the caller's stream, and one on another."""
    with mori_shmem.init("cuda", timeout_s=20) as comm:
        torch.cuda.set_device(comm.device)
        weights = StoredWeights(*[part.to(comm.device) for part in toy.weights(comm.rank)])
        given = [part.to(comm.device) for part in inputs[comm.rank]]
        with toy.layer(comm, **weights._asdict()) as moe:
            first = moe(*given).clone()
            other = torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
            second = moe(*given, stream=other)
            torch.cuda.current_stream().wait_stream(other)
            out = (first.cpu(), second.cpu())
            comm.barrier()
        return out


@gpus
def test_a_call_on_another_stream(world_size: int) -> None:
    toy = toy_for(world_size, "bf16")
    inputs = toy.inputs([100] * world_size, 7)
    for first, second in mori_shmem.run_ranks(layer_on_two_streams, world_size, toy, inputs, timeout_s=240):
        assert wrong_rows(first, second) == []
