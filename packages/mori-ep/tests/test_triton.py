"""The Triton kernels under their interpreter: the reference's rows, order, maps and bytes; chosen by name,
said once; what does not go together is named. They compile for sm_90 anywhere.

On GPUs the same bodies run with compiled kernels (pytest -m gpu).
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp, reference
from mori_ep.plan import Geometry
from mori_ep.reference import RankInput, bytes_of
from mori_shmem.errors import ArgumentError, CollectiveMismatch, MoriError, PeerTimeout, UnsupportedShape

pytestmark = pytest.mark.timeout(240)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
EXPERTS = 4  # a rank
WARNING = "the Triton kernels were chosen"


def started(backend: str) -> mori_shmem.Communicator:
    if backend == "host":
        os.environ["TRITON_INTERPRET"] = "1"
    return mori_shmem.init(backend, timeout_s=60)


def made(comm: mori_shmem.Communicator, **changes: Any) -> EpDispatchCombineOp:
    given: dict[str, Any] = {
        "data_type": BF16,
        "hidden_dim": 48,
        "num_experts": EXPERTS * comm.world_size,
        "num_experts_per_token": 3,
        "max_num_inp_token_per_rank": 70,
        "kernel_type": EpDispatchCombineKernelType.IntraNode,
        **changes,
    }
    return EpDispatchCombineOp(EpDispatchCombineConfig.for_comm(comm, **given), comm, kernels="triton")


def brought(
    op: EpDispatchCombineOp, call: int, tokens: tuple[int, ...], dtype: Any = BF16
) -> list[RankInput]:
    """By every rank; unknown ids among them, and ids of one rank twice in a token."""
    config, ranks = op.config, []
    for rank in range(config.world_size):
        draw = torch.Generator().manual_seed(100 * call + rank)
        n = tokens[rank % len(tokens)]
        ids = torch.randint(-1, config.num_experts + 1, (n, 3), generator=draw, dtype=torch.int32)
        x = torch.randint(0, 100, (n, 48 * dtype.itemsize), generator=draw, dtype=torch.uint8).view(dtype)
        scales = torch.randint(0, 256, (n, 5), generator=draw, dtype=torch.uint8) if dtype is FP8 else None
        ranks.append(RankInput(x, ids, torch.rand(n, 3, generator=draw), scales))
    return ranks


def pair(op: EpDispatchCombineOp, given: list[RankInput], *, registered: bool = False) -> list[str]:
    """A dispatch, and a combine of rows that have nothing to do with it: what differs from the reference."""
    config, me, device = op.config, op.config.rank, op.comm.device
    mine, want = given[me], reference.dispatch(given, EXPERTS)
    tensors = [None if t is None else t.to(device) for t in (mine.x, mine.weights, mine.scales, mine.ids)]
    rows, weights, scales, ids, count, handle = op.dispatch(
        *tensors, call_local_expert_count=True, return_routing=True
    )
    n = want[me].count
    got = {"rows": rows, "weights": weights, "scales": scales, "ids": ids}
    right = {
        name: torch.equal(bytes_of(part[:n].cpu()), bytes_of(getattr(want[me], name)))
        for name, part in got.items()
        if part is not None
    }
    right["count"] = count.tolist() == [n]
    sources = [op.decode_send_flat_idx(p) for p in op.get_dispatch_src_token_pos().tolist()]
    right["sources"] = sources == want[me].sources
    local = [int((want[me].ids == me * EXPERTS + e).sum()) for e in range(EXPERTS)]
    right["experts"] = op.local_expert_count.tolist() == local
    right["map"] = handle.disp_dest_tok_id_map.tolist() == wanted_map(config, mine, me, want)

    draw = torch.Generator().manual_seed(7)
    ys = [torch.randn(config.recv_capacity, 48, generator=draw).to(BF16) for _ in given]
    ws = [torch.rand(config.recv_capacity, 3, generator=draw) for _ in given]
    y = ys[me].to(device)
    if registered:
        buffer = op.get_registered_combine_input_buffer(BF16)
        buffer.copy_(y)
        y = buffer
    out, sums = op.combine(y, ws[me].to(device), tensors[3], use_external_inp_buf=int(not registered))
    k = len(mine.x)
    wanted = reference.combine(given, want, ys, EXPERTS)
    right["sums"] = torch.equal(bytes_of(out[:k].cpu()), bytes_of(wanted[me]))
    wanted = reference.combine(given, want, ws, EXPERTS)
    right["weights"] = torch.equal(sums[:k].cpu(), wanted[me])
    return [name for name, good in right.items() if not good]


def wanted_map(config: Any, mine: RankInput, me: int, want: list[reference.Received]) -> list[list[int]]:
    rows_at = [{source: row for row, source in enumerate(received.sources)} for received in want]
    found = []
    for token, slots in enumerate(mine.ids.tolist()):
        entries, seen = [], set()
        for expert in slots:
            rank = expert // EXPERTS if 0 <= expert < config.num_experts else None
            fresh = rank is not None and rank not in seen
            seen.add(rank)
            entries.append(
                rank * config.position_stride + rows_at[rank][me, token] if fresh else config.null_position
            )
        found.append(entries)
    return found


def round_trips(backend: str) -> tuple[list[object], list[str]]:
    """What was wrong, and what was logged at WARNING."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("mori_ep").addHandler(Kept(logging.WARNING))
    wrong: list[object] = []
    with started(backend) as comm:
        with made(comm) as op:
            for call, tokens in enumerate(((5, 70, 0), (0,), (1, 0, 9), (66, 3, 2))):
                wrong += pair(op, brought(op, call, tokens), registered=call % 2 == 1)
        with made(comm, data_type=FP8, combine_dtype=BF16, scale_dim=5, scale_type_size=1) as op:
            wrong += pair(op, brought(op, 9, (7, 11, 1), FP8))
    return wrong, said


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_EP_1_2_4_7_8_an_op_on_the_triton_kernels_gives_the_references_bytes(num_ranks: int) -> None:
    found = mori_shmem.run_ranks(round_trips, num_ranks, "host", timeout_s=200)
    assert [wrong for wrong, _ in found] == [[]] * num_ranks
    said = [sum(WARNING in text for text in texts) for _, texts in found]
    assert said == [1] + [0] * (num_ranks - 1), "said once, on the first rank"


def handles(backend: str) -> None:
    """Two dispatches open at once, combined in turn; a replay has the rows of the first, in their places."""
    with started(backend) as comm, made(comm) as op:
        me, device = comm.rank, comm.device
        calls = [brought(op, call, tokens) for call, tokens in enumerate(((6, 9), (3, 0)))]
        open_ones = []
        for given in calls:
            rows, _, _, _, count, handle = op.dispatch(
                given[me].x.to(device), None, None, given[me].ids.to(device), return_routing=True
            )
            open_ones.append((given, rows[: int(count)].clone(), handle))
        for given, rows, handle in reversed(open_ones):
            out, weights = op.combine(rows, None, given[me].ids.to(device), routing=handle)
            want = reference.dispatch(given, EXPERTS)
            wanted = reference.combine(given, want, [received.rows for received in want], EXPERTS)
            assert weights is None
            assert torch.equal(bytes_of(out[: len(given[me].x)].cpu()), bytes_of(wanted[me]))
        given, rows, handle = open_ones[0]
        again, *_, count = op.dispatch(
            given[me].x.to(device), None, None, given[me].ids.to(device), routing=handle
        )
        assert int(count) == len(rows)
        assert torch.equal(bytes_of(again[: len(rows)].cpu()), bytes_of(rows.cpu()))


def test_several_dispatches_may_be_open_and_replayed() -> None:
    mori_shmem.run_ranks(handles, 2, "host", timeout_s=120)


def next_call(op: EpDispatchCombineOp, given: RankInput) -> None:
    """On a GPU, that is where errors are raised."""
    if op.comm.device.type == "cuda":
        torch.cuda.synchronize()
        op.dispatch(given.x, None, None, given.ids)


def differences(backend: str) -> None:
    """Named on every rank."""
    with started(backend) as comm:
        for what, told in (
            ("hidden", "hidden bytes is 96 on rank 0 and 32 on rank 1"),
            ("weights", "weights is 1 on rank 0 and 0 on rank 1"),
            (
                "combine",
                r"rank 0 brings \[\*, 48\] bfloat16 with weights, rank 1 .*16 without weights",
            ),
            ("too many", "rank 0 sends 6 rows to rank 1 in one dispatch, which has room for 5"),
        ):
            with made(comm, max_total_recv_tokens=10 if what == "too many" else 0) as op:
                n = 6 if what == "too many" else 4
                x = torch.zeros(
                    n, 16 if what == "hidden" and comm.rank else 48, dtype=BF16, device=comm.device
                )
                ids = torch.arange(3, dtype=torch.int32, device=comm.device).repeat(n, 1) + EXPERTS
                w = torch.ones(n, 3, device=comm.device)
                given = RankInput(x, ids)
                kind = UnsupportedShape if what == "too many" else CollectiveMismatch
                with pytest.raises(kind, match=told):  # noqa: PT012 - one call, or the next where it is async
                    op.dispatch(x, None if what == "weights" and comm.rank else w, None, ids)
                    if what == "combine":
                        rows = torch.zeros(2 * n, 48, dtype=BF16, device=comm.device)
                        some = torch.zeros(2 * n, 3, device=comm.device)
                        op.combine(rows, None if comm.rank else some, ids)
                    next_call(op, given)
                if what == "too many" and comm.device.type == "cpu":
                    assert int(op.dispatch(x[:5], w[:5], None, ids[:5])[4]) == (10 if comm.rank else 0)
                comm.barrier()
        with made(comm) as op:
            given = brought(op, 1, (6, 6))[comm.rank]
            x, ids = given.x.to(comm.device), given.ids.to(comm.device)
            op.dispatch(x, None, None, ids)
            with pytest.raises(ArgumentError, match=rf"rank {comm.rank} combined an input of 1 rows"):  # noqa: PT012
                op.combine(x[:1], None, ids)
                next_call(op, RankInput(x, ids))
            comm.barrier()


def test_what_does_not_go_together_is_named_on_every_rank() -> None:
    mori_shmem.run_ranks(differences, 2, "host", timeout_s=120)


def test_an_op_that_was_given_too_few_rows_goes_on() -> None:
    def rank() -> list[str]:
        with started("host") as comm, made(comm) as op:
            given = brought(op, 1, (6, 6))
            mine = given[comm.rank]
            op.dispatch(mine.x, None, None, mine.ids)
            with pytest.raises(ArgumentError, match="combined an input of 1 rows"):
                op.combine(mine.x[:1], None, mine.ids)
            comm.barrier()
            return pair(op, given)

    assert mori_shmem.run_ranks(rank, 2, timeout_s=60) == [[], []]


def test_a_rank_that_does_not_come_is_named_within_the_deadline(tmp_path: Path) -> None:
    def rank() -> None:
        os.environ["TRITON_INTERPRET"] = "1"
        with mori_shmem.init("host", timeout_s=3) as comm, made(comm) as op:
            given = brought(op, 1, (4, 4))[comm.rank]
            if comm.rank == 0:
                began = time.monotonic()
                with pytest.raises(PeerTimeout, match="rank 1"):
                    op.dispatch(given.x, None, None, given.ids)
                assert time.monotonic() - began < 30
                with pytest.raises(MoriError, match="cannot be used any more"):
                    op.dispatch(given.x, None, None, given.ids)
                (tmp_path / "named").touch()
            while not (tmp_path / "named").exists():
                time.sleep(0.02)

    mori_shmem.run_ranks(rank, 2, timeout_s=60)


def refusals() -> list[str]:
    """Without the interpreter, which the last of them asks for."""
    os.environ["MORI_EP_KERNELS"] = "triton"
    said = []
    kinds = EpDispatchCombineKernelType
    with mori_shmem.init("host", timeout_s=20) as comm:

        def refused(geometry: Any = None, kernels: Any = None, **changes: Any) -> None:
            given = {"num_experts": 4, "data_type": BF16, "hidden_dim": 64, "max_num_inp_token_per_rank": 8}
            config = EpDispatchCombineConfig.for_comm(comm, num_experts_per_token=2, **{**given, **changes})
            with pytest.raises(MoriError) as caught:
                EpDispatchCombineOp(config, comm, geometry=geometry, kernels=kernels)
            said.append(str(caught.value))

        refused(kernel_type=kinds.AsyncLL)
        refused(elastic=True)
        refused(quant_type="fp8_blockwise")
        refused(combine_dtype=torch.float16)
        refused(geometry={"dispatch": Geometry(blocks=4)})
        refused(kernels="cutlass")
        refused()
    return said


def test_PK_2_what_the_triton_kernels_do_not_have_is_refused_by_name() -> None:
    (said,) = mori_shmem.run_ranks(refusals, 1, timeout_s=60)
    names = (
        "AsyncLL",
        "elastic=True",
        "fp8_blockwise",
        "float16",
        "geometry",
        "'cutlass'",
        "TRITON_INTERPRET",
    )
    for name, text in zip(names, said, strict=True):
        assert name in text
    assert all("MORI_EP_KERNELS" in text for text in said[:6])


def test_kernels_differ_between_ranks() -> None:
    def rank() -> None:
        os.environ["TRITON_INTERPRET"] = "1"
        with mori_shmem.init("host", timeout_s=20) as comm:
            config = EpDispatchCombineConfig.for_comm(
                *(comm,),
                num_experts=4,
                data_type=BF16,
                hidden_dim=64,
                max_num_inp_token_per_rank=8,
                num_experts_per_token=2,
            )
            with pytest.raises(ArgumentError, match="kernels is 'own' on rank 0, 'triton' on rank 1"):
                EpDispatchCombineOp(config, comm, kernels=("own", "triton")[comm.rank])
            comm.barrier()

    mori_shmem.run_ranks(rank, 2, timeout_s=60)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mori_ep.targets.triton import kernels
KERNELS = ("place tell settle shift send_rows stage tell_sign compare_signs sum_rows count_experts").split()
CONSTANTS = {"TOPK": 6, "SLOTS": 8, "WORLD": 3, "BLOCK": 128, "BF16": True}
NUMBERS = ("num_tokens experts_a_rank stride rank tokens nbytes size capacity room null given first_expert "
           "num_entries row_bytes dtype scale_bytes weights replay").split()
for name in KERNELS:
    kernel = getattr(kernels, name)
    # A launch makes a constant of an argument that is 1, and 32 bits of an address that is 0.
    for as_type, address in (("i32", "i64"), ("i64", "i64"), ("constexpr", "i64"), ("i32", "i32")):
        types = {p.name: as_type if p.name in NUMBERS else address for p in kernel.params}
        types |= {p.name: "constexpr" for p in kernel.params if p.is_constexpr}
        constants = {name: CONSTANTS.get(name, 1) for name, kind in types.items() if kind == "constexpr"}
        triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32))
    print(name)
"""


def test_the_kernels_compile_for_sm_90_on_any_machine(tmp_path: Any) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) == 10, done.stdout


@pytest.mark.gpu(2)
@pytest.mark.parametrize("body", [round_trips, handles, differences])
def test_on_gpus_too(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    found = mori_shmem.run_ranks(body, 2, "cuda", timeout_s=200)
    if body is round_trips:
        assert [wrong for wrong, _ in found] == [[]] * 2
