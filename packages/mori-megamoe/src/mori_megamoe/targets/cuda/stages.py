"""The ways of Stage1 on this target. All have the same rows, plan and GEMM, so also the same bytes.

DirectStores   the baseline: all SMs store rows to their owners, then all multiply
CopyEngines    what MegaMoEStage1Sdma puts in: one kernel, some of whose blocks bring rows to their owners
               while all others multiply what has come. mover "stores": these blocks store them. "copies":
               they pack them into slots of a fixed size (or a kernel on all SMs before does), copy engines
               carry the slots, and they move what comes to where it lands (slots.cuh)

What the host target's options mean here: README.md has a table. What has no meaning is refused, with a
reason.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

from mori_shmem.errors import ArgumentError, UnsupportedShape

from mori_megamoe.launch import Launch
from mori_megamoe.stage1 import Stage1
from mori_megamoe.stage1.options import Options
from mori_megamoe.targets import Runner as AnyRunner
from mori_megamoe.targets.cuda.runner import Runner
from mori_megamoe.targets.cuda.slots import Copies

_WAY = {"expert": "signals", "ready-first": "queue"}
_REFUSED = {
    "fuse_quant": "prepare quantises each row once, beside the plan and in its launch: there is no pass "
    "to save",
    "puts": "a slot is one copy in any case, and a row's one scale is stored beside it",
    "workers": "all SMs multiply",
    "shufflers": "a row has one scale, which the kernel reads where it landed: there is nothing to shuffle",
    "merge_rows": "stored rows have no signal that they could share; with mover='copies' slot_experts says "
    "how many experts share one",
}


class DirectStores(Stage1):
    """Rows, then GEMM1."""

    name = "direct"

    @property
    def _runner(self) -> Runner:
        return cast(Runner, self.runner)

    def put_in(self) -> None:
        self._runner.send(0, None)

    def move_rows(self, launch: Launch) -> None:
        self._runner.dispatch()

    def gemm1(self, launch: Launch) -> None:
        self._runner.gemm1()


class CopyEngines(DirectStores):
    """Both in one kernel. `move_rows` and `gemm1`, to be timed alone, are the baseline's."""

    def __init__(self, options: Options) -> None:
        check(options)
        self.options, self._way = options, _WAY[options.order]
        self._uses_copies = options.mover == "copies"
        how = options.mover if self._uses_copies else "stores"
        if self._uses_copies:
            packing = "packed in the launch" if options.packs_in_launch else "packed before"
            how = (
                f"copies, {packing}, slots of {options.slot_experts or 'auto'} experts x {options.slot_slack}"
            )
        self.name = f"fused ({options.order}, {how})"
        self._copies: Copies | None = None

    def open(self, runner: AnyRunner) -> None:
        super().open(runner)
        if self._uses_copies:
            options = self.options
            self._copies = self._runner.new_copies(options.slot_experts, options.slot_slack)

    def put_in(self) -> None:
        self._runner.send(self.options.packers, self._copies)

    def run(self, launch: Launch) -> None:
        with launch.span("rows and gemm1", "stage1"):
            if self._copies is None:
                self._runner.fused(self._way)
            else:
                in_launch = self.options.packs_in_launch
                tokens = launch.call.num_tokens
                self._runner.fused_with_copies(self._way, tokens, packs_in_launch=in_launch)

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()


def check(options: Options) -> None:
    """Raise for what has no meaning here."""
    usual, given = asdict(Options()), asdict(options)
    refused = [f"{k}={given[k]!r}: {why}" for k, why in _REFUSED.items() if given[k] != usual[k]]
    if options.scale_mode == "shuffler":
        refused.insert(0, f"scale_mode='shuffler': {_REFUSED['shufflers']}")
    if refused:
        raise UnsupportedShape(f"on the cuda target {'; '.join(refused)}. Leave it out")
    if options.packers % 2:
        raise ArgumentError(
            f"packers={options.packers}: an even number on the cuda target, where blocks come in pairs"
        )
    sizes = [f"{k}={given[k]!r}" for k in ("slot_experts", "slot_slack") if given[k] != usual[k]]
    if sizes and options.mover != "copies":
        raise ArgumentError(f"{', '.join(sizes)} with mover={options.mover!r}: only mover='copies' has slots")
