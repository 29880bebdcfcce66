"""What a rule is tuned for: the device as the rule files name it, seen without importing torch."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mori_tune.errors import SettingError


@dataclass(frozen=True)
class Device:
    """`arch` and `model` are the words in rule files ("gfx942", "mi300x"); compute units bound the grids."""

    backend: str  # "host", "cuda" or "rocm"
    arch: str
    model: str
    compute_units: int

    def __str__(self) -> str:
        return f"{self.arch}/{self.model}/{self.compute_units}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Device:
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})

    @classmethod
    def parse(cls, text: str) -> Device:
        """`ARCH/MODEL/UNITS`, as `--device` takes it and as devices are printed."""
        parts = text.split("/")
        if len(parts) != 3 or not all(parts) or not parts[2].isdigit() or int(parts[2]) < 1:
            raise SettingError(f"device {text!r}: wanted ARCH/MODEL/UNITS, for example gfx942/mi300x/304")
        arch, model, units = parts
        backend = "rocm" if arch.startswith("gfx") else "cuda" if arch.startswith("sm_") else "host"
        return cls(backend, arch, model, int(units))


def host_device(num_workers: int = 1) -> Device:
    """The CPU target: one compute unit for each worker, since its ranks are processes of one machine."""
    return Device("host", platform.machine(), "cpu", num_workers)


def torch_device(index: int = 0) -> Device:
    """The GPU that torch sees at `index`; for tunables, whose package depends on torch."""
    import torch  # an op's dependency, never this package's

    seen = torch.cuda.get_device_properties(index)
    model = model_name(seen.name)
    if torch.version.hip:
        arch = str(seen.gcnArchName).split(":")[0]
        return Device("rocm", arch, model, seen.multi_processor_count)
    return Device("cuda", f"sm_{seen.major}{seen.minor}", model, seen.multi_processor_count)


def model_name(marketing_name: str) -> str:
    """`AMD Instinct MI300X` and `NVIDIA H200` become `mi300x` and `h200`: the word that names the model."""
    words = re.findall(r"[a-z]*\d+[a-z0-9]*", marketing_name.lower())
    short = [w for w in words if not re.fullmatch(r"\d+(gb)?|hbm\d\w*|sxm\d?", w)]
    return short[0] if short else re.sub(r"\W+", "-", marketing_name.lower()).strip("-")
