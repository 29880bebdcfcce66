"""The core raises facts (`CoreError.kind` and `.info`); here they become the errors that people read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mori_shmem import descriptors
from mori_shmem.core import CoreError, native
from mori_shmem.errors import (
    ArgumentError,
    ClosedError,
    DescriptorLimitError,
    ForkedError,
    LayoutError,
    MoriError,
    PeerDied,
    PeerTimeout,
    QueueFault,
    QueueLimitError,
)
from mori_shmem.rendezvous import ranks_text

if TYPE_CHECKING:
    from mori_shmem.comm import Communicator

_POLL_COMPARISONS = {1: "<", 2: "<=", 3: "==", 4: "!=", 5: ">=", 6: ">"}  # by POLL_REGMEM's func
_LIMIT = "the limit is timeout_s=, or MORI_TIMEOUT_S in the environment"


def worded(error: CoreError, comm: Communicator, doing: str) -> MoriError:
    """The error to raise for what the core reported while this rank was `doing` something."""
    who = f"rank {comm.rank} of {comm.world_size}, in {doing}"
    info = error.info
    if descriptors.ran_out(error):
        return descriptors.limit_error(who, f"{info.get('call')} found no file descriptor left")
    if error.kind == "timeout":
        return _timeout(info, comm, who)
    if error.kind in ("peer_died", "peer_left"):
        return _gone(error.kind, info, comm, who)
    if error.kind == "queue_fault":
        return QueueFault(
            f"{who}: the queue stopped at a packet that it may not execute: "
            f"{info.get('reason')}{_place(info, comm)}. Packet: {_dwords(info)}. The queue takes no more "
            "work; make a new communicator"
        )
    if error.kind == "queue_limit":
        return queue_limit(info.get("requested", 0), info.get("limit", 0), who)
    if error.kind == "out_of_range":
        return LayoutError(f"{who}: {info.get('what')}{_place(info, comm)} lies in no open window")
    if error.kind == "misaligned":
        return LayoutError(
            f"{who}: {info.get('what')}{_place(info, comm)} is not {info.get('alignment')}-aligned"
        )
    if error.kind in ("bad_value", "bad_queue"):
        return ArgumentError(f"{who}: {_facts(info)}")
    if error.kind == "closed":
        return ClosedError(f"{who}: the {info.get('what', 'communicator')} is closed")
    if error.kind == "forked":
        return forked(info.get("owner_pid"), info.get("pid"))
    return MoriError(f"{who}: {info.get('call', error.kind)} failed: {info.get('error') or _facts(info)}")


def raise_faults(what: str, faults: Sequence[MoriError | None]) -> None:
    """Raise the same error on all ranks if some of them, in rank order, have met one in `what`."""
    found = [(rank, fault) for rank, fault in enumerate(faults) if fault is not None]
    if found:
        limited = any(isinstance(fault, DescriptorLimitError) for _, fault in found)
        kind: type[MoriError] = DescriptorLimitError if limited else LayoutError
        raise kind(f"{what} failed on " + "; ".join(f"rank {rank}: {fault}" for rank, fault in found))


def queue_limit(requested: int, limit: int, who: str) -> QueueLimitError:
    return QueueLimitError(
        f"{who}: requested={requested} queues to each peer, limit={limit} (MORI_SHMEM_QUEUES). None was "
        "opened. Ask for fewer (max_queues=) or raise the limit; where the engines are hardware, the likely "
        "cause is another process that still holds queues"
    )


def forked(owner_pid: object, pid: object) -> ForkedError:
    return ForkedError(
        f"this communicator belongs to process {owner_pid}, this is its forked child {pid}: engines and "
        "sockets stay with the parent. Call init in the child, or start it without fork"
    )


def _timeout(info: dict[str, Any], comm: Communicator, who: str) -> PeerTimeout:
    missing = [rank for rank in info.get("missing") or [] if rank != comm.rank]
    peer = info.get("peer", -1)
    peers = missing or ([peer] if peer is not None and peer >= 0 else [])
    text = f"{who}: waited {info.get('waited_s', 0.0):.3g} s ({_LIMIT})"
    if missing:
        text += f" for {ranks_text(missing)}, which did not come"
    elif info.get("what") == "kernel":
        text = (
            f"{who}: a kernel's wait passed its deadline ({_LIMIT}): {info['purpose']} from rank {peer} "
            f"should have been >= {info['wanted']}; it was {info['seen']} (block {info['block']}). The call "
            "that the kernel belongs to has failed"
        )
    elif info.get("dwords"):
        return PeerTimeout(f"{text}; the queue stands at {_packet(info, comm)}", rank=comm.rank, peers=peers)
    elif _is_about_a_word(info):
        text += f" for {_word(info, comm)}" + (f". It is expected from rank {peer}" if peers else "")
    return PeerTimeout(text, rank=comm.rank, peers=peers, seen=info.get("seen"), wanted=info.get("wanted"))


def _gone(kind: str, info: dict[str, Any], comm: Communicator, who: str) -> PeerDied:
    ranks = list(info.get("ranks") or [])
    how = "died" if kind == "peer_died" else "left (closed the communicator)"
    text = f"{who}: {ranks_text(ranks) if ranks else 'a peer'} {how}"
    if _is_about_a_word(info):
        text += f"; waited for {_word(info, comm)}"
    return PeerDied(text, rank=comm.rank, peers=ranks)


def _is_about_a_word(info: dict[str, Any]) -> bool:
    return info.get("wanted") is not None and bool(info.get("address"))


def _word(info: dict[str, Any], comm: Communicator) -> str:
    where = comm.describe(info["address"])
    return f"the signal at {where} to be {info.get('cmp', '>=')} {info['wanted']}; it is {info.get('seen')}"


def _packet(info: dict[str, Any], comm: Communicator) -> str:
    """The packet that a queue has come to; if that is a wait, also for what."""
    packet = native.describe_packet(b"".join(dword.to_bytes(4, "little") for dword in info["dwords"]))
    if packet["packet"] != "POLL_REGMEM":
        return f"{packet['packet']} {_dwords(info)}"
    where, cmp = packet["dst"], _POLL_COMPARISONS.get(packet["func"], "?")
    return (
        f"a wait for the signal at {comm.describe(where)} to be {cmp} {packet['value']}; it is "
        f"{comm.core.read(where & ~7)}"
    )


def _place(info: dict[str, Any], comm: Communicator) -> str:
    address, nbytes = info.get("address"), info.get("nbytes")
    if not address:
        return ""
    return f" at {comm.describe(address)}" + (f", {nbytes} bytes" if nbytes else "")


def _dwords(info: dict[str, Any]) -> str:
    return " ".join(f"{dword:08x}" for dword in info.get("dwords") or [])


def _facts(info: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in info.items())
