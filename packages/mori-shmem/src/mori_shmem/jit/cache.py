"""Compiled kernels on disk, safe for any number of processes.

The key is a hash of all that a cubin depends on and of nothing else: every file's text, flags, compiler and
its
version, architecture, package and its version. Not of paths, times, or the environment.

A file holds a magic line, the digest of what follows, and the cubin. It is written beside its place and
renamed into
it, so a reader sees all of it or nothing; a file whose digest does not match (a torn disk, a killed writer
of another
version) is made again. One process compiles a missing key while others wait at a lock; a lock that cannot
be had
costs a second compilation, never correctness.

A cache that cannot be written (read-only, no home) is reported once at WARNING, and the process compiles
for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mori_shmem.jit.source import Source

_LOG = logging.getLogger("mori_shmem")
_MAGIC = b"mori-jit 1\n"
_DIGEST_BYTES = 32


def key_of(
    source: Source,
    *,
    flags: Sequence[str],
    arch: str,
    compiler: str,
    compiler_version: str,
    package: str,
    package_version: str,
) -> str:
    """Equal for equal ingredients, on any machine."""
    ingredients = {
        "format": 1,
        "kernel": source.name,
        "files": list(source.files),
        "flags": list(flags),
        "arch": arch,
        "compiler": [compiler, compiler_version],
        "package": [package, package_version],
    }
    text = json.dumps(ingredients, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Cache:
    """Files by key in one folder; None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._warned = False

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The bytes under `key`, from `make()` if they are not there."""
        if self.folder is None:
            return make()
        found = self._read(key)
        if found is not None:
            return found
        with self._lock(key):
            found = self._read(key)  # another process may have made it while this one waited
            if found is not None:
                return found
            made = make()
            self._write(key, made)
            return made

    def path(self, key: str) -> Path:
        """Where the artefact of a key lies, whether it is there or not."""
        assert self.folder is not None
        return self.folder / f"{key}.cubin"

    def _read(self, key: str) -> bytes | None:
        try:
            blob = self.path(key).read_bytes()
        except OSError:
            return None
        digest, body = blob[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES], blob[len(_MAGIC) + _DIGEST_BYTES :]
        whole = blob.startswith(_MAGIC) and hashlib.sha256(body).digest() == digest
        return body if whole else None

    def _write(self, key: str, body: bytes) -> None:
        assert self.folder is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=f".{key[:16]}-")
        except OSError as e:
            self._warn(e)
            return
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(body).digest() + body)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path(key))
        except OSError as e:
            self._warn(e)
            with contextlib.suppress(OSError):
                os.unlink(name)

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """Held by one process a key; given up by the system when its holder dies."""
        assert self.folder is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / f".{key[:16]}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield  # `_write` will say what is wrong with the folder
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            _LOG.warning(
                "compiled kernels cannot be kept in %s (%s): each process compiles for itself; set "
                "MORI_JIT_CACHE_DIR to a "
                "folder that can be written, or MORI_JIT_CACHE=off",
                self.folder,
                error,
            )
        self._warned = True
