"""The layer's sizes and what follows from them: counts, bytes, and what is refused. No torch, no target."""

from __future__ import annotations

from dataclasses import dataclass

from mori_shmem.errors import ArgumentError, UnsupportedShape

from mori_megamoe.arguments import check_number, check_whole, check_word
from mori_megamoe.config import BLOCK, MAX_TOKENS, max_sort_block_m

PARTIAL_FORMATS = ("bf16", "fp8_blockwise_1x32")
MAX_TOPK = 16  # two slots travel in one byte
MAX_SOURCE_TOKENS = 1 << 24  # ranks * max_tokens; that number itself marks a row that is only padding


def check_widths(model_dim: int, inter_dim: int) -> None:
    """Rows are made of whole pieces of what is stored and multiplied."""
    for name, size in (("model_dim", model_dim), ("inter_dim", inter_dim)):
        if size < 256 or size % 256:
            raise UnsupportedShape(f"{name}={size}: a multiple of 256 is needed")


@dataclass(frozen=True)
class Problem:
    """out[token] = sum over the token's experts of weight * W2(swiglu(W1 x)). Expert e lives on rank e //
    L."""

    model_dim: int
    inter_dim: int
    num_experts: int
    topk: int
    num_ranks: int
    max_tokens: int  # of one rank in one launch
    swiglu_limit: float = 0.0  # at most 0: none
    partials: str = "auto"  # how weighted rows travel back; "auto": bf16 up to 1024 tokens

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def num_segments(self) -> int:
        """One for each expert, then one for each rank's pair."""
        return self.num_experts + self.num_ranks

    @property
    def sends_per_rank(self) -> int:
        """Segments that one rank sends to another: the pair's, then one for each expert there."""
        return 1 + self.experts_per_rank

    @property
    def model_scales(self) -> int:
        """Scales of a row that enters the layer."""
        return self.model_dim // BLOCK

    @property
    def inter_scales(self) -> int:
        """Scales of a row between the GEMMs."""
        return self.inter_dim // BLOCK

    @property
    def padding_source(self) -> int:
        """In the place of a token where a row is only padding."""
        return self.num_ranks * self.max_tokens

    @property
    def max_block_m(self) -> int:
        return max_sort_block_m(self.max_tokens)

    @property
    def capacity_rows(self) -> int:
        """Rows of a rank's plan at most: every slot that can name one of its experts, and for each expert,
        and the two halves of a pair, less than one tile of padding. A multiple of the tile."""
        routed = self.num_ranks * self.max_tokens * min(self.topk, self.experts_per_rank)
        padding = (self.experts_per_rank + 2) * self.max_block_m
        return -(-(routed + padding) // self.max_block_m) * self.max_block_m

    @property
    def partial_format(self) -> str:
        """How weighted rows travel back to their tokens."""
        if self.partials != "auto":
            return self.partials
        return PARTIAL_FORMATS[self.max_tokens > 1024]

    @property
    def partial_bytes(self) -> int:
        """Of one weighted row on its way back."""
        if self.partial_format == "bf16":
            return 2 * self.model_dim
        return self.model_dim + self.model_scales

    @property
    def row_bytes(self) -> int:
        """Of one routed row on its way to an expert, scales included."""
        return self.model_dim + self.model_scales

    def check(self) -> None:
        """Raise for what no target can do. The same on every rank, before anybody waits."""
        for name, size in (
            ("model_dim", self.model_dim),
            ("inter_dim", self.inter_dim),
            ("experts", self.num_experts),
            ("topk", self.topk),
            ("world_size", self.num_ranks),
            ("max_tok_per_rank", self.max_tokens),
        ):
            check_whole(name, size)
        if self.num_ranks < 1 or self.num_experts < 1 or self.num_experts % self.num_ranks:
            raise UnsupportedShape(
                f"experts={self.num_experts} on world_size={self.num_ranks}: every rank holds the same "
                f"number, at least one"
            )
        if self.experts_per_rank > 256:
            raise UnsupportedShape(
                f"{self.experts_per_rank} experts per rank: at most 256 (a pair is two bytes)"
            )
        if not 1 <= self.topk <= min(MAX_TOPK, self.num_experts):
            raise UnsupportedShape(
                f"topk={self.topk}: 1 to {MAX_TOPK} are possible, and no more than experts={self.num_experts}"
            )
        check_widths(self.model_dim, self.inter_dim)
        self._check_tokens()
        check_number("swiglu_limit", self.swiglu_limit)
        if not self.swiglu_limit >= 0:
            raise ArgumentError(f"swiglu_limit={self.swiglu_limit}: 0 (none) or more")
        check_word("partials", self.partials, ("auto", *PARTIAL_FORMATS))

    def _check_tokens(self) -> None:
        most = self.max_tokens
        if most < 1 or most & (most - 1):
            legal = 1 << max(0, most - 1).bit_length()
            raise UnsupportedShape(
                f"max_tok_per_rank={most} is no power of two: the next larger one is {legal}"
            )
        if most > MAX_TOKENS:
            raise UnsupportedShape(f"max_tok_per_rank={most}: at most {MAX_TOKENS}")
        if self.padding_source >= MAX_SOURCE_TOKENS:
            raise UnsupportedShape(
                f"world_size={self.num_ranks} * max_tok_per_rank={most} is {self.padding_source}: less than "
                f"{MAX_SOURCE_TOKENS} is needed, a row's source is 24 bits"
            )
