"""What can be chosen about Stage1 over copy engines, and what goes with what. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError

from mori_megamoe.arguments import check_flag, check_number, check_word
from mori_megamoe.config import bucket_for

SCALE_MODES = ("auto", "shuffler", "ldsw")
ORDERS = ("expert", "ready-first")
PUTS = ("two", "one")
MOVERS = ("auto", "copies", "stores")
IN_LAUNCH = "in-launch"
GEMM1 = (IN_LAUNCH, "7001")  # the second is what others call the first
MAX_WORKGROUPS = 256
MAX_SLACK = 1024
PACKERS = 2  # where it is left to the host target


@dataclass(frozen=True)
class Options:
    """See MegaMoEStage1Sdma, which explains each."""

    scale_mode: str = "auto"
    fuse_quant: bool = False
    gemm1: str | None = None
    order: str = "expert"
    puts: str = "two"
    workers: int = 2
    packers: int = 0
    shufflers: int = 1
    merge_rows: int = 0
    mover: str = "auto"
    slot_experts: int = 0
    slot_slack: float = 1.25

    @property
    def packs_in_launch(self) -> bool:
        return self.gemm1 is not None

    @property
    def ready_first(self) -> bool:
        return self.order == "ready-first"

    @property
    def roles(self) -> tuple[str, ...]:
        """Of each workgroup, lowest number first: what it does before it takes work items as all do."""
        roles = ["put"]
        if self.packs_in_launch:
            roles += ["pack"] * (self.packers or PACKERS)
        if self.ready_first:
            roles.append("schedule")
        elif not self.packs_in_launch and self.scale_mode != "ldsw":
            roles += ["shuffle"] * self.shufflers
        return (*roles, *["work"] * self.workers)

    @property
    def name(self) -> str:
        """For people, and to be compared between ranks: only such choices as peers would notice."""
        packing = IN_LAUNCH if self.packs_in_launch else "route + qpack" if self.fuse_quant else "pack"
        puts = "one put" if self.puts == "one" else "two puts"
        return f"copy engines ({packing}, {self.scale_mode}, {self.order}, {puts})"

    def shuffles(self, num_tokens: int) -> bool:
        """Whether landed scales are rewritten tile by tile in a launch, before work items read them."""
        if self.packs_in_launch:
            return False
        mode = bucket_for(num_tokens).scale_mode if self.scale_mode == "auto" else self.scale_mode
        return mode == "shuffler"

    def check(self) -> None:
        """Raise for what does not exist or does not go together."""
        check_word("scale_mode", self.scale_mode, SCALE_MODES)
        check_word("order", self.order, ORDERS)
        check_word("puts", self.puts, PUTS)
        check_word("mover", self.mover, MOVERS)
        check_flag("fuse_quant", self.fuse_quant)
        if self.gemm1 is not None:
            self._check_in_launch()
        for name, least in (("workers", 1), ("packers", 0), ("shufflers", 1), ("slot_experts", 0)):
            count = getattr(self, name)
            if type(count) is not int or count < least:
                raise ArgumentError(
                    f"{name}={described(count)}: a whole number of at least {least} is needed"
                )
        check_number("slot_slack", self.slot_slack)
        if not 1 <= self.slot_slack <= MAX_SLACK:
            raise ArgumentError(f"slot_slack={self.slot_slack}: 1 to {MAX_SLACK} are possible")
        if type(self.merge_rows) is not int or self.merge_rows < 0:
            raise ArgumentError(f"merge_rows={described(self.merge_rows)}: a number of rows, or 0")
        if len(self.roles) > MAX_WORKGROUPS:
            raise ArgumentError(
                f"workers={self.workers}, packers={self.packers}, shufflers={self.shufflers} are "
                f"{len(self.roles)} workgroups that must all run at the same time: at most {MAX_WORKGROUPS}"
            )

    def _check_in_launch(self) -> None:
        if not isinstance(self.gemm1, str) or self.gemm1 not in GEMM1:
            raise ArgumentError(
                f"gemm1={described(self.gemm1)}: None, or {IN_LAUNCH!r} (also called {GEMM1[1]!r}), which "
                "packs in the launch that multiplies"
            )
        if self.fuse_quant:
            raise ArgumentError(
                f"gemm1={self.gemm1!r} with fuse_quant=True: packing in the launch needs rows that prepare "
                "has quantised. Choose one of the two"
            )
        if self.scale_mode == "shuffler":
            raise ArgumentError(
                f"gemm1={self.gemm1!r} with scale_mode='shuffler': its work items read landed scales "
                "themselves. Leave scale_mode at 'auto'"
            )
