"""The code location of the checkout's own registry."""

from pathlib import Path

from spec_assets.code_location import build_definitions

REGISTRY = Path(__file__).resolve().parents[1] / "registry"

defs = build_definitions(REGISTRY, module="spec_assets.definitions")
