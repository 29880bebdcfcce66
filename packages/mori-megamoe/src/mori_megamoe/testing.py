"""Small layers and their inputs, made alike on whatever rank asks for them; for tests and benches.

toy = Toy(num_ranks=4)
moe = toy.layer(comm)                    # on each rank
given = toy.inputs([40, 0, 7, 23], seed=1)    # of all ranks; this one's: given[comm.rank]
want = toy.reference(given)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mori_shmem
import torch

from mori_megamoe import reference
from mori_megamoe.arguments import check_whole
from mori_megamoe.layer import MegaMoE
from mori_megamoe.problem import Problem
from mori_megamoe.reference import RankInput
from mori_megamoe.weights import StoredWeights, quantize_weights, shuffle_weights


@dataclass(frozen=True)
class Toy:
    """The smallest widths that a layer can have, few experts."""

    num_ranks: int
    experts_per_rank: int = 3
    topk: int = 3
    max_tokens: int = 64
    swiglu_limit: float = 10.0
    partials: str = "auto"
    model_dim: int = 256
    inter_dim: int = 256

    @property
    def problem(self) -> Problem:
        return Problem(
            self.model_dim,
            self.inter_dim,
            self.num_ranks * self.experts_per_rank,
            self.topk,
            self.num_ranks,
            self.max_tokens,
            self.swiglu_limit,
            self.partials,
        )

    def weights(self, rank: int) -> StoredWeights:
        """Of one rank's experts."""
        g = torch.Generator().manual_seed(9000 + rank)
        local, d, i = self.experts_per_rank, self.model_dim, self.inter_dim
        w1 = torch.randn(local, 2 * i, d, generator=g) * d**-0.25
        w2 = torch.randn(local, d, i, generator=g) * i**-0.25
        return shuffle_weights(quantize_weights(w1, w2))

    def layer(self, comm: mori_shmem.Communicator, /, **changes: Any) -> MegaMoE:
        """Collective."""
        given = {
            "rank": comm.rank,
            "world_size": comm.world_size,
            "model_dim": self.model_dim,
            "inter_dim": self.inter_dim,
            "experts": self.problem.num_experts,
            "topk": self.topk,
            "quant": "a8w4",
            "max_tok_per_rank": self.max_tokens,
            "swiglu_limit": self.swiglu_limit,
            "partials": self.partials,
            "comm": comm,
            **self.weights(comm.rank)._asdict(),
        }
        return MegaMoE(**{**given, **changes})

    def inputs(
        self, tokens: Sequence[int], seed: int = 0, *, invalid: float = 0.0, hot: Sequence[int] = ()
    ) -> list[RankInput]:
        """Random rows and weights; each token's experts are different ones.

        invalid  share of slots without an expert
        hot      experts that every second token goes to first
        """
        return [self._input(rank, n, seed, invalid, hot) for rank, n in enumerate(tokens)]

    def _input(self, rank: int, n: int, seed: int, invalid: float, hot: Sequence[int]) -> RankInput:
        g = torch.Generator().manual_seed(1000 * seed + rank)
        x = torch.randn(n, self.model_dim, generator=g).bfloat16()
        score = torch.rand(n, self.problem.num_experts, generator=g)
        score[::2, list(hot)] += 1
        top = score.topk(self.topk)
        ids = top.indices.to(torch.int32)
        ids[torch.rand(n, self.topk, generator=g) < invalid] = -1
        return RankInput(x, top.values.softmax(-1), ids)

    def reference(self, inputs: Sequence[RankInput]) -> list[reference.Result]:
        """What is right for all ranks."""
        return reference.layer(inputs, [self.weights(r) for r in range(self.num_ranks)], self.problem)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, NaN included."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def wrong_rows(got: torch.Tensor, want: torch.Tensor) -> list[int]:
    """Numbers of the rows that differ in any byte."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise ValueError(f"{got.dtype} {tuple(got.shape)} against {want.dtype} {tuple(want.shape)}")
    return (as_bytes(got) != as_bytes(want)).any(1).nonzero()[:, 0].tolist() if len(got) else []


def smoke(world_size: int = 2) -> None:
    """Two calls on ranks of this machine, compared with the reference; raises where a byte differs."""
    check_whole("world_size", world_size)
    toy = Toy(world_size)
    calls = [toy.inputs([9 + rank for rank in range(world_size)], seed, invalid=0.1) for seed in range(2)]
    want = [toy.reference(inputs) for inputs in calls]

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            for number, (inputs, results) in enumerate(zip(calls, want, strict=True)):
                wrong = wrong_rows(moe(*inputs[comm.rank]), results[comm.rank].out)
                if wrong:
                    raise AssertionError(f"call {number} on rank {comm.rank}: rows {wrong} differ")

    mori_shmem.run_ranks(rank, world_size)
    print(f"{world_size} ranks, {len(calls)} calls: every byte is the reference's")
