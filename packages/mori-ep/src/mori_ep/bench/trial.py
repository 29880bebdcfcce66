"""`mori-ep-bench test`: many calls of odd shapes with one op, every result compared with the reference.

Tokens go through all of the capacity, one, none, and a number of its own on each rank's neighbour; rows are
copied in and registered; the halves are called one by one; routes are replayed, and several are open at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import mori_bench
import mori_shmem

from mori_ep.bench.check import Checked
from mori_ep.bench.inputs import Sizes, given_for
from mori_ep.bench.run import Choice, Round, check_round, make_config
from mori_ep.op import EpDispatchCombineOp
from mori_ep.prepared import Dispatched


class Halves(Round):
    """Every call as a send and a receive."""

    def dispatch(self, turn: int) -> Dispatched:
        given = self._inputs[turn]
        got = self.op.dispatch_send(self._x[turn], given.weights, given.scales, given.ids)
        self.op.dispatch_recv()
        return got


class Replays(Round):
    """Every dispatch twice: once to learn the routes, once by them."""

    def dispatch(self, turn: int) -> Dispatched:
        given = self._inputs[turn]
        tensors = (self._x[turn], given.weights, given.scales, given.ids)
        *_, handle = self.op.dispatch(*tensors, return_routing=True)
        got: Dispatched = self.op.dispatch(*tensors, routing=handle)
        return got


def trial(comm: mori_shmem.Communicator, sizes: Sizes, choice: Choice) -> bool:
    """Collective: whether everything was right. Rank 0 prints."""
    rows = []
    kinds: dict[str, Callable[..., Round]] = {"whole": Round, "halves": Halves, "replays": Replays}
    with EpDispatchCombineOp(make_config(comm, sizes, choice), comm) as op:
        for tokens in sorted(
            {sizes.tokens, sizes.tokens // 2 + 1, 1, 0} & set(range(sizes.tokens + 1)), reverse=True
        ):
            for kind, make in kinds.items():
                for zero_copy in (False, True) if choice.quant_type == "none" else (False,):
                    shape = dataclasses.replace(sizes, tokens=tokens)
                    how = dataclasses.replace(choice, zero_copy=zero_copy)
                    checked = _try(comm, op, shape, how, make)
                    rows.append(
                        {
                            "tokens": tokens,
                            "calls": kind,
                            "rows": "registered" if zero_copy else "copied in",
                            "mismatched_rows": checked.mismatched_rows,
                            "rel_l2": checked.rel_l2,
                            "right": checked.ok,
                        }
                    )
    if comm.rank == 0:
        print(mori_bench.table(rows, ["tokens", "calls", "rows", "mismatched_rows", "rel_l2", "right"]))
    return all(bool(row["right"]) for row in rows)


def _try(
    comm: mori_shmem.Communicator,
    op: EpDispatchCombineOp,
    sizes: Sizes,
    choice: Choice,
    make: Callable[..., Round],
) -> Checked:
    """The worse of two turns."""
    inputs = [given_for(sizes, comm.rank, comm.world_size, turn) for turn in range(2)]
    round_ = make(op, sizes, choice, [given.to(comm.device) for given in inputs])
    first, second = (check_round(round_, sizes, inputs[turn], turn, comm) for turn in range(2))
    return first if not first.ok else second
