"""Counters of speculative decoding of SGLang and vLLM servers: their names, and Prometheus' text format.

A counter `X` is exposed as `X_total`. SGLang counts the passes and tokens of a request when the request ends, and has no
counter of accepted tokens. vLLM's names are those of `vllm/v1/spec_decode/metrics.py` (vllm-project/vllm at ee4ceaae5 and
016a8587e, the documentation of 0.11.2, and the wheels of 0.32.0 and 0.33.0).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from draftworks.errors import EngineError

PASSES, ACCEPTED, PROPOSED = "passes", "accepted", "proposed"
TOKENS, REQUESTS = "tokens", "requests"


@dataclass(frozen=True)
class ServerCounters:
    """What a kind of server calls its metrics.

    Attributes:
        prefix: of all its own metrics.
        versions: whose names were read.
        counters: the metric of each count since the start of the process.
        others: further metrics that are read: gauges, and counters of each draft position.
    """

    prefix: str
    versions: tuple[str, ...]
    counters: Mapping[str, str]
    others: Mapping[str, str]

    @property
    def wanted(self) -> frozenset[str]:
        return frozenset([*self.counters.values(), *self.others.values()])


LENGTH, BY_POSITION, CREATED, PROCESS_START = "length", "by_position", "created", "process_start"

SGLANG_COUNTERS = ServerCounters(
    "sglang:",
    ("0.5.23",),
    {
        PASSES: "sglang:spec_verify_calls_total",
        TOKENS: "sglang:generation_tokens_total",
        REQUESTS: "sglang:num_requests_total",
    },
    {LENGTH: "sglang:spec_accept_length"},
)
VLLM_COUNTERS = ServerCounters(
    "vllm:",
    ("0.11", "0.32", "0.33"),
    {
        PASSES: "vllm:spec_decode_num_drafts_total",
        PROPOSED: "vllm:spec_decode_num_draft_tokens_total",
        ACCEPTED: "vllm:spec_decode_num_accepted_tokens_total",
    },
    {
        TOKENS: "vllm:generation_tokens_total",
        BY_POSITION: "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        CREATED: "vllm:spec_decode_num_drafts_created",
        PROCESS_START: "process_start_time_seconds",
    },
)


@dataclass(frozen=True)
class MetricSample:
    """One line of a scrape."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Metrics:
    """The wanted metrics of one scrape, by name; a metric that the scrape does not name is not a key.

    Attributes:
        samples: none for a metric of which the scrape has the type alone, since nothing was counted yet.
        prefixed: whether any sample has the prefix that was asked for, wanted or not.
    """

    samples: Mapping[str, tuple[MetricSample, ...]]
    prefixed: bool

    def __contains__(self, name: str) -> bool:
        return name in self.samples

    def read_counter(self, name: str) -> int:
        """Return the sum of a counter over its labels, such as the ranks of a server.

        Raises:
            EngineError: the scrape lacks it, or a sample is no whole number of 0 or more, such as NaN.
        """
        if name not in self.samples:
            raise EngineError(
                f"expected the counter {name}, found none: the server's version may be another one than those tested"
            )
        return sum(_require_count(name, sample.value) for sample in self.samples[name])

    def read_counter_by(self, name: str, label: str) -> dict[str, int]:
        """Return the sums of a counter for each value of a label. Raises EngineError as `read_counter`."""
        found: dict[str, int] = {}
        for sample in self.samples.get(name, ()):
            key = sample.labels.get(label, "")
            found[key] = found.get(key, 0) + _require_count(name, sample.value)
        return found

    def read_gauge(self, name: str) -> float | None:
        """Return the mean of a gauge over its labels, without samples that are not finite; None if there is none."""
        values = [each.value for each in self.samples.get(name, ()) if math.isfinite(each.value)]
        return sum(values) / len(values) if values else None

    def list_models(self) -> list[str]:
        """Return the different values of the label `model_name`, sorted."""
        every = (sample.labels.get("model_name") for samples in self.samples.values() for sample in samples)
        return sorted({name for name in every if name is not None})


_NUMBERS = re.compile(r"[^\s{]+(?:\{.*\})?\s*(?P<value>[^\s}]+)(?:\s+[+-]?[0-9]+)?\s*")
"""One number, and a time or nothing: the parser takes what follows them."""
_MAX_LINE = 1 << 14
"""The parser's time grows with the square of a line's length."""
_SHOWN = 60


def parse_metrics(text: str, wanted: Collection[str], prefix: str = "") -> Metrics:
    """Parse a scrape and keep the samples of the wanted metrics.

    Raises:
        EngineError: a line is neither a comment nor a sample.
    """
    found: dict[str, list[MetricSample]] = {}
    prefixed = False
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        words = line.split(maxsplit=3)
        if not words or line.startswith("#"):
            if words[:2] == ["#", "TYPE"] and len(words) == 4 and words[2] in wanted:
                found.setdefault(words[2], [])
            continue
        try:
            name, sample = _parse_line(line)
        except ValueError:
            raise EngineError(f"not Prometheus' text format: line {number}: {line[:_SHOWN]!r}") from None
        prefixed = prefixed or name.startswith(prefix)
        if name in wanted:
            found.setdefault(name, []).append(sample)
    return Metrics({name: tuple(samples) for name, samples in found.items()}, prefixed)


def _parse_line(line: str) -> tuple[str, MetricSample]:
    """Return the metric's name and the sample of a line. Raises ValueError if it is none."""
    from prometheus_client.parser import text_string_to_metric_families

    numbers = None if len(line) > _MAX_LINE else _NUMBERS.fullmatch(line)
    if numbers is None:
        raise ValueError("not a sample")
    [family] = text_string_to_metric_families(line)
    [sample] = family.samples
    if numbers["value"] != "NaN" and float(numbers["value"]) != sample.value:
        raise ValueError("more than a sample")
    return sample.name, MetricSample(sample.labels, float(sample.value))


def _require_count(name: str, value: float) -> int:
    if not math.isfinite(value) or value < 0 or value != int(value) or value > 2**53:
        raise EngineError(f"the counter {name} is {value:g}: expected a whole number of 0 or more")
    return int(value)
