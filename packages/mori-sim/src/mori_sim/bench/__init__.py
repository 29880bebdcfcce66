"""`mori-sim bench`: how fast this simulator is on this machine, with the checks off and on.

    valu   wave instructions a second of one executor thread, on a mix of float and integer vector
           instructions
    gemm   seconds for one workgroup of eight waves that multiplies 256x256x512 in fp8 out of 128 KiB of LDS

Each figure is the best of five runs after one that warms up, in CPU time (one thread executes), so that a
busy machine does not look slow; every result is compared with the expected one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mori_sim.environment import program_environment

PROGRAM = Path(__file__).parent / "program.py"


def measure(coherence: str) -> dict[str, Any]:
    settings = {"MORI_SIM_COHERENCE": coherence, "MORI_SIM_REPORT": ""}
    env = program_environment(dict(os.environ), settings)
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=env, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise OSError(f"the {coherence} run of the bench ended with {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(*, as_json: bool) -> int:
    results = {coherence: measure(coherence) for coherence in ("off", "strict")}
    off, strict = results["off"], results["strict"]
    results["slowdown"] = {
        "valu": off["valu_per_s"] / strict["valu_per_s"],
        "gemm": strict["gemm_s"] / off["gemm_s"],
    }
    if as_json:
        print(json.dumps(results))
        return 0
    print("coherence  valu wave instructions/s  gemm 256x256x512, s  gemm instructions")
    for name in ("off", "strict"):
        r = results[name]
        print(f"{name:9s}  {r['valu_per_s']:24,.0f}  {r['gemm_s']:19.3f}  {r['gemm_instructions']:17d}")
    slow = results["slowdown"]
    print(f"strict is slower by {slow['valu']:.2f} (valu) and {slow['gemm']:.2f} (gemm)")
    return 0
