"""Cron expressions and time zones: exactly those that Dagster accepts are accepted, others are refused with a reason."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from dagster._utils.schedules import cron_string_iterator, is_valid_cron_string
from hypothesis import given
from hypothesis import strategies as st

from draftworks.config.operations import FIELDS, CronField, parse_cron, require_timezone
from draftworks.config.registry_files import EvaluationSpec
from draftworks.config.strict_yaml import parse_spec
from draftworks.errors import ConfigError


def items(field: CronField) -> st.SearchStrategy[str]:
    """Items of one cron field, most of them valid."""
    number = st.integers(field.low, field.high).map(str)
    single = st.one_of(number, st.sampled_from(field.names)) if field.names else number
    ranges = st.tuples(single, single).map("-".join)
    plain = st.one_of(st.just("*"), single, ranges)
    return st.one_of(plain, st.tuples(plain, st.integers(0, field.high + 1).map(str)).map("/".join))


EXPRESSIONS = st.tuples(*(st.lists(items(field), min_size=1, max_size=3).map(",".join) for field in FIELDS)).map(
    " ".join
)


@given(EXPRESSIONS)
def test_what_is_taken_dagster_takes_too_and_its_time_comes(expression):
    try:
        taken = parse_cron(expression)
    except ValueError:
        return
    assert is_valid_cron_string(taken)
    start = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC).timestamp()
    assert next(cron_string_iterator(start, taken, "UTC"))


@pytest.mark.parametrize(
    "expression", ["0 3 * * *", "*/15 8-18 * * mon-fri", "0 0 1,15 * *", "5/10 * 29 2 *", "0 0 31 4 sun", "0 0 * JAN 7"]
)
def test_usual_expressions_are_taken(expression):
    assert parse_cron(f" {expression}  ") == expression


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("0 3 * *", "five fields"),
        ("@daily", "five fields"),
        ("0 0 3 * * *", "five fields"),
        ("60 3 * * *", "minute: 60 is outside 0..59"),
        ("0 3 * foo *", "month: foo is outside 1..12"),
        ("0 5-3 * * *", "hour: the range 5-3 ends before it begins"),
        ("*/0 * * * *", "minute: 0 is outside 1..59"),
        ("0 3 , * *", "day of month: expected"),
        ("0 3 ? * *", "day of month: expected"),
        ("0 3 30 2 *", "never occurs"),
        ("0 3 31 4,6,9,11 *", "never occurs"),
    ],
)
def test_mistakes_are_refused_with_their_reason(expression, problem):
    with pytest.raises(ConfigError, match="cron: .*" + problem.replace("*", r"\*")):
        parse_spec(EvaluationSpec, {"cron": expression}, where="targets/mine.yaml")


@pytest.mark.parametrize("name", ["UTC", "Europe/Berlin"])
def test_time_zones_have_iana_names(name):
    assert require_timezone(name) == name


@pytest.mark.parametrize("name", ["", "Berlin", "Europe", "../UTC", str(Path("/etc/localtime"))])
def test_what_is_no_time_zone_is_refused(name):
    with pytest.raises(ConfigError, match="is not a time zone; (did you mean|expected an IANA name)"):
        parse_spec(EvaluationSpec, {"cron_timezone": name}, where="targets/mine.yaml")
