"""The `ld.lld` of the simulated ROCm: links one AMDGPU object with whichever LLVM linker is on the machine.

Runs as a script of its own, started for each compiled kernel, so it imports nothing of this package. Looked
for in this order: MORI_SIM_LLD (a path), `ld.lld` on PATH, the linker inside the triton wheel (no system
package needed).
"""

import importlib.machinery
import importlib.util
import os
import shutil
import sys
from pathlib import Path


def named_linker() -> str | None:
    """A stand-alone lld, unless it is the very script that runs us."""
    asked = os.environ.get("MORI_SIM_LLD")
    found = asked or shutil.which("ld.lld")
    own = Path(__file__).parent / "rocm" / "llvm" / "bin" / "ld.lld"
    if found is None or (Path(found).exists() and own.exists() and Path(found).samefile(own)):
        return None
    return found


def triton_library(search: list[str]) -> Path | None:
    """The triton extension module, found by its file: importing the package would cost a second."""
    for folder in search:
        for found in sorted(Path(folder).glob("triton/_C/libtriton*.so")):
            return found
    return None


def object_and_output(arguments: list[str]) -> tuple[str, str]:
    """The one input and the -o of a call like `ld.lld -shared -o out.hsaco in.o`."""
    output, inputs, rest = "a.out", [], iter(arguments)
    for argument in rest:
        if argument == "-o":
            output = next(rest)
        elif not argument.startswith("-"):
            inputs.append(argument)
    if len(inputs) != 1:
        raise SystemExit(
            f"ld.lld of mori-sim: expected one object file, got {inputs}: set MORI_SIM_LLD to an LLVM ld.lld"
        )
    return inputs[0], output


def main() -> None:
    linker = named_linker()
    if linker is not None:
        os.execv(linker, [linker, *sys.argv[1:]])
    search = os.environ.get("MORI_SIM_SITE", "").split(os.pathsep)
    library = triton_library(search)
    if library is None:
        raise SystemExit(
            "ld.lld of mori-sim: no AMDGPU linker found: install triton (pip install 'mori-sim[flydsl]') "
            "or set MORI_SIM_LLD to an LLVM ld.lld of version 18 or later"
        )
    source, output = object_and_output(sys.argv[1:])
    spec = importlib.util.spec_from_file_location("libtriton", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.amd.link_hsaco(source, output)


if __name__ == "__main__":
    main()
