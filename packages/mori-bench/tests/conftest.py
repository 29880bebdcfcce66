"""What the tests of mori-bench share: a clock that only moves when told, result rows, a bench to run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from mori_bench import Result
from mori_bench.protocol import timing_of


class FakeClock:
    """A clock that stands still between `advance`s."""

    def __init__(self) -> None:
        self.now_ns = 5_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, us: float) -> None:
        self.now_ns += round(us * 1000)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_row():
    """Make a complete result row around one time."""

    def make(us: float = 100.0, **changes: object) -> dict[str, object]:
        samples = [us * 1.5, us * 0.99, us, us * 1.01]
        fields: dict[str, object] = {
            "op": "gemm_ar",
            "backend": "host",
            "device": "cpu",
            "world_size": 8,
            "mode": "split-sdma",
            "shape": {"m": 1024, "n": 7168},
            "dtype": {"quant": "blockscale"},
            "timing": timing_of([(samples, samples, [1.0] * 4)], 2, 800.0, 3.0),
            "validated": True,
            "rel_l2": 2.5e-2,
        }
        fields.update(changes)
        return Result(**fields).row()

    return make


@pytest.fixture
def bench(tmp_path: Path, make_row) -> list[str]:
    """The command of a bench with scripted results: its options are the values that it prints."""
    script = tmp_path / "fake bench.py"  # the space is meant
    script.write_text(
        "import json, sys, time\n"
        f"row = json.loads({json.dumps(json.dumps(make_row()))})\n"
        "given = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "given.update(a.split('=', 1) for a in sys.argv[1:] if '=' in a)\n"
        "print('some other output of the bench')\n"
        "row['shape']['m'] = int(given.get('-m', 1024))\n"
        "row['mode'] = given.get('--mode', row['mode'])\n"
        "row['max_rank_time_us'] = float(given.get('--us', 100))\n"
        "time.sleep(float(given.get('--sleep', 0)))\n"
        "if given.get('--fail-at') == given.get('-m', '1024'):\n"
        "    sys.exit('no kernel for this m: 火')\n"
        "print('RESULT_JSON ' + json.dumps(row))\n"
    )
    return [sys.executable, "-S", str(script)]
