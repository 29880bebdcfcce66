# mypy: disable-error-code="import-untyped"
"""LDS, loads and the matrix instruction, as the GEMM's device code spells them. Buffers are bounded.py's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx
from flydsl._mlir.dialects import llvm, rocdl

BLOCK = 128  # k of one matrix instruction, and of one block of scales: a row of it is 128 bytes
NOWHERE = 1 << 30  # an offset behind the end of every buffer
FP8 = 0  # e4m3, as an operand format of the f8f6f4 instructions


def raw(value: Any) -> Any:
    """The MLIR value of a DSL value or an int."""
    return value.ir_value() if hasattr(value, "ir_value") else fx.Int32(value).ir_value()


def shared_pointer(kind: Any, address: Any, alignment: int = 4) -> Any:
    """To LDS, from a 32-bit address. Made anew where the alignment is known: `pointer + i` forgets it."""
    kind_of = fx.PointerType.get(
        elem_ty=kind.ir_type, address_space=fx.AddressSpace.Shared, alignment=alignment
    )
    return fx.inttoptr(kind_of, address)


def load_into_lds(source: Any, offset: Any, lds_address: Any, nbytes: int) -> None:
    """Start a copy of 4 or 16 bytes per lane: from its own offset to lds_address (uniform) + nbytes * lane.

    The compiler does not wait for it by itself: wait_for_dma() does.
    """
    place = shared_pointer(fx.Uint8, lds_address, nbytes).llvm_ptr
    fx.rocdl.raw_ptr_buffer_load_async_lds(source, place, raw(nbytes), raw(offset), raw(0), raw(0))


def wait_for_dma() -> None:
    """For all that this wave has started. What other waves have is there behind a barrier."""
    fx.rocdl.asyncmark()
    fx.rocdl.wait_asyncmark(0)


def meet() -> None:
    """A barrier that nothing is moved across. This wave's LDS reads have arrived before it."""
    fx.rocdl.sched_barrier(0)
    fx.barrier()
    fx.rocdl.sched_barrier(0)


def in_agprs(vector: Any) -> Any:
    """Four floats, in registers that only matrix instructions, loads and stores can use."""
    kind = fx.Float32x4.ir_type
    return fx.Vector(llvm.inline_asm(kind, [vector.ir_value()], "", "=a,0", has_side_effects=False))


def set_priority(level: int) -> None:
    """Of this wave among those of its SIMD, 0 to 3."""
    rocdl.s_setprio(level)


def load_word(kind: Any, source: Any, offset: Any) -> Any:
    """Four bytes of a buffer at each lane's own offset; 0 behind its end."""
    return kind(fx.rocdl.raw_ptr_buffer_load(kind.ir_type, source, offset, fx.Int32(0)))


def load_words(kind: Any, source: Any, offset: Any, count: int) -> Any:
    """A vector of them."""
    return fx.Vector(
        fx.rocdl.raw_ptr_buffer_load(fx.Vector.make_type(count, kind), source, offset, fx.Int32(0))
    )


def multiply(a: Any, b: Any, c: Any, scales: Sequence[Any] | None = None) -> Any:
    """c + a * b^T for 16 x 16 results and 128 k: v_mfma_f32_16x16x128_f8f6f4, scaled if scales are given.

    Lane l, r = l % 16, g = l // 16: a and b hold 32 codes of their row r: k = 16g .. 16g+15 and 64+16g ..
    64+16g+15. c holds rows (of a) 4g .. 4g+3 of column (row of b) r. scales: the low byte of one word for a
    and of one for b, each the ue8m0 scale of row r, k = 32g .. 32g+31.
    """
    first, second = scales or (fx.Int32(0), fx.Int32(0))
    operands = [a, b, c, FP8, FP8, 0, first, 0, second]
    return fx.Vector(fx.rocdl.mfma_scale_f32_16x16x128_f8f6f4(fx.Float32x4.ir_type, operands))
