"""How vLLM speculates with an exported draft: the config of its serving command, and what it cannot do on a CPU."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftworks.errors import ConfigError

OPTION = "--speculative-config"
RUNNER_V2 = ("dflash2", "dspark", "lilicorr", "xpress")
"""Kinds of drafts, as in the names of their classes, that vLLM's Model Runner V2 has alone, which needs Triton."""


def parse_speculation(command: str, placeholder: str, draft: Path, draft_tokens: int | None = None) -> dict[str, Any]:
    """Return the speculative config of a command line of `vllm serve`, for a draft in a folder and a number of proposals.

    Args:
        placeholder: text that stands for the draft's folder in the command.
        draft_tokens: None leaves the number of the command.

    Raises:
        ConfigError: the command has none.
    """
    words = shlex.split(command)
    found = [value for name, value in zip(words, words[1:]) if name == OPTION]
    try:
        config = json.loads(found[0])
        model = str(config["model"])
    except (IndexError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"expected {OPTION} with a model in the serving command of a draft, found: {command}"
        ) from error
    found = {**config, "model": model.replace(placeholder, str(draft))}
    return found if draft_tokens is None else {**found, "num_speculative_tokens": draft_tokens}


def require_cpu_support(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if vLLM 0.32 and 0.33 do not speculate with this kind of draft on a CPU.

    Args:
        config: the draft's config.json.
    """
    classes = [str(name) for name in config.get("architectures") or ()]
    found = [name for name in classes if any(kind in name.lower() for kind in RUNNER_V2)]
    if found:
        raise ConfigError(
            f"vLLM serves drafts of the class {found[0]} by its Model Runner V2, which needs a GPU: serve it on one, or leave vllm "
            "out of evaluation.serving.engines"
        )
