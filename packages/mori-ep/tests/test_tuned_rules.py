"""Tuned rules in the op: which are used, for which phase, dtype and number of tokens; what refuses them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp, internode
from mori_ep import rules as op_rules
from mori_ep.keys import geometry_of, query_for
from mori_ep.plan import NOTHING_SAID, PLANNED, Geometry
from mori_ep.rules import Rules
from mori_ep.settings import TABLE
from mori_ep.targets.cuda import limits
from mori_ep.targets.cuda.layout import layout_for
from mori_ep.testing import apply_experts, expected, fixture, wrong_rows
from mori_shmem.errors import ArgumentError
from mori_tune import EP_COMBINE, EP_DISPATCH, Book, Device, RulesError
from mori_tune.rules import book as book_module
from mori_tune.settings import Settings

HIDDEN, TOPK, EXPERTS, TOKENS = 256, 4, 16, 40
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
H200 = Device("cuda", "sm_90", "h200", 132)
WORKER = {"block_num": 1, "rdma_block_num": 0, "warp_per_block": 1}
DISPATCH_KEY = {"dtype": "bf16", "hidden_dim": HIDDEN, "topk": TOPK}
COMBINE_KEY = {**DISPATCH_KEY, "zero_copy": False, "quant_type": "none"}


def table(phase: str, rules: list[dict[str, Any]], **header: Any) -> dict[str, Any]:
    head = {"version": "2.0", "op": "ep", "gpu_arch": os.uname().machine, "gpu_model": "cpu"}
    return {**head, "kernel_type": "IntraNode", "ep_size": 2, "phase": phase, "rules": rules, **header}


def write(folder: Path, *tables: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, one in enumerate(tables):
        (folder / f"rules{number}.json").write_text(json.dumps(one))
    return folder


def way(tokens: int, low_latency: str, fields: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    return {**DISPATCH_KEY, "num_tokens": tokens, **WORKER, "low_latency": low_latency, **fields}


# ---- the host target ----


def on_ranks(folders: list[str], environment: dict[str, str], **how: Any) -> list[Any]:
    """Of each rank: the way of its dispatches and the outcome of the lookup, if a round trip was right; or
    what the op was refused with."""

    def rank() -> Any:
        os.environ.update({"MORI_TUNE_DIR": folders[int(os.environ["RANK"])], **environment})
        given = {"kernel_type": "IntraNode", **how}
        given["kernel_type"] = EpDispatchCombineKernelType[given["kernel_type"]]
        geometry = given.pop("geometry", None)
        with mori_shmem.init("host", timeout_s=30) as comm:
            config = EpDispatchCombineConfig.for_comm(
                comm,
                num_experts=EXPERTS,
                data_type=BF16,
                hidden_dim=HIDDEN,
                max_num_inp_token_per_rank=TOKENS,
                num_experts_per_token=TOPK,
                **given,
            )
            try:
                with EpDispatchCombineOp(config, comm, geometry=geometry) as op:
                    for tokens in (TOKENS, 3 + comm.rank, 0):
                        mine = fixture(comm.rank, tokens, TOPK, EXPERTS, HIDDEN)
                        rows, weights, _, ids, count = op.dispatch(mine.x, mine.weights, None, mine.ids)
                        n = int(count)
                        out, _ = op.combine(
                            apply_experts(rows[:n], ids[:n], weights[:n], config), None, mine.ids
                        )
                        assert not wrong_rows(out[:tokens], expected(mine, EXPERTS))
                    rule = op.rule("dispatch", BF16, tokens=TOKENS)
                    return [op.plan.dispatch.value, None if rule is None else rule.outcome]
            except (RulesError, ArgumentError) as refusal:
                return str(refusal)

    return mori_shmem.run_ranks(rank, 2, timeout_s=90)


def test_F2_rules_are_used_without_being_asked_for_and_the_line_says_which(tmp_path, capfd):
    """AUTO is the default. The rule for as many tokens as fit decides how all dispatches of a host op go."""
    folder = write(tmp_path / "rules", table("dispatch", [way(TOKENS, "yes"), way(8, "no")]))
    assert on_ranks([str(folder)] * 2, {}) == [["slots", "MATCH"]] * 2
    said = [line for line in capfd.readouterr().err.splitlines() if "ep dispatch: " in line]
    assert len(said) == 1, said
    assert "MATCH block_num=1 rdma_block_num=0 warp_per_block=1 low_latency=yes from" in said[0]
    assert "rules0.json:1" in said[0]


def test_F2_by_hand_no_rule_is_used_and_without_rules_nothing_is_said(tmp_path, capfd):
    folder = str(write(tmp_path / "rules", table("dispatch", [way(TOKENS, "yes")])))
    assert on_ranks([folder] * 2, {"MORI_EP_LAUNCH_CONFIG_MODE": "MANUAL"}) == [["counts", "MANUAL"]] * 2
    assert "MORI_EP_LAUNCH_CONFIG_MODE=MANUAL" in capfd.readouterr().err
    assert on_ranks([folder] * 2, {}, geometry={}) == [["counts", "MANUAL"]] * 2
    by_hand = {"dispatch": Geometry(low_latency=1)}
    assert on_ranks([str(tmp_path / "none")] * 2, {}, geometry=by_hand) == [["slots", None]] * 2
    assert on_ranks([str(tmp_path / "none")] * 2, {}) == [["counts", None]] * 2
    said = [line for line in capfd.readouterr().err.splitlines() if "ep dispatch" in line]
    assert len(said) == 1, said
    assert "geometry was given by the caller" in said[0]


def test_F2_a_miss_is_said_with_the_field_that_differs(tmp_path, capfd):
    """Nearest rule: what stands in is named. With another number of ranks nothing stands in."""
    folder = write(tmp_path / "rules", table("dispatch", [way(64, "yes")]))
    assert on_ranks([str(folder)] * 2, {}) == [["slots", "NO MATCH"]] * 2
    assert "num_tokens asked 40, rule has 64" in capfd.readouterr().err
    assert on_ranks([str(folder)] * 2, {"MORI_TUNE_LOOKUP": "exact"}) == [["counts", "NO MATCH"]] * 2
    other = write(tmp_path / "other", table("dispatch", [way(TOKENS, "yes")], ep_size=8))
    assert on_ranks([str(other)] * 2, {}) == [["counts", "NO MATCH"]] * 2
    assert "ep_size asked 2, rule has 8" in capfd.readouterr().err


def test_TU_2_ranks_that_see_other_rules_use_those_of_one(tmp_path, capfd):
    """Rank 0 has none. Ranks that sent by different ways would wait for each other for ever."""
    folder = write(tmp_path / "b", table("dispatch", [way(TOKENS, "yes")]))
    assert on_ranks([str(tmp_path / "a"), str(folder)], {}) == [["slots", "MATCH"]] * 2
    assert capfd.readouterr().err.count("ranks [0] see other rules than rank 1, whose are used") == 1


def test_a_way_that_was_tried_with_few_tokens_is_not_taken_with_more(tmp_path, capfd):
    """The largest rule would stand in for more tokens; that way with them nobody has tried."""
    folder = write(tmp_path / "rules", table("dispatch", [way(8, "yes")]))
    assert on_ranks([str(folder)] * 2, {}) == [["counts", "NO MATCH"]] * 2
    assert "40 tokens, and its way for few was tried with 8; the built-in" in capfd.readouterr().err


@pytest.mark.parametrize("fields", [{"low_latency": "perhaps"}, {"warp_per_block": 64}, {"block_num": "all"}])
def test_a_rule_that_no_sweep_could_have_made_is_refused_on_every_rank(tmp_path, fields):
    """Also where it is for another number of tokens: nobody is left waiting in a later call."""
    folder = write(tmp_path / "rules", table("dispatch", [way(8, "no", fields), way(TOKENS, "no")]))
    for refusal in on_ranks([str(folder)] * 2, {}):
        assert "rules0.json:1: " in refusal
        assert "tune again, or remove the rule" in refusal


def test_ranks_with_different_geometry_by_hand_are_told(tmp_path):
    def rank() -> str:
        with mori_shmem.init("host", timeout_s=30) as comm:
            config = EpDispatchCombineConfig.for_comm(
                comm,
                num_experts=EXPERTS,
                data_type=BF16,
                hidden_dim=HIDDEN,
                max_num_inp_token_per_rank=TOKENS,
                num_experts_per_token=TOPK,
            )
            with pytest.raises(ArgumentError, match="geometry is"):
                EpDispatchCombineOp(config, comm, geometry={"dispatch": Geometry(low_latency=comm.rank)})
            with pytest.raises(ArgumentError, match="geometry has combined: its keys are dispatch, combine"):
                EpDispatchCombineOp(config, comm, geometry={"combined": PLANNED})
            with EpDispatchCombineOp(config, comm) as op, pytest.raises(ArgumentError, match="'both'"):
                op.rule("both", BF16, tokens=1)
            return "told"

    assert mori_shmem.run_ranks(rank, 2, timeout_s=60) == ["told"] * 2


# ---- across nodes: call by call ----


def across_nodes(folder: str, environment: dict[str, str]) -> list[list[bool]]:
    """Which calls of 4, 20 and 40 tokens went compact; each was right."""

    def rank() -> list[bool]:
        os.environ.update({"MORI_TUNE_DIR": folder, **environment})
        comm = internode.join(engine="gloo", ranks_per_node=1, timeout_s=60)
        config = EpDispatchCombineConfig.for_comm(
            comm,
            num_experts=EXPERTS,
            data_type=BF16,
            hidden_dim=HIDDEN,
            max_num_inp_token_per_rank=TOKENS,
            num_experts_per_token=TOPK,
            kernel_type=EpDispatchCombineKernelType.InterNode,
            gpu_per_node=1,
        )
        compact = []
        with EpDispatchCombineOp(config, comm) as op:
            for tokens in (4, 20, 40):
                mine = fixture(comm.rank, tokens, TOPK, EXPERTS, HIDDEN)
                rows, weights, _, ids, count = op.dispatch(mine.x, mine.weights, None, mine.ids)
                compact.append(op._runner._dispatcher.routes.compact)
                n = int(count)
                y = apply_experts(rows[:n], ids[:n], weights[:n], config)
                out, _ = op.combine(y, None, mine.ids)
                assert not wrong_rows(out[:tokens], expected(mine, EXPERTS))
        comm.close()
        return compact

    return mori_shmem.run_ranks(rank, 2, timeout_s=120)


def test_the_switch_between_the_kinds_across_nodes_is_in_the_rules(tmp_path, capfd):
    """Without rules up to 16 tokens go as they lie. Rules move that either way; the variable overrules."""
    none = str(tmp_path / "none")
    assert across_nodes(none, {}) == [[False, True, True]] * 2
    assert across_nodes(none, {"MORI_EP_INTERNODE_LL_TOKENS": "30"}) == [[False, False, True]] * 2
    header = {"kernel_type": "InterNode"}
    up = write(tmp_path / "up", table("dispatch", [way(20, "yes"), way(40, "no")], **header))
    assert across_nodes(str(up), {}) == [[False, False, True]] * 2
    down = str(write(tmp_path / "down", table("dispatch", [way(4, "no")], **header)))
    assert across_nodes(down, {}) == [[True, True, True]] * 2
    capfd.readouterr()
    assert across_nodes(down, {"MORI_EP_INTERNODE_LL_TOKENS": "30"}) == [[False, False, True]] * 2
    assert "MORI_EP_INTERNODE_LL_TOKENS was set" in capfd.readouterr().err


# ---- the cuda target's rules, without a GPU ----


@pytest.fixture
def cuda(tmp_path, monkeypatch):
    """`cuda(tables, resident=..., **config)`: an op's rules, as rank 0 of 2 on an H200 would have them."""
    monkeypatch.setattr(op_rules, "device_of", lambda backend, index: H200)
    monkeypatch.setattr(book_module, "_said", set())
    numbers = itertools.count()

    def make(
        *tables: dict[str, Any], resident: int = 132, by_hand: Any = None, env: Any = None, **fields: Any
    ) -> Any:
        folder = write(tmp_path / f"cuda{next(numbers)}", *tables)
        using = Settings({"MORI_TUNE_DIR": str(folder), **(env or {})})
        book = Book("ep", (EP_DISPATCH, EP_COMBINE), "mori_ep", using)
        monkeypatch.setattr(op_rules, "book_for", lambda *key: book)
        comm = SimpleNamespace(
            backend="cuda", device=torch.device("cuda", 0), all_gather=lambda x: [x, x], rank=0, world_size=2
        )
        config = EpDispatchCombineConfig.for_comm(
            comm,
            **{
                "num_experts": 256,
                "data_type": FP8,
                "hidden_dim": 7168,
                "max_num_inp_token_per_rank": 4096,
                "num_experts_per_token": 8,
                "use_external_inp_buf": False,
                **fields,
            },
        )
        found = Rules(comm, config, {"dispatch": FP8, "combine": BF16}, by_hand, TABLE.read())
        refuses = lambda g: f"only {resident} resident" if g.blocks > resident else None  # noqa: E731
        found.announce(SimpleNamespace(why_not_launch=refuses))
        return found, config

    return make


def gpu(phase: str, *rules: dict[str, Any]) -> dict[str, Any]:
    key = {"dtype": "fp8_e4m3" if phase == "dispatch" else "bf16", "hidden_dim": 7168, "topk": 8}
    key |= {"zero_copy": True, "quant_type": "none"} if phase == "combine" else {}
    filled = [{**key, "rdma_block_num": 0, **rule} for rule in rules]
    return table(phase, filled, gpu_arch="sm_90", gpu_model="h200")


FEW = {"num_tokens": 64, "block_num": 64, "warp_per_block": 10, "low_latency": "yes"}
SOME = {"num_tokens": 256, "block_num": 96, "warp_per_block": 12, "low_latency": "yes"}
MANY = {"num_tokens": 4096, "block_num": 132, "warp_per_block": 8}


def test_F3_each_phase_is_looked_up_with_its_own_dtype(cuda):
    """A mixed op has rules for both phases; asking combine's with dispatch's dtype finds nothing."""
    found, _ = cuda(gpu("dispatch", FEW, SOME, MANY), gpu("combine", {**FEW, "block_num": 32}))
    size = {"tokens": 64, "hidden": 7168}
    assert found.geometry("dispatch", FP8, **size) == Geometry(64, -1, 10, 1)
    assert found.geometry("combine", BF16, **size, zero_copy=True) == Geometry(32, -1, 10, 1)
    assert found.decision("combine", BF16, **size, zero_copy=True).is_match
    assert found.geometry("combine", FP8, **size, zero_copy=True) == PLANNED
    wrong = found.decision("combine", FP8, **size, zero_copy=True)
    assert "dtype asked fp8_e4m3, rule has bf16" in wrong.line
    assert found.geometry("dispatch", FP8, tokens=65, hidden=7168) == Geometry(96, -1, 12, 1)
    assert found.geometry("dispatch", FP8, tokens=3000, hidden=7168) == Geometry(132, -1, 8, -1)
    assert found.geometry("combine", BF16, tokens=65, hidden=7168, zero_copy=True) == PLANNED, "not tried"


def test_packets_get_the_memory_that_rules_need_and_no_more(cuda):
    """Rules send more tokens as packets than the target by itself: the window has room for them."""
    found, config = cuda(gpu("dispatch", FEW, SOME), gpu("combine", FEW))
    plan = limits.plan_for(config, found.few_tokens())
    assert (plan.few.dispatch, plan.few.combine) == (256, 64)
    bare = layout_for(config, limits.plan_for(config))
    with_rules = layout_for(config, plan)
    slot = bare.combine_slots_bytes // limits.most_combine_packets(config, config.row_bytes)
    assert with_rules.combine_slots_bytes == 64 * slot
    assert with_rules.dispatch_slots_bytes > bare.dispatch_slots_bytes
    assert layout_for(config, limits.plan_for(config, NOTHING_SAID)) == bare
    small = cuda(gpu("dispatch", FEW))[0].few_tokens()
    assert layout_for(config, limits.plan_for(config, small)).nbytes == bare.nbytes, "64 tokens fit anyway"


def test_what_dispatch_tells_of_the_way_home_is_what_combine_will_do(cuda):
    """From the configuration alone: combines with other rows than it says would be told wrong otherwise."""
    found, _ = cuda(gpu("combine", FEW, {**SOME, "low_latency": "no"}))
    home = found.homeward()
    assert [home(n) for n in (1, 64, 65, 256)] == [1, 1, 0, 0]
    assert cuda(by_hand={"combine": Geometry(low_latency=1)})[0].homeward()(9) == 1
    assert cuda()[0].homeward()(9) == -1


def test_TU_5_a_grid_that_would_wait_for_itself_is_left_and_said(cuda, caplog):
    """A rule of a whole GPU, and two ranks that share one: its blocks would not be resident together."""
    found, _ = cuda(gpu("dispatch", FEW, MANY), resident=66)
    assert found.geometry("dispatch", FP8, tokens=4096, hidden=7168) == PLANNED
    assert found.geometry("dispatch", FP8, tokens=64, hidden=7168) == Geometry(64, -1, 10, 1)
    said = [r.message for r in caplog.records if "does not fit here" in r.message]
    assert len(said) == 1
    assert "only 66 resident; the built-in default is used" in said[0]


def test_F2_another_model_takes_no_rule_unless_asked_and_a_gpu_without_rules_is_told(cuda, caplog):
    caplog.set_level("WARNING")
    other = {**gpu("dispatch", MANY), "gpu_model": "h100"}
    found, _ = cuda(other)
    size = {"tokens": 4096, "hidden": 7168}
    assert found.geometry("dispatch", FP8, **size) == PLANNED
    assert "gpu_model asked h200, rule has h100" in found.decision("dispatch", FP8, **size).line
    assert any("NO MATCH" in r.message and "ep combine" in r.message for r in caplog.records)
    found, _ = cuda(other, env={"MORI_TUNE_LOOKUP": "any-model"})
    assert found.geometry("dispatch", FP8, **size) == Geometry(132, -1, 8, -1)
    found, _ = cuda({**gpu("dispatch", MANY)}, env={"MORI_EP_LAUNCH_CONFIG_MODE": "MANUAL"})
    assert found.geometry("dispatch", FP8, **size) == PLANNED
    assert found.few_tokens() == NOTHING_SAID


def test_zero_means_as_planned(cuda):
    rule = {"num_tokens": 64, "block_num": 0, "warp_per_block": 0, "low_latency": "planned"}
    found, _ = cuda(gpu("dispatch", rule))
    assert found.geometry("dispatch", FP8, tokens=64, hidden=7168) == PLANNED
    with pytest.raises(RulesError, match=r"here: block_num=-1 .*wanted 0 \(as planned\) to 1024 blocks"):
        geometry_of({"block_num": -1, "rdma_block_num": 0, "warp_per_block": 4}, "here")


def test_F3_the_key_names_phase_and_dtype_outright():
    same = {"kernel_type": "IntraNode", "num_ranks": 2, "hidden": 7168, "topk": 8, "tokens": 64}
    more = {"zero_copy": True, "quant_type": "none", "device": H200}
    dispatch, combine = (
        query_for(*pair, **same, **more) for pair in (("dispatch", "fp8_e4m3"), ("combine", "bf16"))
    )
    assert (dispatch.format.phase, dispatch.key["dtype"]) == ("dispatch", "fp8_e4m3")
    assert (combine.format.phase, combine.key["dtype"]) == ("combine", "bf16")
    assert "zero_copy" not in dispatch.key
    assert combine.key["topk"] == 8
