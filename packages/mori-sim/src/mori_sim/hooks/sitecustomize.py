"""Runs first in every Python process below `mori-sim run`: loads the simulator under the vendor's name.

A library that was linked with a run path to /opt/rocm/lib would find the real one there; one that is loaded
already, under the same name, wins. Whatever sitecustomize the environment had is then run as usual.
"""

import ctypes
import importlib.machinery
import importlib.util
import os
import sys

HOOKS = os.path.dirname(os.path.abspath(__file__))


def load_simulator() -> None:
    for name in ("libamdhip64.so.7", "libhsakmt.so.1"):
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)


def run_the_next_sitecustomize() -> None:
    rest = [p for p in sys.path if os.path.abspath(p or ".") != HOOKS]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("MORI_SIM_ACTIVE") == "1":
    load_simulator()
run_the_next_sitecustomize()
