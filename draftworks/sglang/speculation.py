"""Options of a server that speculates with a draft, parsed from the serving command that an export writes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
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
"""Arguments for speculation on a CPU.

SGLang speculates with Triton kernels, which the project's platform plug-in runs in Triton's interpreter on a CPU; each
KV split costs one more iteration there.
"""

_CPU_ALGORITHMS = ("EAGLE", "EAGLE3", "DFLASH")
"""Algorithms that the project's platform plug-in supports on a CPU. SGLang itself refuses DSPARK there."""


@dataclass(frozen=True)
class Speculation:
    """SGLang's options for speculative decoding, by name; `ALGORITHM` and `DRAFT` are among them.

    Only chains are supported: one proposed token at each step, as the walk counts them.
    """

    options: dict[str, str]

    @classmethod
    def of_command(cls, command: str, placeholder: str, folder: Path) -> Speculation:
        """Parse the speculation options of a command line of `sglang.launch_server`, with the draft in `folder`.

        Args:
            placeholder: text that stands for the draft's folder in the command.

        Raises:
            ConfigError: the command lacks the algorithm or the draft's path.
        """
        words = shlex.split(command)
        options = {word: value for word, value in zip(words, words[1:]) if word.startswith(_PREFIX)}
        if ALGORITHM not in options or DRAFT not in options:
            raise ConfigError(f"expected {ALGORITHM} and {DRAFT} in the serving command of a draft, found: {command}")
        return cls({name: value.replace(placeholder, str(folder)) for name, value in options.items()})

    @property
    def algorithm(self) -> str:
        """Name of the algorithm in SGLang, such as EAGLE3 or DFLASH."""
        return self.options[ALGORITHM]

    def require_supported(self, device: str) -> None:
        """Raise ConfigError if SGLang does not run this algorithm on a device of this type."""
        if device == "cpu" and self.algorithm not in _CPU_ALGORITHMS:
            raise ConfigError(
                f"SGLang does not serve drafts with {ALGORITHM} {self.algorithm} on a CPU: expected one of "
                f"{', '.join(_CPU_ALGORITHMS)} there. Serve it on a GPU, or set evaluation.serving.prompts: 0"
            )

    @property
    def sets_draft_tokens(self) -> bool:
        """Whether the number of proposals is a server option; if not, the draft's config.json decides it."""
        return STEPS in self.options

    def find_contradicted(self, args: Sequence[str]) -> list[str]:
        """Return those of more arguments for the server that set one of the options to another value."""
        found = []
        for word, following in zip(args, [*args[1:], ""]):
            name, equals, value = word.partition("=")
            if name in self.options and (value if equals else following) != self.options[name]:
                found.append(word)
        return found

    def with_draft_tokens(self, count: int) -> Speculation:
        """Return a copy that proposes `count` tokens a pass, if the number is a server option.

        Block drafts have the number in their config.json; for them the result is this object unchanged.
        """
        if not self.sets_draft_tokens:
            return self
        return Speculation({**self.options, STEPS: str(count), BRANCHES: "1", VERIFIED: str(count + 1)})

    def build_arguments(self, device: str) -> list[str]:
        """Return the arguments of `sglang.launch_server`, including the one that enables the server's metrics."""
        words = [word for pair in self.options.items() for word in pair]
        return [*words, "--enable-metrics", *(_ON_CPU if device == "cpu" else ())]

    def build_environment(self, device: str) -> dict[str, str]:
        """Return the environment variables of the server in addition to those of every server."""
        return {"TRITON_INTERPRET": "1"} if device == "cpu" else {}


def require_cpu_dtype(compute_dtype: str) -> None:
    """Raise ConfigError for a dtype in which SGLang cannot speculate on a CPU."""
    if compute_dtype != "float32":
        raise ConfigError(
            f"evaluation.serving.compute_dtype: on a CPU expected float32, found {compute_dtype}: Triton's interpreter computes "
            "other values in it. Set float32, or serve on a GPU"
        )
