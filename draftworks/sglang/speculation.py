"""A server that speculates with a draft: options from its serving command, its counters, and its client."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.errors import ConfigError, EngineError
from draftworks.servers.client import Counters, GenerateRequest, SpeculatedAnswer
from draftworks.servers.counters import PASSES, SGLANG_COUNTERS, TOKENS, parse_metrics
from draftworks.sglang.client import SGLangClient

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


def parse_answer(answer: Mapping[str, Any]) -> SpeculatedAnswer:
    """Parse an answer of /generate with the counters of its request.

    Raises:
        EngineError: the server aborted the request, its counters contradict each other, or it sent no counters, because it
            does not speculate.
    """
    meta, ids = answer["meta_info"], answer["output_ids"]
    if meta["finish_reason"]["type"] == "abort":
        raise EngineError(f"SGLang aborted a request: {meta['finish_reason'].get('message', 'it gave no reason')}")
    if "spec_verify_ct" not in meta:
        if len(ids) > 1:
            raise EngineError(
                "SGLang answered without counters of speculative decoding: it runs without a draft, or in another "
                f"version. It sent {', '.join(sorted(meta))}"
            )
        return SpeculatedAnswer(tuple(ids), 0, ())  # the answer ended with the prefill: there was nothing to verify
    found = tuple(meta["spec_correct_drafts_histogram"])
    if sum(found) != meta["spec_verify_ct"]:
        raise EngineError(
            f"SGLang's counters disagree: spec_verify_ct is {meta['spec_verify_ct']}, and the histogram {found} "
            f"has {sum(found)} passes"
        )
    return SpeculatedAnswer(tuple(ids), meta["spec_verify_ct"], found)


def parse_counters(text: str) -> Counters:
    """Parse the answer of /metrics, in Prometheus' text format.

    Raises:
        EngineError: a counter is missing, as on a server without --enable-metrics.
    """
    metrics = parse_metrics(text, SGLANG_COUNTERS.wanted)
    return Counters(*(metrics.read_counter(SGLANG_COUNTERS.counters[name]) for name in (PASSES, TOKENS)))


def read_accept_length(info: Mapping[str, Any]) -> float | None:
    """Return tokens per pass by /server_info, the mean over data-parallel ranks; None if it does not report them."""
    states: Sequence[Mapping[str, Any]] = info.get("internal_states") or []
    values = [state["avg_spec_accept_length"] for state in states if "avg_spec_accept_length" in state]
    return sum(values) / len(values) if values else None


def read_verified_tokens(info: Mapping[str, Any]) -> int:
    """Return the number of tokens that a pass verifies, by /server_info: the proposed ones and the token before them.

    Raises:
        EngineError: the server does not speculate.
    """
    found = info.get("speculative_num_draft_tokens")
    if not found:
        raise EngineError("SGLang runs without speculative decoding: /server_info has no speculative_num_draft_tokens")
    return int(found)


class SpeculatingClient(SGLangClient):
    """Client of one server that speculates, for any number of threads. Raises as `SGLangClient` does."""

    def answer(self, request: GenerateRequest) -> SpeculatedAnswer:
        """Return the server's answer to one prompt, with its counters."""
        body = {"rid": request.request_id, "input_ids": list(request.input_ids), "sampling_params": request.sampling}
        return parse_answer(self._call("POST", "/generate", body))

    def get_raw_info(self) -> dict[str, Any]:
        """Return the whole answer of /server_info."""
        return self._call("GET", "/server_info")

    def get_counters(self) -> Counters:
        """Return the server's counters since its start, from /metrics."""
        return parse_counters(self._get_metrics())
