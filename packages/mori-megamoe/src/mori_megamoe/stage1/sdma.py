"""`MegaMoEStage1Sdma`: Stage1 of a layer over copy engines, put in and taken out again.

    stage1 = MegaMoEStage1Sdma(moe).install()      # collective, on all ranks with the same choices
    out = moe(x, weights, ids)                     # the same bytes as before
    stage1.uninstall()

While engines carry rows from rank to rank, GEMM1 works on the experts whose rows have come. How, who waits
for what, and why it cannot hang: targets/host/sdma/stage.py.
"""

from __future__ import annotations

from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError, MoriError, TransportInert

from mori_megamoe.layer import MegaMoE
from mori_megamoe.stage1 import Stage1
from mori_megamoe.stage1.options import Options
from mori_megamoe.targets import target_for


class MegaMoEStage1Sdma:
    """See the module."""

    def __init__(
        self,
        moe: MegaMoE,
        scale_mode: str = "auto",
        fuse_quant: bool = False,
        gemm1: str | None = None,
        *,
        order: str = "expert",
        puts: str = "two",
        workers: int = 2,
        packers: int = 0,
        shufflers: int = 1,
        merge_rows: int = 0,
        mover: str = "auto",
        slot_experts: int = 0,
        slot_slack: float = 1.25,
    ) -> None:
        """Local. Starts the workgroups, so that what cannot run at the same time is refused here. So is a
        choice that has no meaning on the layer's target (README.md has the table).

        scale_mode  "shuffler": a few workgroups rewrite landed scales once for each tile, and work items
                    wait for those only. "ldsw": each work item waits for the ranks and reads landed scales
                    itself. "auto": as the number of tokens of a launch says (config.BUCKETS)
        fuse_quant  rows are quantised on their way into the slab, once each, instead of in prepare
        gemm1       "in-launch" (or "7001"): packing is part of the launch that puts and multiplies. Without
                    it, rows are packed before
        order       "expert": work items follow the experts. "ready-first": one workgroup watches the
                    ranks and publishes tiles as they become ready, and workers take them in that order
        puts        "two": rows, then scales, each to where the layer keeps them. "one": a row and its
                    scales lie together, and land in memory of the stage's own
        workers     workgroups that multiply from the start; all others join them when they are done
        packers, shufflers  workgroups for that, in the modes that have them; packers 0: host 2, cuda 16,
                    where they send rows too
        merge_rows  segments to a rank are held back until they have so many rows together, and share a
                    signal: fewer signals, later starts. 0: each goes by itself
        mover       "copies": copy engines carry rows. "stores" (cuda only): blocks of the kernel that
                    multiplies store them where they land. "auto": host copies, cuda stores
        slot_experts, slot_slack  cuda's copies are queued before anybody knows how many rows there are, so
                    their size is fixed. So many experts of a rank share a slot (0: as make 8 slots), which
                    has room for `slot_slack` times the rows of an even router and is always copied whole.
                    Rows beyond that are stored: right for any routing, slower for skewed ones
        """
        if not isinstance(moe, MegaMoE):
            raise ArgumentError(
                f"moe is {described(moe)}, which is no mori_megamoe.MegaMoE: one is needed, this goes into "
                "no other layer"
            )
        self.options = Options(
            *(scale_mode, fuse_quant, gemm1, order, puts, workers, packers, shufflers, merge_rows),
            *(mover, slot_experts, slot_slack),
        )
        self.options.check()
        moe.check_usable()
        self.moe = moe
        target = target_for(moe.comm.backend)
        if not hasattr(target, "CopyEngines"):
            raise TransportInert(
                f"backend {moe.comm.backend!r} has no Stage1 over copy engines in this version of "
                "mori-megamoe; host has one"
            )
        self._stage: Stage1 = target.CopyEngines(self.options)
        self._previous: Stage1 | None = None
        moe.adopt(self._stage)

    @property
    def installed(self) -> bool:
        return self._previous is not None

    def install(self) -> MegaMoEStage1Sdma:
        """Collective. From the next call on the layer uses this stage. The first time, windows are made;
        where that fails on a rank, all raise with its reason, and another object has to be made."""
        self.moe.check_usable()
        if self._previous is not None:
            raise MoriError("this MegaMoEStage1Sdma is installed already: uninstall() it first")
        if isinstance(self.moe.stage1, type(self._stage)):
            raise MoriError(
                f"the layer has another Stage1 over copy engines already, {self.moe.stage1.name}: uninstall "
                "that first"
            )
        self._previous = self.moe.replace_stage1(self._stage)
        return self

    def uninstall(self) -> None:
        """Collective. The stage from before is back from the next call on. Windows stay for another
        install."""
        self.moe.check_usable()
        if self._previous is None:
            raise MoriError("this MegaMoEStage1Sdma is not installed")
        if self.moe.stage1 is not self._stage:
            raise MoriError(
                f"the layer's Stage1 is {self.moe.stage1.name!r}, put in after this one: put this one back "
                "first"
            )
        self.moe.replace_stage1(self._previous)
        self._previous = None
