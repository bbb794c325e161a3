"""Text of the differences between two nested mappings. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ABSENT = "nothing"


def describe_changes(
    expected: Mapping[str, Any], found: Mapping[str, Any], wording: str = "{name}: expected {expected}, found {found}"
) -> list[str]:
    """Return a text for each value that differs, sorted by name; nested names are joined as `outer.inner`."""
    ours, theirs = _flatten(expected), _flatten(found)
    return [
        wording.format(name=name, expected=ours.get(name, ABSENT), found=theirs.get(name, ABSENT))
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or ours[name] != theirs[name]
    ]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `{"training.lr": 0.1}` for `{"training": {"lr": 0.1}}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat
