"""vLLM in its own environment, for the tests that run it."""

from __future__ import annotations

import os
from pathlib import Path

from waiting import HANG_S

from draftworks.config.capture import VLLMSpec
from draftworks.vllm.environment import VLLM as SOFTWARE

ROOT = Path(__file__).resolve().parents[2]
VLLM = VLLMSpec(python=str(ROOT / ".venv-vllm" / "bin" / "python"), start_timeout_s=HANG_S, grace_s=60)


def make_vllm_environment(folder: Path) -> dict[str, str]:
    """The environment of a program that runs in vLLM's Python, with a link to this package in `folder`."""
    return {**os.environ, **SOFTWARE.build_program_environment(Path(VLLM.python), folder)}
