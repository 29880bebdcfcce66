"""Each obligation of mori_shmem.device.flydsl, taken away: something has to notice.

The table says what does: a rule of strict mode (mori-sim's README names them), `wrong` results, a wait that
is `late`, or a `fault` that stops the run. An obligation that could be taken away unnoticed would not be
one: "packets have arrived" before the write pointer, for one, is no wait of its own any more, because the
look at the turn waits for them. The scenes run twice on two devices of one process (tests/rocm/rig.py).
Some omissions show only in some orders of the waves: one that was not noticed is tried in further ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from simulated import PROGRAMS, STRICT, Outcome, needs_node, simulate

pytestmark = needs_node

CAUGHT_BY = {
    # the helpers as they are
    "none: puts": "",
    "none: puts_through": "",
    "none: full_ring": "",
    "none: lanes": "",
    "none: batch": "",
    "none: loopback": "",
    "none: push": "",
    "none: push_through": "",
    "none: pull": "",
    "none: locked": "",
    "none: meet": "",
    "none: late": "late",  # as it is meant to be
    # memory.py
    "release_fence: no write-back, before a put": "a",
    "release_fence: no write-back, before a barrier of all": "c",
    "acquire_fence: none, after a wait": "b",
    "acquire_fence: agent scope, after a wait for a peer": "b",
    "acquire_fence: none, in quiet": "b",
    "acquire_fence: none, in lock_queue": "d",
    "release_fence: none, in unlock_queue": "d",
    "release_fence: only a wait, in unlock_queue": "c",
    "wait_stores: does not wait": "e",
    "store16_through: without its bits": "a",
    "store16_through: with agent scope, to a peer": "c",
    "load16_fresh: without its bits": "d",
    "load16_fresh: does not wait": "wait",
    "store_release_system: no release": "c",
    "store_system: plain": "c",
    "load_system: plain": "d",
    "add_system: agent scope": "scope",
    # barrier.py, waits.py
    "all_ranks_meet: does not wait": "wrong",
    "write_record: published before its fields": "d",
    # queue.py
    "lock_queue: does not wait": "d",
    "commit: write pointer not waited for": "e",
    "commit: doorbell not waited for": "e",
    "commit: packets after the turn": "e",
    "commit: not in turn": "late",
    "quiet: by the read pointer": "b",
    "quiet: does not wait": "wrong",
    "put_lanes: every lane for itself": "late",
}
FAULTS = {
    "commit: no write pointer": "bad_pointer; read pointer 128, write pointer 128, doorbell",
    "reserve: no look at the room": "bad_pointer",
    "reserve: fills the ring to the last byte": "bad_pointer; read pointer 128, write pointer 640",
}
SEEDS = ("1", "2", "3", "4", "5")
VARIABLES = {
    "MORI_SIM_SLICE": "16",  # waves interleave inside their critical sections
    "MORI_SIM_MAX_REPORTS": "100000",
    "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
}


def in_order(seed: str) -> tuple[str, ...]:
    return (*STRICT, "--schedule", "random", "--seed", seed)


def found_by(names: Iterable[str], seed: str) -> dict[str, str]:
    """What was noticed, by name; the output where nothing came of it."""
    outcome = simulate("mutations.py", *names, devices=2, options=in_order(seed), **VARIABLES)
    lines = [line.removeprefix("found ") for line in outcome.output.splitlines() if line.startswith("found ")]
    return {line.rpartition(": ")[0]: line.rpartition(": ")[2] for line in lines} or {"": outcome.output}


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return found_by(CAUGHT_BY, SEEDS[0])


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_an_obligation_taken_away_is_noticed(name: str, found: dict[str, str]) -> None:
    assert name in found, found
    if name.startswith("none: "):
        assert found[name] == CAUGHT_BY[name]
        return
    noticed = [found[name]]
    for seed in SEEDS[1:]:
        if CAUGHT_BY[name] in noticed[-1].split():
            break
        noticed.append(found_by([name], seed).get(name, ""))
    assert CAUGHT_BY[name] in noticed[-1].split(), noticed


@pytest.mark.parametrize("name", FAULTS)
def test_an_obligation_taken_away_stops_the_engine(name: str) -> None:
    outcome: Outcome = simulate("mutations.py", name, devices=2, options=in_order(SEEDS[0]), **VARIABLES)
    assert outcome.code != 0
    assert FAULTS[name] in outcome.output, outcome.output


def test_the_table_is_complete() -> None:
    source = (PROGRAMS / "mutations.py").read_text()
    for name in (*CAUGHT_BY, *FAULTS):
        assert name.startswith("none: ") or f'"{name}": (' in source, name
    assert source.count('": (\n        "') + source.count('": ("') == len(FAULTS) + sum(
        not name.startswith("none: ") for name in CAUGHT_BY
    )
