"""Messages between caller, server, supervisor and ranks: eight bytes of length, then a pickle.

All ends belong to one user and one process tree and reach each other only over inherited descriptors, so what
arrives may be unpickled.
"""

from __future__ import annotations

import pickle
import socket
from typing import Any

_LENGTH_BYTES = 8


def encode(message: object) -> bytes:
    """The bytes that carry `message`."""
    body = pickle.dumps(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def receive(sock: socket.socket) -> Any:
    """The next message, or EOFError once the other end is gone."""
    length = int.from_bytes(_receive_bytes(sock, _LENGTH_BYTES), "little")
    return pickle.loads(_receive_bytes(sock, length))


def _receive_bytes(sock: socket.socket, nbytes: int) -> bytearray:
    data = bytearray()
    while len(data) < nbytes:
        piece = sock.recv(min(nbytes - len(data), 1 << 20))
        if not piece:
            raise EOFError(f"connection closed after {len(data)} of {nbytes} bytes")
        data += piece
    return data


class Inbox:
    """Collects bytes as they come, for a reader that must not block; `take()` gives the complete messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data

    def take(self) -> list[Any]:
        messages = []
        while len(self._data) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._data[:_LENGTH_BYTES], "little")
            if len(self._data) < end:
                break
            messages.append(pickle.loads(bytes(self._data[_LENGTH_BYTES:end])))
            del self._data[:end]
        return messages
