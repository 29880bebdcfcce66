"""All ranks of a node in one process, a window and a stream each, for the cuda target's kernels by
themselves; compared with the reference, byte for byte.

    cuda  the kernels as they are, all ranks on one GPU
    cpu   the same sources compiled for the CPU (emulator.py): what they compute and how ranks meet, without
          what only hardware can show, the order of memory and time
"""

from __future__ import annotations

import functools
import platform
import random
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import emulator
import pytest
import torch
from mori_ep import reference
from mori_ep.config import EpDispatchCombineConfig
from mori_ep.plan import NOTHING_SAID, PLANNED, FewTokens, Geometry
from mori_ep.reference import RankInput, bytes_of
from mori_ep.targets import CombineShape, DispatchShape
from mori_ep.targets.cuda import launch as launches
from mori_ep.targets.cuda import limits, variants
from mori_ep.targets.cuda.launch import CombineLaunch, DispatchLaunch, Maps
from mori_ep.targets.cuda.layout import layout_for
from mori_ep.targets.cuda.params import BOTH, SEND, STATE_WORDS
from mori_ep.targets.cuda.place import Place, blocks_of
from mori_shmem.targets.fault_record import FIELDS

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
        few: FewTokens = NOTHING_SAID,
        **fields: Any,
    ) -> None:
        self.device, self.world = device, world_size
        self.asked: Callable[[str, int], Geometry] = lambda phase, rank: PLANNED
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
        layout = layout_for(configs[0], limits.plan_for(configs[0], few))
        gpu = device == "cuda"
        if gpu:
            torch.cuda.set_device(0)
        windows = [aligned_zeros(layout.nbytes, device) for _ in configs]
        bases = [window.data_ptr() for window in windows]
        blocks = blocks_of(0, world_size) if gpu else CPU_BLOCKS
        self.ranks = []
        for config, window in zip(configs, windows, strict=True):
            record = torch.zeros(8, dtype=torch.int32, pin_memory=gpu)
            place = Place(config, layout, bases, 0, blocks, record.data_ptr(), timeout_s, wire_block, few)
            self.ranks.append(Rank(place, window, record, torch.cuda.Stream() if gpu else None))
        self.config = configs[0]
        self.launches: dict[Any, list[Any]] = {}
        self.masked: list[int] = []
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
        for launch in self.launches[key]:
            launch.set_alive(sum(1 << rank for rank in range(self.world) if rank not in self.masked))
        return self.launches[key]

    def states(self, rank: Rank) -> list[torch.Tensor]:
        """The words of both directions."""
        return [rank.view(f"{phase}_state", (STATE_WORDS,), torch.int32) for phase in ("dispatch", "combine")]

    def living(self, inputs: list[RankInput]) -> list[RankInput]:
        """What those who take part bring; the others no token."""
        return [
            RankInput(*(None if part is None else part[:0] for part in vars(given).values()))
            if rank in self.masked
            else given
            for rank, given in enumerate(inputs)
        ]

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
            if rank.place.rank in self.masked:
                continue
            if phases & SEND:
                self.poison(rank, "table", "out_positions")
            tensors = (given.x, given.weights, given.scales, given.ids)
            geometry, home = (self.asked(phase, rank.place.rank) for phase in ("dispatch", "combine"))
            launch.launch(rank.raw_stream, *tensors, None, geometry, phases, homeward=home.low_latency)

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
            if i in self.masked:
                continue
            if phases & SEND:
                self.poison(rank, "result", "result_weights")
            maps = rank.maps if packets else replace(rank.maps, meta=None)
            rows = rank.view("y", tuple(y[i].shape), y[i].dtype) if registered else y[i]
            given = (rows, weights and weights[i], tokens[i], maps)
            geometry = self.asked("combine", rank.place.rank)
            launch.launch(rank.raw_stream, *given, guard=guard, geometry=geometry, phases=phases)

    def faults(self) -> list[dict[str, int]]:
        found = [dict(zip(FIELDS, rank.record.tolist(), strict=True)) for rank in self.ranks]
        return [record for record in found if record["code"]]


def aligned_zeros(nbytes: int, device: str) -> torch.Tensor:
    memory = torch.zeros(nbytes + 256, dtype=torch.uint8, device=device)
    return memory[-memory.data_ptr() % 256 :][:nbytes]


# ---- kernels on the CPU ----


def use_kernels_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches get them."""
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

    launched: ClassVar[list[tuple[str, int, int]]] = []  # kernel, blocks, threads

    def launch(self, rank: Rank) -> None:
        self.launched.append((self._kernel.args[0], *self._shape))  # type: ignore[attr-defined]
        as_it_is = type(self._params).from_buffer_copy(self._params)
        rank.then(functools.partial(self._kernel, as_it_is, *self._shape))


def on_cpu_module(variant: Any, kernels: dict[str, str]) -> Any:
    with tempfile.TemporaryDirectory(prefix="mori-ep-on-cpu-") as folder:
        library = emulator.Library(
            dict(variant.source.files), variant.source.name, variant.flags, kernels, Path(folder)
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
    given = node.living(on_cpu(inputs))
    wanted = reference.dispatch(given, config.num_experts_per_rank)
    rows_at = [{source: row for row, source in enumerate(want.sources)} for want in wanted]
    for r, want in enumerate(wanted):
        if r in node.masked:
            continue
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
        assert table.tolist() == wanted_table(node, given[r].ids, r, rows_at)


def wanted_table(node: Node, ids: torch.Tensor, rank: int, rows_at: Any) -> list[list[int]]:
    table, config = [], node.config
    for t, slots in enumerate(ids.tolist()):
        seen: set[int] = set()
        row = []
        for e in slots:
            d = e // config.num_experts_per_rank if 0 <= e < config.num_experts else -1
            fresh = d >= 0 and d not in seen and d not in node.masked
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
        inputs = node.living(on_cpu(given))
        experts, gone = config.num_experts_per_rank, node.masked
        received = reference.dispatch(inputs, experts)
        want = reference.combine(inputs, received, [part.cpu() for part in y], experts, wire, gone)
        want_w = reference.combine(inputs, received, [part.cpu() for part in w], experts, missing=gone)
        for r in range(node.world):
            got = kept.pop(0)
            if r in gone:
                continue
            assert torch.equal(got["out"].cpu(), bytes_of(want[r])), r
            if with_weights:
                assert torch.equal(got["weights"].cpu(), bytes_of(want_w[r]))


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
