"""What the README shows must run as it stands there, and its tables must agree with the code."""

import pathlib
import re

import pytest
from mori_shmem.variables import TABLE

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_example_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    promised = re.findall(r"print\(.*\)  # (.*)", code)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.splitlines() == promised


def test_the_settings_table_is_complete_and_right() -> None:
    rows = dict(re.findall(r"^\| `(MORI_\w+)` \| (\S+) \|", README.read_text(), flags=re.MULTILINE))
    assert rows == {
        s.variable: f"{s.default:g}" if type(s.default) is float else str(s.default) for s in TABLE
    }
