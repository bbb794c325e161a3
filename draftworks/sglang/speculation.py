"""A draft for a server to speculate with: from the command that an export tells to what we start ourselves."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from draftworks.errors import ConfigError

ALGORITHM, DRAFT = "--speculative-algorithm", "--speculative-draft-model-path"
STEPS, BRANCHES, VERIFIED = (
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
)
_PREFIX = "--speculative-"
_ON_CPU = ("--attention-backend", "triton", "--triton-attention-num-kv-splits", "1")
"""SGLang speculates with Triton kernels, which our platform plug-in has interpreted on a CPU; each split costs one more turn."""

_CPU_ALGORITHMS = ("EAGLE", "EAGLE3", "DFLASH")
"""Those for which our platform plug-in stands in on a CPU. DSPARK is refused there by SGLang itself."""


@dataclass(frozen=True)
class Speculation:
    """SGLang's options for speculative decoding, by name; `ALGORITHM` and `DRAFT` are among them.

    Only chains are meant: one proposal at each step, as the walk counts them.
    """

    options: dict[str, str]

    @classmethod
    def of_command(cls, command: str, placeholder: str, folder: Path) -> Speculation:
        """The options in a command line of `sglang.launch_server`, with the draft in `folder`.

        Args:
            placeholder: stands for the draft's folder in the command.

        Raises:
            ConfigError: the command does not say what SGLang needs to know of a draft.
        """
        words = shlex.split(command)
        options = {word: value for word, value in zip(words, words[1:]) if word.startswith(_PREFIX)}
        if ALGORITHM not in options or DRAFT not in options:
            raise ConfigError(f"a command that serves a draft: expected {ALGORITHM} and {DRAFT}, found: {command}")
        return cls({name: value.replace(placeholder, str(folder)) for name, value in options.items()})

    @property
    def algorithm(self) -> str:
        """As SGLang names it: EAGLE3, DFLASH, ..."""
        return self.options[ALGORITHM]

    def require_supported(self, device: str) -> None:
        """ConfigError where SGLang does not speculate so on a device of this type."""
        if device == "cpu" and self.algorithm not in _CPU_ALGORITHMS:
            raise ConfigError(
                f"SGLang does not serve drafts with {ALGORITHM} {self.algorithm} on a CPU: expected one of "
                f"{', '.join(_CPU_ALGORITHMS)} there. Serve it on a GPU, or set evaluation.serving.prompts: 0"
            )

    def with_draft_tokens(self, count: int) -> Speculation:
        """The same, proposing `count` tokens a pass where the server is told how many; a block has them in its config.json."""
        if STEPS not in self.options:
            return self
        return Speculation({**self.options, STEPS: str(count), BRANCHES: "1", VERIFIED: str(count + 1)})

    def build_arguments(self, device: str) -> list[str]:
        """Of `sglang.launch_server`, with the server's own counters switched on."""
        words = [word for pair in self.options.items() for word in pair]
        return [*words, "--enable-metrics", *(_ON_CPU if device == "cpu" else ())]

    def build_environment(self, device: str) -> dict[str, str]:
        """Variables of the server beside those of every server."""
        return {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
