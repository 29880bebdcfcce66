"""Matrix products: fp8 with fp32 block scales (from memory, or staged in LDS by DMA), and fp8 x fp4.

out[m, n] = sum over k of a[m, k] * b[n, k], with scales. Fragments of lane l, where row = l % 16 and part =
l // 16:
  16x16x128, 8-bit operand   16 k from 16 * part, and 16 more from 64 + 16 * part
  16x16x128, 4-bit operand   32 k from 32 * part
  16x16x32, fp8              8 k from 8 * part
  result                     rows 4 * part .. + 3 of column l % 16
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch
from device import pointer

BLOCK = 128  # k that share a scale, and k of one step
FP8, FP4 = 0, 4  # operand formats of the f8f6f4 instructions


def launcher(kernel, side, threads):
    """A workgroup of `threads` makes one side x side tile of out."""

    @flyc.jit
    def launch(
        a: fx.Int64,
        b: fx.Int64,
        sa: fx.Int64,
        sb: fx.Int64,
        out: fx.Int64,
        m: fx.Int32,
        n: fx.Int32,
        stream: fx.Stream = fx.Stream(None),
    ):
        kernel(a, b, sa, sb, out, m, n).launch(
            grid=(m // side, n // side, 1), block=(threads, 1, 1), stream=stream
        )

    return launch


def row_and_part():
    lane = fx.thread_idx.x % 64
    return lane % 16, lane // 16


def nothing():
    return fx.Vector.filled(4, 0.0, fx.Float32)


def join(first, second):
    return first.shuffle(second, list(range(8)))


def operand_128(address):
    """The 32 bytes of an 8-bit operand that a lane holds, from memory."""
    words = pointer(fx.Int32, address, 16)
    return join(fx.generic_load(words, count=4), fx.generic_load(words + 16, count=4))


def product_128(a, b, c, formats=(FP8, FP8), scales=None):
    """Without scales the unscaled instruction is selected."""
    sa, sb = scales or (fx.Int32(0), fx.Int32(0))
    return fx.Vector(
        fx.rocdl.mfma_scale_f32_16x16x128_f8f6f4(fx.Float32x4.ir_type, [a, b, c, *formats, 0, sa, 0, sb])
    )


def row_weights(scales, first, blocks, block, factor):
    """`factor` times the scales of four rows of a."""
    weights = [fx.generic_load(scales + ((first + i) * blocks + block)) * factor for i in range(4)]
    return fx.Vector.from_elements(weights, fx.Float32)


def store_tile(out, n, row, column, values):
    kind, nbytes = (fx.BFloat16, 2) if values.dtype is fx.BFloat16 else (fx.Float32, 4)
    for i in fx.range_constexpr(4):
        fx.generic_store(
            pointer(kind, out, nbytes) + (fx.Int64(row + i) * fx.Int64(n) + fx.Int64(column)), values[i]
        )


# ---- one wave for each 16 x 16 tile, operands straight from memory
def direct(k, wide):
    """`wide`: one 16x16x128 instruction a block; else four 16x16x32."""
    blocks = k // BLOCK

    @flyc.kernel
    def matmul_direct(
        a: fx.Int64, b: fx.Int64, sa: fx.Int64, sb: fx.Int64, out: fx.Int64, m: fx.Int32, n: fx.Int32
    ):
        row, part = row_and_part()
        top, left = fx.block_idx.x * 16, fx.block_idx.y * 16
        row_a, row_b = a + fx.Int64(top + row) * k, b + fx.Int64(left + row) * k
        scale_a = pointer(fx.Float32, sa, 4)
        scale_b = pointer(fx.Float32, sb, 4) + (left // BLOCK) * blocks
        total = nothing()
        for block in range(blocks):
            at = fx.Int64(block * BLOCK)
            tile = nothing()
            if fx.const_expr(wide):
                eight_a, eight_b = (operand_128(r + at + fx.Int64(part * 16)) for r in (row_a, row_b))
                tile = product_128(eight_a, eight_b, tile)
            else:
                first_a, first_b = (pointer(fx.Int64, r + at + fx.Int64(part * 8), 8) for r in (row_a, row_b))
                for i in fx.range_constexpr(4):
                    operands = [
                        fx.generic_load(first_a + 4 * i),
                        fx.generic_load(first_b + 4 * i),
                        tile,
                        0,
                        0,
                        0,
                    ]
                    tile = fx.Vector(fx.rocdl.mfma_f32_16x16x32_fp8_fp8(fx.Float32x4.ir_type, operands))
            factor = fx.generic_load(scale_b + block)
            total = total + tile * row_weights(scale_a, top + 4 * part, blocks, block, factor)
        store_tile(out, n, top + 4 * part, left + row, total.to(fx.BFloat16))

    return launcher(matmul_direct, side=16, threads=64)


# ---- four waves, a 64 x 64 tile; two LDS buffers for each operand, filled by DMA one step ahead
SIDE = 64
STAGE = SIDE * BLOCK  # bytes of one operand's buffer


def staged(k, asynchronous):
    blocks = k // BLOCK

    @fx.struct
    class Shared:
        a: fx.Array[fx.Uint8, 2 * STAGE, 16]
        b: fx.Array[fx.Uint8, 2 * STAGE, 16]

    @flyc.kernel
    def matmul_staged(
        a: fx.Int64, b: fx.Int64, sa: fx.Int64, sb: fx.Int64, out: fx.Int64, m: fx.Int32, n: fx.Int32
    ):
        lane = fx.thread_idx.x % 64
        wave = fx.Int32(fx.rocdl.readfirstlane(fx.Int32.ir_type, (fx.thread_idx.x // 64).ir_value()))
        row, part = row_and_part()
        top, left = fx.block_idx.x * SIDE, fx.block_idx.y * SIDE
        down, across = (wave // 2) * 32, (wave % 2) * 32
        shared = fx.SharedAllocator().allocate(Shared).peek()

        def describe(base, rows):
            return fx.rocdl.get_buffer_rsrc(
                fx.rocdl.make_buffer_ptr(pointer(fx.Int32, base, 16), num_records_bytes=fx.Int64(rows) * k)
            )

        source_a, source_b = describe(a, m), describe(b, n)

        def fetch(source, target, first_row, half, block):
            """Eight rows for each DMA; piece p of row r goes to place p ^ (r % 8), against bank conflicts."""
            for eight in (0, 8):
                base = wave * 16 + eight
                offset = (first_row + base + lane // 8) * k + ((lane % 8) ^ (lane // 8)) * 16
                place = (target + (half * STAGE + base * BLOCK)).llvm_ptr
                issue = (
                    fx.rocdl.raw_ptr_buffer_load_async_lds
                    if asynchronous
                    else fx.rocdl.raw_ptr_buffer_load_lds
                )
                values = (source, place, fx.Int32(16), offset, block * BLOCK, fx.Int32(0))
                issue(*(v.ir_value() if hasattr(v, "ir_value") else v for v in values))

        def arrived():
            if fx.const_expr(asynchronous):
                fx.rocdl.asyncmark()
                fx.rocdl.wait_asyncmark(0)
            else:
                fx.rocdl.s_waitcnt(vmcnt=0)
            fx.barrier()

        def fragment(target, r, half):
            def piece(p):
                place = fx.Int32(fx.ptrtoint(target)) + half * STAGE + r * BLOCK + (p ^ (r % 8)) * 16
                kind = fx.PointerType.get(
                    elem_ty=fx.Int32.ir_type, address_space=fx.AddressSpace.Shared, alignment=16
                )
                return fx.generic_load(fx.inttoptr(kind, place), count=4)

            return join(piece(part), piece(part + 4))

        scale_a = pointer(fx.Float32, sa, 4)
        scale_b = pointer(fx.Float32, sb, 4) + (left // BLOCK) * blocks
        fetch(source_a, shared.a.ptr, top, fx.Int32(0), fx.Int32(0))
        fetch(source_b, shared.b.ptr, left, fx.Int32(0), fx.Int32(0))
        arrived()
        t0, t1, t2, t3 = nothing(), nothing(), nothing(), nothing()
        for block in range(blocks):
            half = block % 2
            if block + 1 < blocks:
                fetch(source_a, shared.a.ptr, top, 1 - half, block + 1)
                fetch(source_b, shared.b.ptr, left, 1 - half, block + 1)
            parts_a = [fragment(shared.a.ptr, down + 16 * i + row, half) for i in range(2)]
            parts_b = [fragment(shared.b.ptr, across + 16 * j + row, half) for j in range(2)]
            factor = fx.generic_load(scale_b + block)
            tiles = []
            for i in fx.range_constexpr(2):
                weights = row_weights(scale_a, top + down + 16 * i + 4 * part, blocks, block, factor)
                for j in fx.range_constexpr(2):
                    tiles.append(product_128(parts_a[i], parts_b[j], nothing()) * weights)
            t0, t1, t2, t3 = t0 + tiles[0], t1 + tiles[1], t2 + tiles[2], t3 + tiles[3]
            arrived()
        for i, tile in enumerate((t0, t1, t2, t3)):
            first = top + down + (i // 2) * 16 + 4 * part
            store_tile(out, n, first, left + across + (i % 2) * 16 + row, tile.to(fx.BFloat16))

    return launcher(matmul_staged, side=SIDE, threads=256)


# ---- fp8 x fp4 with a power-of-two scale for every 32 k, applied by the instruction
def mixed(k, by_atom):
    @flyc.kernel
    def matmul_mixed(
        a: fx.Int64, b: fx.Int64, sa: fx.Int64, sb: fx.Int64, out: fx.Int64, m: fx.Int32, n: fx.Int32
    ):
        row, part = row_and_part()
        top, left = fx.block_idx.x * 16, fx.block_idx.y * 16
        row_a, row_b = a + fx.Int64(top + row) * k, b + fx.Int64(left + row) * (k // 2)
        scale_a = pointer(fx.Uint8, sa, 1) + ((top + row) * (k // 32) + part)
        scale_b = pointer(fx.Uint8, sb, 1) + ((left + row) * (k // 32) + part)
        total = nothing()
        for block in range(k // BLOCK):
            eight = operand_128(row_a + fx.Int64(block * BLOCK + part * 16))
            first_b = pointer(fx.Int32, row_b + fx.Int64(block * BLOCK // 2 + part * 16), 16)
            four = fx.generic_load(first_b, count=4)
            scales = (
                fx.Int32(fx.generic_load(scale_a + block * 4)),
                fx.Int32(fx.generic_load(scale_b + block * 4)),
            )
            if fx.const_expr(by_atom):
                atom = fx.make_mma_atom(
                    fx.rocdl.cdna4.MFMA_Scale(16, 16, 128, fx.Float8E4M3FN, fx.Float4E2M1FN)
                )
                held_a, held_b, held_c = (
                    fx.make_rmem_tensor(c, t) for c, t in ((8, fx.Int32), (4, fx.Int32), (4, fx.Float32))
                )
                held_a.store(eight)
                held_b.store(four)
                held_c.store(total)
                fx.gemm(atom, held_c, held_a, held_b, held_c, scale_a=scales[0], scale_b=scales[1])
                total = fx.Vector(held_c.load())
            else:
                total = product_128(eight, four, total, (FP8, FP4), scales)
        store_tile(out, n, top + 4 * part, left + row, total)

    return launcher(matmul_mixed, side=16, threads=64)


# ---- operands, and results in float64
def random_fp8(rows, k, random):
    return torch.randn(rows, k, generator=random).to(torch.float8_e4m3fn)


def products(wide_a, wide_b):
    """The product, and the product of magnitudes, which bounds the rounding errors."""
    return wide_a @ wide_b.T, wide_a.abs() @ wide_b.abs().T


FP4_VALUES = torch.tensor(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64
)


def block_scaled_problem(m, n, k, seed):
    """(a, b, sa, sb) and their products()."""
    random = torch.Generator().manual_seed(seed)
    a, b = random_fp8(m, k, random), random_fp8(n, k, random)
    sa = torch.rand(m, k // BLOCK, generator=random) + 0.1
    sb = torch.rand(-(-n // BLOCK), k // BLOCK, generator=random) + 0.1
    wide_a = a.double() * sa.double().repeat_interleave(BLOCK, 1)
    wide_b = b.double() * sb.double().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)
    return (a, b, sa, sb), *products(wide_a, wide_b)


def mixed_problem(m, n, k, seed):
    random = torch.Generator().manual_seed(seed)
    a = random_fp8(m, k, random)
    codes = torch.randint(0, 16, (n, k), generator=random, dtype=torch.uint8)
    sa, sb = (
        torch.randint(121, 133, (rows, k // 32), generator=random, dtype=torch.uint8) for rows in (m, n)
    )
    wide_a = a.double() * (2.0 ** (sa.double() - 127)).repeat_interleave(32, 1)
    wide_b = FP4_VALUES[codes.long()] * (2.0 ** (sb.double() - 127)).repeat_interleave(32, 1)
    return (a, codes[:, 0::2] | codes[:, 1::2] << 4, sa, sb), *products(wide_a, wide_b)
