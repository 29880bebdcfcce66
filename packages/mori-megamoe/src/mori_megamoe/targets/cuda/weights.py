"""w1 and w2 in the order in which the kernels read them, made once when a layer's weights are loaded. torch
operations, on any device; 48 experts of 6144 x 7168 keep their 1.06 GB (and 66 MB of deltas, as large as the
scales they replace).

The caller's form (mx.layouts) is read as it is: codes of 16 rows of gate, then 16 of up, and so on; scales in
pieces of 256 bytes. What comes out, for an expert's block of 256 rows (128 outputs) and 128 of K, is one run
of bytes that one bulk copy brings to a CTA:

    codes   [wg 2][fragment 2][half 2][warp 4][g 8][c 4][step 2][gate, up]  words of 8 codes (decode.cuh)
    deltas  [wg 2][fragment 2][warp 4][g 8][gate, up][4 blocks of 32]       bytes

Output 128 block + 64 wg + 16 warp + 2 g + fragment has its gate and its up in the same thread. Each row of
weights has one power of two, `base`; a block's delta says how far its scale is above. Blocks of zeros have
any scale: they take no part. A body holds deltas up to MAX_DELTA; rows with a wider span are refused, never
rounded.

w2 [D, I] is w1's form with other names: its rows stand in the caller's bytes 16 and 16, as gate and up do, so
what is said here of output o with gate and up is said there of columns 32 (o / 16) + o % 16 and 16 further
on. An item is two blocks, so an odd number of them is filled up with one of zeros.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from mori_shmem.errors import UnsupportedShape

from mori_megamoe.targets.cuda import limits

_LOG = logging.getLogger("mori_megamoe")
BLOCK_ROWS, BLOCK_K = 256, 128
CODE_BYTES, DELTA_BYTES = 16384, 1024
WEIGHT_BYTES = CODE_BYTES + DELTA_BYTES
_UNIT = {"R": 5, "A": 16}  # a code v with delta d is held as v * 2^(d - unit)
_NAN_SCALE = 255


@dataclass(frozen=True)
class PreparedWeights:
    """One rank's w1, or w2, for one body. Of w2: D for 2 I, rounded up to 512, and I for D."""

    body: str
    codes: torch.Tensor  # uint8 [experts, 2 I / 256, D / 128, WEIGHT_BYTES]
    base: torch.Tensor  # fp32 [experts, 2 I], in the kernel's order of rows


def prepare_weights(
    w1: torch.Tensor, w1_scale: torch.Tensor, *, model_dim: int, inter_dim: int, body: str = "auto"
) -> PreparedWeights:
    """w1, w1_scale: bytes as `mori_megamoe.shuffle_weights` makes them, [experts, ...].

    body  "R" or "A"; "auto" is R where that is exact for every row, else A, and says so
    """
    experts = w1.shape[0]
    codes = w1.reshape(experts, -1).view(torch.uint8)
    scales = w1_scale.reshape(experts, -1).view(torch.uint8)
    if body == "auto":
        body = "R" if max(_widest(c, s, model_dim) for c, s in zip(codes, scales, strict=True)) <= 11 else "A"
        if body == "A":
            _LOG.warning(
                "w1 has rows whose scales are more than 2^%d apart: this layer's GEMM1 uses body A (bf16), "
                "which is exact for them; body='A' says so beforehand",
                limits.MAX_DELTA["R"],
            )
    out = torch.empty(
        *(experts, 2 * inter_dim // BLOCK_ROWS, model_dim // BLOCK_K, WEIGHT_BYTES),
        dtype=torch.uint8,
        device=w1.device,
    )
    base = torch.empty(experts, 2 * inter_dim, dtype=torch.float32, device=w1.device)
    for expert in range(experts):
        _prepare(
            f"w1 of expert {expert}",
            codes[expert],
            scales[expert],
            model_dim,
            body,
            out[expert],
            base[expert],
        )
    return PreparedWeights(body, out, base)


def prepare_back_weights(
    w2: torch.Tensor, w2_scale: torch.Tensor, *, model_dim: int, inter_dim: int, body: str
) -> PreparedWeights:
    """The same of w2, for GEMM2."""
    experts, blocks = w2.shape[0], -(-model_dim // (2 * BLOCK_ROWS)) * 2
    codes = w2.reshape(experts, -1).view(torch.uint8)
    scales = w2_scale.reshape(experts, -1).view(torch.uint8)
    sizes = (experts, blocks, inter_dim // BLOCK_K, WEIGHT_BYTES)
    out = torch.zeros(sizes, dtype=torch.uint8, device=w2.device)
    base = torch.zeros(experts, blocks * BLOCK_ROWS, dtype=torch.float32, device=w2.device)
    real = model_dim // BLOCK_ROWS
    for expert in range(experts):
        _prepare(
            f"w2 of expert {expert}",
            *(codes[expert], scales[expert], inter_dim, body),
            *(out[expert, :real], base[expert, :model_dim]),
        )
    return PreparedWeights(body, out, base)


def _prepare(
    name: str,
    stored: torch.Tensor,
    scales: torch.Tensor,
    model_dim: int,
    body: str,
    out: torch.Tensor,
    base: torch.Tensor,
) -> None:
    by_row = _codes(stored, model_dim)
    lowest, deltas = _deltas(by_row, _scales(scales, model_dim))
    _check(name, lowest, deltas, body)
    words = _words_r(by_row) if body == "R" else _words_a(by_row)
    blocks, steps = out.shape[:2]
    # words: [block, wg, warp, gate/up, K block, half, step, g, fragment, c]
    ordered = words.permute(0, 4, 1, 8, 5, 2, 7, 9, 6, 3).contiguous()
    out[..., :CODE_BYTES] = ordered.view(torch.uint8).view(blocks, steps, CODE_BYTES)
    # deltas: [block, wg, warp, gate/up, K block, step of 4, g, fragment]
    ordered = deltas.to(torch.uint8).permute(0, 4, 1, 7, 2, 6, 3, 5).contiguous()
    out[..., CODE_BYTES:] = ordered.view(blocks, steps, DELTA_BYTES)
    power = (lowest + _UNIT[body] << 23).view(torch.float32)  # [block, wg, warp, gate/up, 1, 1, g, fragment]
    base.copy_(power[:, :, :, :, 0, 0].permute(0, 1, 5, 2, 3, 4).reshape(-1))


def _codes(stored: torch.Tensor, model_dim: int) -> torch.Tensor:
    """One expert's bytes as [block, wg 2, warp 4, gate/up 2, K block, half 2, step 2, g 8, fragment 2, 16
    bytes]."""
    steps = model_dim // BLOCK_K
    # stored: [16 outputs][gate/up][K block][32 of K][row][16 bytes]
    return stored.view(-1, 2, 4, 2, steps, 2, 2, 8, 2, 16)


def _scales(stored: torch.Tensor, model_dim: int) -> torch.Tensor:
    """One expert's scales as [block, wg, warp, gate/up, K block, step of 4, g, fragment]."""
    # stored: [16 outputs][8 columns][column % 4][row][column / 4 % 2][gate/up]
    x = stored.view(-1, 2, 4, model_dim // 256, 4, 8, 2, 2, 2)
    return x.permute(0, 1, 2, 8, 3, 7, 4, 5, 6).flatten(4, 5)


def _deltas(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the lowest scale of each row [block, wg, warp, gate/up, 1, 1, g, fragment], how far each block is
    above)."""
    used = ((codes & 0x77) != 0).any(-1).flatten(5, 6)  # [.., K block, step of 4, g, fragment]
    wide = scales.to(torch.int32)
    lowest = wide.masked_fill(~used, _NAN_SCALE + 1).amin((4, 5), keepdim=True)
    lowest = lowest.masked_fill(lowest > _NAN_SCALE, 127)  # a row of zeros
    return lowest, (wide - lowest).masked_fill(~used, 0)


def _widest(stored: torch.Tensor, scales: torch.Tensor, model_dim: int) -> int:
    return int(_deltas(_codes(stored, model_dim), _scales(scales, model_dim))[1].max())


def _check(name: str, lowest: torch.Tensor, deltas: torch.Tensor, body: str) -> None:
    most, highest = limits.MAX_DELTA[body], 254 - _UNIT[body]
    widest, top = int(deltas.max()), int((lowest + deltas).max())
    if top == _NAN_SCALE:
        raise UnsupportedShape(f"a scale of {name} is 255, which stands for NaN")
    if widest > most:
        row = _row_of(name, int(deltas.amax((4, 5)).argmax()))
        other = "body='A' holds 2^17" if body == "R" else "no body of the cuda target holds them"
        raise UnsupportedShape(
            f"{name}: the scales of the {row} are 2^{widest} apart, body {body} holds "
            f"2^{most} exactly; {other}"
        )
    if int(lowest.max()) > highest:
        raise UnsupportedShape(
            f"{name} has a row whose lowest scale is 2^{int(lowest.max()) - 127}: "
            f"at most 2^{highest - 127} with body {body}"
        )


def _row_of(name: str, index: int) -> str:
    """The row at a place in [block, wg, warp, gate/up, g, fragment]."""
    index, fragment = divmod(index, 2)
    index, g = divmod(index, 8)
    index, up = divmod(index, 2)
    row = 2 * g + fragment
    if name.startswith("w2"):
        return f"row {index * 32 + 16 * up + row}"
    return f"{'up' if up else 'gate'} row {index * 16 + row}"


def _words_r(codes: torch.Tensor) -> torch.Tensor:
    """int32 [.., c 4]: magnitude i of half h at bit 16 h + 4 i, its sign at bit 8 i + 3 + 4 h."""
    x = codes.view(*codes.shape[:-1], 2, 4, 2)  # [h][c][i / 2]
    word = torch.zeros(*x.shape[:-3], 4, dtype=torch.int32, device=codes.device)
    for h in range(2):
        for i in range(4):
            code = (x[..., h, :, i // 2] >> 4 * (i % 2)).to(torch.int32)
            word |= (code & 7) << 16 * h + 4 * i | (code >> 3 & 1) << 8 * i + 3 + 4 * h
    return word


def _words_a(codes: torch.Tensor) -> torch.Tensor:
    """int32 [.., c 4]: pairs p as decode_bf16 takes them apart."""
    x = codes.view(*codes.shape[:-1], 4, 4)  # [p][c]
    word = torch.zeros(*x.shape[:-2], 4, dtype=torch.int32, device=codes.device)
    for p in range(4):
        for b in range(2):
            code = (x[..., p, :] >> 4 * b).to(torch.int32)
            m, s, at = code & 7, code >> 3 & 1, 16 * b
            if p < 3:
                word |= m << 6 - 3 * p + at | s << 15 - 3 * p + at
            else:
                word |= s << 14 + at | m >> 2 << 13 + at | (m & 3) << 10 + at
    return word
