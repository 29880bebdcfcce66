"""Every variant of the cuda target's kernels, compiled as it will be, on any machine; what must hold of its
machine code, and that both sides have the same arguments."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from mori_megamoe.targets import cuda
from mori_megamoe.targets.cuda import limits, params, weights
from mori_megamoe.targets.cuda.variants import VARIANTS
from mori_shmem.jit import Source, Variant, build, cuda_headers, resources
from mori_shmem.jit.cache import Cache
from mori_shmem.jit.compilers import Compiler, CompilerMissing, compiler_named

CUDA = Path(cuda.__file__).parent
# Of 384 threads; then setmaxnreg gives consumers 240 and the others 24 (R), or 232 and 40 (A).
GEMM_REGISTERS = 168
SHARED_BYTES = {  # by BODY and rows
    (0, 128): 223488,
    (0, 64): 146688,
    (0, 32): 108288,
    (1, 128): 225568,
    (1, 64): 165152,
    (1, 32): 134944,
}
MOST_SHARED_BYTES = 232448  # of a block on sm_90
# Registers at most; without spills. Found: prepare 64, operand_rows 40, dispatch 115, pack 111, hidden 32,
# combine 47.
OTHERS = {
    "prepare": {"prepare": 64, "operand_rows": 64},
    "dispatch": {"dispatch": 128, "pack": 128},
    "hidden": {"hidden": 64},
    "combine": {"combine": 64},
}
GEMMS = [name for name, _ in VARIANTS if name.startswith("gemm")]
TUNED = [name for name in GEMMS if not name.endswith("sums")]


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


def code_of(name: str, nvrtc: Compiler, cache: Cache) -> list[str]:
    disassembler = resources.find_disassembler()
    if disassembler is None:
        pytest.skip("no cuobjdump: neither on PATH nor in Triton's wheel")
    return resources.instructions_of(build(dict(VARIANTS)[name], compiler=nvrtc, cache=cache), disassembler)


@pytest.mark.parametrize("name", TUNED)
def test_a_gemm_keeps_its_sums_in_registers(name: str, nvrtc: Compiler, cache: Cache) -> None:
    """All bodies, tiles and ways to wait: no spill anywhere, setmaxnreg heeded (a trap in a wait, or a call,
    and ptxas ignores it and serialises the matrix instructions)."""
    used = resources.kernels_of(build(dict(VARIANTS)[name], compiler=nvrtc, cache=cache))
    kernel = "gemm2" if name.startswith("gemm2") else "gemm1" if name.endswith("never") else "stage1"
    assert used == {kernel: resources.Resources(GEMM_REGISTERS, 0)}


@pytest.mark.parametrize("name", [name for name in TUNED if "-128-" in name])
def test_a_gemms_main_loop_is_the_tuned_one(name: str, nvrtc: Compiler, cache: Cache) -> None:
    """Per K block of 128, two fragments: R 8 matrix instructions of 32, 64 additions (of the second fragment;
    the first's stand in front of the first matrix instruction, which is where the loop is cut here); A 16 of
    16. Nothing waits for memory."""
    code = code_of(name, nvrtc, cache)
    assert [text for text in code if re.search(r"\b(LDL|STL)\b", text)] == []
    assert sum("USETMAXREG" in text for text in code) == 2
    assert [text for text in code if re.search(r"\bBPT\b|\bCALL\b", text)] == []
    loop = resources.main_loop(code)
    kind, count = ("QGMMA.64x128x32", 8) if "-R-" in name else ("HGMMA.64x128x16", 16)
    assert [kind in text for text in loop if "GMMA." in text] == [True] * count
    assert sum(bool(re.search(r"\bFADD\b", text)) for text in loop) == (64 if "-R-" in name else 0)
    # A warpgroup instruction for each batch of products. ptxas that serialises them has one for each.
    assert sum("WARPGROUP" in text for text in loop) <= (2 if "-R-" in name else 5)
    assert [text for text in loop if re.search(r"MEMBAR|\bLDG\b|\bATOM|\bRED\b", text)] == []
    assert len(loop) <= (185 if "-R-" in name else 270)  # the prototype that was tuned: 173 and 257


@pytest.mark.parametrize("name", [name for name, _ in VARIANTS if name not in GEMMS])
def test_the_other_kernels_keep_to_their_registers(name: str, nvrtc: Compiler, cache: Cache) -> None:
    used = resources.kernels_of(build(dict(VARIANTS)[name], compiler=nvrtc, cache=cache))
    most = OTHERS[name.split("-")[0]]
    assert used.keys() == most.keys()
    for kernel, found in used.items():
        assert found.registers <= most[kernel]
        assert found.stack_bytes == 0


def test_rows_travel_in_16_byte_stores_and_are_released(nvrtc: Compiler, cache: Cache) -> None:
    code = code_of("dispatch", nvrtc, cache)
    assert (
        sum(bool(re.search(r"\bSTG\.E\.128|\bST\.E\.128", text)) for text in code) >= 16
    )  # in flight together
    assert any("MEMBAR" in text and "SYS" in text for text in code)


def fields_of(struct: str) -> list[str]:
    """Names in the order of declaration."""
    text = (CUDA / "params.cuh").read_text()
    start = re.search(rf"struct (?:alignas\(64\) )?{struct} {{", text)
    assert start is not None
    body = re.sub(r"//.*", "", text[start.end() : text.index("};", start.end())])
    return [
        name
        for line in body.split(";")
        for name in re.findall(r"\*?(\w+)(?:\[[^\]]*\])?\s*(?:,|$)", line.strip())
    ]


STRUCTS = (
    "Tiles",
    "Arrivals",
    "Gemm1Params",
    "Gemm1Maps",
    "Landing",
    "Slots",
    "SendParams",
    "PlanParams",
    "HiddenParams",
    "BackParams",
    "CombineParams",
    "RowsParams",
)
CONSTANTS = {
    "MAX_RANKS": limits.MAX_RANKS,
    "MAX_EXPERTS": limits.MAX_EXPERTS,
    "UNIT_ROWS": limits.UNIT_ROWS,
    "sizeof(Unit)": params.UNIT_BYTES,
    "sizeof(Move)": params.MOVE_BYTES,
    "WEIGHT_BYTES": weights.WEIGHT_BYTES,
    "CODE_BYTES": weights.CODE_BYTES,
    "MAX_DELTA_REBASED": limits.MAX_DELTA["R"],
    "MAX_DELTA_EXACT": limits.MAX_DELTA["A"],
    **{
        name: getattr(params, name)
        for name in (
            *("NUM_ITEMS", "NUM_TILES", "NUM_ROWS", "NUM_UNITS", "SEND_HEAD", "TICKETS", "EPOCH"),
            *("NUM_MOVES", "MOVE_HEAD"),
            *("WAIT_COUNTS", "WAIT_ROWS", "WAIT_TILE", "TOO_MANY_ROWS", "WAIT_PARTIALS", "WAIT_SLOT"),
        )
    },
}


def test_both_sides_have_the_same_parameters(tmp_path: Path, nvrtc: Compiler) -> None:
    for struct in STRUCTS:
        assert fields_of(struct) == [name for name, *_ in getattr(params, struct)._fields_]
    checks = [f"static_assert(sizeof({s}) == {ctypes.sizeof(getattr(params, s))});" for s in STRUCTS]
    checks += [f"static_assert({name} == {value});" for name, value in CONSTANTS.items()]
    assert max(SHARED_BYTES.values()) <= MOST_SHARED_BYTES
    for (body, tile_rows), shared in SHARED_BYTES.items():
        path = tmp_path / f"sizes{body}{tile_rows}.cu"
        head = f'#define BODY {body}\n#define TILE_ROWS {tile_rows}\n#include "tile.cuh"\n'
        fits = f"static_assert(SHARED_BYTES == {shared});\nstatic_assert(BARS % 8 == 0);\n"
        path.write_text(
            head + '#include "decode.cuh"\n#include "plan.cuh"\n' + fits + "\n".join(checks) + "\n"
        )
        source = Source.read(path, [CUDA, cuda_headers()])
        build(Variant("mori-megamoe", source, (), "sm_90a"), compiler=nvrtc, cache=Cache(None))


def test_the_triton_baseline_compiles_for_hopper() -> None:
    """So that the benchmark does not find out on a GPU."""
    triton = pytest.importorskip("triton")
    from mori_megamoe.targets.cuda.triton_baseline import _grouped
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"x": "*fp8e4nv", **dict.fromkeys(("x_scale", "w", "w_scale"), "*u8"), "expert_of": "*i32"}
    sizes = {"K": 256, "N": 512, "BM": 128, "BN": 128, "BK": 64}
    signature = types | {"out": "*bf16"} | dict.fromkeys(sizes, "constexpr")
    constants = {(len(signature) - len(sizes) + i,): size for i, size in enumerate(sizes.values())}
    source = ASTSource(fn=_grouped, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", 90, 32)
    made = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 3})
    assert made.asm["cubin"]
