# mypy: disable-error-code="import-not-found, import-untyped"
"""Pointers, buffers and the matrix instruction, as the GEMM's device code spells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import rocdl

BLOCK = 128  # k of one matrix instruction, and of one block of scales: a row of it is 128 bytes
FP8 = 0  # e4m3, as an operand format of the f8f6f4 instructions


def raw(value: Any) -> Any:
    """The MLIR value of a DSL value or an int."""
    return value.ir_value() if hasattr(value, "ir_value") else fx.Int32(value).ir_value()


def global_pointer(kind: Any, address: Any) -> Any:
    """To memory: `pointer + i` counts elements of `kind`."""
    kind_of = fx.PointerType.get(elem_ty=kind.ir_type, address_space=fx.AddressSpace.Global, alignment=4)
    return fx.inttoptr(kind_of, address)


def shared_pointer(kind: Any, address: Any, alignment: int = 4) -> Any:
    """To LDS, from a 32-bit address. Made anew wherever the alignment is known and `pointer + i` forgot it."""
    kind_of = fx.PointerType.get(
        elem_ty=kind.ir_type, address_space=fx.AddressSpace.Shared, alignment=alignment
    )
    return fx.inttoptr(kind_of, address)


def buffer(address: Any, nbytes: Any) -> Any:
    """A descriptor of nbytes at an address (both uniform): loads behind its end give 0, stores do nothing."""
    pointer = fx.rocdl.make_buffer_ptr(global_pointer(fx.Int32, address), num_records_bytes=nbytes)
    return fx.rocdl.get_buffer_rsrc(pointer)


def load_into_lds(source: Any, offset: Any, lds_address: Any) -> None:
    """Start a copy of 16 bytes per lane: from the lane's own offset to lds_address (uniform) + 16 * lane.

    The compiler does not wait for it by itself: asyncmark() behind a group, wait_asyncmark() for it.
    """
    place = shared_pointer(fx.Uint8, lds_address, 16).llvm_ptr
    fx.rocdl.raw_ptr_buffer_load_async_lds(source, place, raw(16), raw(offset), raw(0), raw(0))


def load_word(kind: Any, source: Any, offset: Any) -> Any:
    """Four bytes of a buffer at each lane's own offset; 0 behind its end."""
    return kind(fx.rocdl.raw_ptr_buffer_load(kind.ir_type, source, offset, fx.Int32(0)))


def store_16_bytes(target: Any, offset: Any, words: Any, aux: int) -> None:
    """Store four words per lane; `aux` holds the cache bits as mori_shmem.device.flydsl gives them."""
    bits = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), aux)
    rocdl.raw_ptr_buffer_store(words.ir_value(), target, raw(offset), raw(0), aux=bits)


def multiply(a: Any, b: Any, c: Any, scales: Sequence[Any] | None = None) -> Any:
    """c + a * b^T for 16 x 16 results and 128 k: v_mfma_f32_16x16x128_f8f6f4, scaled if scales are given.

    Lane l, r = l % 16, g = l // 16: a and b hold 32 codes of their row r: k = 16g .. 16g+15 and 64+16g ..
    64+16g+15. c holds rows (of a) 4g .. 4g+3 of column (row of b) r. scales: the low byte of one word for a
    and of one for b, each the ue8m0 scale of row r, k = 32g .. 32g+31.
    """
    first, second = scales or (fx.Int32(0), fx.Int32(0))
    operands = [a, b, c, FP8, FP8, 0, first, 0, second]
    return fx.Vector(fx.rocdl.mfma_scale_f32_16x16x128_f8f6f4(fx.Float32x4.ir_type, operands))
