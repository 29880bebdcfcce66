"""Programs for the tests of strict mode: lists of (name, assembly) steps, of which a variant drops or replaces one.

Each runs under ten random schedules and ten workgroup-to-XCD mappings (SEEDS): a report must not depend on luck.
"""
# ruff: noqa: E501  (one instruction, one line)

from asm950 import Bench

SEEDS = range(10)

# s[4:5] data, s[6:7] flag, s[8:9] output, s[10:11] second argument of the engine tests
SETUP = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_load_dwordx4 s[8:11], s[0:1], 0x10
v_lshlrev_b32_e32 v1, 2, v0
v_lshrrev_b32_e32 v2, 6, v0
v_mov_b32_e32 v3, 0
v_mov_b32_e32 v4, 1
s_nop 0
v_readfirstlane_b32 s12, v2
s_waitcnt lgkmcnt(0)
"""
ONLY_WAVE_0 = "s_cmp_lg_u32 s12, 0\ns_cbranch_scc1 END"
ONLY_LANE_0 = "s_mov_b64 exec, 1"


def program(steps: list[tuple[str, str]], drop: str | None = None, swap: dict[str, str] | None = None) -> str:
    swap = swap or {}
    names = [n for n, _ in steps]
    assert drop is None or drop in names
    assert set(swap) <= set(names)
    return "\n".join(swap.get(n, text) for n, text in steps if n != drop)


def producer(scope: str, flag_scope: str) -> list[tuple[str, str]]:
    """Two waves store 512 bytes; wave 0 publishes for both."""
    return [
        ("store", "v_add_u32_e32 v5, 7, v0\nglobal_store_dword v1, v5, s[4:5]"),
        ("wait stores", "s_waitcnt vmcnt(0)"),
        ("barrier", "s_barrier"),
        ("leader", ONLY_WAVE_0),
        ("write back", f"buffer_wbl2 {scope}"),
        ("wait write back", "s_waitcnt vmcnt(0)"),
        ("one lane", ONLY_LANE_0),
        ("flag", f"global_store_dword v3, v4, s[6:7] {flag_scope}"),
    ]


def consumer(scope: str, poll_scope: str) -> list[tuple[str, str]]:
    """Both waves poll, then read."""
    return [
        ("poll", f"POLL:\nglobal_load_dword v6, v3, s[6:7] {poll_scope}"),
        ("wait poll", "s_waitcnt vmcnt(0)"),
        ("test", "v_readfirstlane_b32 s13, v6\ns_sleep 1\ns_cmp_eq_u32 s13, 0\ns_cbranch_scc1 POLL"),
        ("invalidate", f"buffer_inv {scope}"),
        ("read", "global_load_dword v7, v1, s[4:5]"),
        ("wait read", "s_waitcnt vmcnt(0)"),
        ("out", "global_store_dword v1, v7, s[8:9]"),
    ]


def two_workgroups(produce: str, consume: str) -> str:
    return f"{SETUP}\ns_cmp_eq_u32 s2, 1\ns_cbranch_scc1 CONSUMER\n{produce}\ns_endpgm\nCONSUMER:\n{consume}\nEND:\ns_endpgm"


def one_workgroup(body: str) -> str:
    return f"{SETUP}\n{body}\nEND:\ns_endpgm"


def bench(seed: int) -> Bench:
    return Bench(strict=True, order="random", seed=seed, xcd_seed=seed, slice=64)


def rules(b: Bench) -> set[str]:
    return {r[0] for r in b.machine.reports()}


PRODUCER_OMISSIONS = ["wait stores", "barrier", "write back", "wait write back"]
