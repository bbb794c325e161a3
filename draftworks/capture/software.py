"""The engines that run targets in a Python of their own, by their key of the deployment. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftworks.servers.environment import EngineSoftware
from draftworks.sglang.environment import SGLANG
from draftworks.vllm.environment import VLLM

ENGINE_SOFTWARE: dict[str, EngineSoftware] = {each.key: each for each in (SGLANG, VLLM)}


@dataclass(frozen=True)
class EnginePython:
    """The interpreter that an engine is installed for, of programs that run it in their own process."""

    path: Path
    software: EngineSoftware

    def build_program_environment(self, folder: Path) -> dict[str, str]:
        """See `EngineSoftware.build_program_environment`."""
        return self.software.build_program_environment(self.path, folder)
