"""Calls like the one before take the short way (again.py), with a driver that only counts: the same launches
and the same refusals as the whole way, and the whole way wherever something has changed."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import host_cost
import pytest
import torch
from host_cost import Last, Pair
from mori_ep import EpDispatchCombineKernelType as Kind
from mori_ep import EpDispatchCombineOp
from mori_ep.targets.cuda.params import CombineParams, DispatchParams
from mori_shmem.errors import ArgumentError, ClosedError, MoriError

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="the driver that counts needs a C compiler")


@pytest.fixture(scope="module")
def library() -> Iterator[ctypes.CDLL]:
    return host_cost.build()


class Watched:
    """An op whose calls have settled on the short way, and how many go the whole way since."""

    def __init__(self, op: EpDispatchCombineOp, library: ctypes.CDLL) -> None:
        self.op, self.pair, self.last = op, Pair(op), Last.in_dll(library, "last")
        for _ in range(3):
            self.pair.both()
        self.whole = 0
        calls: Any = op._calls
        for name in ("dispatch_shape", "combine_shape"):
            setattr(calls, name, self._counting(getattr(calls, name)))

    def _counting(self, check: Any) -> Any:
        def counted(*args: Any, **named: Any) -> Any:
            self.whole += 1
            return check(*args, **named)

        return counted

    def of(self, call: Any) -> int:
        """How many calls of `call` go the whole way; each is one launch."""
        before, launched = self.whole, self.last.count
        call()
        assert self.last.count > launched
        return self.whole - before

    def params(self, kind: type[ctypes.Structure]) -> Any:
        """The arguments of the last launch."""
        return kind.from_address(self.last.params)


@contextlib.contextmanager
def watched(library: ctypes.CDLL, **changes: Any) -> Iterator[Watched]:
    with host_cost.made(library, **changes) as op:
        yield Watched(op, library)


def rows_of(n: int) -> dict[str, torch.Tensor]:
    return {
        "input": torch.zeros(n, 7168, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "weights": torch.ones(n, 8),
        "scales": torch.ones(n, 56),
        "indices": torch.zeros(n, 8, dtype=torch.int32),
    }


def test_the_third_call_and_on_are_short_with_the_addresses_of_their_own_tensors(
    library: ctypes.CDLL,
) -> None:
    with watched(library) as w:
        results = (*w.pair.dispatch(), *w.pair.combine())
        for _ in range(3):
            given = rows_of(8)
            assert w.of(lambda given=given: w.op.dispatch(**given)) == 0
            p = w.params(DispatchParams)
            wanted = [given[x].data_ptr() for x in ("input", "weights", "scales", "indices")]
            assert [p.input.payload, p.input.weights, p.input.scales, p.input.ids] == wanted
            assert (p.c.tokens, p.replay, w.last.stream) == (8, None, 7)
            assert w.of(w.pair.combine) == 0
            p = w.params(CombineParams)
            assert (p.y, p.c.tokens, p.guard) == (w.pair._y.data_ptr(), 8, 1)
        assert all(a is b for a, b in zip((*w.pair.dispatch(), *w.pair.combine()), results, strict=True))


def test_another_number_of_tokens_goes_the_whole_way_and_so_does_its_combine(library: ctypes.CDLL) -> None:
    with watched(library) as w:
        for n in (5, 8, 3):
            assert w.of(lambda n=n: w.op.dispatch(**rows_of(n))) == 1
            ids = rows_of(n)["indices"]
            assert w.of(lambda ids=ids: w.op.combine(w.pair._y, None, ids, use_external_inp_buf=0)) == 1
            assert w.params(CombineParams).c.tokens == n


def test_a_combine_of_another_kind_goes_the_whole_way(library: ctypes.CDLL) -> None:
    """Rows of one's own after registered ones, and back after a dispatch that was short."""
    with watched(library) as w:
        y, ids = torch.zeros(16, 7168).bfloat16(), w.pair._ids
        assert w.of(w.pair.dispatch) == 0
        assert w.of(lambda: w.op.combine(y, None, ids)) == 1
        with pytest.raises(ArgumentError, match="right after a combine of rows of your own"):
            w.pair.combine()
        assert w.of(w.pair.dispatch) == 1, "a refused call forgets"
        assert w.of(w.pair.dispatch) == 0
        assert w.of(w.pair.combine) == 1, "the last combine was of another kind"
        assert w.of(w.pair.combine) == 1
        assert w.of(w.pair.combine) == 0


def test_what_is_refused_is_refused_on_the_short_way_too(library: ctypes.CDLL) -> None:
    with watched(library) as w:
        given = rows_of(8)
        for name, wrong in (
            ("input", given["input"][:, :7000]),
            ("indices", given["indices"].long()),
            ("weights", given["weights"][:, :4]),
            ("scales", given["scales"].t()),
        ):
            with pytest.raises(MoriError, match=name):
                w.op.dispatch(**{**given, name: wrong})
            assert w.of(w.pair.dispatch) == 0
        with pytest.raises(ArgumentError, match="block_num"):
            w.op.dispatch(**given, block_num=0.5)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError):
            w.op.dispatch(**given, return_routing="yes")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError):
            w.op.combine(w.pair._y, None, given["indices"], use_external_inp_buf="yes")  # type: ignore[arg-type]


def test_what_kernels_left_is_raised_and_ends_the_short_way(library: ctypes.CDLL) -> None:
    with watched(library) as w:
        record = w.op.comm.record  # type: ignore[attr-defined]
        record[0] = 1
        w.op.comm.check = lambda: (_ for _ in ()).throw(MoriError("said"))  # type: ignore[method-assign]
        with pytest.raises(MoriError, match="said"):
            w.pair.dispatch()
        record[0] = 0
        with pytest.raises(MoriError, match="cannot be used any more"):
            w.pair.dispatch()


def test_masks_launches_halves_traces_and_the_end_are_noticed(library: ctypes.CDLL) -> None:
    with watched(library, elastic=True) as w:
        w.op.update_mask(1, True)
        assert w.of(w.pair.dispatch) == 1
        assert w.params(DispatchParams).c.alive == 1
        w.op.clean_mask()
        w.pair.both(), w.pair.both()
        assert w.of(w.pair.both) == 0
        w.op.trace = object()  # type: ignore[assignment]
        with pytest.raises(AttributeError):  # a trace that is none: the whole way has it
            w.pair.dispatch()
        w.op.trace = None
    with pytest.raises(ClosedError):
        w.pair.dispatch()
    with host_cost.made(library, kernel_type=Kind.AsyncLL) as op:
        halves = Watched(op, library)
        assert halves.of(halves.pair.both) == 2, "a call in halves has more state than its addresses"


def test_an_op_in_use_on_another_thread_says_so(library: ctypes.CDLL) -> None:
    with watched(library) as w, w.op._lock:
        said: list[str] = []

        def other() -> None:
            try:
                w.pair.dispatch()
            except MoriError as error:
                said.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "in a call already" in said[0]


def test_views_made_anew_and_ids_that_are_looked_at_need_the_whole_way(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MORI_EP_DISABLE_VIEW_CACHE", "MORI_EP_CHECK_IDS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            with watched(library) as w:
                assert w.of(w.pair.dispatch) == 1


def test_a_short_dispatch_also_frees_the_registered_buffer(library: ctypes.CDLL) -> None:
    with watched(library) as w:
        y, ids = torch.zeros(16, 7168).bfloat16(), w.pair._ids
        w.op.combine(y, None, ids)
        assert w.of(w.pair.dispatch) == 0
        w.pair.combine()  # not "right after a combine of rows of your own"


def test_another_buffer_is_not_the_registered_one(library: ctypes.CDLL) -> None:
    with watched(library) as w, pytest.raises(ArgumentError, match="not the registered buffer"):
        w.op.combine(w.pair._y.clone(), None, w.pair._ids, use_external_inp_buf=0)


def test_a_closed_op_and_one_with_other_launches_go_the_whole_way(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(library) as w:
        monkeypatch.setattr(w.op.rules, "take", lambda geometry: None)
        w.op.launch_with({})
        assert w.of(w.pair.both) == 2
        w.pair.both()
        assert w.of(w.pair.both) == 0
    for call in (w.pair.dispatch, w.pair.combine):
        with pytest.raises(ClosedError):
            call()


def test_a_short_combine_of_ones_own_rows_holds_the_registered_buffer(library: ctypes.CDLL) -> None:
    with watched(library) as w:
        y, ids = torch.zeros(16, 7168).bfloat16(), w.pair._ids
        own = lambda: w.op.combine(y, None, ids)  # noqa: E731
        for _ in range(2):
            w.pair.dispatch(), own()
        assert w.of(w.pair.dispatch) + w.of(own) == 0
        with pytest.raises(ArgumentError, match="right after a combine of rows of your own"):
            w.pair.combine()


def test_behind_a_look_at_what_came_a_call_goes_the_whole_way(library: ctypes.CDLL) -> None:
    """The look may have raised what the call has to raise as well."""
    with watched(library) as w:
        w.op.get_dispatch_src_token_pos()
        assert w.of(w.pair.both) == 2
