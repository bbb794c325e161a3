"""Parser of Prometheus' text format (version 0.0.4), strict: a text that is something else is refused whole."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from draftworks.errors import EngineError

_LABEL = r'[A-Za-z_]\w*="(?:[^"\\]|\\.)*"'
_LINE = re.compile(
    r"(?P<name>[A-Za-z_:][\w:]*)"
    rf"(?:\{{(?P<labels>(?:{_LABEL}(?:,{_LABEL})*,?)?)\}})?"
    r"[ \t]+(?P<value>[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|Inf|NaN))"
    r"(?:[ \t]+[+-]?\d+)?[ \t]*",
    re.ASCII,
)
_PAIR = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"', re.ASCII)
_ESCAPE = re.compile(r"\\(.)")
_SHOWN = 60
MODEL_LABEL = "model_name"


@dataclass(frozen=True)
class MetricSample:
    """One line of a scrape."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Metrics:
    """The wanted metrics of one scrape, by name; a metric that the scrape does not have is not a key.

    Attributes:
        prefixed: whether any metric has the prefix that was asked for, wanted or not.
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
            raise EngineError(f"expected the counter {name}, found none")
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
        every = (sample.labels.get(MODEL_LABEL) for samples in self.samples.values() for sample in samples)
        return sorted({name for name in every if name is not None})


def parse_metrics(text: str, wanted: Collection[str], prefix: str = "") -> Metrics:
    """Parse a scrape and keep the samples of the wanted metrics.

    Raises:
        EngineError: a line is neither a comment nor a sample.
    """
    found: dict[str, list[MetricSample]] = {}
    prefixed = False
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or line.isspace() or line.startswith("#"):
            continue
        matched = _LINE.fullmatch(line)
        if matched is None:
            raise EngineError(f"not Prometheus' text format: line {number}: {line[:_SHOWN]!r}")
        name = matched["name"]
        prefixed = prefixed or name.startswith(prefix)
        if name in wanted:
            labels = {key: _unescape(value) for key, value in _PAIR.findall(matched["labels"] or "")}
            found.setdefault(name, []).append(MetricSample(labels, float(matched["value"])))
    return Metrics({name: tuple(samples) for name, samples in found.items()}, prefixed)


def _require_count(name: str, value: float) -> int:
    if not math.isfinite(value) or value < 0 or value != int(value) or value > 2**53:
        raise EngineError(f"the counter {name} is {value:g}: expected a whole number of 0 or more")
    return int(value)


def _unescape(value: str) -> str:
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], value)
