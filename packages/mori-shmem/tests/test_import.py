"""PK-1: importing does nothing but import, and a broken native part says so when it is needed."""

import subprocess
import sys
import textwrap


def _python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )


def test_PK_1_import_is_quick_and_has_no_side_effects() -> None:
    done = _python("""
        import logging, os, sys, time
        def state():
            fds, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
            return fds, threads, dict(os.environ), list(logging.root.handlers)
        before = state()
        began = time.monotonic()
        import mori_shmem
        took_s = time.monotonic() - began
        assert state() == before
        assert "torch" not in sys.modules and "numpy" not in sys.modules
        assert logging.getLogger("mori_shmem").handlers == [] and logging.getLogger("mori_shmem").level == 0
        import mori_shmem.testing, mori_shmem.collectives, mori_shmem.device.host, mori_shmem.comm
        assert "torch" not in sys.modules, "an import of a module must not import torch either"
        assert len(os.listdir("/proc/self/task")) == 1
        assert set(mori_shmem.__all__) <= set(dir(mori_shmem))
        assert took_s < 1, took_s
    """)
    assert done.returncode == 0, done.stderr


def test_PK_1_a_broken_native_part_is_one_import_error_with_file_and_cause() -> None:
    done = _python("""
        import sys
        class Broken:
            def find_spec(self, name, path=None, target=None):
                if name == "mori_shmem._core":
                    raise ImportError("undefined symbol: sdma_missing", path="/somewhere/_core.so")
        sys.meta_path.insert(0, Broken())
        import mori_shmem
        from mori_shmem.errors import ArgumentError, CoreMissing
        try:
            mori_shmem.init(rank=0, world_size=1)
        except ImportError as error:
            assert type(error) is CoreMissing and error.path == "/somewhere/_core.so"
            assert "undefined symbol: sdma_missing" in str(error) and "_core" in str(error)
        else:
            raise AssertionError("no error")
        assert mori_shmem.run_ranks(lambda: 5, 2) == [5, 5]      # what needs no native part still works
        assert mori_shmem.settings.effective()
    """)
    assert done.returncode == 0, done.stderr
