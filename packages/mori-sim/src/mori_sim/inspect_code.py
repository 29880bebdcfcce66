"""`mori-sim info` and `mori-sim disasm`: what a code object says about its kernels, without running them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from mori_sim import _core

CODE = ("code",)


def kernels_of(path: Path, *, with_code: bool = True) -> list[dict[str, Any]]:
    """Raises ValueError when the file is no gfx950 code object."""
    try:
        kernels: list[dict[str, Any]] = _core.describe(path.read_bytes(), with_code)
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from None
    return kernels


def summary(kernel: dict[str, Any]) -> dict[str, Any]:
    """The kernel's figures plus its static instruction mix and what the executor could not run."""
    mix = Counter(category for _, _, _, category, _ in kernel["code"])
    missing = sorted({why for *_, why in kernel["code"] if why})
    return {k: v for k, v in kernel.items() if k not in CODE} | {
        "mix": dict(mix.most_common()),
        "unsupported": missing,
    }


def info_text(kernel: dict[str, Any]) -> str:
    s = summary(kernel)
    lines = [
        f"{s['name']}  ({s['target']})",
        f"  registers   VGPR {s['vgprs']} of which AGPR {s['agprs']}, SGPR {s['sgprs']}",
        f"  spills      VGPR {s['vgpr_spills']}, SGPR {s['sgpr_spills']}",
        f"  memory      LDS {s['lds_nbytes']} bytes, scratch {s['scratch_nbytes']} bytes per lane",
        f"  residency   {s['waves_per_simd']} waves per SIMD by registers",
        f"              {s['workgroups_per_cu']} workgroups per CU of {s['max_workgroup_size']} work items",
        f"  code        {s['code_nbytes']} bytes at {s['entry_offset']:#x}",
        "  mix         " + ", ".join(f"{name} {count}" for name, count in s["mix"].items()),
        f"  kernarg     {s['kernarg_nbytes']} bytes",
    ]
    lines += [
        f"    {a['offset']:5d} +{a['nbytes']:<3d} {a['kind']} {a['name']}".rstrip() for a in s["arguments"]
    ]
    lines += [f"  cannot run  {why}" for why in s["unsupported"]]
    return "\n".join(lines)


def info(path: Path, *, as_json: bool) -> str:
    kernels = kernels_of(path)
    if as_json:
        return json.dumps([summary(k) for k in kernels], indent=1)
    return "\n\n".join(info_text(k) for k in kernels)


def disassembly(path: Path, kernel_name: str | None) -> str:
    kernels = kernels_of(path)
    wanted = [k for k in kernels if kernel_name in (None, k["name"])]
    if not wanted:
        raise ValueError(
            f"{path} has no kernel {kernel_name}: it has {', '.join(k['name'] for k in kernels)}"
        )
    lines = []
    for kernel in wanted:
        lines.append(f"{kernel['name']}:")
        lines += [
            f"  {offset:6x}  {text}" + (f"  ; {why}" if why else "")
            for offset, _, text, _, why in kernel["code"]
        ]
    return "\n".join(lines)
