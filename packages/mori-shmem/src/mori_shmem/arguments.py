"""How errors of these packages name a wrong argument."""

from __future__ import annotations

_NAMED = ("dtype", "device")  # of torch, which is not imported for it


def described(value: object) -> str:
    """A wrong value: itself if that is short, else its type."""
    kind = type(value)
    short = value is None or isinstance(value, bool | int | float | str)
    short = short or (kind.__module__ == "torch" and kind.__name__ in _NAMED)
    return repr(value)[:80] if short else f"a {kind.__name__}"
