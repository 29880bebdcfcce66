"""Code objects are read without trusting a byte, and what `info` and `disasm` say is what is in them."""

import json
import os
import random
import struct
import subprocess
import sys

import pytest
from mori_sim import _core
from mori_sim.inspect_code import disassembly, kernels_of, summary


def cli(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "mori_sim", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (b"", "outside of the file"),
        (b"not an ELF file" * 10, "not an ELF file"),
        (b"\x7fELF" + bytes(200), "not a 64-bit AMDGPU file"),
    ],
)
def test_what_is_no_code_object_is_refused_with_the_reason(image, why):
    with pytest.raises(RuntimeError, match=why):
        _core.describe(image)


def test_another_architecture_is_refused_by_name(examples):
    image = bytearray(examples.code_object("sum_slices").read_bytes())
    image[48] = 0x4C  # e_flags: gfx942
    with pytest.raises(RuntimeError, match="gfx950"):
        _core.describe(bytes(image))


def test_damaged_files_never_crash_the_reader(examples):
    image = examples.code_object("matmul_staged").read_bytes()
    source = random.Random(3)
    refused = 0
    for _ in range(400):
        damaged = bytearray(image[: source.choice([len(image), source.randrange(len(image))])])
        for _ in range(source.randrange(1, 30)):
            damaged[source.randrange(min(len(damaged), 2400))] = source.randrange(256)
        try:
            _core.describe(bytes(damaged))
        except RuntimeError:
            refused += 1
    assert refused > 100  # and the others were read, whatever they now say


def test_a_count_larger_than_the_note_is_refused_without_allocating(examples):
    image = bytearray(examples.code_object("sum_slices").read_bytes())
    at = image.index(b"\xaeamdhsa.kernels") + 15
    image[at : at + 5] = b"\xdd" + struct.pack(">I", 0xFFFFFFFF)  # four thousand million kernels
    with pytest.raises(RuntimeError):
        _core.describe(bytes(image))


def test_info_of_the_staged_product(examples):
    (kernel,) = kernels_of(examples.code_object("matmul_staged", holding="buffer_load_dwordx4"))
    s = summary(kernel)
    assert s["lds_nbytes"] == 4 * 64 * 128
    assert (s["vgpr_spills"], s["sgpr_spills"], s["scratch_nbytes"]) == (0, 0, 0)
    assert s["mix"]["mfma"] >= 4
    assert s["unsupported"] == []
    assert [a["nbytes"] for a in s["arguments"]][:7] == [8, 8, 8, 8, 8, 4, 4]
    assert s["waves_per_simd"] == min(8, 512 // ((s["vgprs"] + 7) // 8 * 8))


def test_disasm_shows_every_instruction_of_the_function(examples):
    path = examples.code_object("await_flags")
    text = disassembly(path, None)
    assert "global_load_dword" in text
    assert "s_sleep" in text
    assert text.rstrip().endswith("s_endpgm")
    with pytest.raises(ValueError, match="await_flags_0"):
        disassembly(path, "another")


def test_the_commands(examples):
    path = examples.code_object("quantise_rows")
    assert json.loads(cli("info", "--json", path).stdout)[0]["name"] == "quantise_rows_0"
    assert "VGPR" in cli("info", path).stdout
    assert "v_cvt_pk_fp8_f32" in cli("disasm", path).stdout
    assert cli("info", "--unknowns").stdout.strip()
    for wrong in (("disasm", __file__), ("info", "/nowhere.hsaco")):
        outcome = cli(*wrong)
        assert outcome.returncode == 2
        assert outcome.stderr.startswith("mori-sim: ")


def test_no_kernel_of_the_examples_is_out_of_reach(examples):
    names = set()
    for path in examples.code.glob("*.hsaco"):
        for kernel in kernels_of(path):
            names.add(kernel["name"])
            assert summary(kernel)["unsupported"] == [], kernel["name"]
    assert len(names) >= 9, os.listdir(examples.code)
