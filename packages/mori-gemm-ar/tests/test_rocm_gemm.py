"""The GEMM kernel of the rocm target on the simulated node, with the checks of strict mode on."""

import importlib.util
import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from mori_gemm_ar.problem import Problem

HERE = Path(__file__).parent
missing = [name for name in ("flydsl", "mori_sim") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"needs {', '.join(missing)}: pip install flydsl==0.5.0 mori-sim"
)

QUANTS = ("blockscale", "ptpc", "mxfp8")
SHAPES = ("256x256", "128x256", "128x128", "64x128")
KINDS = (*(f"exact_{{}}_{shape}" for shape in SHAPES), "one_block_{}", "one_row_{}", "odd_k_{}")
KINDS = (*KINDS, "padded_rows_{}", "padded_odd_k_{}", "random_{}")
CASES = [kind.format(quant) for quant in QUANTS for kind in KINDS]
CASES += ["degenerate", "not_finite", "mx_scales", "two_shapes", "model_tile"]

# What strict mode says when an obligation of gemm_kernel.py is left out. The barriers behind La and Ma are no
# obligations: they make the two groups of waves take turns, and nothing is wrong without them.
CAUGHT_BY = {
    "no_wait_before_the_first_block": {"wait"},
    "no_wait_in_phase_lb": {"wait"},
    "no_barrier_before_the_first_block": {"lds"},
    "no_barrier_behind_lb": {"lds", "wait"},
    "no_barrier_behind_mb": {"lds", "wait"},
    "no_barrier_behind_the_last_scales": {"lds"},
    "reads_not_waited_for": {"wait"},
    "dma_too_early": {"lds", "wait"},
    "ratios_too_early": {"wait"},
    "no_barrier_behind_la": set(),
    "no_barrier_behind_ma": set(),
    "none": set(),
}


def simulate(*command, options=(), **variables):
    """(exit code, what it printed) of a program on the node."""
    run = [sys.executable, "-m", "mori_sim", "run", "--devices", "1", *map(str, options), "--"]
    done = subprocess.run(
        [*run, sys.executable, *map(str, command)],
        cwd=HERE,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(exit code, output, folder) of all cases: the folder holds the report and the code objects."""
    folder = tmp_path_factory.mktemp("gemm")
    options = ("--coherence", "strict", "--report", folder / "report", "--save-code", folder)
    return *simulate("rocm_gemm_program.py", options=options), folder


@pytest.mark.parametrize("case", CASES)
def test_a_product_is_right(run, case):
    assert f"ok {case} " in run[1], run[1][-3000:]


def test_no_rule_is_broken(run):
    assert run[0] == 0, run[1][-3000:]
    assert run[1].count("ok ") == len(CASES)


def test_the_order_of_waves_does_not_matter():
    options = ("--coherence", "strict", "--schedule", "random", "--seed", "5")
    cases = [f"exact_{quant}_256x256" for quant in QUANTS]
    code, output = simulate("rocm_gemm_program.py", *cases, options=options)
    assert (code, output.count("ok ")) == (0, 3), output[-3000:]


def test_the_matrix_instructions_of_the_models_shape(run):
    """M=16384, N=7168, K=2048 on one rank: 7,340,032 instructions of 16x16x128, whoever owns the rows."""
    from mori_gemm_ar.targets.rocm.gemm import SHAPES, shape_for
    from mori_gemm_ar.targets.rocm.tiles import Slices
    from mori_gemm_ar.targets.rocm.wire import one_slice
    from mori_sim import report

    problem = Problem(16384, 7168, 2048, 8)
    shape = shape_for(problem.m, problem.n, problem.num_ranks)
    assert shape == SHAPES[0]
    counts = report.read(run[2] / "report").kernels["gemm_blockscale_256x256_model"]
    assert counts["workgroups"] == 1
    per_tile = counts["mfma"]
    assert counts["mfma_flops"] == per_tile * 2 * 16 * 16 * 128
    column_tiles, rows = problem.n // shape.cols, problem.slice_rows
    sliced = Slices(problem.m, 3, 8, rows, rows // shape.rows, shape.rows, 1)
    for cut in (one_slice(problem.m, shape), sliced):
        assert cut.num_tiles(column_tiles) * per_tile == 7_340_032
    assert problem.flops == 7_340_032 * 2 * 16 * 16 * 128


def test_the_next_block_is_in_flight_while_one_is_multiplied(run):
    """In the loop of every 256x256 kernel: DMA, barrier, products, barrier, and only then a wait for it."""
    from mori_sim.inspect_code import disassembly

    letters = {
        r"buffer_load_dwordx4 .*lds": "D",
        "s_barrier": "B",
        "v_mfma": "M",
        r"s_waitcnt.*vmcnt\(0\)": "W",
    }
    for quant in QUANTS:
        (code,) = run[2].glob(f"gemm_{quant}_256x256_output-*.hsaco")
        found = (
            next((letter for pattern, letter in letters.items() if re.search(pattern, line)), "")
            for line in disassembly(code, None).splitlines()
        )
        phases = "".join(letter for letter, _ in groupby(filter(None, found)))
        assert "DBMBWBMB" in phases, phases
        assert "scratch_" not in disassembly(code, None)


@pytest.mark.gpu(1)
def test_products_on_a_gpu():
    import torch

    if not torch.version.hip:
        pytest.skip("this torch is not a ROCm build: the kernels are for gfx950")
    command = [sys.executable, "rocm_gemm_program.py"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=280)
    found = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("ok ")}
    assert found == set(CASES), done.stderr[-3000:]


@pytest.fixture(scope="module")
def mutants(tmp_path_factory):
    """(output, the rules that each mutant broke)."""
    from mori_sim import report

    path = tmp_path_factory.mktemp("mutants") / "report"
    _, output = simulate("rocm_gemm_mutants.py", options=("--coherence", "strict", "--report", path))
    broken = {}
    for entry in report.read(path).coherence:
        broken.setdefault(entry["kernel"].split("64x128_")[1], set()).add(entry["rule"])
    return output, broken


@pytest.mark.parametrize("mutant", CAUGHT_BY)
def test_an_obligation_that_is_left_out_is_reported(mutants, mutant):
    output, broken = mutants
    assert f"mutant {mutant} " in output, output[-3000:]
    assert broken.get(mutant, set()) == CAUGHT_BY[mutant]
    if not CAUGHT_BY[mutant]:
        assert f"mutant {mutant} right" in output


def test_kernels_compiled_ahead_of_time_are_all_that_a_run_needs(tmp_path):
    compiled = ("-n", 136, "--cache-dir", tmp_path / "cache", "--only", "gemm ptpc 64x128 to output")
    code, output = simulate("-m", "mori_gemm_ar.targets.rocm.compile", *compiled)
    assert code == 0, output
    assert "1 kernels compiled, 1 in" in output
    variables = {"FLYDSL_RUNTIME_RUN_ONLY": "1", "FLYDSL_RUNTIME_CACHE_DIR": str(tmp_path / "cache")}
    code, output = simulate("rocm_gemm_program.py", "one_block_ptpc", **variables)
    assert (code, "ok one_block_ptpc" in output) == (0, True), output
    code, output = simulate("rocm_gemm_program.py", "one_block_mxfp8", **variables)
    assert code != 0
    assert "MoriError: kernel " in output
    assert f"is not in the cache {tmp_path / 'cache'} (FLYDSL_RUNTIME_CACHE_DIR)" in output
    assert f"python -m mori_gemm_ar.targets.rocm.compile --cache-dir {tmp_path / 'cache'} -n N" in output
