"""Checks of the Python that SGLang is installed in, made before Draftworks runs anything there. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from draftworks.errors import ConfigError
from draftworks.servers.environment import EngineSoftware

SGLANG_VERSIONS = ("0.5.23",)
"""Versions whose internal types the capture hook reads and whose numbers were compared with those of transformers."""
FIRST_CAPTURING = (0, 5, 23)
"""First version with an option to return the hidden states of given layers (`--return-aux-hidden-state-layer-ids`)."""
SGLANG = EngineSoftware(
    name="SGLang",
    key="sglang",
    distributions=("sglang",),
    versions=SGLANG_VERSIONS,
    recipe="`make sglang-env` creates an environment for CPU",
    captures="sglang",
)


def require_capturing(version: str, where: str) -> None:
    """Raise ConfigError if this version of SGLang cannot return hidden states; it can still answer and serve."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is not None and tuple(map(int, numbers.groups())) < FIRST_CAPTURING:
        expected = ".".join(map(str, FIRST_CAPTURING))
        raise ConfigError(
            f"{where} is SGLang {version}, which cannot return hidden states: expected {expected} or later. Install "
            "that, or set capture.backend to hf"
        )


def require_cpu_speculation(python: Path) -> None:
    """Raise ConfigError unless this Python has the project's platform plug-in, with which SGLang speculates without a GPU."""
    script = "import importlib.util as u; print(u.find_spec('draftworks_sglang_cpu.speculation') is not None)"
    if SGLANG.run_python(python, script).stdout.strip() != "True":
        raise ConfigError(
            f"{SGLANG.describe_python(python)} cannot speculate on a CPU: expected a GPU, or this project's platform "
            "plug-in for SGLang. `make sglang-env` creates an environment with it; on a machine with a GPU set "
            "evaluation.serving.device"
        )
