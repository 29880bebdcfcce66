"""What a bench gives to the layer, and what must come out.

Rows are normal, weights of experts too, by width^-1/4. Each rank makes the weights of its own experts, in
memory that all ranks can read: so each can say for its own tokens what every expert makes of them.
"""

from __future__ import annotations

from typing import NamedTuple

import mori_shmem
import torch

from mori_megamoe import reference
from mori_megamoe.bench.routes import generator, slots_for
from mori_megamoe.bench.sizes import Sizes
from mori_megamoe.reference import RankInput
from mori_megamoe.weights import StoredWeights, quantize_weights, shuffle_weights

TURNS = 2  # different inputs, so that a result of the call before would show


class Answer(NamedTuple):
    """What is right for one rank's tokens."""

    out: torch.Tensor  # [n, D] bf16: every byte
    dense: torch.Tensor  # [n, D] fp64: with rows that are not quantised


def given_for(sizes: Sizes, rank: int, tokens: int, turn: int) -> RankInput:
    """One rank's tokens."""
    purpose = (tokens, rank, turn)
    rows = generator(sizes.seed, "x", *purpose)
    x = torch.randn(tokens, sizes.problem.model_dim, generator=rows).bfloat16()
    slots = generator(sizes.seed, "slots", *purpose)
    ids, weights = slots_for(sizes.routing, sizes.problem, tokens, sizes.hot_bias, slots)
    return RankInput(x, weights, ids)


class SharedWeights:
    """Weights of all experts, each rank's in its own part of a window. Collective to make."""

    def __init__(self, comm: mori_shmem.Communicator, sizes: Sizes) -> None:
        self._problem = sizes.problem
        experts = [self._expert(sizes, comm.rank, e) for e in range(self._problem.experts_per_rank)]
        self._nbytes = [part[0].numel() for part in experts[0]]
        self._window = comm.alloc(len(experts) * sum(self._nbytes))
        self._world_size = comm.world_size
        for expert, parts in enumerate(experts):
            for kept, part in zip(self.of(comm.rank), parts, strict=True):
                kept[expert] = part[0]
        comm.barrier()

    def _expert(self, sizes: Sizes, rank: int, expert: int) -> StoredWeights:
        d, i = self._problem.model_dim, self._problem.inter_dim
        g = generator(sizes.seed, "experts", rank, expert)
        w1 = torch.randn(1, 2 * i, d, generator=g) * d**-0.25
        w2 = torch.randn(1, d, i, generator=g) * i**-0.25
        return shuffle_weights(quantize_weights(w1, w2))

    def of(self, rank: int) -> StoredWeights:
        """Views of what a rank has."""
        offset, parts, experts = 0, [], self._problem.experts_per_rank
        for nbytes in self._nbytes:
            parts.append(self._window.peer(rank).tensor((experts, nbytes), torch.uint8, offset))
            offset += experts * nbytes
        return StoredWeights(*parts)

    def answer(self, given: RankInput) -> Answer:
        """For tokens of one rank, by the reference, which moves no row anywhere."""
        weights = [self.of(rank) for rank in range(self._world_size)]
        (result,) = reference.layer([given], weights, self._problem)
        (dense,) = reference.dense([given], weights, self._problem)
        return Answer(result.out, dense)

    def close(self) -> None:
        self._window.close()
