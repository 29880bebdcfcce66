"""Documents stay true: every command in them is run here, or says which hardware it needs.

A fenced block opens with its language and, where it cannot run anywhere, the reason:
    ```sh                        run here, line by line, from the root of the repository
    ```sh needs: 8 GPUs          not run; a person with the hardware can
    ```sh in: .ci/run            run by that script, which must contain the line
    ```python                    run here as one script
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")])
LIMIT_S = 240


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    note: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    found = []
    text = page.read_text()
    for match in re.finditer(r"^```(\w+)[ \t]*([^\n]*)\n(.*?)^```", text, re.M | re.S):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[1], match[2].strip(), match[3]))
    return found


ALL = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in ALL if block.language == "sh"]
PYTHON = [block for block in ALL if block.language == "python" and not block.note]


def commands(block: Block) -> list[str]:
    joined = block.text.replace("\\\n", " ")
    return [c.split("  #")[0].strip() for c in joined.splitlines() if c.strip() and not c.startswith("#")]


@pytest.mark.parametrize("block", SHELL, ids=lambda b: b.name)
@pytest.mark.timeout(LIMIT_S * 4)
def test_commands(block: Block) -> None:
    if block.note.startswith("needs: "):
        return
    if block.note.startswith("in: "):
        script = (ROOT / block.note[4:]).read_text()
        assert all(c in script for c in commands(block)), f"{block.note[4:]} does not run {block.text}"
        return
    assert not block.note, f"{block.name}: unknown note {block.note!r}"
    for command in commands(block):
        subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=ROOT, check=True, timeout=LIMIT_S)


@pytest.mark.parametrize("block", PYTHON, ids=lambda b: b.name)
def test_python_blocks(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.text)
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=True, timeout=LIMIT_S)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page}: dead link {target}"
