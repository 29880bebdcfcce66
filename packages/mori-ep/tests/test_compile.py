"""Every variant of the cuda target's kernels, compiled as it will be, on any machine; what must hold of its
machine
code, and that both sides have the same arguments. (The kernels run in test_cuda_dispatch.py and its like.)
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from mori_ep import signs
from mori_ep.targets.cuda import params
from mori_ep.targets.cuda.variants import VARIANTS
from mori_shmem.jit import Source, Variant, build, cuda_headers, resources
from mori_shmem.jit.__main__ import main as compile_ahead
from mori_shmem.jit.cache import Cache
from mori_shmem.jit.compilers import Compiler, CompilerMissing, compiler_named

CUDA = Path(__file__).parent.parent / "src" / "mori_ep" / "targets" / "cuda"
KERNELS = {  # registers at most, for 640, 512, 640 and 256 threads a block
    "dispatch": {"dispatch_packets": 102, "dispatch_rows": 128},
    "tables": {"count_experts": 64, "copy_routing": 64},
    "combine": {"combine_packets": 102, "combine_pull": 255},
    "quantised": {"combine_pull": 255},
    "experts": {"place_by_expert": 255, "spread_rows": 255, "gather_rows": 255},
}


@pytest.fixture(scope="module")
def nvrtc() -> Compiler:
    try:
        return compiler_named("nvrtc")
    except CompilerMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """Compiled once for all tests here."""
    return Cache(tmp_path_factory.mktemp("cubins"))


def wanted_kernels(name: str) -> dict[str, int]:
    kind = name.split("-", 1)[0]
    return KERNELS["quantised" if "fp8_" in name else kind]


@pytest.mark.parametrize("name", [name for name, _ in VARIANTS])
def test_a_variant_compiles_and_keeps_to_its_registers(name: str, nvrtc: Compiler, cache: Cache) -> None:
    used = resources.kernels_of(build(dict(VARIANTS)[name], compiler=nvrtc, cache=cache))
    limits = wanted_kernels(name)
    assert used.keys() == limits.keys()
    for kernel, most in limits.items():
        assert used[kernel].registers <= most
        assert used[kernel].stack_bytes <= 0


@pytest.mark.parametrize("name", [name for name, _ in VARIANTS])
def test_packets_are_single_accesses_and_nothing_spills(name: str, nvrtc: Compiler, cache: Cache) -> None:
    """A packet that went as four words, or as two halves, could arrive torn."""
    disassembler = resources.find_disassembler()
    if disassembler is None:
        pytest.skip("no cuobjdump: neither on PATH nor in Triton's wheel")
    code = resources.instructions_of(build(dict(VARIANTS)[name], compiler=nvrtc, cache=cache), disassembler)
    assert [text for text in code if re.search(r"\b(LDL|STL)\b", text)] == []
    if "packets" in " ".join(wanted_kernels(name)):
        assert any(
            re.search(r"\bST\.?\w*\.E\.128\.STRONG\.SYS|STG\.E\.128\.STRONG\.SYS", text) for text in code
        )
        assert any(re.search(r"LDG\.E\.128\.STRONG\.SYS|LD\.E\.128\.STRONG\.SYS", text) for text in code)


def fields_of(text: str, struct: str) -> list[str]:
    """Names in the order of declaration."""
    start = text.index(f"struct {struct} {{")
    body = re.sub(r"//.*", "", text[start : text.index("};", start)]).split("{", 1)[1]
    return [
        name
        for line in body.split(";")
        for name in re.findall(r"\*?(\w+)(?:\[[^\]]*\])?\s*(?:,|$)", line.strip())
    ]


HEADERS = {"ExpertParams": "experts.cu"}
STRUCTS = ("Common", "RowShape", "RowArrays", "DispatchParams", "CombineParams")
SIGNS = ("SIGN_WEIGHTS", "SIGN_NO_WEIGHTS", "SIGN_ROWS")
CONSTANTS = {
    "params.cuh": ("MAX_RANKS", "MAX_TOP_K", "MASK_WORDS", "HEADER_PACKETS", "SEND", "RECEIVE"),
    "protocol.cuh": ("GAVE_UP", "ROWS_AS_PACKETS", "COMBINE_BY_PACKETS", "META_MINE", "META_SENT"),
}


def test_both_sides_have_the_same_parameters(tmp_path: Path, nvrtc: Compiler) -> None:
    text = (CUDA / "params.cuh").read_text()
    for struct in STRUCTS:
        assert fields_of(text, struct) == [name for name, *_ in getattr(params, struct)._fields_]
    path = tmp_path / "sizes.cu"
    checks = [f"static_assert(sizeof({s}) == {ctypes.sizeof(getattr(params, s))});" for s in STRUCTS]
    checks += [f"static_assert({c} == {getattr(params, c)});" for names in CONSTANTS.values() for c in names]
    checks += [f"static_assert({c} == {getattr(signs, c)}u);" for c in SIGNS]
    path.write_text('#include "protocol.cuh"\n' + "\n".join(checks) + "\n")
    source = Source.read(path, [CUDA, cuda_headers()])
    build(Variant("mori-ep", source, (), "sm_90a"), compiler=nvrtc, cache=Cache(None))


def test_compiling_ahead_fills_a_cache(
    tmp_path: Path, nvrtc: Compiler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documented command, on the smallest kernels."""
    from mori_ep.targets.cuda import variants

    monkeypatch.setattr(variants, "VARIANTS", [v for v in variants.VARIANTS if v[0] == "tables"])
    assert compile_ahead(["mori_ep.targets.cuda.variants", "--cache-dir", str(tmp_path), "--report"]) == 0
    assert "count_experts" in capsys.readouterr().out
    assert [path.suffix for path in tmp_path.glob("*.cubin")] == [".cubin"]
