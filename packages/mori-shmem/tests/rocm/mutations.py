"""mutations.py NAME...: each obligation of the device helpers, taken away, and what then notices.

Prints `found NAME: what` for each, `what` being a sorted list of
    the rules that strict mode reports        wrong   bytes, or a count, that are not what they should be
    late    a wait passed its deadline        fault   the node stopped the run (its exit code says so, too)
or nothing, which is what is to be seen of "none".
"""
# ruff: noqa: E501  (one change, one line)

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels
import mori_shmem.device.flydsl as helpers
import torch
from rig import WORLD, Rig
from variants import variant


def rows(num_kib: int) -> Callable[[Rig], bool]:
    return lambda rig: rig.wrong_rows(2, num_kib) > 0


def counter_is_not(value: int) -> Callable[[Rig], bool]:
    return lambda rig: any(
        int(rig.counter.tensor(rank)[:8].view(torch.int64)) != value for rank in range(WORLD)
    )


def own_row(rig: Rig) -> bool:
    from bed import pattern_of

    return any(
        not torch.equal(rig.out.tensor(rank)[:1024], pattern_of(rank, rank, 2, 1)) for rank in range(WORLD)
    )


def next_row(rig: Rig) -> bool:
    from bed import pattern_of

    wanted = [pattern_of(1 - rank, rank, 2, 1) for rank in range(WORLD)]
    return any(
        not torch.equal(rig.out.tensor(r)[(1 - r) * kernels.SLOT :][:1024], wanted[r]) for r in range(WORLD)
    )


@dataclass(frozen=True)
class Scene:
    """A kernel and what must be right after it."""

    factory: Callable[..., Any]
    parameters: tuple[Any, ...]
    is_wrong: Callable[[Rig], bool]


SCENES = {
    "puts": Scene(kernels.puts, (2, 2, False), rows(4)),
    "puts_through": Scene(kernels.puts, (2, 2, True), rows(4)),
    "full_ring": Scene(kernels.puts, (4, 4, True), rows(16)),
    "lanes": Scene(kernels.lanes, (8,), rows(2)),
    "batch": Scene(kernels.batch, (3,), rows(3)),
    "loopback": Scene(kernels.loopback, (), own_row),
    "push": Scene(kernels.push, (False, False), rows(2)),
    "push_through": Scene(kernels.push, (True, True), rows(2)),
    "pull": Scene(kernels.pull, (), rows(2)),
    "locked": Scene(kernels.locked, (5,), counter_is_not(2 * 5 * 3)),
    "meet": Scene(kernels.meet, (1,), next_row),
    "late": Scene(kernels.late, (), lambda rig: False),
}

Change = tuple[str, str, str]
RELEASE = "    fx.memory_fence(ordering=_ORDER.Release, syncscope=_SCOPES[scope])"
ACQUIRE = "    fx.memory_fence(ordering=_ORDER.Acquire, syncscope=_SCOPES[scope])"
THROUGH = '"global_store_dwordx4 $0, $1, off sc0 sc1"'

# name -> scene, changes. The names are those of the table in test_rocm_mutations.py.
MUTATIONS: dict[str, tuple[str, list[Change]]] = {
    **{f"none: {scene}": (scene, []) for scene in SCENES},
    "release_fence: no write-back, before a put": ("puts", [("memory.py", RELEASE, "    wait_stores()")]),
    "release_fence: no write-back, before a barrier of all": (
        "meet",
        [
            ("barrier.py", '    release_fence("system")', "    wait_stores()"),
            (
                "barrier.py",
                "import load_system, release_fence, store_system",
                "import load_system, wait_stores, store_system",
            ),
        ],
    ),
    "acquire_fence: none, after a wait": ("puts", [("waits.py", "    acquire_fence(scope)\n", "")]),
    "acquire_fence: agent scope, after a wait for a peer": (
        "puts",
        [("waits.py", "    acquire_fence(scope)\n", '    acquire_fence("agent")\n')],
    ),
    "acquire_fence: none, in quiet": ("loopback", [("queue.py", '    acquire_fence("system")\n', "")]),
    "acquire_fence: none, in lock_queue": ("locked", [("queue.py", '    acquire_fence("agent")\n', "")]),
    "release_fence: none, in unlock_queue": ("locked", [("queue.py", '    release_fence("agent")\n', "")]),
    "release_fence: only a wait, in unlock_queue": (
        "locked",
        [("queue.py", '    release_fence("agent")\n', "    wait_stores()\n")],
    ),
    "lock_queue: does not wait": (
        "locked",
        [
            ("queue.py", "    while (taken != 0) & (over == 0):", "    while (taken > 1) & (over == 0):"),
            ("queue.py", "    return taken == 0", "    return taken < 2"),
        ],
    ),
    "wait_stores: does not wait": ("puts_through", [("memory.py", "    fx.rocdl.s_waitcnt(vmcnt=0)\n", "")]),
    "store16_through: without its bits": (
        "puts_through",
        [("memory.py", THROUGH, THROUGH.replace(" sc0 sc1", ""))],
    ),
    "store16_through: with agent scope, to a peer": (
        "push_through",
        [("memory.py", THROUGH, THROUGH.replace(" sc0 sc1", " sc1"))],
    ),
    "load16_fresh: without its bits": (
        "pull",
        [
            ("memory.py", ', off sc0 sc1" for i', ', off" for i'),
            ("waits.py", "    acquire_fence(scope)\n", ""),
        ],
    ),
    "load16_fresh: does not wait": (
        "pull",
        [("memory.py", '"\\n".join([*loads, "s_waitcnt vmcnt(0)"])', '"\\n".join(loads)')],
    ),
    "store_release_system: no release": (
        "push",
        [
            (
                "memory.py",
                "dtype(value), memory_order=_ORDER.Release)",
                "dtype(value), memory_order=_ORDER.Monotonic)",
            )
        ],
    ),
    "store_system: plain": (
        "push_through",
        [
            (
                "memory.py",
                "    fx.generic_store(_word(address, dtype), dtype(value), memory_order=_ORDER.Monotonic)\n",
                "    fx.generic_store(_word(address, dtype), dtype(value))\n",
            )
        ],
    ),
    "load_system: plain": (
        "push",
        [
            (
                "memory.py",
                "    return fx.generic_load(_word(address, dtype), memory_order=_ORDER.Monotonic)\n",
                "    return fx.generic_load(_word(address, dtype))\n",
            )
        ],
    ),
    "add_system: agent scope": (
        "pull",
        [
            (
                "memory.py",
                "    return fx.atomic_add(_word(address, dtype), dtype(value))\n",
                '    return fx.atomic_add(_word(address, dtype), dtype(value), syncscope="agent")\n',
            )
        ],
    ),
    "all_ranks_meet: does not wait": (
        "meet",
        [("barrier.py", "wait_at_least(there, epoch,", "wait_at_least(there, 0,")],
    ),
    "commit: write pointer not waited for": (
        "batch",
        [
            (
                "queue.py",
                "        store_system(queue.wptr, end)\n        wait_stores()\n",
                "        store_system(queue.wptr, end)\n",
            )
        ],
    ),
    "commit: doorbell not waited for": (
        "batch",
        [
            (
                "queue.py",
                "        store_system(queue.doorbell, end)\n        wait_stores()\n",
                "        store_system(queue.doorbell, end)\n",
            )
        ],
    ),
    "commit: no write pointer": (
        "batch",
        [("queue.py", "        store_system(queue.wptr, end)\n        wait_stores()\n", "")],
    ),
    "commit: packets after the turn": (
        "batch",
        [
            (
                "queue.py",
                "    if _wait_for_turn(queue, start):\n",
                "    if _wait_for_turn(queue, start):\n        last = queue.ring + (start & queue.mask) + 28  # of a packet whose last dword is 0\n        fx.generic_store(pointer(fx.Int32, last, 4), fx.Int32(0))\n",
            )
        ],
    ),
    "commit: not in turn": (
        "batch",
        [
            ("queue.py", "    while (turn != start) & (over == 0):", "    while (turn < 0) & (over == 0):"),
            ("queue.py", "    return turn == start", "    return turn >= 0"),
        ],
    ),
    "reserve: no look at the room": (
        "full_ring",
        [
            (
                "queue.py",
                "    must_pass = start + nbytes - (queue.mask + 1)",
                "    must_pass = start - start - 1",
            )
        ],
    ),
    "reserve: fills the ring to the last byte": (
        "full_ring",
        [
            (
                "queue.py",
                "    must_pass = start + nbytes - (queue.mask + 1)",
                "    must_pass = start + nbytes - (queue.mask + 2)",
            )
        ],
    ),
    "quiet: by the read pointer": (
        "loopback",
        [
            (
                "queue.py",
                "        behind = target - load_system(queue.words + words.DONE, fx.Int32)\n        over",
                "        behind = fx.Int32((end - load_system(queue.rptr)) >> 5)\n        over",
            ),
            (
                "queue.py",
                "            behind = target - load_system(queue.words + words.DONE, fx.Int32)\n",
                "            behind = fx.Int32((end - load_system(queue.rptr)) >> 5)\n",
            ),
            ("queue.py", "_FENCE, *_halves(queue.words + words.DONE), target)", "0)"),
        ],
    ),
    "quiet: does not wait": (
        "loopback",
        [
            (
                "queue.py",
                "        while (behind > 0) & (over == 0):",
                "        while (behind > 99) & (over == 0):",
            ),
            ("queue.py", "        if behind > 0:\n", "        if behind > 99:\n"),
        ],
    ),
    "put_lanes: every lane for itself": (
        "lanes",
        [
            (
                "queue.py",
                "    if before == 0:\n        start = reserve(queue, fx.Int64(count) if signal is None else fx.Int64(count) + 1)\n    start = _of_first_lane(start)\n",
                "    before, count = fx.Int32(0), fx.Int32(1)\n    start = reserve(queue, 1 if signal is None else 2)\n",
            )
        ],
    ),
    "write_record: published before its fields": ("late", [("waits.py", "        wait_stores()\n", "")]),
}


def reports_since(position: int) -> tuple[set[str], int]:
    """The rules in the report file after `position`, and where it ends now."""
    with open(os.environ["MORI_SIM_REPORT"]) as file:
        file.seek(position)
        lines = [json.loads(line) for line in file]
        return {line["rule"] for line in lines if "rule" in line}, file.tell()


def main(names: list[str]) -> None:
    rig = Rig()
    position = reports_since(0)[1]
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names or MUTATIONS):
            scene_name, changes = MUTATIONS[name]
            scene = SCENES[scene_name]
            dev = variant(Path(folder), f"variant_{number}", changes) if changes else helpers
            for memory in (rig.data, rig.flags, rig.out, rig.counter):
                for rank in range(WORLD):
                    memory.tensor(rank).zero_()
            late = rig.run(scene.factory, dev, *scene.parameters)
            rules, position = reports_since(position)
            found = sorted(rules) + ["wrong"] * (not late and scene.is_wrong(rig)) + ["late"] * bool(late)
            print(f"found {name}: {' '.join(found)}", flush=True)
            if late:
                rig = Rig()


if __name__ == "__main__":
    main(sys.argv[1:])
