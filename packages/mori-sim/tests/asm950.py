"""gfx950 assembly for tests: LLVM's assembler inside the triton wheel, and running a few lines on a bare machine."""
# ruff: noqa: E501  (one instruction, one line)

import struct

import numpy as np
from mori_sim import _exec
from triton._C.libtriton import amd, llvm

llvm.init_targets()
LANES = 64


def assemble(source: str) -> bytes:
    """The bytes of .text; RuntimeError when LLVM does not accept the source."""
    elf = amd.assemble_amdgcn(source + "\n", "gfx950", "")
    if len(elf) < 64:
        raise RuntimeError(f"LLVM does not accept: {source}")
    (shoff,) = struct.unpack_from("<Q", elf, 0x28)
    shnum, shstr = struct.unpack_from("<HH", elf, 0x3C)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, shoff + 64 * i) for i in range(shnum)]
    for s in sections:
        name = sections[shstr][4] + s[0]
        if elf[name : elf.index(b"\0", name)] == b".text":
            return elf[s[4] : s[4] + s[5]]
    raise RuntimeError("no .text")


class Bench:
    """A machine with whatever arrays a test registers as device memory."""

    def __init__(self, **options):
        self.machine = _exec.BareMachine(options)
        self.kept = []

    def array(self, values, **where) -> np.ndarray:
        """An array the kernels may touch; the machine's memory ends where it ends."""
        a = np.ascontiguousarray(values).copy()
        self.machine.add_memory(a.ctypes.data, a.nbytes, **where)
        self.kept.append(a)
        return a

    def submit(
        self, source: str, args=(), *, grid=(1,), block=(64,), lds=0, base=0x10_0000_0000, **extra
    ) -> int:
        """Starts a kernel: s[0:1] points to `args` (64-bit each), s2 is the workgroup id, v0 the work item."""
        code = assemble(source)
        kernarg = self.array(np.array([*args, 0], dtype=np.uint64))
        self.kept.append(_exec.Code(base, code))
        extra.setdefault("rsrc1", 0xF0 << 12 | 1 << 21 | 1 << 23 | 63 >> 1)
        return self.machine.submit(
            self.kept[-1], base, grid, block, kernarg.ctypes.data, {"lds": lds, **extra}
        )

    def run(self, limit=50_000_000) -> None:
        """Until all kernels are done. A fault or too many instructions raise."""
        state = "running"
        while state == "running":
            state = self.machine.run(1 << 16)
            if self.machine.instructions() > limit:
                raise TimeoutError(self.machine.watchdog_report())
        if state == "fault":
            raise RuntimeError(self.machine.fault())


PROLOGUE = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_load_dwordx2 s[8:9], s[0:1], 0x10
v_mov_b32_e32 v254, v0
v_lshlrev_b32_e32 v255, 2, v0
s_waitcnt lgkmcnt(0)
"""


def run_lanes(
    body: str,
    inputs: dict[int, np.ndarray],
    outputs: list[int],
    *,
    exec_mask=None,
    lds=0,
    lds_image=None,
    mode=None,
    **options,
) -> dict[int, np.ndarray]:
    """Runs `body` in one wave. inputs: VGPR -> 64 dwords loaded before; outputs: VGPRs stored after, under full EXEC.

    The address of an extra 64 KiB scratch array is in s[8:9]; v254 is the lane, v255 its byte offset.
    """
    bench = Bench(**options)
    source = np.zeros((max(len(inputs), 1), LANES), dtype=np.uint32)
    lines = [PROLOGUE]
    for k, (register, values) in enumerate(inputs.items()):
        source[k] = np.ascontiguousarray(values).view(np.uint32)
        lines += [
            f"s_add_u32 s10, s4, {hex(256 * k)}",
            "s_addc_u32 s11, s5, 0",
            f"global_load_dword v{register}, v255, s[10:11]",
        ]
    lines.append("s_waitcnt vmcnt(0)")
    if exec_mask is not None:
        lines += [
            f"s_mov_b32 exec_lo, {hex(exec_mask & 0xFFFFFFFF)}",
            f"s_mov_b32 exec_hi, {hex(exec_mask >> 32)}",
        ]
    if mode is not None:
        lines.append(f"s_setreg_imm32_b32 hwreg(1, 0, 32), {hex(mode)}")
    lines += [body, "s_waitcnt vmcnt(0) lgkmcnt(0)", "s_mov_b64 exec, -1"]
    for k, register in enumerate(outputs):
        lines += [
            f"s_add_u32 s10, s6, {hex(256 * k)}",
            "s_addc_u32 s11, s7, 0",
            f"global_store_dword v255, v{register}, s[10:11]",
        ]
    lines.append("s_endpgm")
    src = bench.array(source)
    dst = bench.array(np.zeros((max(len(outputs), 1), LANES), dtype=np.uint32))
    extra = bench.array(lds_image if lds_image is not None else np.zeros(16384, dtype=np.uint32))
    bench.submit(
        "\n".join(lines), [src.ctypes.data, dst.ctypes.data, extra.ctypes.data], lds=lds, name="lanes"
    )
    bench.run()
    return {r: dst[k].copy() for k, r in enumerate(outputs)} | {-1: extra}
