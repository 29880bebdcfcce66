"""How the kernels of this target are launched: one struct of arguments, a number of workgroups, a stream.

    @fx.struct
    class Sum: ...                       the arguments, with one name on the host and in the kernel

    @flyc.kernel
    def add(args: Sum, blocks: fx.Int32): ...

    kernel = Kernel(add, Sum, threads=256)
    kernel.compile(Sum(...), blocks)     when an op is made: traces and compiles, needs no GPU, launches
                                         nothing
    kernel.launch(Sum(...), blocks, stream)

A kernel is traced once, also where nothing is left to compile: FlyDSL's cache has the machine code, but is
asked with what was traced, which takes 30 to 300 ms. The first launch makes a handle of what `compile` has
found; later ones bind no signature and look nothing up. FlyDSL prints what a launch meets, and goes on: here
it is an error of that launch.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator"
import os
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from mori_shmem import descriptors
from mori_shmem.core import native
from mori_shmem.errors import MoriError


def filled(struct: Any, *values: int) -> Any:
    """A struct of arguments; type checkers do not see its fields."""
    return struct(*values)


class Kernel:
    """One compiled specialisation; shared by everything in a process that asks for the same one."""

    def __init__(self, body: Any, arguments: Any, threads: int) -> None:
        @flyc.jit
        def launch(args: arguments, blocks: fx.Int32, stream: fx.Stream = fx.Stream(None)) -> None:
            body(args, blocks).launch(grid=(blocks, 1, 1), block=(threads, 1, 1), stream=stream)

        self._launcher = launch
        self._name = getattr(body, "__name__", None) or arguments.__name__
        self.compiled = ""  # FlyDSL's name for what it has compiled; kernels of equal code share it
        self._handle: Any = None

    def compile(self, args: Any, blocks: int) -> None:
        """With arguments like those of later launches: their values do not matter."""
        if not self.compiled:
            try:
                self._launcher._compile_only(args, blocks, 0)
            except RuntimeError as error:
                if "no usable AOT cache" in str(error):
                    raise self._missing() from error
                raise
            self.compiled, _ = self._launcher._last_compiled

    def launch(self, args: Any, blocks: int, stream: int) -> None:
        """Queue it on a raw stream."""
        if self._handle is None:
            self.compile(args, blocks)
            bound = self._launcher._sig.bind(args, blocks, stream)
            # What flyc.compile returns, without tracing anew: it would launch before its caller has a handle.
            handle = self._launcher._make_compiled_function(self.compiled, bound, None)
            native.rocm_take_error()  # of somebody else
            handle(args, blocks, stream)  # loads it
            self._raise_if_failed(native.rocm_take_error())
            self._handle = handle
        else:
            native.rocm_take_error()
            self._handle(args, blocks, stream)
            self._raise_if_failed(native.rocm_take_error())

    def _raise_if_failed(self, error: str) -> None:
        if not error:
            return
        if descriptors.shortage() is not None:
            raise descriptors.limit_error(f"launching kernel {self._name}", "no file descriptor was left")
        raise MoriError(f"kernel {self._name} could not be loaded or launched: {error}")

    def _missing(self) -> MoriError:
        folder = os.environ.get("FLYDSL_RUNTIME_CACHE_DIR", "")
        return MoriError(
            f"kernel {self._name} is not in the cache {folder} (FLYDSL_RUNTIME_CACHE_DIR) as these versions "
            "of mori-gemm-ar and flydsl make it, and FLYDSL_RUNTIME_RUN_ONLY=1 forbids compiling it. Add it, "
            "with N columns of C and W ranks: python -m mori_gemm_ar.targets.rocm.compile "
            f"--cache-dir {folder or 'DIR'} -n N --world-size W"
        )
