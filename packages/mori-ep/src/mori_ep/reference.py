"""The same calls on plain tensors of all ranks at once: what "right" means, byte for byte.

    received = dispatch(ranks, experts_per_rank)          # for every rank, the rows that it must get, in
                                                          order
    out = combine(ranks, received, y, experts_per_rank)   # for every rank, what it must get back

Order of rows: by (source rank, token). Order of additions: a token's experts in slot order, each rank at the
first slot that names it; fp32, one rounding at the end. A slot with an id that no expert has goes nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class RankInput:
    """What one rank brings."""

    x: torch.Tensor  # [n, hidden], any dtype
    ids: torch.Tensor  # [n, k] int32
    weights: torch.Tensor | None = None  # [n, k] fp32
    scales: torch.Tensor | None = None  # [n, scale_dim]


@dataclass
class Received:
    """The rows that one rank gets."""

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None
    sources: list[tuple[int, int]]  # (source rank, token) of each row

    @property
    def count(self) -> int:
        return len(self.sources)


def destinations(ids: torch.Tensor, experts_per_rank: int, num_ranks: int) -> list[list[int]]:
    """For every token the ranks that get it, in order of the first slot that names them."""
    found = []
    for slots in ids.tolist():
        ranks = [e // experts_per_rank for e in slots if 0 <= e < experts_per_rank * num_ranks]
        found.append(list(dict.fromkeys(ranks)))
    return found


def dispatch(ranks: Sequence[RankInput], experts_per_rank: int) -> list[Received]:
    """For every rank what it receives."""
    routes = [destinations(r.ids, experts_per_rank, len(ranks)) for r in ranks]
    results = []
    for destination in range(len(ranks)):
        sources = [
            (source, token)
            for source, route in enumerate(routes)
            for token, to in enumerate(route)
            if destination in to
        ]
        results.append(
            Received(
                rows=_rows([r.x for r in ranks], sources),
                ids=_rows([r.ids for r in ranks], sources),
                weights=_maybe([r.weights for r in ranks], sources),
                scales=_maybe([r.scales for r in ranks], sources),
                sources=sources,
            )
        )
    return results


def combine(
    ranks: Sequence[RankInput],
    received: Sequence[Received],
    y: Sequence[torch.Tensor],  # of each rank [>= rows received, hidden]
    experts_per_rank: int,
    wire: object = None,  # applied to y: what a quantised transport makes of it, as fp32
    missing: Sequence[int] = (),  # masked ranks: what they should add is left out
) -> list[torch.Tensor]:
    """For every rank the [n, hidden] sums, in y's dtype."""
    row_of = [{source: row for row, source in enumerate(r.sources)} for r in received]
    widened = [(wire(part) if callable(wire) else part.float()) for part in y]
    results = []
    for rank, given in enumerate(ranks):
        out = torch.zeros(given.ids.shape[0], y[rank].shape[1])
        for token, to in enumerate(destinations(given.ids, experts_per_rank, len(ranks))):
            terms = [widened[d][row_of[d][rank, token]] for d in to if d not in missing]
            for i, term in enumerate(terms):
                out[token] = term if i == 0 else out[token] + term
        results.append(rounded(out, y[rank].dtype))
    return results


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 to a dtype, once, to nearest even; 8-bit floats keep to their largest finite value."""
    if dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error of a whole tensor; 0 where both are 0."""
    difference = float((got.double() - want.double()).norm())
    size = float(want.double().norm())
    return difference / size if size else difference


def _rows(parts: Sequence[torch.Tensor], sources: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Rows picked from the ranks' tensors; as bytes, since not every dtype can be stacked."""
    like = parts[0]
    row_bytes = like.shape[1] * like.dtype.itemsize
    picked = [bytes_of(parts[rank])[token] for rank, token in sources]
    stacked = torch.stack(picked) if picked else torch.empty(0, row_bytes, dtype=torch.uint8)
    return stacked.view(like.dtype) if row_bytes else stacked


def _maybe(parts: Sequence[torch.Tensor | None], sources: Sequence[tuple[int, int]]) -> torch.Tensor | None:
    given = [part for part in parts if part is not None]
    return _rows(given, sources) if len(given) == len(parts) else None


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """[n, row bytes] uint8 of a two-dimensional tensor, whatever its dtype."""
    if x.shape[0] == 0:
        return torch.empty(0, x.shape[1] * x.dtype.itemsize, dtype=torch.uint8)
    return x.contiguous().view(torch.uint8)
