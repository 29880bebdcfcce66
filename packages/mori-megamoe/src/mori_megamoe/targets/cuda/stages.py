"""The ways of Stage1 on this target. All have the same rows, plan and GEMM, so also the same bytes.

DirectStores   the baseline: all SMs store rows to their owners, then all multiply
CopyEngines    what MegaMoEStage1Sdma puts in: one kernel, some of whose blocks store rows while all others
               multiply what has come. A GPU's copy engines cannot be driven from a kernel here, and only a
               kernel knows how many rows go where; so blocks have their part
"""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

from mori_shmem.errors import UnsupportedShape

from mori_megamoe.launch import Launch
from mori_megamoe.stage1 import Stage1
from mori_megamoe.stage1.options import Options
from mori_megamoe.targets.cuda.runner import Runner

_WAY = {"expert": "signals", "ready-first": "queue"}


class DirectStores(Stage1):
    """Rows, then GEMM1."""

    name = "direct"

    @property
    def _runner(self) -> Runner:
        return cast(Runner, self.runner)

    def move_rows(self, launch: Launch) -> None:
        self._runner.dispatch()

    def gemm1(self, launch: Launch) -> None:
        self._runner.gemm1()


class CopyEngines(DirectStores):
    """Both in one kernel. `move_rows` and `gemm1`, to be timed alone, are the baseline's."""

    def __init__(self, options: Options) -> None:
        usual, given = asdict(Options()), asdict(options)
        refused = [f"{k}={v!r}" for k, v in given.items() if k != "order" and v != usual[k]]
        if refused:
            raise UnsupportedShape(
                f"{', '.join(refused)}: on the cuda target rows are quantised once, scaled and sent by the "
                "kernel that multiplies, and only `order` can be chosen; leave the others out"
            )
        self._way = _WAY[options.order]
        self.name = f"fused ({options.order})"

    def run(self, launch: Launch) -> None:
        with launch.span("rows and gemm1", "stage1"):
            self._runner.fused(self._way)
