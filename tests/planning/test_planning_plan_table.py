"""A plan as a table: durations, sums of what was taken, and what is said beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planning_toys import PlannedTarget

from draftworks.planning.estimates import Estimate, Source
from draftworks.planning.plan import SavedStep, StepActual, add_plans
from draftworks.planning.plan_table import build_header, build_rows, describe_beside, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ((0, 0, 0), "0"),
        ((40, 40, 40), "40 s"),
        ((11, 27, 66), "27 (11–66) s"),
        ((108, 277, 738), "4.62 (1.8–12.3) min"),
        ((4800, 4800, 4800), "1 h 20 min"),
        ((2400, 4800, 11100), "1 h 20 min (40 min–3 h 5 min)"),
        ((7200, 35_990, 1_000_000), "10 h (2 h–278 h)"),
        ((0, 3600, 3600), "1 h (0 min–1 h)"),
    ],
)
def test_a_duration_is_said_in_hours_and_minutes_or_seconds(seconds: tuple[float, float, float], text: str):
    assert format_seconds(Estimate(*seconds)) == text


def took(asset: str, planned: float, seconds: float | None) -> StepActual:
    source = Source("counted", "the test")
    return StepActual(SavedStep(asset, Estimate.exactly(planned), 1, Estimate.exactly(0), source), seconds)


def test_what_was_taken_is_summed_over_the_steps_of_the_table(tmp_path: Path):
    plan = PlannedTarget(tmp_path).plan()
    actual = [took("responses", 100, 150), took("eagle3_draft", 300, 250), took("of_another_plan", 1, 9999)]
    rows = [dict(zip(build_header(plan, actual), row, strict=True)) for row in build_rows(plan, actual)]
    together = next(row for row in rows if row["step"] == "time")
    assert (together["took"], together["took / plan"]) == ("6.67 min", "1.00")


def test_the_gate_of_fp8_is_a_row_where_the_entry_asks_for_fp8_and_a_line_where_not(tmp_path: Path):
    target = PlannedTarget(tmp_path)
    plain = target.plan()
    assert "fp8_gate" not in {row[0] for row in build_rows(plain)}
    [line] = [line for line in describe_beside(plain) if line.startswith("fp8: ")]
    gate = plain.ways["fp8"].unasked_gate
    assert format_seconds(gate) in line
    assert add_plans([plain, plain]).ways["fp8"].unasked_gate == gate + gate
    target.edit(capture={"storage": "fp8"})
    asked = target.plan()
    assert "fp8_gate" in {row[0] for row in build_rows(asked)}
    assert not [line for line in describe_beside(asked) if line.startswith("fp8: ")]
    step = asked.ways["fp8"].find_step("fp8_gate")
    assert step is not None
    assert step.seconds.value == pytest.approx(gate.value)


def test_a_comparison_of_thinking_is_a_line_where_the_data_has_shares_of_both_kinds(tmp_path: Path):
    target = PlannedTarget(tmp_path)
    for on, expected in ((None, 0), (0, 0), (0.25, 1)):
        shares = {} if on is None else {"shares": {"thinking": {"on": on, "off": 1 - on}}}
        target.edit(mix=shares, responses={"mode": "regenerate", "max_new_tokens": 8}, comparison={"seeds": 2})
        plan = target.plan()
        lines = [line for line in describe_beside(plan) if line.startswith("compare_thinking: ")]
        assert len(lines) == expected
    assert format_seconds(plan.thinking_comparison) in lines[0]
    assert add_plans([plan, plan]).thinking_comparison == plan.thinking_comparison * 2
    target.edit(comparison={"seeds": 4})
    more_seeds = target.plan().thinking_comparison
    assert 1.5 * plan.thinking_comparison.value < more_seeds.value < 2 * plan.thinking_comparison.value


def test_documented_rates_are_said_to_be_of_machines_with_nothing_beside(tmp_path: Path):
    plan = PlannedTarget(tmp_path).plan()
    assert "to themselves" in describe_beside(plan)[-1]
    counted = Source("counted", "the test")
    ways = {
        name: replace(way, steps=tuple(replace(step, source=counted) for step in way.steps))
        for name, way in plan.ways.items()
    }
    assert not [line for line in describe_beside(replace(plan, ways=ways)) if "to themselves" in line]


def test_samples_that_a_hash_chooses_have_bounds_until_they_are_counted(tmp_path: Path):
    """1,000 rows of which a tenth is held out: 100, and three deviations of sqrt(1000 x 0.1 x 0.9) = 9.49 beyond;
    a twentieth may be rejected."""
    target = PlannedTarget(tmp_path, entry={"data": {"max_conversations": 1000, "held_out_share": 0.1}}, rows=5000)
    heldout = target.plan().amounts["heldout"].samples
    assert (heldout.low, heldout.value, heldout.high) == pytest.approx((0.95 * 71.54, 100, 128.46), abs=0.01)
    assert [line for line in describe_beside(target.plan()) if line.startswith("heldout: 100 (68–128) samples, ")]
