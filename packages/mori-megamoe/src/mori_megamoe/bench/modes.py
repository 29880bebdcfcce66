"""What is compared: ways of Stage1, a row for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mori_megamoe.layer import MegaMoE
    from mori_megamoe.stage1 import Stage1


@dataclass(frozen=True)
class Mode:
    """One way."""

    name: str
    about: str
    copy_engines: bool = True  # else the layer's own stage
    in_all: bool = True  # or only where it is named
    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))  # MegaMoEStage1Sdma's

    def effective(self, tokens: int) -> dict[str, object]:
        """Its options, and what they mean for so many tokens."""
        if not self.copy_engines:
            return {}
        from mori_megamoe.stage1.options import PACKERS, Options

        options = Options(**self.options)  # type: ignore[arg-type]
        scales = "shuffler" if options.shuffles(tokens) else "ldsw"
        return {
            **asdict(options),
            "scale_mode": scales,
            "packers": options.packers or PACKERS,
            "mover": "copies",
        }

    def stage_of(self, moe: MegaMoE) -> Stage1:
        """Collective: its stage, open on this layer, which keeps the one that it has."""
        if not self.copy_engines:
            return moe.stage1
        from mori_megamoe.stage1.sdma import MegaMoEStage1Sdma

        made = MegaMoEStage1Sdma(moe, **self.options).install()  # type: ignore[arg-type]
        stage = moe.stage1
        made.uninstall()
        return stage


MODES = {
    mode.name: mode
    for mode in (
        Mode("baseline", "rows by direct stores, then GEMM1", copy_engines=False),
        Mode(
            "shuffler",
            "copy engines; scales rewritten once for each tile",
            options={"scale_mode": "shuffler"},
        ),
        Mode("ldsw", "copy engines; each work item reads landed scales", options={"scale_mode": "ldsw"}),
        Mode("fuse-quant", "copy engines; rows quantised on their way to them", options={"fuse_quant": True}),
        Mode("in-launch", "copy engines; rows packed in the launch of GEMM1", options={"gemm1": "in-launch"}),
        Mode(
            "ready-first",
            "copy engines; tiles as they become complete",
            in_all=False,
            options={"order": "ready-first"},
        ),
        Mode("one-put", "copy engines; rows and scales in one put", in_all=False, options={"puts": "one"}),
    )
}


def modes_from(words: str) -> list[Mode]:
    """Of --mode: names with commas between, or all. The baseline is always among them, and first."""
    names = [mode.name for mode in MODES.values() if mode.in_all] if words == "all" else words.split(",")
    for name in names:
        if name not in MODES:
            raise ValueError(f"--mode {name}: one of {', '.join(MODES)}, all, or several with commas")
    if len(set(names)) < len(names):
        raise ValueError(f"--mode {words}: each once")
    return [MODES[name] for name in dict.fromkeys(["baseline", *names])]
