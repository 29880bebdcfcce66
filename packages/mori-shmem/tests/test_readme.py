"""What the README shows must run as it stands there, and its tables must agree with the code."""

import pathlib
import re
import subprocess
import sys

from mori_shmem.variables import TABLE

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_example_runs_and_prints_what_it_says(tmp_path: pathlib.Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    promised = re.findall(r"print\(.*\)  # (.*)", code)
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == promised


def test_the_settings_table_is_complete_and_right() -> None:
    rows = dict(re.findall(r"^\| `(MORI_\w+)` \| (\S+) \|", README.read_text(), flags=re.MULTILINE))
    assert rows == {
        s.variable: f"{s.default:g}" if type(s.default) is float else str(s.default) for s in TABLE
    }
