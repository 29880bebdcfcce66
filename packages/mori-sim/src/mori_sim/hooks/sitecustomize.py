"""Runs first in every Python process below `mori-sim run`: loads the simulator under the vendor's name.

A library that was linked with a run path to /opt/rocm/lib would find the real one there; one that is loaded
already, under the same name, wins. Whatever sitecustomize the environment had is then run as usual.
"""

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

HOOKS = os.path.dirname(os.path.abspath(__file__))


def load_simulator() -> None:
    for name in ("libamdhip64.so.7", "libhsakmt.so.1", "libhsa-runtime64.so.1"):
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)


def run_the_next_sitecustomize() -> None:
    rest = [p for p in sys.path if os.path.abspath(p or ".") != HOOKS]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


class AfterTorch:
    """Finds torch as usual, and installs mori_sim.torch_cuda behind its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                from mori_sim.torch_cuda import install

                install()

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("MORI_SIM_ACTIVE") == "1":
    load_simulator()
    if os.environ.get("MORI_SIM_TORCH_CUDA") == "1":
        sys.meta_path.insert(0, AfterTorch())
run_the_next_sitecustomize()
