"""The adapter for aiter, against stand-ins with the attributes and signatures of its trees: what it finds,
what it refuses, what kernels get, and that everything is put back."""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from mori_megamoe.adapters import aiter_found
from mori_megamoe.adapters.aiter import AiterRefused, AiterStage1Sdma, Launch
from mori_megamoe.adapters.aiter_found import PACKAGE, SLOTS, STAGE1_ARGUMENTS, Found
from mori_shmem.errors import ArgumentError, MoriError, UnsupportedShape

NO_KERNELS = "this version of mori-megamoe has no Stage1 kernels for gfx950"


class Int64(NamedTuple):
    """In the place of the DSL's integer."""

    value: int


class Variant(NamedTuple):
    sort_block_m: int


class Tree:
    """One kind of source tree: modules, and layers that call what they have as it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        self.kind, self._monkeypatch = kind, monkeypatch
        parts = PACKAGE.split(".")
        for end in range(1, len(parts) + 1):
            self.module(".".join(parts[:end]))
        first = {"plan inside": 0, "plan before": 3, "later": 10}[kind]
        names = [name for name in SLOTS if kind != "plan inside" or name not in ("FANOUT_PAIR_CONFIG",)]
        slots = enum.IntEnum("DispatchSlot", {name: first + 2 * i for i, name in enumerate(names)})
        self.module(f"{PACKAGE}.dispatch", DispatchSlot=slots)
        home = "intra_node" if kind == "later" else "mega_moe_v2"
        self.module(f"{PACKAGE}.{home}", MegaMoEV2=Layer)
        self.layer = Layer(kind)

    def module(self, name: str, **members: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(members)
        self._monkeypatch.setitem(sys.modules, name, made)
        return made

    def gemm1(self, build: Any) -> None:
        self.module(f"{PACKAGE}.gemm1", build_fused_gemm1=build)


class Layer:
    """As MegaMoEV2 keeps what it launches."""

    def __init__(self, kind: str) -> None:
        self.rank, self.world_size = 1, 2
        self.model_dim, self.inter_dim, self.topk, self.mtpr = 7168, 3072, 6, 8192
        self._s1_nvm, self._s1_fixed_slot = 100_000, False
        self._s1_w1 = "weights"
        self.log: list[Any] = []
        self._s1_mega = self._original("mega", [*"abcdefghijklmnopqr", "stream"])
        if kind != "plan inside":
            bundle = [*"abcdefghijklmnopqr", "variant_id", "stream"]
            self._s1_mega_bundle = self._original("bundle", bundle)
            self._s1_prepare = self._original("prepare", [*"abcde", "q1", "q2", "q3", "stream"])

    def _original(self, name: str, parameters: list[str]) -> Any:
        namespace: dict[str, Any] = {"log": self.log}
        source = (
            f"def {name}({', '.join(parameters)}, **compiled):\n"
            f"    log.append(({name!r}, [{', '.join(parameters)}], compiled))"
        )
        exec(source, namespace)
        return namespace[name]

    def forward(
        self, *, variant: int | None = 1, x_bf16: int = 77, block_m: int = 64, extra: int = 0
    ) -> None:
        """A call as aiter makes it: prepare, then Stage1. x_bf16=0: forward_prequant."""
        quant = [Int64(x_bf16), Int64(x_bf16 and 78), Int64(x_bf16 and 79)]
        planned = [Int64(i) for i in range(5)]
        self._s1_prepare(*planned, *quant, "stream", num_quant_cu=64 if x_bf16 else 0, num_prepare_cu=32)
        self.stage1(variant, block_m, extra)

    def stage1(self, variant: int | None = 1, block_m: int = 64, extra: int = 0) -> None:
        call = ["out", "rx", self._s1_w1, *range(STAGE1_ARGUMENTS - 3 + extra)]
        if variant is None:
            self._s1_mega(*call, "stream", sort_block_m=block_m, model_dim=7168)
        else:
            variants = (Variant(32), Variant(64), Variant(128))
            self._s1_mega_bundle(*call, variant, "stream", variants=variants, model_dim=7168)


class Kernels:
    """Take notes."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def open(self, found: Found, options: Any, comm: Any) -> None:
        self.log.append(("open", found.slab_bytes, found.landing_bytes))

    def launch(self, launch: Launch) -> None:
        self.log.append(launch)

    def close(self) -> None:
        self.log.append("close")


def communicator(world_size: int = 2, backend: str = "rocm") -> Any:
    """Rank 1 of ranks that all do as it does."""
    return SimpleNamespace(
        rank=1, world_size=world_size, backend=backend, all_gather=lambda told: [told] * world_size
    )


COMM = communicator()


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Tree:
    monkeypatch.setattr(aiter_found, "_arch", lambda: "gfx950:sramecc+:xnack-")
    return Tree(monkeypatch, getattr(request, "param", "plan before"))


both = pytest.mark.parametrize("tree", ["plan before", "later"], indirect=True)


def reasons(layer: Layer, comm: Any = COMM, **choices: Any) -> list[str]:
    return AiterStage1Sdma(layer, comm, kernels=Kernels(), **choices).reasons()


# ---- what is found ----


@both
def test_a_layer_that_has_a_place_for_it_lacks_only_kernels(tree: Tree) -> None:
    adapter = AiterStage1Sdma(tree.layer, COMM)
    assert len(adapter.reasons()) == 1
    assert adapter.reasons()[0].startswith(NO_KERNELS)
    before = dict(vars(tree.layer))
    with pytest.raises(AiterRefused, match="has no Stage1 kernels for gfx950") as refused:
        adapter.install()
    assert refused.value.reasons == tuple(adapter.reasons())
    assert "Found: aiter of unknown version, MegaMoEV2 in " in str(refused.value)
    assert vars(tree.layer) == before
    assert reasons(tree.layer) == []


@both
def test_entries_of_the_table_are_found_by_name(tree: Tree) -> None:
    found = Found.of(tree.layer)
    first = 10 if tree.kind == "later" else 3
    assert found.slots == {name: first + 2 * i for i, name in enumerate(SLOTS)}
    assert found.arities == {"_s1_mega": 18, "_s1_mega_bundle": 19}
    assert found.row_bytes == 7168 + 224
    assert (found.slab_bytes, found.landing_bytes) == (8192 * 6 * 7392, 100_000 * 7392)


def test_without_aiter_it_says_what_is_needed_and_that_no_wheel_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "aiter", None)
    (reason, kernels) = AiterStage1Sdma(object(), COMM).reasons()
    assert reason.startswith(f"aiter is not installed: a source tree with {PACKAGE} is needed")
    assert "No amd-aiter wheel on the package index has it, the newest is of 2025" in reason
    assert kernels.startswith(NO_KERNELS)


def test_the_wheel_of_2025_has_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = ModuleType("aiter")
    wheel.__version__ = "0.1.7.post2"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter", wheel)
    assert reasons(object())[0].startswith("aiter 0.1.7.post2 has no MegaMoEV2")  # type: ignore[arg-type]


@pytest.mark.parametrize("tree", ["plan inside"], indirect=True)
def test_trees_that_plan_inside_stage1_are_refused_by_what_they_lack(tree: Tree) -> None:
    first, second = reasons(tree.layer)
    assert first.startswith("the layer has no _s1_mega_bundle, _s1_prepare: trees that plan inside")
    assert second.startswith("DispatchSlot has no FANOUT_PAIR_CONFIG")


# ---- one sentence for each refusal ----


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"_s1_fixed_slot": True, "mtpr": 128}, "max_tok_per_rank=128 gives every expert fixed slots"),
        ({"mtpr": 32768}, "max_tok_per_rank=32768: from 32768 on rows are stored by token"),
        ({"model_dim": 7200}, "model_dim=7200: a multiple of 256 is needed"),
        ({"inter_dim": 3000}, "inter_dim=3000: a multiple of 256 is needed"),
        ({"rank": 0}, "the layer is rank 0 of 2, the communicator rank 1 of 2"),
        ({"world_size": 4}, "the layer is rank 1 of 4, the communicator rank 1 of 2"),
    ],
)
def test_what_a_layer_is_made_for(tree: Tree, changes: dict[str, Any], words: str) -> None:
    for name, value in changes.items():
        setattr(tree.layer, name, value)
    (reason,) = reasons(tree.layer)
    assert words in reason


def test_where_it_runs(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    (reason,) = reasons(tree.layer, communicator(backend="host"))
    assert reason.startswith("the communicator's backend is 'host'")
    tree.layer.world_size = 16
    (reason,) = reasons(tree.layer, communicator(world_size=16))
    assert reason == "16 ranks: at most 8, those of one node"
    tree.layer.world_size = 2
    for arch, name in (("gfx942", "gfx942"), (None, "no AMD GPU")):
        monkeypatch.setattr(aiter_found, "_arch", lambda arch=arch: arch)
        (reason,) = reasons(tree.layer)
        assert reason.startswith(f"this GPU is {name}")


def test_a_newer_call_is_refused_at_install_where_its_signature_tells(tree: Tree) -> None:
    tree.layer._s1_mega_bundle = tree.layer._original("bundle", [*"abcdefghijklmnopqrstuv", "stream"])
    (reason,) = reasons(tree.layer)
    assert reason == "_s1_mega_bundle takes 22 arguments before its stream, 19 are known"


def test_an_attribute_that_is_gone_is_named(tree: Tree) -> None:
    del tree.layer._s1_nvm
    (reason,) = reasons(tree.layer)
    assert reason.startswith("the layer has no _s1_nvm")


def test_packing_in_the_launch_needs_that_gemm1(tree: Tree) -> None:
    words = "needs aiter's gemm1.py with build_fused_gemm1(tib_rsrc=, indirect_input=)"
    assert words in reasons(tree.layer, gemm1="7001")[0]
    tree.gemm1(lambda *, x_tensor, trb_rsrc: None)
    assert words in reasons(tree.layer, gemm1="in-launch")[0]
    tree.gemm1(lambda *, x_tensor, tib_rsrc, indirect_input: None)
    assert reasons(tree.layer, gemm1="7001") == []
    with pytest.raises(ArgumentError, match="gemm1='7001' with fuse_quant=True"):
        AiterStage1Sdma(tree.layer, COMM, gemm1="7001", fuse_quant=True)


# ---- installed ----


@both
def test_kernels_get_the_call_and_the_originals_come_back(tree: Tree) -> None:
    layer, kernels = tree.layer, Kernels()
    before = dict(vars(layer))
    adapter = AiterStage1Sdma(layer, COMM, kernels=kernels).install()
    assert kernels.log == [("open", 8192 * 6 * 7392, 100_000 * 7392)]
    layer._s1_w1 = "weights of another layer"  # as frameworks do
    layer.forward(variant=1)
    layer.forward(variant=2)
    layer.forward(variant=None, block_m=128)
    first, second, third = kernels.log[1:]
    assert (first.block_m, first.scale_mode, first.x_bf16) == (64, "ldsw", None)
    assert (second.block_m, second.scale_mode) == (128, "shuffler")
    assert (third.block_m, third.stream, third.compiled_for) == (128, "stream", {"model_dim": 7168})
    assert first.call.w1 == "weights of another layer"
    assert first.call._fields[-1] == "expected"
    assert (first.call.row_scales, first.call.expected) == (0, STAGE1_ARGUMENTS - 4)
    assert [name for name, *_ in layer.log] == ["prepare"] * 3  # which stays aiter's, and quantises
    assert layer.log[0][2]["num_quant_cu"] == 64
    layer._s1_w1 = before["_s1_w1"]
    adapter.uninstall()
    assert vars(layer) == before
    assert all(vars(layer)[name] is before[name] for name in before)
    assert kernels.log[-1] == "close"
    layer.forward()
    assert [name for name, *_ in layer.log][-1] == "bundle"


def test_with_fuse_quant_prepare_only_plans_and_kernels_get_this_calls_rows(tree: Tree) -> None:
    layer, kernels = tree.layer, Kernels()
    original = layer._s1_prepare
    adapter = AiterStage1Sdma(layer, COMM, fuse_quant=True, scale_mode="ldsw", kernels=kernels).install()
    layer.forward(variant=2, x_bf16=77)
    (_, args, compiled) = layer.log[0]
    assert args == [*(Int64(i) for i in range(5)), Int64(0), Int64(0), Int64(0), "stream"]
    assert compiled == {"num_quant_cu": 0, "num_prepare_cu": 32}
    assert (kernels.log[-1].x_bf16, kernels.log[-1].scale_mode) == (Int64(77), "ldsw")
    with pytest.raises(ArgumentError, match="forward_prequant with fuse_quant=True"):
        layer.forward(x_bf16=0)
    layer.forward()
    with pytest.raises(ArgumentError, match="no bf16 rows to quantise"):
        layer.stage1()  # the rows of the call before are not taken for this one's
    adapter.uninstall()
    assert layer._s1_prepare is original


def test_what_only_a_call_tells_is_refused_there(tree: Tree) -> None:
    AiterStage1Sdma(tree.layer, COMM, kernels=Kernels()).install()
    with pytest.raises(UnsupportedShape, match=r"tiles of 32 rows .* for 64 and 128"):
        tree.layer.forward(variant=0)
    with pytest.raises(ArgumentError, match="launched Stage1 with 20 arguments, 18 are known"):
        tree.layer.forward(extra=2)


def test_twice_is_refused(tree: Tree) -> None:
    adapter = AiterStage1Sdma(tree.layer, COMM, kernels=Kernels())
    with pytest.raises(MoriError, match="is not installed"):
        adapter.uninstall()
    adapter.install()
    with pytest.raises(MoriError, match="is installed already"):
        adapter.install()
    (reason,) = reasons(tree.layer)
    assert reason.startswith("another Stage1 of mori-megamoe is installed in this layer")
    adapter.uninstall()
    assert reasons(tree.layer) == []


@both
def test_kernels_that_cannot_be_opened_leave_the_layer_as_it_was(tree: Tree) -> None:
    class NoRoom(Kernels):
        def open(self, found: Found, options: Any, comm: Any) -> None:
            raise MemoryError("no room")

    before = tree.layer._s1_mega
    with pytest.raises(MoriError, match="kernels cannot be opened on rank 0: MemoryError: no room; rank 1: "):
        AiterStage1Sdma(tree.layer, COMM, kernels=NoRoom()).install()
    assert tree.layer._s1_mega is before


def test_what_the_adapter_is_given_is_looked_at() -> None:
    for comm in (None, 3, "x"):
        with pytest.raises(ArgumentError, match=r"comm is .*: a communicator of mori_shmem\.init is needed"):
            AiterStage1Sdma(object(), comm)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="kernels is 'x': an object with open, launch and close"):
        AiterStage1Sdma(object(), COMM, kernels="x")  # type: ignore[arg-type]
