"""Pickle a call so that a rank can load it, whatever module its function comes from.

cloudpickle sends a function of an imported module by name. A rank then imports that module, which fails, or
finds another one, if the module was loaded in a way of its own: pytest's importlib mode, `runpy`, a
notebook. So the function's module is sent by value unless the normal import system would find the very same
file.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def dumps(value: object) -> bytes:
    """The pickle of any value, functions and classes of the main module included."""
    import cloudpickle  # type: ignore[import-untyped]

    return cloudpickle.dumps(value)  # type: ignore[no-any-return]


def loads(data: bytes) -> Any:
    """The value of a pickle."""
    return pickle.loads(data)


def dumps_for_ranks(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """The pickle of (fn, args)."""
    import cloudpickle

    modules = [m for m in map(_home, (fn, *args)) if m is not None and not _importable(m)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return _dumps_with_modules((fn, args))
    finally:
        for module in modules:
            if module.__name__ in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(module)


def _dumps_with_modules(value: object) -> bytes:
    """cloudpickle.dumps, but imported modules of a class of their own (torch.ops) go by name as others do."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType and obj.__name__ in sys.modules:
                return importlib.import_module, (obj.__name__,)
            return super().reducer_override(obj)

    with io.BytesIO() as file:
        Pickler(file, protocol=cloudpickle.DEFAULT_PROTOCOL).dump(value)
        return file.getvalue()


def _home(thing: Any) -> ModuleType | None:
    """The imported module that `thing` (a function, class or instance) was defined in, apart from
    __main__."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    thing = inspect.unwrap(thing) if callable(thing) else type(thing)
    name = getattr(thing, "__module__", None)
    return None if name in (None, "__main__", "builtins") else sys.modules.get(name)


def _importable(module: ModuleType) -> bool:
    """Whether `import module.__name__` in a fresh process with our sys.path gives this same file."""
    file = getattr(module, "__file__", None)
    if file is None:
        return True  # built into the interpreter
    path: Any = None
    origin = None
    parts = module.__name__.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:depth]), path)
        if spec is None:
            return False
        path, origin = spec.submodule_search_locations, spec.origin
    return origin in (file, "frozen", "built-in")


def _find(name: str, path: Any) -> Any:
    """The spec that the import system finds for `name`, not looking at what is imported already."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None
