"""Addresses in Triton kernels as pointers. They come as integers, not as tensors: they may lie in a peer's
memory, and Triton's interpreter, given tensors, would copy them there and back.

An integer below 2^31 reaches a kernel as 32 bits, in the interpreter too: the address of an empty tensor, or
of a heap that lies low. So every address is widened first.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def words(address):
    """int64."""
    return tl.cast(address, tl.int64).to(tl.pointer_type(tl.int64))


@triton.jit
def numbers(address):
    """int32."""
    return tl.cast(address, tl.int64).to(tl.pointer_type(tl.int32))


@triton.jit
def halves(address):
    """int16: the bits of bf16."""
    return tl.cast(address, tl.int64).to(tl.pointer_type(tl.int16))


@triton.jit
def octets(address):
    """uint8."""
    return tl.cast(address, tl.int64).to(tl.pointer_type(tl.uint8))


@triton.jit
def floats(address):
    """fp32."""
    return tl.cast(address, tl.int64).to(tl.pointer_type(tl.float32))
