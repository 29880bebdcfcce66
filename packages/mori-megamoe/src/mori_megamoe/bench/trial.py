"""`mori-megamoe-bench test`: every mode makes four calls, one after the other, with inputs that alternate;
every byte is compared with the reference."""

from __future__ import annotations

import mori_bench
import mori_shmem

from mori_megamoe.bench.run import TEST_TURNS, Bench, Choice
from mori_megamoe.bench.sizes import Sizes

COLUMNS = ("tokens", "mode", "calls", "mismatched_rows", "rel_l2", "right")


def trial(comm: mori_shmem.Communicator, sizes: Sizes, choice: Choice) -> bool:
    """Collective: whether everything was right. Rank 0 prints."""
    bench, rows = Bench(comm, sizes, choice), []
    try:
        for tokens in sizes.bs_list:
            checker = bench.checker(tokens)
            for mode in choice.modes:
                checked = bench.check(checker, mode, TEST_TURNS)
                rows.append(
                    {
                        "tokens": tokens,
                        "mode": mode.name,
                        "calls": len(TEST_TURNS),
                        "mismatched_rows": checked.mismatched_rows,
                        "rel_l2": checked.rel_l2,
                        "right": checked.ok,
                    }
                )
    finally:
        bench.close()
    if comm.rank == 0:
        print(mori_bench.table(rows, COLUMNS))
    return all(bool(row["right"]) for row in rows)
