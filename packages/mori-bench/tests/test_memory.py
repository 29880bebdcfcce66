from pathlib import Path

import mori_bench


def test_it_is_what_is_available_in_bytes(tmp_path: Path) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    1024 kB\n")
    assert mori_bench.free_bytes(str(told)) == 1 << 20
    assert mori_bench.free_bytes() > 0
