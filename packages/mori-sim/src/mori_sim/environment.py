"""The environment in which a program finds the simulated node instead of ROCm."""

import importlib.util
import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent
ARCH = "gfx950"


def library_folder() -> Path:
    """Where libamdhip64.so.7 and its like lie; an editable install keeps them away from the sources."""
    spec = importlib.util.find_spec("mori_sim._core")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "mori_sim was installed without its libraries: build it with `pip install packages/mori-sim`"
        )
    return Path(spec.origin).parent


def linker_search_path() -> str:
    """Folders in which link.py looks for the triton wheel."""
    spec = importlib.util.find_spec("triton")
    return "" if spec is None or spec.origin is None else str(Path(spec.origin).parent.parent)


def prepend(path: str, rest: str | None) -> str:
    return path if not rest else path + os.pathsep + rest


def program_environment(base: dict[str, str], settings: dict[str, str]) -> dict[str, str]:
    """`base` with everything a HIP program, FlyDSL and the node need; `settings` are MORI_SIM_* variables."""
    env = dict(base)
    env.update(settings)
    env["MORI_SIM_ACTIVE"] = "1"
    env["MORI_SIM_PYTHON"] = sys.executable
    env["MORI_SIM_SITE"] = linker_search_path()
    env["LD_LIBRARY_PATH"] = prepend(str(library_folder()), base.get("LD_LIBRARY_PATH"))
    env["PYTHONPATH"] = prepend(str(PACKAGE / "hooks"), base.get("PYTHONPATH"))
    env["PATH"] = prepend(str(PACKAGE / "rocm" / "bin"), base.get("PATH"))
    env["ROCM_PATH"] = str(PACKAGE / "rocm")
    env["FLYDSL_GPU_ARCH"] = ARCH
    if base.get("ARCH", "").startswith("gfx"):  # FlyDSL lets it win over FLYDSL_GPU_ARCH
        env["ARCH"] = ARCH
    for name in ("COMPILE_ONLY", "HSA_OVERRIDE_GFX_VERSION"):
        env.pop(name, None)
    return env
