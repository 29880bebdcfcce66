"""What a bench gives to the op, and what must come out.

Rows are random in the dispatch dtype. The experts of the bench multiply a row by the sum of its weights for
the rank that they are on, so what a token must get back follows from its own row and ids: the check needs no
other rank's memory. Packed fp4 rows have no value of their own; there the experts take numbers that follow
from where a row is from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mori_bench
import torch

from mori_ep import reference
from mori_ep.bench.routes import ids_for
from mori_ep.config import EpDispatchCombineConfig

PACKED = (torch.float4_e2m1fn_x2, torch.uint8)


@dataclass(frozen=True)
class Sizes:
    """One configuration of the bench."""

    tokens: int
    hidden: int
    topk: int
    experts: int
    dtype: torch.dtype
    combine_dtype: torch.dtype
    routing: str
    scale_dim: int  # fp32 scales per row; 0: none
    seed: int


@dataclass
class Given:
    """One rank's tensors."""

    rank: int
    x: torch.Tensor  # [n, hidden]
    weights: torch.Tensor  # [n, topk] fp32
    scales: torch.Tensor | None
    ids: torch.Tensor  # [n, topk] int32

    def to(self, device: torch.device) -> Given:
        scales = None if self.scales is None else self.scales.to(device)
        return Given(self.rank, self.x.to(device), self.weights.to(device), scales, self.ids.to(device))


def given_for(sizes: Sizes, rank: int, world_size: int, turn: int) -> Given:
    """What a rank gives in its calls of this turn; any rank can make it."""
    g = torch.Generator().manual_seed(mori_bench.seed_for(sizes.seed, "rows", rank, turn))
    n = sizes.tokens
    if sizes.dtype in PACKED:
        x = torch.randint(0, 256, (n, sizes.hidden), generator=g, dtype=torch.uint8).view(sizes.dtype)
    else:
        x = torch.randn(n, sizes.hidden, generator=g).to(sizes.dtype)
    ids = ids_for(
        sizes.routing,
        rank=rank,
        world_size=world_size,
        tokens=n,
        topk=sizes.topk,
        experts=sizes.experts,
        seed=mori_bench.seed_for(sizes.seed, "routes", turn),
    )
    weights = torch.rand(n, sizes.topk, generator=g)
    scales = torch.rand(n, sizes.scale_dim, generator=g) if sizes.scale_dim else None
    return Given(rank, x, weights, scales, ids)


def values(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The numbers that experts take for rows; positions say where each is from."""
    if rows.dtype not in PACKED:
        return rows.float()
    columns = torch.arange(rows.shape[1], device=rows.device)
    return ((positions[:, None].long() * 31 + columns * 7) % 17 - 8).float()


def experts(
    rows: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    config: EpDispatchCombineConfig,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What this rank's experts make of the rows that it received."""
    here = torch.div(ids, config.num_experts_per_rank, rounding_mode="floor") == config.rank
    return reference.rounded(values(rows, positions) * sum_over_slots(weights * here), dtype)


def sum_over_slots(weights: torch.Tensor) -> torch.Tensor:
    """[n, 1], slot by slot: the same bits on every device, whatever order its reductions have."""
    total = weights[:, :1].clone()
    for slot in range(1, weights.shape[1]):
        total += weights[:, slot : slot + 1]
    return total


def answer(given: Given, config: EpDispatchCombineConfig, dtype: torch.dtype) -> torch.Tensor:
    """What combine must give for this rank's tokens, with the rounding that the experts' own rows have; on
    the device of `given`. Across nodes every node adds up its ranks' rows first, and rounds, and then the
    nodes' sums are added."""
    n, device = given.x.shape[0], given.x.device
    positions = torch.arange(n, device=device) + given.rank * config.position_stride
    x, per_rank = values(given.x, positions), config.num_experts_per_rank
    ranks_a_node = config.gpu_per_node if config.kernel_type.across_nodes else config.world_size
    owner = torch.where(given.ids >= 0, given.ids, -per_rank).div(per_rank, rounding_mode="floor")
    node_of = owner.div(ranks_a_node, rounding_mode="floor")
    sums = {}
    for node in range(config.world_size // ranks_a_node):
        rows = {}
        for rank in range(node * ranks_a_node, (node + 1) * ranks_a_node):
            weight = sum_over_slots(given.weights * (owner == rank))
            rows[rank] = reference.rounded(x * weight, dtype).float()
        sums[node] = reference.rounded(_added(owner, rows), dtype).float()
    return reference.rounded(_added(node_of, sums), dtype)


def _added(names: torch.Tensor, rows: dict[int, torch.Tensor]) -> torch.Tensor:
    """The sum of the rows that a token's slots name [n, k], each once, in the order of the slots."""
    n, device = len(names), names.device
    total = torch.zeros(n, next(iter(rows.values())).shape[1], device=device)
    named = {name: torch.zeros(n, dtype=torch.bool, device=device) for name in rows}
    for slot in range(names.shape[1]):
        for name, row in rows.items():
            first = (names[:, slot] == name) & ~named[name]
            total[first] += row[first]
            named[name] |= first
    return total


def received_rows(
    sizes: Sizes, config: EpDispatchCombineConfig, turn: int
) -> Iterator[tuple[Given, torch.Tensor]]:
    """For every source, what it gave and which of its tokens come to this rank; one source in memory at a
    time."""
    for source in range(config.world_size):
        given = given_for(sizes, source, config.world_size, turn)
        mine = torch.div(given.ids, config.num_experts_per_rank, rounding_mode="floor") == config.rank
        yield given, mine.any(1).nonzero().flatten()
