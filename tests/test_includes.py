"""C++ files include what they name: what comes along by chance with one compiler, does not with the next."""

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADER_OF = {
    "algorithm": "min max sort find find_if any_of all_of fill clamp remove_if upper_bound lower_bound",
    "array": "array", "atomic": "atomic", "chrono": "chrono", "condition_variable": "condition_variable",
    "cstdio": "snprintf fprintf fopen", "cstdlib": "getenv abort strtoull", "deque": "deque",
    "cstring": "memcpy memset strlen strerror memcmp", "functional": "function", "limits": "numeric_limits",
    "map": "map", "memory": "unique_ptr shared_ptr make_unique make_shared weak_ptr",
    "mutex": "mutex lock_guard unique_lock", "optional": "optional nullopt", "set": "set",
    "sstream": "istringstream ostringstream", "stdexcept": "invalid_argument runtime_error out_of_range",
    "string": "string to_string", "thread": "thread", "tuple": "tuple tie", "unordered_map": "unordered_map",
    "utility": "move pair exchange swap", "vector": "vector",
}  # fmt: skip
HEADERS = {name: header for header, names in HEADER_OF.items() for name in names.split()}
PROMISED = {"map": {"utility"}, "memory": {"utility"}, "functional": {"utility"}, "thread": {"chrono"},
            "condition_variable": {"mutex"}}  # fmt: skip
PYBIND11 = {"string", "vector", "memory", "functional", "stdexcept", "utility", "optional", "map"}


@functools.cache
def headers_of(file: Path) -> frozenset[str]:
    """Of the standard library: what the file includes, and what the project's headers do that it includes."""
    text = file.read_text()
    found = set(re.findall(r"#include\s*<([^>]+)>", text))
    base = next(folder for folder in file.parents if folder.name == "csrc")
    for name in re.findall(r'#include\s*"([^"]+)"', text):
        places = [place / name for place in (file.parent, base, base / "include") if (place / name).exists()]
        found |= headers_of(places[0].resolve()) if places else set()
    found |= set().union(*(PROMISED.get(header, set()) for header in found))
    return frozenset(found | (PYBIND11 if any("pybind11" in header for header in found) else set()))


def test_every_name_of_the_standard_library_has_its_header() -> None:
    files = [f for kind in ("*.cpp", "*.h", "*.hpp") for f in ROOT.glob(f"packages/*/csrc/**/{kind}")]
    missing = [
        f"{file.relative_to(ROOT)}: std::{name} without <{HEADERS[name]}>"
        for file in files
        for name in sorted(
            set(re.findall(r"std::(\w+)", re.sub(r"//.*", "", file.read_text()))) & HEADERS.keys()
        )
        if HEADERS[name] not in headers_of(file)
    ]
    assert len(files) > 100
    assert missing == []
