"""The table of buckets, and the sizes that follow from a layer's."""

from __future__ import annotations

from typing import Any

import pytest
from mori_megamoe.config import BUCKETS, bucket_for, max_sort_block_m
from mori_megamoe.layout import layout_for
from mori_megamoe.problem import Problem
from mori_shmem.errors import ArgumentError

PRO = Problem(7168, 3072, 384, 6, 8, 8192, 10.0)


def test_buckets_are_the_powers_of_two_but_2() -> None:
    assert [b.tokens for b in BUCKETS] == [1, *(1 << i for i in range(2, 16))]


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 4),
        (6, 8),
        (5, 4),
        (48, 64),
        (47, 32),
        (3000, 2048),
        (3072, 4096),
        (10**6, 32768),
    ],
)
def test_nearest_bucket_and_ties_upward(tokens: int, bucket: int) -> None:
    assert bucket_for(tokens).tokens == bucket


def test_the_rows_that_stage1_over_copy_engines_goes_by() -> None:
    rows = {b.tokens: (b.sort_block_m, b.scale_mode) for b in BUCKETS}
    assert rows[128] == (32, "ldsw")
    assert rows[256] == rows[2048] == (64, "ldsw")
    assert rows[4096] == rows[8192] == (128, "shuffler")


def test_the_largest_tile_covers_every_number_of_tokens() -> None:
    for most in (1, 64, 128, 256, 2048, 4096, 32768):
        assert max_sort_block_m(most) == max(bucket_for(n).sort_block_m for n in range(most + 1))


def test_sizes_of_a_large_layer() -> None:
    assert (PRO.experts_per_rank, PRO.num_segments, PRO.sends_per_rank) == (48, 392, 49)
    assert PRO.capacity_rows == 8 * 8192 * 6 + 50 * 128
    assert PRO.partial_format == "fp8_blockwise_1x32"
    assert PRO.partial_bytes == 7168 + 224
    assert layout_for(PRO).nbytes < 5 << 30


def test_regions_lie_one_after_the_other_and_are_aligned() -> None:
    layout = layout_for(Problem(256, 512, 12, 3, 4, 64))
    end = 0
    for name, region in layout.regions.items():
        assert region.offset_bytes % 256 == 0, name
        assert region.offset_bytes >= end, name
        end = region.offset_bytes + region.nbytes
    assert end <= layout.nbytes
    assert layout.count_row(1, 3) + 4 * 17 <= layout["counts"].offset_bytes + layout["counts"].nbytes


def problem(**changes: Any) -> Problem:
    sizes = {
        "model_dim": 256,
        "inter_dim": 256,
        "num_experts": 8,
        "topk": 2,
        "num_ranks": 2,
        "max_tokens": 128,
    }
    return Problem(**{**sizes, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 9}, "experts=9 on world_size=2"),
        ({"num_experts": 0}, "experts=0"),
        ({"num_experts": 1024}, "512 experts per rank: at most 256"),
        ({"topk": 0}, "topk=0: 1 to 16"),
        ({"topk": 17, "num_experts": 32}, "topk=17"),
        ({"topk": 9}, "no more than experts=8"),
        ({"model_dim": 384}, "model_dim=384: a multiple of 256"),
        ({"inter_dim": 0}, "inter_dim=0"),
        ({"max_tokens": 100}, "max_tok_per_rank=100 is no power of two: the next larger one is 128"),
        ({"max_tokens": 0}, "max_tok_per_rank=0 is no power of two: the next larger one is 1"),
        ({"max_tokens": 65536}, "at most 32768"),
        ({"max_tokens": 32768, "num_ranks": 512, "num_experts": 512}, "less than 16777216"),
        ({"swiglu_limit": -1.0}, "swiglu_limit=-1"),
        ({"swiglu_limit": float("nan")}, "swiglu_limit=nan"),
        ({"partials": "fp8"}, "partials='fp8' is not known; allowed: auto, bf16, fp8_blockwise_1x32"),
    ],
)
def test_MM_2_what_no_target_can_do_is_refused_with_the_rule(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        problem(**changes).check()
    assert words in str(refused.value)


def test_what_is_right_passes() -> None:
    problem().check()
    PRO.check()
    problem(num_ranks=1, topk=1, max_tokens=1).check()
