"""The report file, the exit code, and the files that other packages share with this one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mori_sim import report
from mori_sim.settings import VARIABLES

PACKAGE = Path(__file__).parent.parent


def lines(*entries):
    return "".join(json.dumps(e) + "\n" for e in entries)


def test_counters_of_processes_add_up_and_broken_rules_are_grouped(tmp_path):
    counters = {
        "kind": "counters",
        "pid": 1,
        "rank": None,
        "kernels": {"k": {"instructions": 5, "mfma_flops": 64, "local_bytes": 32}},
    }
    broken = {
        "kind": "coherence",
        "pid": 1,
        "rank": "0",
        "rule": "a",
        "kernel": "k",
        "pc": 16,
        "text": "first\nsecond",
    }
    path = tmp_path / "r.jsonl"
    path.write_text(lines(counters, counters, broken, broken | {"rank": "1"}, broken | {"pc": 20}))
    found = report.read(path)
    assert found.num_processes == 2
    assert found.kernels["k"]["instructions"] == 10
    assert "2.0 per byte of memory" in report.cost_sheet(found)
    told = report.findings(found)
    assert told.count("rule a broken") == 2
    assert "rule a broken 2 x in k" in told
    assert not found.clean


def test_the_counters_of_a_run_are_kept(examples):
    counts = report.read(examples.report).kernels["matmul_direct_0"]
    assert counts["dispatches"] == 2  # one takes 128 k in an MFMA, the other 32
    assert counts["workgroups"] == counts["waves"] == 2 * 18
    assert counts["mfma"] == 18 * 3 + 18 * 12
    assert counts["mfma_flops"] == 2 * 18 * 3 * 2 * 16 * 16 * 128
    assert "matmul_direct_0: 2 launches" in examples.outcome.output


@pytest.mark.parametrize(
    ("code", "expected"),
    [("pass", 0), ("import sys; sys.exit(5)", 5), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_program_s_own_exit_code_is_kept(program, code, expected):
    assert program("-c", code).code == expected


def test_nothing_is_left_behind_when_a_run_is_killed(tmp_path):
    code = (
        "import hip, time; hip.malloc(1 << 20, True); hip.Window(2 << 20, 0, 2, 0, False).export();"
        " print('ready', flush=True); time.sleep(60)"
    )
    shared = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-m", "mori_sim", "run", "--coherence", "strict", "--", sys.executable, "-c", code],
        cwd=PACKAGE / "tests" / "programs",
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    during = [n for n in set(os.listdir("/dev/shm")) - shared if "mori-sim" in n]
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert [*during, *tmp_path.iterdir()] == []
    assert [n for n in os.listdir("/dev/shm") if "mori-sim" in n] == []


def test_a_swallowed_fault_is_no_success(program, tmp_path):
    # The program's own process is well; a process that it started had the fault, and nobody looked.
    child = "import faults; faults.bad_packet(None)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}]); print('all is well')"
    outcome = program("-c", code)
    assert "all is well" in outcome.output
    assert outcome.code == 3


def test_the_environment_of_a_run(program):
    code = """
import os, subprocess, sys
assert os.environ["FLYDSL_GPU_ARCH"] == "gfx950"
agents = subprocess.run(["rocm_agent_enumerator", "-name"], capture_output=True, text=True).stdout.split()
assert agents == ["gfx000"] + ["gfx950"] * 3, agents
assert os.access(os.environ["ROCM_PATH"] + "/llvm/bin/ld.lld", os.X_OK)
import mori_sim
assert mori_sim.active()
print("ok env")
"""
    outcome = program("-c", code, options=("--devices", "3"))
    assert "ok env" in outcome.output, outcome.output


def test_another_sitecustomize_still_runs(program, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('ok other')\n")
    outcome = program("-c", "pass", PYTHONPATH=str(tmp_path))
    assert "ok other" in outcome.output


def test_without_a_command_the_usage_is_told(program):
    outcome = subprocess.run(
        [sys.executable, "-m", "mori_sim", "run"], capture_output=True, text=True, timeout=60
    )
    assert outcome.returncode == 2
    assert "mori-sim run -- python program.py" in outcome.stderr


def test_every_setting_is_in_the_readme_and_read_somewhere():
    readme = (PACKAGE / "README.md").read_text()
    sources = "".join(
        p.read_text() for p in [*PACKAGE.glob("csrc/node/*.cpp"), *PACKAGE.glob("src/mori_sim/*.py")]
    )
    for variable in VARIABLES:
        assert f"`{variable.name}`" in readme, variable.name
        assert sources.count(f'"{variable.name}"') >= 2 or variable.name == "MORI_SIM_PACKET_LIBRARY", (
            variable.name
        )


def test_the_packet_header_is_mori_shmem_s():
    theirs = PACKAGE.parent / "mori-shmem" / "csrc" / "include" / "mori_sdma.h"
    if not theirs.exists():
        pytest.skip("mori-shmem's sources are not beside this package's")
    assert theirs.read_bytes() == (PACKAGE / "csrc" / "include" / "mori_sdma.h").read_bytes()
