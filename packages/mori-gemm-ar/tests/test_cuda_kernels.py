"""Every variant of the CUDA kernel, compiled as it will be, and what its machine code must not hold.

Why: a memory barrier or a wait for a load in the main loop made the whole GEMM 1.17 to 1.35 times slower,
and both came
and went with changes elsewhere in the file.
"""

from __future__ import annotations

import ctypes
import random
import re
from pathlib import Path

import pytest
from mori_gemm_ar.targets.cuda.params import MAX_BANDS, Divisor, Maps, Params
from mori_gemm_ar.targets.cuda.regions import HALF_BYTES, Q_BYTES, regions_for
from mori_gemm_ar.targets.cuda.split import split_variant
from mori_gemm_ar.targets.cuda.split_params import SplitParams
from mori_gemm_ar.targets.cuda.variants import VARIANTS
from mori_shmem.jit import Source, Variant, build, cuda_headers, resources
from mori_shmem.jit.cache import Cache
from mori_shmem.jit.compilers import Compiler, CompilerMissing, compiler_named

CUDA = Path(__file__).parent.parent / "src" / "mori_gemm_ar" / "targets" / "cuda"
REGISTERS_AT_LAUNCH = (
    168  # 384 threads share 65536; setmaxnreg then gives the consumers 224 and the others 56
)
MOST_STACK_BYTES = 88  # what the couriers spill beside their 56 registers, outside of any loop over k


@pytest.fixture(scope="module")
def nvrtc() -> Compiler:
    try:
        return compiler_named("nvrtc")
    except CompilerMissing as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("name", [name for name, _ in VARIANTS])
def test_a_variant_compiles_and_its_main_loop_is_clean(name: str, nvrtc: Compiler) -> None:
    cubin = build(dict(VARIANTS)[name], compiler=nvrtc, cache=Cache(None))
    used = resources.kernels_of(cubin)["gemm_allreduce"]
    assert used.registers == REGISTERS_AT_LAUNCH
    assert used.stack_bytes <= MOST_STACK_BYTES
    disassembler = resources.find_disassembler()
    if disassembler is None:
        pytest.skip("no cuobjdump: neither on PATH nor in Triton's wheel; registers and stack were checked")
    loop = resources.main_loop(resources.instructions_of(cubin, disassembler))
    assert sum("GMMA" in text for text in loop) == (16 if "-256x" in name else 8)  # two steps of k
    assert [text for text in loop if "MEMBAR" in text] == []
    if not name.startswith("mxfp8"):  # eight scale words a step do not fit beside 192 sums
        assert [text for text in loop if re.search(r"\b(LDL|STL)\b", text)] == []
        assert resources.waits_for_loads(loop) == []


def test_the_split_kernels_compile_without_spills(nvrtc: Compiler) -> None:
    kernels = resources.kernels_of(build(split_variant(), compiler=nvrtc, cache=Cache(None)))
    assert len(kernels) == 8
    for name, used in kernels.items():
        assert used.stack_bytes == 0, name
        assert used.registers <= 128, name  # 512 threads


def fields_of(file: str, struct: str) -> list[str]:
    text = (CUDA / file).read_text()
    body = text[text.index(f"struct {struct} {{") :]
    body = re.sub(r"//.*", "", body[: body.index("};")])
    return [
        name
        for line in body.split(";")
        for name in re.findall(r"(\w+)(?:\[[^\]]*\])?\s*(?:,|$)", line.strip())
    ]


def test_both_sides_have_the_same_parameters(tmp_path: Path, nvrtc: Compiler) -> None:
    assert fields_of("params.cuh", "Params") == [name for name, _ in Params._fields_]  # type: ignore[misc]
    assert fields_of("split.cuh", "SplitParams") == [name for name, _ in SplitParams._fields_]  # type: ignore[misc]
    path = tmp_path / "sizes.cu"
    path.write_text(
        '#include "split.cuh"\n'
        f"static_assert(sizeof(SplitParams) == {ctypes.sizeof(SplitParams)});\n"
        f"static_assert(sizeof(Params) == {ctypes.sizeof(Params)});\n"
        f"static_assert(sizeof(Maps) == {ctypes.sizeof(Maps)});\n"
        f"static_assert(MAX_BANDS == {MAX_BANDS});\n"
    )
    build(
        Variant("mori-gemm-ar", Source.read(path, [CUDA, cuda_headers()]), (), "sm_90a"),
        compiler=nvrtc,
        cache=Cache(None),
    )


def test_a_divisor_divides() -> None:
    draw = random.Random(3)
    for d in [*range(1, 300), 3584, 7168, 65535, 1 << 20]:
        divisor = Divisor.of(d)
        for x in [0, 1, d - 1, d, d + 1, (1 << 31) - 1, *(draw.randrange(1 << 31) for _ in range(20))]:
            quotient = x if divisor.shift == 32 else (x * divisor.multiplier >> 32) >> divisor.shift
            assert quotient == x // d


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("m_max", "n", "num_ranks"), [(16384, 7168, 2), (1000, 320, 3), (17, 7168, 8), (4096, 7168, 1)]
)
def test_regions_do_not_overlap_and_hold_whole_tiles(m_max: int, n: int, num_ranks: int, fp8: bool) -> None:
    regions = regions_for(m_max, n, num_ranks, 256, copies=True, fp8=fp8)
    starts = sorted(regions.offsets.values())
    assert starts[0] == 0
    assert len(set(starts)) >= 10
    assert regions.offsets["out"] + m_max * n * 2 <= regions.nbytes
    if num_ranks > 1:
        slice_rows = (m_max + num_ranks - 1) // num_ranks
        tiles = (slice_rows + 255) // 256 * ((n + 255) // 256 * 2) * 4
        assert regions.slot_halves == tiles
        assert regions.slot("inbox", 1) - regions.slot("inbox", 0) == tiles * HALF_BYTES
        assert regions.slot("inbox", num_ranks - 1) + tiles * HALF_BYTES <= regions.offsets["staging"]
        if fp8:
            assert regions.slot("q_inbox", num_ranks - 1) + tiles * Q_BYTES <= regions.offsets["q_staging"]
