"""Mover "copies" on the host's side: memory of the slots, and the copies that are queued before anybody
knows what is in them. The protocol, and what it costs: slots.cuh.

A rank's part of the window, in bytes:

    packed    u64 [number]                      1: my slot may be copied, by destination
    came      u64 [number]                      1: a slot has come here, by source
    outgoing  [number][most_rows][row_bytes]    by destination
    incoming  [number][most_rows][row_bytes]    by source

How large slots are. `experts` of a rank share one: fewer make the first rows come earlier, and each copy
costs some 7 us beside its bytes. A copy carries `slack` times the rows that an even router would send to
these experts, of the call's own number of tokens; memory is for the layer's most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mori_shmem
import torch
from mori_shmem import PutProgram

from mori_megamoe.targets.cuda import limits
from mori_megamoe.targets.cuda.layout import Shape
from mori_megamoe.targets.cuda.params import MOVE_BYTES, PlanParams, SendParams
from mori_megamoe.targets.cuda.params import Slots as SlotsStruct

_ALIGNMENT = 1024
_WORD_BYTES = 8


@dataclass(frozen=True)
class SlotSizes:
    """Equal on all ranks."""

    shape: Shape
    experts: int  # of a rank that share a slot
    slack: float

    @classmethod
    def of(cls, shape: Shape, experts: int = 0, slack: float = limits.SLOT_SLACK) -> SlotSizes:
        """experts  0: as many as make limits.SLOTS_PER_RANK slots"""
        return cls(shape, min(experts or -(-shape.experts // limits.SLOTS_PER_RANK), shape.experts), slack)

    @property
    def per_rank(self) -> int:
        """Slots from one rank to another."""
        return -(-self.shape.experts // self.experts)

    @property
    def number(self) -> int:
        """Of one rank to all others, and from all others to it."""
        return (self.shape.world_size - 1) * self.per_rank

    @property
    def row_bytes(self) -> int:
        return self.shape.row_bytes

    @property
    def most_rows(self) -> int:
        return self.rows_for(self.shape.max_tokens)

    def rows_for(self, tokens: int) -> int:
        """That a copy carries in a call of so many tokens: no more than there can be, in whole units."""
        even = tokens * self.shape.topk * self.experts / self.shape.num_experts
        most = tokens * min(self.shape.topk, self.experts)
        step = limits.SLOT_STEP_ROWS
        return -(-min(math.ceil(self.slack * even), most) // step) * step

    def sent_bytes(self, tokens: int) -> int:
        """What one rank's copies carry in a call, full or not."""
        return self.number * self.rows_for(tokens) * self.row_bytes

    @property
    def max_moves(self) -> int:
        """Of what can come in slots."""
        return self.number * (self.most_rows // limits.UNIT_ROWS) + self.shape.num_experts

    def offsets(self) -> tuple[dict[str, int], int]:
        """(where each region begins, bytes in all)."""
        rows = self.number * self.most_rows * self.row_bytes
        words = self.number * _WORD_BYTES
        sizes = {"packed": words, "came": words, "outgoing": rows, "incoming": rows}
        offset, offsets = 0, {}
        for name, nbytes in sizes.items():
            offsets[name] = offset
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return offsets, max(offset, _ALIGNMENT)  # of one rank too, which has no slots

    def index(self, me: int, rank: int, slot: int) -> int:
        """Among the slots of rank `me`, of one to (or from) another rank."""
        return (rank - (rank > me)) * self.per_rank + slot


@dataclass(frozen=True)
class SlotMemory:
    """One rank's slots, for kernels. Nothing here touches a driver."""

    sizes: SlotSizes
    rank: int
    base: int  # of my part of the window
    left: torch.Tensor  # int32 [number]
    moves: torch.Tensor  # uint8 [max_moves * MOVE_BYTES]

    @classmethod
    def empty(cls, sizes: SlotSizes, rank: int, base: int, device: torch.device | str) -> SlotMemory:
        left = torch.zeros(sizes.number, dtype=torch.int32, device=device)
        moves = torch.zeros(sizes.max_moves * MOVE_BYTES, dtype=torch.uint8, device=device)
        return cls(sizes, rank, base, left, moves)

    def put_into(self, params: PlanParams | SendParams, tokens: int) -> None:
        """For a call of so many tokens."""
        offsets, _ = self.sizes.offsets()
        params.slots = SlotsStruct(
            experts=self.sizes.experts,
            per_rank=self.sizes.per_rank,
            number=self.sizes.number,
            rank=self.rank,
            most_rows=self.sizes.most_rows,
            rows=self.sizes.rows_for(tokens),
            left=self.left.data_ptr(),
            **{name: self.base + offset for name, offset in offsets.items()},
        )
        params.moves = self.moves.data_ptr()


def take_out(params: PlanParams | SendParams) -> None:
    """No slots from now on."""
    params.slots, params.moves = SlotsStruct(), None


class Copies:
    """The copies of one rank: a queue to each other rank."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        sizes: SlotSizes,
    ) -> None:
        """Collective."""
        self.sizes = sizes
        self._rank = comm.rank
        self._window = comm.alloc(sizes.offsets()[1])
        self.memory = SlotMemory.empty(sizes, comm.rank, self._window.addresses[comm.rank], comm.device)
        others = [(comm.rank + step) % comm.world_size for step in range(1, comm.world_size)]
        self._queues = {peer: comm.queue(peer) for peer in others}
        self._programs: dict[tuple[int, int], PutProgram] = {}  # by peer and rows

    def enqueue(self, tokens: int) -> None:
        """All copies of a call, ordered after what the caller's stream holds: each starts when its slot is
        packed."""
        rows = self.sizes.rows_for(tokens)
        for peer, queue in self._queues.items():
            program = self._programs.get((peer, rows))
            if program is None:
                program = self._programs[peer, rows] = self._program(peer, rows)
            queue.submit(program)

    def join(self) -> None:
        """The caller's stream goes on behind them."""
        for queue in self._queues.values():
            queue.join()

    def _program(self, peer: int, rows: int) -> PutProgram:
        program = PutProgram()
        sizes, at = self.sizes, self._window.at
        offsets, _ = sizes.offsets()
        slot_bytes = sizes.most_rows * sizes.row_bytes
        for slot in range(sizes.per_rank):
            mine, theirs = sizes.index(self._rank, peer, slot), sizes.index(peer, self._rank, slot)
            to = at(offsets["incoming"] + theirs * slot_bytes, peer)
            source = at(offsets["outgoing"] + mine * slot_bytes)
            program.wait(at(offsets["packed"] + mine * _WORD_BYTES), 1)
            program.put(to, source, rows * sizes.row_bytes)
            program.signal(at(offsets["came"] + theirs * _WORD_BYTES, peer), 1)
        return program

    def poison(self) -> None:
        """NaN into all slots, before this rank tells its counts."""
        offsets, nbytes = self.sizes.offsets()
        start = offsets["outgoing"]
        self._window.tensor((nbytes - start,), torch.uint8, start).fill_(0xFF)

    def close(self) -> None:
        """Give the window back. Local; twice is fine. Copies under way still end."""
        self._window.close()
