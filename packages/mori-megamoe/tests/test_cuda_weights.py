"""w1 in the kernel's order: nothing is lost, what a body cannot hold is refused, and the device's decoding
gives exactly what the caller stored."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

import pytest
import torch
from mori_megamoe import mx
from mori_megamoe.targets.cuda import limits
from mori_megamoe.targets.cuda.weights import CODE_BYTES, PreparedWeights, prepare_weights
from mori_shmem.errors import UnsupportedShape

sys.path.insert(0, str(Path(__file__).parent))
from cuda_cases import exact_weights, make_weights
from cuda_emulator import Library

bodies = pytest.mark.parametrize("body", ["R", "A"])
UNIT = {"R": 5, "A": 16}
DECODE = r"""
extern "C" void decode_r(const uint32_t* words, const uint32_t* deltas, int count, uint32_t* out) {
  for (int i = 0; i < count; i++) {
    uint32_t d[2] = {deltas[i], deltas[i]}, a[8];
    decode_step_fp8(a, 0, words[i], words[i], d, i & 3, 16);
    out[2 * i] = a[0], out[2 * i + 1] = a[2];
    if (a[1] != a[0] || a[3] != a[2]) abort();
  }
}
extern "C" void decode_a(const uint32_t* words, const uint32_t* deltas, int count, uint32_t* out) {
  for (int i = 0; i < count; i++, out += 4) decode_bf16(words[i], deltas[i], out[0], out[1], out[2], out[3]);
}
"""


@functools.cache
def decoder() -> Library:
    return Library("decode.cuh", tests="#include <stdlib.h>\n" + DECODE)


def stored(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """Packed codes [E, 2 I, D / 2] and scales as a caller has them, and their sizes."""
    _, rows, half = codes.shape
    form, scale_form = mx.W1Bytes(rows, half), mx.W1Scales(rows, half // 16)
    return form.shuffle(codes), scale_form.shuffle(scales), {"model_dim": 2 * half, "inter_dim": rows // 2}


def taken_apart(prepared: PreparedWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse: codes one a byte [E, 2 I, D] and the scales of blocks, relative to nothing: e8m0 [E, 2 I,
    D / 32]."""
    experts, blocks, steps, _ = prepared.codes.shape
    words = prepared.codes[..., :CODE_BYTES].contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    # [E, block, K block, wg, fragment, half, warp, g, c, step, gate/up]
    words = words.view(experts, blocks, steps, 2, 2, 2, 4, 8, 4, 2, 2)
    codes = torch.zeros(*words.shape, 32 // 4, dtype=torch.int64)  # the eight of a word, in its own order
    for i in range(8):
        if prepared.body == "R":  # half h, magnitude j: K 16 h + 4 c + j
            h, j = divmod(i, 4)
            codes[..., i] = words >> 16 * h + 4 * j & 7 | (words >> 8 * j + 3 + 4 * h & 1) << 3
        else:  # pair p, bit b: K 8 p + 2 c + b
            p, b = divmod(i, 2)
            at = 16 * b
            if p < 3:
                magnitude, sign = words >> 6 - 3 * p + at & 7, words >> 15 - 3 * p + at & 1
            else:
                magnitude = (words >> 13 + at & 1) << 2 | words >> 10 + at & 3
                sign = words >> 14 + at & 1
            codes[..., i] = magnitude | sign << 3
    # to [E, gate/up, block, wg, warp, g, fragment, K block, half, step, K in 32]
    ordered = codes.permute(0, 10, 1, 3, 6, 7, 4, 2, 5, 9, 8, 11)
    if prepared.body == "R":
        inner = ordered.unflatten(-1, (2, 4)).permute(*range(10), 11, 10, 12)
    else:
        inner = ordered.unflatten(-1, (4, 2)).permute(*range(10), 11, 10, 12)
    values = inner.reshape(experts, 2 * blocks * 128, steps * 128).to(torch.uint8)
    deltas = (
        prepared.codes[..., CODE_BYTES:].reshape(experts, blocks, steps, 2, 2, 4, 8, 2, 4).to(torch.int32)
    )
    base = prepared.base.view(experts, blocks, 2, 2, 4, 2, 8)  # [block, wg, fragment, warp, gate/up, g]
    lowest = (base.view(torch.int32) >> 23) - UNIT[prepared.body]
    # [E, gate/up, block, wg, warp, g, fragment, K block, 4]
    scales = deltas.permute(0, 7, 1, 3, 5, 6, 4, 2, 8) + lowest.permute(0, 5, 1, 2, 4, 6, 3)[..., None, None]
    return values, scales.reshape(experts, 2 * blocks * 128, steps * 4)


@bodies
def test_taking_it_apart_gives_back_what_was_stored(body: str) -> None:
    """Codes bit for bit, the sign of zeros too; scales of all blocks that are not zeros."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (2, 512, 256), generator=generator, dtype=torch.uint8)
    scales = torch.randint(
        110, 111 + limits.MAX_DELTA[body], (2, 512, 16), generator=generator, dtype=torch.uint8
    )
    codes[0, 7, 16:48] = 0x08  # zeros with a sign: two blocks
    scales[0, 7, 1:3] = 3
    codes[1, 300] = 0  # a whole row
    scales[1, 300] = 255
    w1, w1_scale, sizes = stored(codes, scales)
    values, got = taken_apart(prepare_weights(w1, w1_scale, **sizes, body=body))
    assert torch.equal(values, mx.unpack_e2m1(codes))
    used = (codes & 0x77).unflatten(-1, (-1, 16)).ne(0).any(-1)
    assert torch.equal(got[used], scales[used].to(torch.int32))
    assert int((~used).sum()) == 2 + 16


@bodies
def test_the_device_decodes_every_code_at_every_delta_exactly(body: str) -> None:
    """R: 4 codes a register, table lookups. A: pairs, one multiplication. Every byte at every place of a
    word, and block i of a row with delta i, as far as the body goes."""
    line = torch.arange(256, dtype=torch.uint8)
    packed = torch.stack([line.roll(i).repeat(2) for i in range(512)])[None]  # 32 blocks a row
    scales = torch.arange(32).clamp_max(limits.MAX_DELTA[body]).to(torch.uint8).expand(1, 512, 32) + 100
    w1, w1_scale, sizes = stored(packed, scales)
    assert_decoded(prepare_weights(w1, w1_scale, **sizes, body=body), exact_weights(packed, scales))


def assert_decoded(prepared: PreparedWeights, exact: torch.Tensor) -> None:
    """Each word decoded by the device's function, times its row's base, is what was stored."""
    experts, blocks, steps, _ = prepared.codes.shape
    shape = (experts, blocks, steps, 2, 2, 2, 4, 8, 4, 2, 2)
    words = prepared.codes[..., :CODE_BYTES].contiguous().view(torch.int32).view(shape)
    deltas = prepared.codes[..., CODE_BYTES:].reshape(experts, blocks, steps, 2, 2, 4, 8, 2, 2, 2)
    # of [.. wg, fragment, warp, g, gate/up, half, step] for each word
    of_word = deltas.permute(0, 1, 2, 3, 4, 8, 5, 6, 9, 7)[..., None, :, :].expand(shape).contiguous()
    count, each = words.numel(), 2 if prepared.body == "R" else 4
    flat, of_word = words.reshape(-1), of_word.reshape(-1).to(torch.int32)
    given = of_word * 0x01010101 if prepared.body == "R" else of_word
    out = torch.empty(count * each, dtype=torch.int32)
    function = getattr(decoder().functions, "decode_r" if prepared.body == "R" else "decode_a")
    function(*(ctypes.c_void_p(t.data_ptr()) for t in (flat, given)), count, ctypes.c_void_p(out.data_ptr()))
    if prepared.body == "R":
        values = mx.decode_e4m3(out.view(torch.uint8), torch.float64).view(*shape, 2, 4)  # K 16 h + 4 c + j
    else:
        values = out.view(torch.bfloat16).double().view(*shape, 4, 2)  # K 8 p + 2 c + b
    rows = values.permute(0, 10, 1, 3, 6, 7, 4, 2, 5, 9, 11, 8, 12).reshape(
        experts, 2 * blocks * 128, steps * 128
    )
    base = (
        prepared.base.view(experts, blocks, 2, 2, 4, 2, 8).permute(0, 5, 1, 2, 4, 6, 3).reshape(experts, -1)
    )
    assert torch.equal(rows * base.double()[..., None], exact)


def with_span(span: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """One row, up row 21 of the second expert, has scales so far apart."""
    codes = torch.full((2, 512, 128), 0x21, dtype=torch.uint8)
    scales = torch.full((2, 512, 8), 120, dtype=torch.uint8)
    scales[1, 256 + 21, 5] = 120 + span
    return stored(codes, scales)


def test_auto_is_r_where_that_is_exact_and_else_says_that_it_is_a(caplog: pytest.LogCaptureFixture) -> None:
    w1, w1_scale, sizes = with_span(11)
    assert prepare_weights(w1, w1_scale, **sizes).body == "R"
    assert not caplog.records
    w1, w1_scale, sizes = with_span(12)
    assert prepare_weights(w1, w1_scale, **sizes).body == "A"
    assert "uses body A" in caplog.text


def test_rows_that_a_body_cannot_hold_are_refused_by_name() -> None:
    w1, w1_scale, sizes = with_span(12)
    with pytest.raises(
        UnsupportedShape, match=r"expert 1: the scales of the up row 21 are 2\^12 apart, body R"
    ):
        prepare_weights(w1, w1_scale, **sizes, body="R")
    w1, w1_scale, sizes = with_span(18)
    with pytest.raises(UnsupportedShape, match=r"up row 21 are 2\^18 apart, body A holds 2\^17"):
        prepare_weights(w1, w1_scale, **sizes)
    w1, w1_scale, sizes = with_span(135)
    with pytest.raises(UnsupportedShape, match="255, which stands for NaN"):
        prepare_weights(w1, w1_scale, **sizes)


def test_a_blocks_scale_of_zeros_does_not_matter() -> None:
    """Checkpoints hold such blocks with scale 0: 2^-127, far from the rest of their row."""
    codes = torch.full((1, 512, 128), 0x21, dtype=torch.uint8)
    codes[0, 3, :16] = 0x80
    scales = torch.full((1, 512, 8), 120, dtype=torch.uint8)
    scales[0, 3, 0] = 0
    w1, w1_scale, sizes = stored(codes, scales)
    prepared = prepare_weights(w1, w1_scale, **sizes, body="R")
    assert int(prepared.codes[..., CODE_BYTES:].max()) == 0


def test_normal_and_heavy_tailed_weights_need_small_deltas() -> None:
    """Why R is the default: deltas of a row stay far below 11."""
    for tails, most in ((False, 4), (True, 7)):
        w1, w1_scale, _ = make_weights(1, 256, 2048, tails=tails)
        prepared = prepare_weights(w1, w1_scale, model_dim=2048, inter_dim=256)
        assert prepared.body == "R"
        assert int(prepared.codes[..., CODE_BYTES:].max()) <= most
