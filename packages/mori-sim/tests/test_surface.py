"""The vendor libraries' entry points, called as a C program calls them."""

import pytest

NAMES = (
    "ipc",
    "devices",
    "memory",
    "host_memory",
    "windows",
    "streams",
    "null_stream",
    "graphs",
    "fork_is_refused",
    "queues",
    "queue_limits",
    "errors",
    "both_names_are_one_node",
)


@pytest.fixture(scope="module")
def surface(program):
    return program("surface.py", options=("--devices", "8"))


@pytest.mark.parametrize("name", NAMES)
def test_entry_points(surface, name):
    assert name in surface.ok(), surface.output


def test_they_hold_with_lazy_copies(program):
    outcome = program(
        "surface.py", "queues", "queue_limits", options=("--devices", "8"), MORI_SIM_LAZY_COPIES="1"
    )
    assert outcome.ok() == {"queues", "queue_limits"}, outcome.output
    assert outcome.code == 0
