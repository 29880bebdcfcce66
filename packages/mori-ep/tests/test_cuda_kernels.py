"""The cuda target's kernels by themselves: all ranks of a node in one process, a window and a stream each.
Compared with the reference, byte for byte.

    cuda  the kernels as they are, all ranks on one GPU
    cpu   the same sources compiled for the CPU (on_cpu/): what they compute and how ranks meet, without what
          only hardware can show, the order of memory and time
"""

from __future__ import annotations

import functools
import importlib.util
import platform
import random
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mori_ep import reference
from mori_ep.config import EpDispatchCombineConfig
from mori_ep.reference import RankInput, bytes_of
from mori_ep.targets import CombineCall, CombineShape, DispatchCall, DispatchShape
from mori_ep.targets.cuda import launch as launches
from mori_ep.targets.cuda import limits, variants
from mori_ep.targets.cuda.faults import error_of
from mori_ep.targets.cuda.launch import CombineLaunch, DispatchLaunch, Maps
from mori_ep.targets.cuda.layout import layout_for
from mori_ep.targets.cuda.params import BOTH, RECEIVE, SEND
from mori_ep.targets.cuda.place import Place, blocks_of
from mori_ep.targets.cuda.runner import Runner
from mori_shmem.errors import ArgumentError, CollectiveMismatch, PeerTimeout, UnsupportedShape
from mori_shmem.targets.fault_record import FIELDS

pytestmark = pytest.mark.timeout(240)
on_gpu = pytest.param("cuda", marks=pytest.mark.gpu(1))


def cases(names: str, *, cpu: list[Any], cuda: list[Any]) -> pytest.MarkDecorator:
    """Parameters that depend on the device: the CPU is slow."""
    both = [("cpu", case) for case in cpu] + [("cuda", case) for case in cuda]
    values = [(device, *(case if isinstance(case, tuple) else (case,))) for device, case in both]
    marks = {"cpu": (), "cuda": (pytest.mark.gpu(1),)}
    return pytest.mark.parametrize(
        f"device, {names}", [pytest.param(*value, marks=marks[value[0]]) for value in values]
    )


only_gpu = pytest.mark.parametrize("device", [on_gpu])
on_both = pytest.mark.parametrize("device", ["cpu", on_gpu])
BF16, FP8, FP32, FP16 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float16
FNUZ = torch.float8_e4m3fnuz
STALE = 0xEE
CPU_BLOCKS, CPU_PACKET_TOKENS = 3, 40


# ---- ranks ----


@dataclass
class Rank:
    place: Place
    window: torch.Tensor
    record: torch.Tensor
    stream: Any  # on the CPU: this rank's queue
    jobs: list[Callable[[], object]] = field(default_factory=list)

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        region = getattr(self.place.layout, name)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self.window[region.offset_bytes : region.offset_bytes + nbytes].view(dtype).view(shape)

    def then(self, job: Callable[[], object]) -> None:
        """In the order of this rank's stream."""
        if self.stream is None:
            self.jobs.append(job)
        else:
            with torch.cuda.stream(self.stream):
                job()

    @property
    def raw_stream(self) -> Any:
        """What launches take."""
        return self if self.stream is None else self.stream.cuda_stream

    @property
    def maps(self) -> Maps:
        layout = self.place.layout
        regions = (layout.table, layout.out_positions, layout.recv_count, layout.meta)
        return Maps(*[self.place.mine(region) for region in regions])


class Node:
    """Ranks 0..W-1 of one op."""

    def __init__(
        self,
        device: str,
        world_size: int,
        *,
        timeout_s: float = 20.0,
        wire_block: int = 128,
        **fields: Any,
    ) -> None:
        self.device, self.world = device, world_size
        for name in ("max_num_inp_token_per_rank", "max_total_recv_tokens"):
            if name in fields:
                fields[name] = self.scaled(fields[name])
        given: dict[str, Any] = {
            "data_type": BF16,
            "hidden_dim": 512,
            "scale_dim": 0,
            "scale_type_size": 4,
            "max_token_type_size": 2,
            "max_num_inp_token_per_rank": 128,
            "num_experts_per_rank": 8,
            "num_experts_per_token": 4,
            **fields,
        }
        configs = [EpDispatchCombineConfig(rank=r, world_size=world_size, **given) for r in range(world_size)]
        layout = layout_for(configs[0], limits.plan_for(configs[0]))
        gpu = device == "cuda"
        if gpu:
            torch.cuda.set_device(0)
        windows = [aligned_zeros(layout.nbytes, device) for _ in configs]
        bases = [window.data_ptr() for window in windows]
        blocks = blocks_of(0, world_size) if gpu else CPU_BLOCKS
        self.ranks = []
        for config, window in zip(configs, windows, strict=True):
            record = torch.zeros(8, dtype=torch.int32, pin_memory=gpu)
            place = Place(config, layout, bases, 0, blocks, record.data_ptr(), timeout_s, wire_block)
            self.ranks.append(Rank(place, window, record, torch.cuda.Stream() if gpu else None))
        self.config = configs[0]
        self.launches: dict[Any, list[Any]] = {}
        self.sync()

    def scaled(self, tokens: int) -> int:
        """On the CPU a tenth of the larger sizes; the limit of packets is set to 40 tokens there."""
        return tokens // 10 if self.device == "cpu" and tokens > CPU_PACKET_TOKENS else tokens

    def sync(self) -> None:
        """Everything that was queued is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            return
        with ThreadPoolExecutor(self.world) as pool:
            done = [pool.submit(lambda rank=rank: [job() for job in rank.jobs]) for rank in self.ranks]
            for future in done:
                future.result()
        for rank in self.ranks:
            rank.jobs.clear()

    def prepared(self, kind: type, shape: Any) -> list[Any]:
        key = (kind, shape)
        if key not in self.launches:
            self.launches[key] = [kind(rank.place, shape) for rank in self.ranks]
        return self.launches[key]

    def poison(self, rank: Rank, first: str, last: str) -> None:
        """What an earlier call left must not pass for a result."""
        begin, end = getattr(rank.place.layout, first), getattr(rank.place.layout, last)
        rank.then(lambda: rank.window[begin.offset_bytes : end.end_bytes].fill_(STALE))

    def dispatch(self, inputs: list[RankInput], *, phases: int = BOTH) -> None:
        """Launched on all ranks, one after the other, without a host wait."""
        x, scales = inputs[0].x, inputs[0].scales
        scale = (0, None) if scales is None else (scales.shape[1], scales.dtype)
        shape = DispatchShape(x.shape[1], x.dtype, *scale, inputs[0].weights is not None)
        for rank, launch, given in zip(self.ranks, self.prepared(DispatchLaunch, shape), inputs, strict=True):
            if phases & SEND:
                self.poison(rank, "table", "out_positions")
            tensors = (given.x, given.weights, given.scales, given.ids)
            launch.launch(rank.raw_stream, *tensors, phases=phases)

    def combine(
        self,
        y: list[torch.Tensor],
        weights: list[torch.Tensor] | None,
        tokens: list[int],
        *,
        registered: bool = False,
        guard: bool = False,
        packets: bool = True,
        phases: int = BOTH,
    ) -> None:
        shape = CombineShape(y[0].shape[1], y[0].dtype, weights is not None, registered)
        for i, (rank, launch) in enumerate(zip(self.ranks, self.prepared(CombineLaunch, shape), strict=True)):
            if phases & SEND:
                self.poison(rank, "result", "result_weights")
            maps = rank.maps if packets else replace(rank.maps, meta=None)
            rows = rank.view("y", tuple(y[i].shape), y[i].dtype) if registered else y[i]
            given = (rows, weights and weights[i], tokens[i], maps)
            launch.launch(rank.raw_stream, *given, guard=guard, phases=phases)

    def faults(self) -> list[dict[str, int]]:
        found = [dict(zip(FIELDS, rank.record.tolist(), strict=True)) for rank in self.ranks]
        return [record for record in found if record["code"]]


def aligned_zeros(nbytes: int, device: str) -> torch.Tensor:
    memory = torch.zeros(nbytes + 256, dtype=torch.uint8, device=device)
    return memory[-memory.data_ptr() % 256 :][:nbytes]


# ---- kernels on the CPU ----


@pytest.fixture(autouse=True)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device is the CPU, launches get kernels for it."""
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu":
        if not shutil.which("g++") or platform.machine() != "x86_64":
            pytest.skip("the kernels for the CPU need g++ and an x86-64, whose 16-byte stores arrive whole")
        monkeypatch.setattr(limits, "PACKET_TOKENS", CPU_PACKET_TOKENS)
        monkeypatch.setattr(launches, "dispatch_module", lambda device: dispatch_on_cpu())
        monkeypatch.setattr(launches, "combine_module", lambda device, *kind: combine_on_cpu(*kind))
        monkeypatch.setattr(launches.driver, "PreparedLaunch", OnCpu)


class OnCpu:
    """A prepared launch: like the driver's, it takes the arguments as they are when it is launched."""

    def __init__(self, kernel: Callable[..., None], grid: int, block: int, args: list[Any]) -> None:
        self._kernel, self._shape, self._params = kernel, (grid, block), args[0]

    def launch(self, rank: Rank) -> None:
        as_it_is = type(self._params).from_buffer_copy(self._params)
        rank.then(functools.partial(self._kernel, as_it_is, *self._shape))


def on_cpu_module(variant: Any, kernels: dict[str, str]) -> Any:
    path = Path(__file__).parent / "on_cpu" / "emulator.py"
    spec = importlib.util.spec_from_file_location("emulator", path)
    assert spec is not None
    assert spec.loader is not None
    emulator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(emulator)
    folder = Path(tempfile.mkdtemp(prefix="mori-ep-on-cpu-"))
    library = emulator.Library(
        dict(variant.source.files), variant.source.name, variant.flags, kernels, folder
    )
    return SimpleNamespace(function=lambda name: functools.partial(library.run, name))


@functools.cache
def dispatch_on_cpu() -> Any:
    kernels = dict.fromkeys(("dispatch_packets", "dispatch_rows"), "DispatchParams")
    return on_cpu_module(variants.dispatch_variant(), kernels)


@functools.cache
def combine_on_cpu(dtype: torch.dtype, quant_type: str) -> Any:
    names = ("combine_packets", "combine_pull") if quant_type == "none" else ("combine_pull",)
    return on_cpu_module(variants.combine_variant(dtype, quant_type), dict.fromkeys(names, "CombineParams"))


# ---- inputs and results ----


def make_inputs(
    node: Node,
    tokens: list[int],
    seed: int,
    *,
    hidden: int = 512,
    dtype: torch.dtype = BF16,
    scale: tuple[int, torch.dtype] | None = None,
    weights: bool = True,
    drop: float = 0.0,
    experts: range | None = None,
) -> list[RankInput]:
    """On the GPU. Ids without repeats in a token, some of them -1 or out of range, drawn from `experts`."""
    draw = torch.Generator(device=node.device).manual_seed(seed)
    config, made = node.config, []
    pool = experts or range(config.num_experts)
    for n in map(node.scaled, tokens):
        row_bytes = hidden * dtype.itemsize
        x = torch.randint(0, 256, (n, row_bytes), dtype=torch.uint8, device=node.device, generator=draw)
        scores = torch.rand(n, len(pool), device=node.device, generator=draw)
        ids = scores.argsort(1)[:, : config.num_experts_per_token].int() + pool.start
        if drop:
            gone = torch.rand(ids.shape, device=node.device, generator=draw) < drop
            nobody = torch.rand(ids.shape, device=node.device, generator=draw) < 0.5
            ids = torch.where(gone, torch.where(nobody, -1, 1 << 20).int(), ids)
        w = torch.rand(ids.shape, device=node.device, generator=draw) if weights else None
        s = None
        if scale:
            scale_bytes = scale[0] * scale[1].itemsize
            s = torch.randint(0, 256, (n, scale_bytes), dtype=torch.uint8, device=node.device, generator=draw)
            s = s.view(scale[1])
        made.append(RankInput(x.view(dtype), ids.contiguous(), w, s))
    return made


def on_cpu(inputs: list[RankInput]) -> list[RankInput]:
    return [
        RankInput(
            g.x.cpu(),
            g.ids.cpu(),
            None if g.weights is None else g.weights.cpu(),
            None if g.scales is None else g.scales.cpu(),
        )
        for g in inputs
    ]


def snapshot(node: Node, inputs: list[RankInput]) -> list[dict[str, torch.Tensor]]:
    """Copies of every rank's results, in stream order; there after `sync`."""
    rows, k = node.config.recv_capacity, node.config.num_experts_per_token
    taken: list[dict[str, torch.Tensor]] = [{} for _ in node.ranks]
    for rank, given, kept in zip(node.ranks, inputs, taken, strict=True):
        views = {
            "out": rank.view("out", (rows, given.x.shape[1]), given.x.dtype),
            "ids": rank.view("out_indices", (rows, k), torch.int32),
            "weights": rank.view("out_weights", (rows, k), FP32),
            "sources": rank.view("out_positions", (rows,), torch.int32),
            "table": rank.view("table", (given.x.shape[0], k), torch.int32),
            "count": rank.view("recv_count", (1,), torch.int32),
        }
        if given.scales is not None:
            views["scales"] = rank.view("out_scales", (rows, given.scales.shape[1]), given.scales.dtype)
        rank.then(functools.partial(keep, kept, views))
    return taken


def keep(kept: dict[str, torch.Tensor], views: dict[str, torch.Tensor]) -> None:
    for name, view in views.items():
        kept[name] = (bytes_of(view) if view.dim() == 2 else view).clone()


def check_dispatch(node: Node, inputs: list[RankInput], got: list[dict[str, torch.Tensor]]) -> None:
    """Rows, order and maps are those of the reference."""
    config = node.config
    given = on_cpu(inputs)
    wanted = reference.dispatch(given, config.num_experts_per_rank)
    rows_at = [{source: row for row, source in enumerate(want.sources)} for want in wanted]
    for r, want in enumerate(wanted):
        n, found = want.count, {name: value.cpu() for name, value in got[r].items()}
        assert int(found["count"]) == n
        positions = [s * config.position_stride + t for s, t in want.sources]
        assert found["sources"][:n].tolist() == positions
        assert torch.equal(found["out"][:n], bytes_of(want.rows))
        assert torch.equal(found["ids"][:n], bytes_of(want.ids))
        if want.weights is not None:
            assert torch.equal(found["weights"][:n], bytes_of(want.weights))
        if want.scales is not None:
            assert torch.equal(found["scales"][:n], bytes_of(want.scales))
        table = found["table"].contiguous().view(torch.int32).view(given[r].ids.shape)
        assert table.tolist() == wanted_table(config, given[r].ids, r, rows_at)


def wanted_table(config: Any, ids: torch.Tensor, rank: int, rows_at: Any) -> list[list[int]]:
    table = []
    for t, slots in enumerate(ids.tolist()):
        seen: set[int] = set()
        row = []
        for e in slots:
            d = e // config.num_experts_per_rank if 0 <= e < config.num_experts else -1
            fresh = d >= 0 and d not in seen
            seen.add(d)
            row.append(d * config.position_stride + rows_at[d][rank, t] if fresh else config.null_position)
        table.append(row)
    return table


def ragged(world: int, seed: int, sizes: tuple[int, ...]) -> list[int]:
    draw = random.Random(seed)
    return [draw.choice(sizes) for _ in range(world)]


def run_dispatches(node: Node, calls: list[list[RankInput]]) -> None:
    """All calls back to back, then all results compared."""
    results = []
    node.sync()
    for given in calls:
        node.dispatch(given)
        results.append(snapshot(node, given))
    node.sync()
    assert node.faults() == []
    for given, got in zip(calls, results, strict=True):
        check_dispatch(node, given, got)


# ---- dispatch ----


@cases("world", cpu=[1, 3], cuda=[1, 2, 3, 5, 8])
def test_EP_8_any_number_of_ranks_each_sending_in_its_own_way(device: str, world: int) -> None:
    """600 tokens leave as rows, fewer as packets (512 at most); ranks of both kinds meet in one call."""
    node = Node(device, world, max_num_inp_token_per_rank=600, num_experts_per_token=6)
    draws = [[600] * world, *(ragged(world, i, (0, 1, 37, 128, 560, 600)) for i in range(1, 12))]
    calls = [make_inputs(node, n, i, drop=0.3 if i % 3 == 2 else 0.0) for i, n in enumerate(draws)]
    run_dispatches(node, calls)


@on_both
def test_EP_1_empty_ranks_and_one_sided_routing_again_and_again(device: str) -> None:
    node = Node(device, 2, max_num_inp_token_per_rank=600)
    one_side = [
        make_inputs(node, [600, 128], 9, experts=range(8)),
        make_inputs(node, [0, 600], 8, experts=range(8, 16)),
    ]
    calls = [make_inputs(node, n, 3) for n in ([0, 64], [64, 0], [0, 0], [0, 600], [600, 0])] + one_side
    run_dispatches(node, calls * 4)


@cases("top_k", cpu=[3, 31], cuda=[1, 3, 6, 7, 9, 10, 31])
def test_EP_2_any_top_k(device: str, top_k: int) -> None:
    node = Node(
        device,
        2,
        num_experts_per_token=top_k,
        num_experts_per_rank=24,
        scale_dim=8,
        max_num_inp_token_per_rank=600,
    )
    calls = [make_inputs(node, [37, 37], 5), make_inputs(node, [600, 37], 6, drop=0.2)]
    run_dispatches(node, calls * 2)


SHAPES = {
    "fp8 with block scales": (FP8, 7168, (56, FP32)),
    "bf16": (BF16, 7168, None),
    "fp16 with seven one-byte scales": (FP16, 512, (7, torch.uint8)),
    "fp32 with a scale a token": (FP32, 128, (1, FP32)),
    "packed fp4 with e8m0 scales": (torch.uint8, 3584, (224, torch.uint8)),
    "fnuz": (torch.float8_e4m3fnuz, 2048, (16, FP32)),
    "one unit": (FP8, 16, (3, torch.uint8)),
    "a row that no warp divides": (BF16, 3592, (5, torch.int16)),
}
SMALL_SHAPES = {
    "fp8 with block scales": (FP8, 896, (7, FP32)),
    "fp16 with seven one-byte scales": (FP16, 512, (7, torch.uint8)),
    "one unit": (FP8, 16, (3, torch.uint8)),
    "a row that no warp divides": (BF16, 904, (5, torch.int16)),
}


@on_both
def test_EP_7_every_dtype_and_shape_in_turn_on_one_op(device: str) -> None:
    node = Node(
        device,
        3,
        hidden_dim=7168,
        scale_dim=224,
        max_token_type_size=2,
        num_experts_per_token=8,
        max_num_inp_token_per_rank=400,
    )
    calls = []
    for i, (dtype, hidden, scale) in enumerate((SHAPES if device == "cuda" else SMALL_SHAPES).values()):
        for tokens in ([128, 3, 400], [5, 0, 1]):
            shape: dict[str, Any] = {"hidden": hidden, "dtype": dtype, "scale": scale, "weights": i % 3 != 1}
            calls.append(make_inputs(node, tokens, i, drop=0.1, **shape))
    run_dispatches(node, calls * 2)


@on_both
def test_tensors_that_begin_at_odd_places(device: str) -> None:
    """Ids, weights and scales need no alignment of their own; the payload's 16 bytes are asked for."""
    node = Node(device, 2, num_experts_per_token=8, scale_dim=16)
    given = make_inputs(node, [40, 40], 1, scale=(16, FP32))
    for g in given:
        for name in ("ids", "weights", "scales"):
            value = getattr(g, name)
            moved = torch.empty(value.numel() + 1, dtype=value.dtype, device=node.device)[1:].view(
                value.shape
            )
            setattr(g, name, moved.copy_(value))
    run_dispatches(node, [given] * 2)
    x = torch.empty(40 * 512 + 1, dtype=BF16, device=node.device)[1:].view(40, 512)
    with pytest.raises(ArgumentError, match="multiple of 16"):
        node.dispatch([replace(given[0], x=x), given[1]])


@only_gpu
def test_EP_3_tokens_beyond_two_to_the_sixteen(device: str) -> None:
    node = Node(
        device,
        2,
        hidden_dim=128,
        num_experts_per_rank=1,
        num_experts_per_token=1,
        max_num_inp_token_per_rank=65537,
    )
    given = make_inputs(node, [65537, 65537], 1, hidden=128)
    node.dispatch(given)
    (mine, theirs) = snapshot(node, given)
    node.sync()
    assert node.faults() == []
    assert int(mine["count"]) + int(theirs["count"]) == 131074
    for got, here in ((mine, 0), (theirs, 1)):
        sources = torch.cat([(g.ids[:, 0] == here).nonzero()[:, 0] + s * 131074 for s, g in enumerate(given)])
        n = len(sources)
        assert torch.equal(got["sources"][:n].long(), sources)
        rows = torch.cat([bytes_of(g.x)[g.ids[:, 0] == here] for g in given])
        assert torch.equal(got["out"][:n], rows)


@only_gpu
def test_EP_3_elements_beyond_two_to_the_31(device: str) -> None:
    node = Node(
        device,
        1,
        hidden_dim=7168,
        num_experts_per_rank=2,
        num_experts_per_token=1,
        max_num_inp_token_per_rank=300_000,
    )
    x = torch.zeros(300_000, 7168, dtype=BF16, device=node.device)
    x[-1] = torch.arange(7168, device=node.device)
    ids = torch.zeros(300_000, 1, dtype=torch.int32, device=node.device)
    node.dispatch([RankInput(x, ids)])
    node.sync()
    rows = node.ranks[0].view("out", (300_000, 7168), BF16)
    assert torch.equal(rows[-1], x[-1])
    node.ranks[0].view("y", (300_000, 7168), BF16).copy_(rows)
    node.combine([rows], None, [300_000], registered=True)
    node.sync()
    assert torch.equal(node.ranks[0].view("result", (300_000, 7168), BF16)[-1], x[-1])


@on_both
def test_a_dispatch_in_two_halves(device: str) -> None:
    node = Node(device, 3, max_num_inp_token_per_rank=600)
    for i, tokens in enumerate(([5, 0, 128], [600, 3, 600], [128, 128, 128])):
        given = make_inputs(node, tokens, i)
        node.sync()
        node.dispatch(given, phases=SEND)
        node.dispatch(given, phases=RECEIVE)
        got = snapshot(node, given)
        node.sync()
        check_dispatch(node, given, got)
    assert node.faults() == []


# ---- what goes wrong ----


def error_in(node: Node) -> Exception:
    node.sync()
    (found,) = node.faults()
    return error_of(found, 0.3)


@pytest.mark.parametrize("tokens", [40, 600])
@on_both
def test_a_rank_that_does_not_come_is_named_within_the_deadline(device: str, tokens: int) -> None:
    node = Node(device, 2, timeout_s=0.3, max_num_inp_token_per_rank=600)
    given = make_inputs(node, [tokens, tokens], 1)
    node.sync()
    node.prepared(DispatchLaunch, DispatchShape(512, BF16, 0, None, True))[0].launch(
        node.ranks[0].raw_stream, given[0].x, given[0].weights, None, given[0].ids
    )
    late = error_in(node)
    assert isinstance(late, PeerTimeout)
    assert (late.rank, late.peers, late.wanted) == (0, (1,), 1)
    assert "rank 0 waited more than 0.3 s for rank 1: the header of a dispatch" in str(late)


@pytest.mark.parametrize("packets", [True, False])
@on_both
def test_a_combine_that_a_rank_misses_is_named(device: str, packets: bool) -> None:
    node = Node(device, 2, timeout_s=0.3)
    given = make_inputs(node, [40, 40], 1)
    node.dispatch(given)
    node.sync()
    y = node.ranks[1].view("y", (node.config.recv_capacity, 512), BF16)
    launch = node.prepared(CombineLaunch, CombineShape(512, BF16, False, True))[1]
    maps = node.ranks[1].maps if packets else replace(node.ranks[1].maps, meta=None)
    launch.launch(node.ranks[1].raw_stream, y, None, 40, maps)
    late = error_in(node)
    assert isinstance(late, PeerTimeout)
    assert (late.rank, late.peers) == (1, (0,))


@on_both
def test_more_rows_than_there_is_room_for(device: str) -> None:
    """The rows that fit are right, nothing is written beyond them, and all ranks' errors have the numbers."""
    node = Node(device, 2, max_num_inp_token_per_rank=600, max_total_recv_tokens=200)
    for tokens in (128, 600):
        given = make_inputs(node, [tokens, 7], 2, experts=range(8))
        node.sync()
        node.dispatch(given)
        got = snapshot(node, given)
        node.sync()
        errors = [error_of(found, 1) for found in node.faults()]
        assert [type(error) for error in errors] == [UnsupportedShape] * 2
        room = node.config.recv_per_source
        assert f"rank 0 sends {node.scaled(tokens)} rows to rank 0" in str(errors[1])
        assert f"room for {room} of each rank" in str(errors[1])
        count = min(node.scaled(tokens) + 7, 2 * room)
        assert int(got[0]["count"]) == count
        rows = torch.cat([bytes_of(g.x) for g in given])[:count]
        assert torch.equal(got[0]["out"][:count], rows)
        for rank in node.ranks:
            rank.record.zero_()
            assert not rank.view("y", (1, 512), BF16).any()  # what lies behind


@on_both
def test_a_combine_of_too_few_rows(device: str) -> None:
    node = Node(device, 2)
    given = make_inputs(node, [40, 40], 1)
    node.dispatch(given)
    node.sync()
    y = [
        torch.zeros(256, 512, dtype=BF16, device=node.device),
        torch.zeros(7, 512, dtype=BF16, device=node.device),
    ]
    node.combine(y, None, [40, 40])
    error = error_in(node)
    assert isinstance(error, ArgumentError)
    assert "rank 1 combined an input of 7 rows" in str(error)


@on_both
def test_calls_of_different_kinds_are_told_apart(device: str) -> None:
    node = Node(device, 2, timeout_s=0.5)
    bf16, fp8 = make_inputs(node, [9, 9], 1), make_inputs(node, [9, 9], 1, dtype=FP8)
    shapes = (DispatchShape(512, BF16, 0, None, True), DispatchShape(512, FP8, 0, None, True))
    launches = [node.prepared(DispatchLaunch, shape)[r] for r, shape in enumerate(shapes)]
    node.sync()
    for rank, launch, given in zip(node.ranks, launches, (bf16[0], fp8[1]), strict=True):
        launch.launch(rank.raw_stream, given.x, given.weights, None, given.ids)
    node.sync()
    errors = [error_of(found, 0.5) for found in node.faults()]
    assert [type(error) for error in errors] == [CollectiveMismatch] * 2
    assert "rank 1 made a dispatch of another kind than rank 0" in str(errors[0])


@on_both
def test_a_masked_rank_is_neither_sent_to_nor_waited_for(device: str) -> None:
    node = Node(device, 3, timeout_s=0.5)
    calls = [make_inputs(node, [30, 40, 50], i) for i in range(4)]
    node.sync()
    for given in calls:
        results = []
        shape = DispatchShape(512, BF16, 0, None, True)
        for r in (0, 2):
            rank, launch = node.ranks[r], node.prepared(DispatchLaunch, shape)[r]
            launch.set_alive(0b101)
            launch.launch(rank.raw_stream, given[r].x, given[r].weights, None, given[r].ids)
        node.sync()
        assert node.faults() == []
        results = snapshot(node, given)
        node.sync()
        gone = RankInput(given[1].x[:0], given[1].ids[:0], given[1].weights[:0], None)
        wanted = reference.dispatch(on_cpu([given[0], gone, given[2]]), node.config.num_experts_per_rank)
        for r in (0, 2):
            assert torch.equal(results[r]["out"][: wanted[r].count].cpu(), bytes_of(wanted[r].rows))
            assert int(results[r]["count"]) == wanted[r].count


# ---- combine ----


def rounds(node: Node, calls: list[list[RankInput]], dtype: torch.dtype, hidden: int, **how: Any) -> None:
    """Dispatch, then combine rows that have nothing to do with what was dispatched: all calls back to
    back."""
    config, kept = node.config, []
    with_weights = how.pop("weights", False)
    wire = how.pop("wire", None)
    ys, ws = [], []
    for i, given in enumerate(calls):
        draw = torch.Generator(device=node.device).manual_seed(i)
        shape = (config.recv_capacity, hidden)
        ys.append([(torch.randn(shape, device=node.device, generator=draw) * 8).to(dtype) for _ in given])
        slots = (config.recv_capacity, config.num_experts_per_token)
        ws.append([torch.rand(slots, device=node.device, generator=draw) for _ in given])
    node.sync()
    for given, y, w in zip(calls, ys, ws, strict=True):
        node.dispatch(given)
        if how.get("registered"):
            for rank, rows in zip(node.ranks, y, strict=True):
                rank.then(functools.partial(rank.view("y", tuple(rows.shape), dtype).copy_, rows))
        tokens = [g.x.shape[0] for g in given]
        node.combine(y, w if with_weights else None, tokens, **how)
        for r, rank in enumerate(node.ranks):
            slots = (tokens[r], config.num_experts_per_token)
            results: dict[str, torch.Tensor] = {}
            views = {
                "out": rank.view("result", (tokens[r], hidden), dtype),
                "weights": rank.view("result_weights", slots, FP32),
            }
            rank.then(functools.partial(keep, results, views))
            kept.append(results)
    node.sync()
    assert node.faults() == []
    for given, y, w in zip(calls, ys, ws, strict=True):
        inputs = on_cpu(given)
        received = reference.dispatch(inputs, config.num_experts_per_rank)
        want = reference.combine(
            inputs, received, [part.cpu() for part in y], config.num_experts_per_rank, wire
        )
        want_w = reference.combine(inputs, received, [part.cpu() for part in w], config.num_experts_per_rank)
        for r in range(node.world):
            got = kept.pop(0)
            assert torch.equal(got["out"].cpu(), bytes_of(want[r])), r
            if with_weights:
                assert torch.equal(got["weights"].cpu(), bytes_of(want_w[r]))


@cases(
    "world, registered",
    cpu=[(2, False), (3, True)],
    cuda=[(world, registered) for world in (1, 2, 3, 8) for registered in (False, True)],
)
def test_EP_4_sums_in_slot_order_whichever_way_rows_come_home(
    device: str, world: int, registered: bool
) -> None:
    """Owners of up to 512 tokens get packets, larger ones pull, in the same call."""
    node = Node(
        device,
        world,
        max_num_inp_token_per_rank=600,
        num_experts_per_token=6,
        use_external_inp_buf=not registered,
    )
    draws = [[600] * world, *(ragged(world, i, (0, 1, 37, 128, 600)) for i in range(1, 6))]
    calls = [make_inputs(node, n, i, drop=0.3 if i % 2 else 0.0) for i, n in enumerate(draws)]
    rounds(node, calls, BF16, 512, registered=registered)
    rounds(node, calls, BF16, 512, registered=registered, weights=True)


@cases(
    "dtype, packets",
    cpu=[(FP16, True), (FNUZ, False)],
    cuda=[(dtype, packets) for dtype in (BF16, FP16, FP32, FP8, FNUZ) for packets in (True, False)],
)
def test_every_dtype_is_added_in_fp32_and_rounded_once(
    device: str, dtype: torch.dtype, packets: bool
) -> None:
    node = Node(device, 3, hidden_dim=7168, max_token_type_size=4, num_experts_per_token=9)
    calls = [make_inputs(node, [20, 3, 1], 1), make_inputs(node, [7, 0, 33], 2, drop=0.2)]
    for hidden in (7168 if device == "cuda" else 896, 144):
        rounds(node, calls, dtype, hidden, weights=True, packets=packets)
        rounds(node, calls, dtype, hidden, registered=True, packets=packets)


def wire_of(quant_type: str, block: int) -> Any:
    """What a quantised transport makes of rows."""

    def direct(y: torch.Tensor) -> torch.Tensor:
        return reference.rounded(y.float(), FP8).float()

    def blockwise(y: torch.Tensor) -> torch.Tensor:
        values = y.float().view(y.shape[0], -1, block)
        most = values.abs().amax(2, keepdim=True)
        largest = torch.full_like(most, 448)  # (a number over a tensor is a reciprocal in torch)
        scale, factor = most / largest, largest / most
        empty = most == 0
        codes = reference.rounded(values * factor.masked_fill(empty, 1), FP8).float()
        return (codes * scale.masked_fill(empty, 1)).view(y.shape)

    return direct if quant_type == "fp8_direct_cast" else blockwise


@cases(
    "quant_type, block",
    cpu=[("fp8_blockwise", 128)],
    cuda=[("fp8_direct_cast", 128), ("fp8_blockwise", 128), ("fp8_blockwise", 32)],
)
def test_quantised_transports_have_the_bytes_of_their_definition(
    device: str, quant_type: str, block: int
) -> None:
    node = Node(
        device, 3, hidden_dim=7168, quant_type=quant_type, max_num_inp_token_per_rank=400, wire_block=block
    )
    calls = [make_inputs(node, [20, 3, 300], 1), make_inputs(node, [7, 0, 33], 2, drop=0.2)]
    for hidden in (7168 if device == "cuda" else 896, 128):
        rounds(node, calls, BF16, hidden, weights=True, wire=wire_of(quant_type, block))


@on_both
def test_combine_again_with_the_registered_buffer_filled_again_at_once(device: str) -> None:
    """With `guard` a rank ends a combine only when nobody reads its rows any more."""
    node = Node(device, 3, max_num_inp_token_per_rank=600)
    given = make_inputs(node, [600, 37, 590], 1)
    node.sync()
    node.dispatch(given)
    tokens = [g.x.shape[0] for g in given]
    kept: list[dict[str, torch.Tensor]] = []
    shape = (node.config.recv_capacity, 512)
    for i in range(20):
        for rank in node.ranks:
            rank.then(functools.partial(rank.view("y", shape, BF16).fill_, i + 1))
        y = [rank.view("y", shape, BF16) for rank in node.ranks]
        node.combine(y, None, tokens, registered=True, guard=True)
        for rank, n in zip(node.ranks, tokens, strict=True):
            kept.append({})
            rank.then(functools.partial(keep, kept[-1], {"out": rank.view("result", (n, 512), BF16)}))
    node.sync()
    assert node.faults() == []
    for i in range(20):
        for given_here in given:
            to = reference.destinations(given_here.ids, node.config.num_experts_per_rank, 3)
            want = torch.tensor([float(len(d) * (i + 1)) for d in to], dtype=BF16)
            assert torch.equal(kept.pop(0)["out"].cpu().view(BF16)[:, 0], want)


def test_nobody_fills_the_registered_buffer_while_peers_read_it() -> None:
    """What a runner asks of the kernel: `guard` with every combine of that buffer, however many dispatches
    came before; and no such combine while rows that were copied there may be read."""
    guards: list[bool] = []

    def note(*_: object, guard: bool, **__: object) -> None:
        guards.append(guard)

    registered, copied = (
        SimpleNamespace(shape=CombineShape(512, BF16, False, registered), launch=note)
        for registered in (True, False)
    )
    runner: Any = SimpleNamespace(_stream=lambda: 0, _maps=None, _copied_in=False)
    rows = torch.empty(0, 512, dtype=BF16)
    combine = functools.partial(Runner.combine, runner, call=CombineCall(rows, None, 0))
    given = DispatchCall(rows, None, None, torch.empty(0, 4, dtype=torch.int32))
    dispatch = functools.partial(Runner.dispatch, runner, SimpleNamespace(launch=lambda *_: None), given)
    for dispatches in (1, 0, 2, 1):
        for _ in range(dispatches):
            dispatch()
        combine(registered)
    assert guards == [True] * 4
    combine(copied)
    with pytest.raises(ArgumentError, match="may still read them there"):
        combine(registered)
    combine(copied)
    dispatch()
    combine(registered)
    assert guards[4:] == [False, False, True]


# ---- many calls ----


@only_gpu
def test_EP_6_a_captured_pair_of_calls_replayed_a_thousand_times_between_eager_calls(device: str) -> None:
    """All ranks' kernels in one graph, an odd number of pairs in it; every replay has fresh inputs."""
    node = Node(device, 2, max_num_inp_token_per_rank=128)
    tokens, mismatches = [128, 37], torch.zeros(1, dtype=torch.long, device=node.device)
    static = make_inputs(node, tokens, 0)

    def pair() -> None:
        node.dispatch(static)
        y = [rank.view("out", (node.config.recv_capacity, 512), BF16) for rank in node.ranks]
        node.combine(y, None, tokens)

    def compare() -> None:
        for rank, given in zip(node.ranks, static, strict=True):
            owners = torch.where(given.ids >= 0, given.ids // node.config.num_experts_per_rank, 2)
            ranks = (owners == 0).any(1).float() + (owners == 1).any(1).float()
            want = (given.x.float() * ranks[:, None]).to(BF16)
            out = rank.view("result", tuple(given.x.shape), BF16)
            mismatches.add_((out != want).any())

    pair()
    node.sync()
    graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=main):
        for rank in node.ranks:
            rank.stream.wait_stream(main)
        for _ in range(3):
            pair()
        for rank in node.ranks:
            main.wait_stream(rank.stream)
    draw = torch.Generator(device=node.device).manual_seed(5)
    for i in range(1000):
        for given in static:
            given.x.normal_(generator=draw)
            order = torch.rand(given.ids.shape[0], 16, device=node.device, generator=draw).argsort(1)
            given.ids.copy_(order[:, : given.ids.shape[1]])
        graph.replay()
        compare()
        if i % 10 == 3:
            node.sync()
            pair()
            node.sync()
            compare()
    node.sync()
    assert node.faults() == []
    assert int(mismatches) == 0
