"""SGLang's counters of speculative decoding: per request, in its metrics and in its server info.

Results are computed from the counters of each request, which are exact and do not include other requests. Metrics and
server info cover the whole server, including its warm-up, and serve as a cross-check. Names are those of SGLang 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftworks.errors import EngineError

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{.*\})?\s+(?P<value>\S+)")
_VERIFY_CALLS, _TOKENS = "sglang:spec_verify_calls_total", "sglang:generation_tokens_total"


@dataclass(frozen=True)
class SpeculatedAnswer:
    """An answer with the counters of accepted tokens of its request.

    Attributes:
        passes: number of passes of the target after the prefill, which gives the first token.
        histogram: entry n is the number of passes that accepted exactly n proposed tokens. It includes tokens that the
            last pass accepted beyond the answer's end, which `output_ids` does not.
    """

    output_ids: tuple[int, ...]
    passes: int
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> SpeculatedAnswer:
        """Parse an answer of /generate.

        Raises:
            EngineError: the server aborted the request, its counters contradict each other, or it sent no counters,
                because it does not speculate.
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
            return cls(tuple(ids), 0, ())  # the answer ended with the prefill: there was nothing to verify
        found = tuple(meta["spec_correct_drafts_histogram"])
        if sum(found) != meta["spec_verify_ct"]:
            raise EngineError(
                f"SGLang's counters disagree: spec_verify_ct is {meta['spec_verify_ct']}, and the histogram {found} "
                f"has {sum(found)} passes"
            )
        return cls(tuple(ids), meta["spec_verify_ct"], found)

    def list_accepted_per_pass(self) -> list[int]:
        """Return the number of accepted tokens of each pass, in no particular order.

        Tokens that the last pass accepted beyond the answer's end are not counted. SGLang does not report which pass
        was the last; it is assumed to be one of those that accepted most. The sum is therefore exact, but one entry may
        not be.
        """
        accepted = sorted(n for n, passes in enumerate(self.histogram) for _ in range(passes))
        beyond = 1 + sum(accepted) + self.passes - len(self.output_ids)
        if accepted and beyond > 1:  # the first token beyond is the target's own, not a proposed one
            accepted[-1] -= beyond - 1
        return accepted


@dataclass(frozen=True)
class Counters:
    """Counters of a server since its start.

    Attributes:
        passes: number of verifying passes of the target, counted once for each request in the pass.
        tokens: number of generated tokens.
    """

    passes: int
    tokens: int

    @classmethod
    def of_metrics(cls, text: str) -> Counters:
        """Parse the answer of /metrics, in Prometheus' text format.

        Raises:
            EngineError: a counter is missing, as on a server without --enable-metrics.
        """
        return cls(int(read_metric(text, _VERIFY_CALLS)), int(read_metric(text, _TOKENS)))

    def subtract(self, before: Counters) -> Counters:
        return Counters(self.passes - before.passes, self.tokens - before.tokens)


def read_metric(text: str, name: str) -> float:
    """Return the sum of a metric over its labels, such as the ranks of a data-parallel server; 0 if not counted yet.

    Raises:
        EngineError: the text does not have the metric.
    """
    samples = (found for line in text.splitlines() if (found := _SAMPLE.match(line)))
    values = [float(found["value"]) for found in samples if found["name"] == name]
    if not values and f"# TYPE {name} " not in text:
        raise EngineError(f"SGLang's metrics have no {name}. Its version may be another one than those tested")
    return sum(values)


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
