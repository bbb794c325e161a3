"""Prometheus' text format: what is written by its rules is read as it was, and nothing else is read at all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import EngineError
from draftworks.servers.counters import MetricSample, parse_metrics

NAMES = st.from_regex(r"[a-z_:][a-z0-9_:]{0,8}", fullmatch=True)
LABELS = st.dictionaries(st.from_regex(r"_?[a-z][a-z0-9_]{0,5}", fullmatch=True), st.text(max_size=8), max_size=3)
VALUES = st.one_of(st.integers(0, 2**53).map(float), st.floats(allow_nan=False))


def write_line(name: str, labels: dict[str, str], value: float) -> str:
    """One line, as the format's description has it."""
    escaped = {key: each.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for key, each in labels.items()}
    inside = ",".join(f'{key}="{each}"' for key, each in escaped.items())
    number = f"{value:+.17g}".replace("inf", "Inf")
    return f"{name}{{{inside}}} {number}" if labels else f"{name} {number}"


@given(st.lists(st.tuples(NAMES, LABELS, VALUES), max_size=5), st.booleans())
def test_what_is_written_by_the_rules_is_read_as_it_was(lines, commented: bool):
    # A carriage return in a label is no line end of the format, and `\r\n` is what some proxies make of one.
    lines = [(name, {k: v.rstrip("\r") for k, v in labels.items()}, value) for name, labels, value in lines]
    text = "\n".join(write_line(*line) for line in lines) + "\n"
    text = f"# HELP a what it is\n# TYPE a counter\n\n{text}" if commented else text
    found = parse_metrics(text, {name for name, _, _ in lines})
    for name in {name for name, _, _ in lines}:
        expected = [MetricSample(labels, value) for each, labels, value in lines if each == name]
        assert list(found.samples[name]) == expected


@pytest.mark.parametrize(
    "line",
    [
        "<!doctype html>", '{"detail": "not found"}', "a", "a{b=1} 2", 'a{b="c} 2', "a 1 2 3", "a 1e", "a nan", "a 0x1",
        "a 1_0", "a -", "1a 2", "a b", 'a{b="c"} 1 # {d="e"} 2',
    ],
)  # fmt: skip
def test_another_text_is_refused_with_its_line(line: str):
    with pytest.raises(EngineError, match="not Prometheus' text format: line 2"):
        parse_metrics(f"a 1\n{line}\nb 2\n", {"a"})


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "0.5", "1e300"])
def test_a_counter_that_cannot_be_is_refused(value: str):
    found = parse_metrics(f'a{{b="c"}} {value}\na 3\n', {"a"})
    with pytest.raises(EngineError, match="the counter a is"):
        found.read_counter("a")


def test_a_counter_is_summed_over_its_labels_and_a_gauge_is_their_mean():
    found = parse_metrics('a{rank="0"} 3\na{rank="1"} 4 1700000000\nb NaN\n', {"a", "b"}, prefix="a")
    assert (found.read_counter("a"), found.read_gauge("a"), found.read_gauge("b")) == (7, 3.5, None)
    assert found.read_counter_by("a", "rank") == {"0": 3, "1": 4}
    assert found.prefixed
    assert math.isclose(parse_metrics("g 1.5\n", {"g"}).read_gauge("g") or 0, 1.5)
    with pytest.raises(EngineError, match="expected the counter c, found none"):
        found.read_counter("c")


def test_a_long_line_is_refused_as_fast_as_a_short_one():
    """A pattern that tries all ways to divide a line would not come back."""
    with pytest.raises(EngineError, match="line 1"):
        parse_metrics("a{" + 'b="c",' * 50_000 + "\n", {"a"})
