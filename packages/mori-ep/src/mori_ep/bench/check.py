"""Is it right? Dispatch byte for byte, row by row; combine to the bit, or within what its transport may
lose."""

from __future__ import annotations

from dataclasses import dataclass

import mori_shmem
import torch

from mori_ep import reference
from mori_ep.bench.inputs import Given, Sizes, answer, received_rows
from mori_ep.config import EpDispatchCombineConfig
from mori_ep.op import EpDispatchCombineOp
from mori_ep.prepared import Dispatched
from mori_ep.reference import bytes_of

TWICE = 1.5  # across nodes rows are quantised twice
LOSS = {"none": 0.0, "fp8_direct_cast": 4e-2, "fp8_blockwise": 3.5e-2, "fp4_blockwise": 0.17}  # relative L2


@dataclass(frozen=True)
class Checked:
    """All ranks' findings together."""

    mismatched_rows: int  # of dispatch
    rel_l2: float  # of combine, against the sum of the experts' rows
    allowed: float

    @property
    def ok(self) -> bool:
        return self.mismatched_rows == 0 and self.rel_l2 <= self.allowed  # a NaN is not


def mismatched(op: EpDispatchCombineOp, sizes: Sizes, got: Dispatched, turn: int) -> int:
    """Rows of this rank that are not what their source gave, in the order that is promised."""
    rows, weights, scales, ids, count = (None if t is None else t.cpu() for t in got)
    assert rows is not None
    assert weights is not None
    assert ids is not None
    assert count is not None
    positions = op.get_dispatch_src_token_pos().cpu()
    wrong, begin = 0, 0
    for given, tokens in received_rows(sizes, op.config, turn):
        end = begin + len(tokens)
        right = torch.ones(len(tokens), dtype=torch.bool)
        pairs = [
            (bytes_of(rows[begin:end]), bytes_of(given.x)[tokens]),
            (ids[begin:end], given.ids[tokens]),
            (weights[begin:end], given.weights[tokens]),
            (positions[begin:end, None], (given.rank * op.config.position_stride + tokens.int())[:, None]),
        ]
        if given.scales is not None:
            assert scales is not None
            pairs.append((scales[begin:end], given.scales[tokens]))
        for have, want in pairs:
            right &= (have == want).all(1) if len(have) == len(want) else torch.zeros_like(right)
        wrong += int((~right).sum())
        begin = end
    return wrong + abs(int(count) - begin)


def loss(op: EpDispatchCombineOp, sizes: Sizes, given: Given, out: torch.Tensor) -> float:
    """Relative error of what combine gave for this rank's tokens."""
    want = answer(given, op.config, sizes.combine_dtype)
    return reference.rel_l2(out[: len(want)].cpu().float(), want.float())


def gathered(
    comm: mori_shmem.Communicator, wrong: int, error: float, config: EpDispatchCombineConfig
) -> Checked:
    """Collective: the worst of all ranks."""
    found = comm.all_gather((wrong, error))
    errors = [e for _, e in found]
    worst = next((e for e in errors if e != e), max(errors))
    allowed = LOSS[config.quant_type] * (TWICE if config.kernel_type.across_nodes else 1)
    return Checked(sum(w for w, _ in found), worst, allowed)
