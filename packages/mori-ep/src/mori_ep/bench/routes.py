"""Which experts the tokens of a bench go to. Any rank can make any rank's ids: they follow from the seed.

uniform      topk different experts, all equally likely
zipf         expert i of a shuffled list is picked with weight 1 / (i + 1)
hot-rank     rank 0's experts are eight times as likely as the others
one-expert   the first slot of every token is expert 0, the others are -1
FILE         one token a line: topk ids, with blanks or commas between; rank r takes the lines from r *
             tokens on, and starts over at the end
"""

from __future__ import annotations

from pathlib import Path

import mori_bench
import torch

GENERATORS = ("uniform", "zipf", "hot-rank", "one-expert")
HOT = 8.0


def ids_for(
    routing: str, *, rank: int, world_size: int, tokens: int, topk: int, experts: int, seed: int
) -> torch.Tensor:
    """[tokens, topk] int32 of one rank."""
    if routing not in GENERATORS:
        return _from_file(Path(routing), rank, tokens, topk, experts)
    if routing == "one-expert":
        ids = torch.full((tokens, topk), -1, dtype=torch.int32)
        ids[:, 0] = 0
        return ids
    likely = torch.ones(experts)
    if routing == "zipf":
        order = torch.randperm(experts, generator=_generator(seed, "experts"))  # the same on all ranks
        likely[order] = 1 / (torch.arange(experts) + 1.0)
    elif routing == "hot-rank":
        likely[: experts // world_size] = HOT
    if tokens == 0:
        return torch.empty(0, topk, dtype=torch.int32)
    # The topk smallest of exponential variables, scaled by their likelihood, are a draw without repeats.
    clock = torch.empty(tokens, experts).exponential_(generator=_generator(seed, "ids", rank))
    return (clock / likely).topk(topk, dim=1, largest=False).indices.int()


def _generator(seed: int, *purpose: object) -> torch.Generator:
    return torch.Generator().manual_seed(mori_bench.seed_for(seed, *purpose))


def _from_file(path: Path, rank: int, tokens: int, topk: int, experts: int) -> torch.Tensor:
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--routing {path}: no lines")
    table = []
    for number, line in enumerate(lines, 1):
        try:
            ids = [int(word) for word in line.replace(",", " ").split()]
        except ValueError:
            raise ValueError(
                f"--routing {path}, line {number}: {line!r} is not {topk} whole numbers"
            ) from None
        if len(ids) != topk or not all(-1 <= i < experts for i in ids):
            raise ValueError(
                f"--routing {path}, line {number}: {line!r}: {topk} ids from -1 to {experts - 1} are needed"
            )
        table.append(ids)
    return torch.tensor(
        [table[(rank * tokens + t) % len(table)] for t in range(tokens)], dtype=torch.int32
    ).view(tokens, topk)


def check(routing: str, topk: int, experts: int) -> None:
    """Raise ValueError for what could not be made."""
    if routing in GENERATORS:
        return
    if not Path(routing).is_file():
        raise ValueError(f"--routing {routing}: one of {', '.join(GENERATORS)}, or a file")
    _from_file(Path(routing), 0, 1, topk, experts)
