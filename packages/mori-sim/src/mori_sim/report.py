"""What the processes of one run wrote into the report file, and how it is told to a person.

Each line is a JSON object with `kind`, `pid` and `rank`:
  fault      something that ends the run: a wild address, an unknown instruction, a bad packet, a stuck kernel
  coherence  a rule of the memory model broken (strict mode): `rule`, `text` with both instructions, kernel,
             pc, address
  counters   at the end of a process: instructions by class, MFMA flops and bytes by space, for each kernel
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLASSES = (
    "valu",
    "salu",
    "mfma",
    "vmem",
    "smem",
    "lds",
    "flat",
    "branch",
    "waits",
    "barriers",
    "other",
)
SPACES = ("lds_bytes", "l1_bytes", "local_bytes", "peer_bytes", "host_bytes", "uncached_bytes", "smem_bytes")


@dataclass
class Report:
    faults: list[dict[str, Any]] = field(default_factory=list)
    coherence: list[dict[str, Any]] = field(default_factory=list)
    kernels: dict[str, Counter[str]] = field(default_factory=dict)  # summed over processes
    num_processes: int = 0

    @property
    def clean(self) -> bool:
        return not self.faults and not self.coherence


@contextmanager
def unnamed_file() -> Iterator[Path]:
    """A file without a name in any folder: it is gone with this process, however that ends."""
    fd = os.memfd_create("mori-sim report")
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)


def read(path: Path) -> Report:
    report = Report()
    if not path.exists():
        return report
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        entry = json.loads(line)
        if entry["kind"] == "fault":
            report.faults.append(entry)
        elif entry["kind"] == "coherence":
            report.coherence.append(entry)
        elif entry["kind"] == "counters":
            report.num_processes += 1
            for name, counts in entry["kernels"].items():
                report.kernels.setdefault(name, Counter()).update(counts)
    return report


def findings(report: Report) -> str:
    """Faults in full; each broken rule once for each pair of kernel and instruction, with its count."""
    lines = []
    for fault in report.faults:
        rank = "" if fault["rank"] is None else f", rank {fault['rank']}"
        lines.append(f"fault in process {fault['pid']}{rank}:\n{fault['text']}")
    seen: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for entry in report.coherence:
        seen.setdefault((entry["rule"], entry["kernel"], entry["pc"]), []).append(entry)
    for (rule, kernel, _), entries in seen.items():
        who = kernel or "a copy engine"
        lines.append(f"rule {rule} broken {len(entries)} x in {who}; the first:\n{entries[0]['text']}")
    return "\n\n".join(lines)


def cost_sheet(report: Report) -> str:
    """What each kernel did. Counts only: this node knows nothing about time on hardware."""
    lines = []
    for name, c in sorted(report.kernels.items()):
        memory = c["local_bytes"] + c["peer_bytes"] + c["host_bytes"] + c["uncached_bytes"]
        lines.append(f"{name}: {c['dispatches']} launches, {c['workgroups']} workgroups, {c['waves']} waves")
        lines.append(f"  wave instructions {c['instructions']}: " + ", ".join(f"{k} {c[k]}" for k in CLASSES))
        lines.append("  bytes " + ", ".join(f"{space.removesuffix('_bytes')} {c[space]}" for space in SPACES))
        if c["mfma_flops"]:
            per_byte = f", {c['mfma_flops'] / memory:.1f} per byte of memory" if memory else ""
            lines.append(f"  mfma flops {c['mfma_flops']}{per_byte}")
    return "\n".join(lines)
