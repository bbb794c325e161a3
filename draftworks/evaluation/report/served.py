"""What live servers accepted (rung 6), as a result of a serving check has it: one record for each server, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}
"""Names of engines for people."""


def list_served(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of each server, in the order in which they were measured.

    Results from before there were several have the figures of one SGLang server.
    """
    return [{name: value for name, value in summary.items() if name != "others"}, *summary.get("others", ())]


def name_engine(found: Mapping[str, Any]) -> str:
    """Return the name of the engine that figures are of."""
    return ENGINES[found.get("engine", "sglang")]
