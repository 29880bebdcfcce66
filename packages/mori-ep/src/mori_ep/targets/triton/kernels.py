"""Dispatch and combine in Triton, to be read beside dispatch.cu and combine.cu, and to run where no CUDA
compiler may.

    place        where each token's row goes, counted from 0 for each rank
    tell         my header at every rank
    settle       from all headers: where my rows start at each rank, how many came; whether all go together
    shift        the map: from numbers among my rows to rows at the receiver
    send_rows    one field of every token's row (payload, scales, weights, ids, position) to its rows
    stage        rows of y, or their weights, to where peers read them
    tell_sign    what I bring to this combine, at every rank;   compare_signs  whether all go together
    sum_rows     a token's rows in the order of its slots, added in fp32, rounded once

Addresses come as plain numbers (mori_shmem.device.triton_addresses). A map entry is rank * stride + row;
`null` or more goes nowhere. What is wrong with a call goes to `record`, five words: what (0: nothing yet),
and what it is about (faults.py).
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from mori_shmem.device.triton_addresses import floats, halves, numbers, octets, words

# ---- words and bits ----


@triton.jit
def values_at(address, offsets, mask, BF16: tl.constexpr):
    """fp32 from bf16 or fp32."""
    if BF16:
        bits = tl.load(halves(address) + offsets, mask=mask, other=0).to(tl.int32) << 16
        values = bits.to(tl.float32, bitcast=True)
    else:
        values = tl.load(floats(address) + offsets, mask=mask, other=0.0)
    return values


@triton.jit
def store_values(address, offsets, values, mask, BF16: tl.constexpr):
    """The nearest bf16, ties to even, made here: the interpreter would truncate. NaN stays NaN."""
    if BF16:
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(values != values, 0x7FC0, rounded).to(tl.int16)
        tl.store(halves(address) + offsets, rounded, mask=mask)
    else:
        tl.store(floats(address) + offsets, values, mask=mask)


@triton.jit
def report(record, what, a, b, c, d):
    """The first one stays. Called by one program of a call at a time."""
    if tl.load(words(record)) == 0:
        tl.store(words(record) + 1, a)
        tl.store(words(record) + 2, b)
        tl.store(words(record) + 3, c)
        tl.store(words(record) + 4, d)
        tl.debug_barrier()
        tl.atomic_xchg(words(record), tl.cast(what, tl.int64), sem="release", scope="sys")


# ---- dispatch ----


@triton.jit
def place(
    ids,  # [num_tokens, TOPK] int32
    table,  # [num_tokens, TOPK] int32, filled with null
    sent,  # [WORLD] int64: rows for each rank
    num_tokens,
    experts_a_rank,
    stride,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,  # TOPK, rounded up to a power of two
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each destination: its rows in token order, each at the first slot that names it."""
    destination = tl.program_id(0)
    slots = tl.arange(0, SLOTS)[None, :]
    count = 0
    for start in range(0, num_tokens, BLOCK):
        tokens = (start + tl.arange(0, BLOCK)).to(tl.int64)
        here = (tokens < num_tokens)[:, None] & (slots < TOPK)
        expert = tl.load(numbers(ids) + tokens[:, None] * TOPK + slots, mask=here, other=-1)
        known = (expert >= 0) & (expert < experts_a_rank * WORLD)
        named = known & (expert // experts_a_rank == destination)
        first = tl.min(tl.where(named, slots, SLOTS), axis=1)
        goes = (first < SLOTS).to(tl.int32)
        row = count + tl.cumsum(goes, axis=0) - goes
        tl.store(numbers(table) + tokens * TOPK + first, destination * stride + row, mask=goes == 1)
        count += tl.sum(goes, axis=0)
    tl.store(words(sent) + destination, count)


@triton.jit
def tell(
    sent,
    windows,
    at_headers,
    rank,
    tokens,
    row_bytes,
    dtype,
    scale_bytes,
    weights,
    replay,
    WORLD: tl.constexpr,
):
    """My header at the rank of this program: the fields of layout.HEADER, then my rows for each rank."""
    header = words(tl.load(words(windows) + tl.program_id(0)) + at_headers) + rank * (6 + WORLD)
    tl.store(header, tokens)
    tl.store(header + 1, row_bytes)
    tl.store(header + 2, dtype)
    tl.store(header + 3, scale_bytes)
    tl.store(header + 4, weights)
    tl.store(header + 5, replay)
    for destination in tl.static_range(WORLD):
        tl.store(header + 6 + destination, tl.load(words(sent) + destination))


@triton.jit
def settle(
    headers,  # [WORLD] of 6 + WORLD words
    first,  # [WORLD] int32: where my rows start at each rank
    received,  # [WORLD] int32: rows from each rank
    recv_count,  # [1] int32
    record,
    rank,
    room,  # rows that one rank may send to one other
    WORLD: tl.constexpr,
):
    """One program."""
    total = 0
    for other in tl.static_range(WORLD):
        before = 0
        for source in tl.static_range(WORLD):
            rows = tl.load(words(headers) + source * (6 + WORLD) + 6 + other).to(tl.int32)
            before += tl.where(source < rank, rows, 0)
            if rows > room:
                report(record, 1, source, other, rows, room)
        came = tl.load(words(headers) + other * (6 + WORLD) + 6 + rank).to(tl.int32)
        tl.store(numbers(first) + other, before)
        tl.store(numbers(received) + other, came)
        total += tl.minimum(came, room)
    tl.store(numbers(recv_count), total)
    for field in tl.static_range(1, 6):
        of_rows = (field == 3) + (field == 4)  # without tokens a rank need not know of scales or weights
        known = -1  # the first rank that the field means something on
        value = tl.load(words(headers)) * 0
        for source in tl.static_range(WORLD):
            header = words(headers) + source * (6 + WORLD)
            theirs = tl.load(header + field)
            if tl.load(header) >= of_rows:
                if known < 0:
                    known = source
                    value = theirs
                elif theirs != value:
                    report(record, 1 + field, known, value, source, theirs)


@triton.jit
def shift(table, first, num_entries, stride, null, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(numbers(table) + at, mask=at < num_entries, other=null)
    goes = entry < null
    base = tl.load(numbers(first) + tl.where(goes, entry // stride, 0))
    tl.store(numbers(table) + at, entry + base, mask=goes)


@triton.jit
def send_rows(
    source,  # [tokens] rows of nbytes
    table,
    windows,
    at_region,  # where such rows lie in a window
    nbytes,
    capacity,
    stride,
    null,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for a token and a run of its row's bytes."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    run = tl.load(octets(source) + token * nbytes + at, mask=at < nbytes, other=0)
    for slot in range(TOPK):
        entry = tl.load(numbers(table) + token * TOPK + slot)
        if entry < null:
            row = (entry % stride).to(tl.int64)
            to = octets(tl.load(words(windows) + entry // stride) + at_region + row * nbytes)
            tl.store(to + at, run, mask=(at < nbytes) & (row < capacity))


# ---- combine ----


@triton.jit
def stage(source, to, nbytes, count, BLOCK: tl.constexpr):
    """Rows of nbytes, as many as have been received."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = (at < nbytes) & (row < tl.load(numbers(count)))
    run = tl.load(octets(source) + row * nbytes + at, mask=here, other=0)
    tl.store(octets(to) + row * nbytes + at, run, mask=here)


@triton.jit
def tell_sign(windows, at_signs, rank, sign, no_weights, given, count, record):
    """My sign at the rank of this program; `no_weights` is added to it if there are rows."""
    received = tl.load(numbers(count))
    mine = sign + tl.where(received > 0, no_weights, 0)
    tl.store(words(tl.load(words(windows) + tl.program_id(0)) + at_signs) + rank, mine)
    if (tl.program_id(0) == 0) & (received > given):
        report(record, 7, rank, given, received, 0)


@triton.jit
def compare_signs(signs, record, rows_bits, weights_bit, no_weights_bit, WORLD: tl.constexpr):
    """One program. The first rank that differs from rank 0, or the first with weights and one without."""
    first = tl.load(words(signs))
    having, lacking = -1, -1
    for rank in tl.static_range(WORLD):
        sign = tl.load(words(signs) + rank)
        if ((sign ^ first) & rows_bits) != 0:
            report(record, 8, 0, first, rank, sign)
        if ((sign & weights_bit) != 0) & (having < 0):
            having = rank
        if ((sign & no_weights_bit) != 0) & (lacking < 0):
            lacking = rank
    if (having >= 0) & (lacking >= 0):
        with_weights, without = tl.load(words(signs) + having), tl.load(words(signs) + lacking)
        report(record, 8, having, with_weights, lacking, without)


@triton.jit
def sum_rows(
    table,
    windows,
    at_region,
    out,
    size,  # elements of a row
    capacity,
    stride,
    null,
    TOPK: tl.constexpr,
    BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for a token and a run of its row's elements."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    found = 0
    for slot in range(TOPK):
        entry = tl.load(numbers(table) + token * TOPK + slot)
        if entry < null:
            rows = tl.load(words(windows) + entry // stride) + at_region
            row = (entry % stride).to(tl.int64)  # none is beyond, but where `settle` has found too many
            x = values_at(rows, row * size + at, (at < size) & (row < capacity), BF16)
            total = tl.where(found == 0, x, total + x)  # not 0 + x, which would make 0 of -0
            found = 1
    store_values(out, token * size + at, total, at < size, BF16)


# ---- what callers ask for beside ----


@triton.jit
def count_experts(ids, count, counts, first_expert, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """A program for each of my experts: how many slots of the rows received name it."""
    expert = tl.program_id(0)
    num_slots = tl.load(numbers(count)) * TOPK
    total = 0
    for start in range(0, num_slots, BLOCK):
        at = start + tl.arange(0, BLOCK)
        named = tl.load(numbers(ids) + at, mask=at < num_slots, other=-1)
        total += tl.sum((named == first_expert + expert).to(tl.int32), axis=0)
    tl.store(numbers(counts) + expert, total)
