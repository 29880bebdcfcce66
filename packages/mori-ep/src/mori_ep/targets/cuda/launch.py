"""Prepared launches: all that a call of one shape needs but its pointers, its tokens and its stream.

The kernels' arguments live in ctypes structs that are made once; a call patches a few words of them and
makes one call into the driver. A captured graph keeps its own copy of the arguments.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import zlib
from collections.abc import Callable
from ctypes import c_int, c_uint
from dataclasses import dataclass

import torch
from mori_shmem.errors import ArgumentError, LayoutError, UnsupportedShape
from mori_shmem.jit import driver

from mori_ep.again import Repeated
from mori_ep.grids import Grid, combine_grid, dispatch_grid
from mori_ep.plan import PLANNED, Geometry
from mori_ep.targets import CombineCall, CombineShape, DispatchCall, DispatchShape
from mori_ep.targets.cuda import limits
from mori_ep.targets.cuda.params import (
    BOTH,
    COMBINE_BY_PACKETS,
    PACKET_TOKENS,
    RECEIVE,
    ROWS_AS_PACKETS,
    CombineParams,
    Common,
    DispatchParams,
    RowArrays,
    RowShape,
    row_shape,
    slot_bytes,
    units,
)
from mori_ep.targets.cuda.place import Place, combine_module, dispatch_module


@dataclass(frozen=True)
class Maps:
    """Addresses of what a combine needs of its dispatch."""

    table: int
    source: int
    count: int
    meta: int | None  # None: rebuilt by a caller, who wants packets is not known, so everybody pulls


class _Launch:
    """One kernel on one struct of arguments, by grid and block."""

    def __init__(self, function: driver.Function, params: ctypes.Structure) -> None:
        self._function, self._params = function, params
        self._made: dict[tuple[int, int], driver.PreparedLaunch] = {}

    def shaped(self, grid: Grid) -> driver.PreparedLaunch:
        shape = grid.blocks, grid.threads
        made = self._made.get(shape)
        if made is None:
            made = self._made[shape] = driver.PreparedLaunch(self._function, *shape, [self._params])
        return made


class DispatchLaunch:
    """Dispatches of one shape."""

    def __init__(self, place: Place, shape: DispatchShape) -> None:
        config, layout = place.config, place.layout
        row = shape.row_format(config.num_experts_per_token)
        _check_units("input", shape.hidden, row.payload_bytes)
        self._place, self.shape = place, shape
        self._row_shape = row_shape(row.payload_bytes, row.scale_bytes, row.topk, weights=row.weights)
        num_units = self._num_units = self._row_shape.payload_units + self._row_shape.tail_units
        self._whole_tail = bool(self._row_shape.aligned)
        self._digest = zlib.crc32(repr(shape).encode()) << 8 & 0xFFFFFFFF  # calls that differ are noticed
        room = (
            layout.dispatch_slots_bytes // slot_bytes(num_units) if config.world_size > 1 else PACKET_TOKENS
        )
        planned = limits.most_dispatch_packets(config, row.nbytes)
        self._planned_packets = min(planned, PACKET_TOKENS, room)
        self._most_packets = min(max(planned, limits.within(config, place.few.dispatch)), PACKET_TOKENS, room)
        self.params = self._make_params()
        module = dispatch_module(place.device)
        self._packets = _Launch(module.function("dispatch_packets"), self.params)
        self._rows = _Launch(module.function("dispatch_rows"), self.params)
        self._patch, self._phases = _DispatchWords(self.params), BOTH
        self._key: tuple[int, Geometry, int] = (-1, PLANNED, -1)
        self._prepared: driver.PreparedLaunch | None = None

    def _make_params(self) -> DispatchParams:
        place, layout = self._place, self._place.layout
        experts = place.config.num_experts_per_rank
        p = DispatchParams(
            c=place.common(layout.dispatch_state, ctypes.sizeof(DispatchParams)),
            shape=self._row_shape,
            mask_packets=-(-self._most_packets // 96),  # 32 tokens a word, three words a packet
            room=place.config.recv_per_source,
            experts_a_rank=experts,
            experts_inverse=-(-(1 << 32) // experts) & 0xFFFFFFFF,
            at_header=layout.headers.offset_bytes,
            at_slots=layout.dispatch_slots.offset_bytes,
            slots_a_source=layout.dispatch_slots_bytes,
            at_done=layout.done.offset_bytes,
            at_payload=layout.out.offset_bytes,
            at_scales=layout.out_scales.offset_bytes,
            at_ids=layout.out_indices.offset_bytes,
            at_weights=layout.out_weights.offset_bytes,
            at_source=layout.out_positions.offset_bytes,
            table=place.mine(layout.table),
            meta=place.mine(layout.meta),
            count=place.mine(layout.recv_count),
            block_counts=place.mine(layout.block_counts),
        )
        p.c.phases = BOTH
        return p

    def _choose(self, tokens: int, geometry: Geometry, homeward: int) -> driver.PreparedLaunch:
        """The kernel and its grid for so many tokens."""
        words, self._key = self._patch, (tokens, geometry, homeward)
        most = self._planned_packets if geometry.low_latency < 0 else self._most_packets
        few = geometry.low_latency != 0 and tokens <= most
        home = self._place.comes_home_in_packets(tokens, homeward)
        grid = dispatch_grid(tokens, self._num_units, few, self._place.blocks, geometry)
        words.tokens.value, words.threads_a_row.value = tokens, grid.threads_a_row
        words.flags.value = self._digest | few * ROWS_AS_PACKETS | home * COMBINE_BY_PACKETS
        made = self._prepared = (self._packets if few else self._rows).shaped(grid)
        return made

    def set_alive(self, ranks: int) -> None:
        self.params.c.alive = ranks

    def launch(
        self,
        stream: int,
        x: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        replay: torch.Tensor | None = None,
        geometry: Geometry = PLANNED,
        phases: int = BOTH,
        homeward: int = -1,
    ) -> int:
        """One kernel. The tensors are read when it runs. Returns the number of tokens."""
        tokens: int = x.shape[0]
        made = self._prepared
        if (tokens, geometry, homeward) != self._key or made is None:
            made = self._choose(tokens, geometry, homeward)
        payload, ids = x.data_ptr(), indices.data_ptr()
        of_weights = 0 if weights is None else weights.data_ptr()
        of_scales = 0 if scales is None else scales.data_ptr()
        if payload & 15:
            raise _misaligned("input", payload)
        whole = self._whole_tail and not (ids | of_weights | of_scales) & 15
        again = 0 if replay is None else replay.data_ptr()
        self._patch.pointers(whole, payload, of_scales, ids, of_weights, again)
        if phases != self._phases:
            self._patch.phases.value = self._phases = phases
        made.launch(stream)
        return tokens

    def repeated(self, call: DispatchCall, results: object) -> Repeated | None:
        """For dispatches like the one launched last."""
        given = (call.x, call.weights, call.scales, call.indices)
        assert self._prepared is not None
        if not self.params.shape.aligned and self._whole_tail:
            return None
        base = ctypes.addressof(self.params) + DispatchParams.input.offset
        fields = (RowArrays.payload, RowArrays.weights, RowArrays.scales, RowArrays.ids)
        places = [(base + field.offset, 0) for field in fields]
        return self._place.repeated(self._prepared, given, places, results)

    def receive(self, stream: int) -> None:
        """The second half of what was launched last."""
        assert self._prepared is not None
        self._patch.phases.value = self._phases = RECEIVE
        self._prepared.launch(stream)


class CombineLaunch:
    """Combines of one shape."""

    def __init__(self, place: Place, shape: CombineShape) -> None:
        config, layout = place.config, place.layout
        self._place, self.shape = place, shape
        row_bytes = shape.hidden * shape.dtype.itemsize
        _check_units("input", shape.hidden, row_bytes)
        if config.quant_type != "none":
            _check_wire(config.quant_type, shape.hidden, place.wire_block)
        weight_units = units(4 * config.num_experts_per_token) if shape.weights else 0
        self._num_units = units(row_bytes) + weight_units
        self.params = self._make_params(row_bytes)
        module = combine_module(place.device, shape.dtype, config.quant_type)
        self._pull = _Launch(module.function("combine_pull"), self.params)
        self._packets: _Launch | None = None
        if config.quant_type == "none":
            self._packets = _Launch(module.function("combine_packets"), self.params)
        self._patch, self._phases = _CombineWords(self.params), BOTH
        self._maps: Maps | None = None  # that the arguments name
        self._registered = place.mine(layout.y)
        self._key: tuple[int, bool, Geometry] = (-1, False, PLANNED)
        self._prepared: driver.PreparedLaunch | None = None

    def _make_params(self, row_bytes: int) -> CombineParams:
        place, layout, config, shape = self._place, self._place.layout, self._place.config, self.shape
        quantised = config.quant_type != "none"
        p = CombineParams(
            c=place.common(layout.combine_state, ctypes.sizeof(CombineParams)),
            y=place.mine(layout.y),
            payload_units=row_bytes // 16,
            wire_units=shape.hidden // 16 if quantised else row_bytes // 16,
            scale_units=shape.hidden // place.wire_block,
            stages=int(quantised or not shape.registered),
            at_slots=layout.combine_slots.offset_bytes,
            slots_a_source=layout.combine_slots_bytes,
            at_y=(layout.y_wire if quantised else layout.y).offset_bytes,
            at_y_scales=layout.y_scales.offset_bytes,
            at_y_weights=layout.y_weights.offset_bytes,
            at_entered=layout.entered.offset_bytes,
            at_ready=layout.ready.offset_bytes,
            at_finished=layout.finished.offset_bytes,
            out=place.mine(layout.result),
            out_weights=place.mine(layout.result_weights),
        )
        p.c.phases = BOTH
        return p

    def _choose(self, tokens: int, told: bool, geometry: Geometry) -> driver.PreparedLaunch:
        """The kernel and its grid for so many tokens. `told`: the dispatch has told the others how they come
        home."""
        words, self._key = self._patch, (tokens, told, geometry)
        packets = told and self._place.comes_home_in_packets(tokens, geometry.low_latency)
        kernel = self._packets if packets and self._packets is not None else self._pull
        few = kernel is self._packets
        grid = combine_grid(tokens, self._num_units, few, self._place.blocks, geometry)
        words.tokens.value, words.threads_a_row.value = tokens, grid.threads_a_row
        made = self._prepared = kernel.shaped(grid)
        return made

    def set_alive(self, ranks: int) -> None:
        self.params.c.alive = ranks

    def launch(
        self,
        stream: int,
        y: torch.Tensor,
        weights: torch.Tensor | None,
        tokens: int,
        maps: Maps,
        guard: bool = False,
        geometry: Geometry = PLANNED,
        phases: int = BOTH,
    ) -> None:
        """One kernel. The tensors are read when it runs."""
        told = maps.meta is not None
        made = self._prepared
        if (tokens, told, geometry) != self._key or made is None:
            made = self._choose(tokens, told, geometry)
        words = self._patch
        given: int = y.shape[0] if weights is None else min(y.shape[0], weights.shape[0])
        rows = self._registered if not given else y.data_ptr()
        if self.shape.registered and rows != self._registered:
            raise ArgumentError(
                "input is not the registered buffer of this op (get_registered_combine_input_buffer), which "
                "use_external_inp_buf=0 says"
            )
        if rows & 15:
            raise _misaligned("input", rows)
        words.pointers(rows, 0 if weights is None else weights.data_ptr(), given)
        if maps is not self._maps:
            words.maps(maps.table, maps.source, maps.meta or 0, maps.count)
            self._maps = maps
        words.guard.value = guard
        if phases != self._phases:
            words.phases.value = self._phases = phases
        made.launch(stream)

    def repeated(self, call: CombineCall, indices: torch.Tensor, results: object) -> Repeated | None:
        """For combines like the one launched last."""
        assert self._prepared is not None
        base = ctypes.addressof(self.params)
        fields = (CombineParams.y, CombineParams.weights)
        places = [(base + field.offset, 0) for field in fields]
        if self.shape.registered:
            places[0] = (places[0][0], self._registered)
        given = (call.rows, call.weights, indices)
        return self._place.repeated(self._prepared, given, [*places, (0, 0)], results)

    def receive(self, stream: int) -> None:
        """The second half of what was launched last."""
        assert self._prepared is not None
        self._patch.phases.value = self._phases = RECEIVE
        self._prepared.launch(stream)


def _check_units(name: str, hidden: int, row_bytes: int) -> None:
    if row_bytes % 16:
        raise UnsupportedShape(
            f"{name} has rows of {hidden} elements, {row_bytes} bytes: the cuda target moves 16 bytes "
            "at a time, so a row has to be a multiple of that"
        )


def _check_wire(quant_type: str, hidden: int, block: int) -> None:
    """Rows of a quantised transport, in units of 16 values and blocks of a power of two of them."""
    if hidden % 16:
        raise UnsupportedShape(
            f"{quant_type} with rows of {hidden} elements: a multiple of 16 on the cuda target"
        )
    if quant_type == "fp8_blockwise" and (block not in (16, 32, 64, 128, 256, 512) or hidden % block):
        raise UnsupportedShape(
            f"fp8_blockwise with rows of {hidden} elements in blocks of {block}: whole blocks of 16, "
            "32, 64, 128, 256 or 512 values on the cuda target (MORI_FP8_COMBINE_SCALE_DIM)"
        )


def _misaligned(name: str, address: int) -> LayoutError:
    return LayoutError(
        f"{name} begins at {address:#x}: the cuda target moves 16 bytes at a time, so a tensor's "
        "first row has to begin at a multiple of 16 (copy it, or slice at another row)"
    )


class _DispatchWords:
    """The words of the arguments that change from call to call, in place. `pointers` writes a run of them at
    once: RowShape.aligned, input and replay lie one after the other."""

    def __init__(self, p: DispatchParams) -> None:
        base, c = ctypes.addressof(p), DispatchParams.c.offset
        self._keep = p
        self.phases = c_uint.from_address(base + c + Common.phases.offset)
        self.tokens = c_int.from_address(base + c + Common.tokens.offset)
        self.threads_a_row = c_int.from_address(base + c + Common.threads_a_row.offset)
        self.flags = c_uint.from_address(base + DispatchParams.flags.offset)
        at = DispatchParams.shape.offset + RowShape.aligned.offset
        _follow(at, [(4, DispatchParams.input.offset), (32, DispatchParams.replay.offset)])
        # (aligned, payload, scales, ids, weights, replay)
        self.pointers = functools.partial(_pack("=iQQQQQ"), p, at)


class _CombineWords:
    """The same of a combine: y, weights and y_rows in one run, the addresses of the maps in another."""

    def __init__(self, p: CombineParams) -> None:
        base, c = ctypes.addressof(p), CombineParams.c.offset
        self._keep = p
        self.phases = c_uint.from_address(base + c + Common.phases.offset)
        self.tokens = c_int.from_address(base + c + Common.tokens.offset)
        self.threads_a_row = c_int.from_address(base + c + Common.threads_a_row.offset)
        self.guard = c_int.from_address(base + CombineParams.guard.offset)
        at = CombineParams.y.offset
        _follow(at, [(8, CombineParams.weights.offset), (8, CombineParams.y_rows.offset)])
        self.pointers = functools.partial(_pack("=QQi"), p, at)
        at = CombineParams.table.offset
        _follow(at, [(8, getattr(CombineParams, name).offset) for name in ("source", "meta", "count")])
        self.maps = functools.partial(_pack("=QQQQ"), p, at)


def _pack(layout: str) -> Callable[..., None]:
    return struct.Struct(layout).pack_into


def _follow(begin: int, steps: list[tuple[int, int]]) -> None:
    """Fields lie where a run of them is written."""
    for nbytes, offset in steps:
        begin += nbytes
        assert offset == begin, (offset, begin)
