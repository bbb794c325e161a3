"""Code location of the streamed demo: `draftworks run everything --target tiny -f registry/examples/streamed/definitions.py`."""

from pathlib import Path

from spec_assets.definitions import build_definitions

defs = build_definitions(Path(__file__).resolve().parent)
