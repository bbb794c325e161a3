"""A plan as one table of texts, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from draftworks.planning.estimates import Estimate
from draftworks.planning.plan import Plan, StepActual
from draftworks.planning.steps import WAYS, PlannedStep

_LEAST_MINUTES_S, _LEAST_HOURS_S = 120, 3600
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def build_header(plan: Plan, actual: Sequence[StepActual] = ()) -> tuple[str, ...]:
    """Return the titles of the columns; the way that the target's entry asks for has a star."""
    ways = [f"{plan.ways[way].way}{' *' if way == plan.chosen_way else ''}" for way in WAYS]
    return ("step", "tokens", "there", *ways, *(("took", "took / plan") if actual else ()), "rate")


def build_rows(plan: Plan, actual: Sequence[StepActual] = ()) -> list[tuple[str, ...]]:
    """Return a row for each step, then those of time, GPU-hours, bytes and money; of steps that exist nothing is left to
    do. What steps took is summed over those that have a row."""
    took = {each.step.asset: each for each in actual}
    assets = _list_assets(plan)
    rows = [_build_step_row(plan, asset, took if actual else None) for asset in assets]
    blank = ("", "") if actual else ()
    sums = _sum_actual([took[asset] for asset in assets if asset in took]) if actual else ()

    def add(name: str, texts: Mapping[str, str], compared: tuple[str, ...] = blank) -> None:
        rows.append((name, "", "", *(texts[way] for way in WAYS), *compared, ""))

    ways = plan.ways
    add("time", {way: format_seconds(ways[way].hours * 3600) for way in WAYS}, sums)
    add("GPU-hours", {way: format_estimate(ways[way].gpu_hours) for way in WAYS})
    add("features", {way: format_bytes(ways[way].nbytes) for way in WAYS})
    add("features, not there yet", {way: format_bytes(ways[way].new_bytes) for way in WAYS})
    add("features at most", {way: format_bytes(ways[way].peak_bytes) for way in WAYS})
    if plan.prices is not None:
        money = {way: plan.price(way) for way in WAYS}
        currency = plan.prices.currency
        add(f"GPUs, {currency}", {way: format_estimate(m.compute) for way, m in money.items() if m is not None})
        texts = {way: format_estimate(m.storage_month) for way, m in money.items() if m is not None}
        add(f"storage, {currency} a month", texts)
    return rows


def build_json(plan: Plan, actual: Sequence[StepActual] = ()) -> dict[str, Any]:
    """Return a plan as JSON: bytes, seconds and GPU-hours with their bounds, and the source of each rate."""
    ways: dict[str, Any] = {}
    for way in WAYS:
        found, money = plan.ways[way], plan.price(way)
        ways[way] = {
            "storage": found.storage,
            "gpu_hours": found.gpu_hours.to_json(),
            "hours": found.hours.to_json(),
            "feature_bytes": found.nbytes.to_json(),
            "new_feature_bytes": found.new_bytes.to_json(),
            "peak_feature_bytes": found.peak_bytes.to_json(),
            "unasked_gate_seconds": found.unasked_gate.to_json(),
            "money": None if money is None else asdict(money),
            "steps": [_describe_step(each) for each in found.steps],
        }
    data = {
        name: {
            "samples": amount.samples.to_json(),
            "tokens": amount.tokens.to_json(),
            "generated_tokens": amount.generated.to_json(),
            "source": asdict(amount.source),
        }
        for name, amount in plan.amounts.items()
    }
    return {
        "targets": list(plan.targets),
        "strategies": list(plan.strategies),
        "registry_asks_for": plan.chosen_way,
        "data": data,
        "ways": ways,
        "thinking_comparison_seconds": plan.thinking_comparison.to_json(),
        "actual": [
            {
                "asset": each.step.asset,
                "planned_seconds": each.step.seconds.to_json(),
                "seconds": each.seconds,
                "ratio": each.ratio,
                "planned_bytes": each.step.nbytes.to_json(),
                "bytes": each.nbytes,
            }
            for each in actual
        ],
    }


def describe_beside(plan: Plan) -> list[str]:
    """Return what a reader has to know beside the table: of the data, of the gate of fp8, of the rates."""
    lines = _describe_data(plan)
    gate = plan.ways["fp8"].unasked_gate
    if gate.high:
        lines.append(
            f"fp8: the registry does not ask for it. If it did, fp8_gate would come first: {format_seconds(gate)}, which is "
            "not in the table"
        )
    if plan.thinking_comparison.high:
        lines.append(f"compare_thinking: {format_seconds(plan.thinking_comparison)} if you run it, not in the table")
    if any(step.source.kind == "documented" for way in plan.ways.values() for step in way.steps):
        lines.append(
            "documented rates are of programs that had their machine to themselves: beside other work it takes longer"
        )
    return lines


def _describe_data(plan: Plan) -> list[str]:
    """Return a line for each part of the data: samples, tokens, and how they are known."""
    return [
        f"{name}: {format_estimate(amount.samples)} samples, {format_estimate(amount.tokens)} tokens "
        f"({amount.source.kind}: {amount.source.text})"
        for name, amount in plan.amounts.items()
    ]


def format_seconds(found: Estimate) -> str:
    """Format seconds with their bounds where they have any: 40 s, 4.6 (1.8–12) min, 1 h 20 min (40 min–3 h 5 min)."""
    if not found.high:
        return "0"
    if found.value >= _LEAST_HOURS_S:
        low, value, high = map(_format_hours, (found.low, found.value, found.high))
        return value if found.low == found.high else f"{value} ({low}–{high})"
    unit, name = (60, "min") if found.value >= _LEAST_MINUTES_S else (1, "s")
    return f"{format_estimate(found * (1 / unit))} {name}"


def _format_hours(seconds: float) -> str:
    """Format seconds as hours and minutes; minutes alone below an hour, hours alone from ten."""
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours >= 10:
        return f"{round(seconds / 3600):,} h"
    return " ".join(f"{count} {unit}" for count, unit in ((hours, "h"), (minutes, "min")) if count) or "0 min"


def format_bytes(found: Estimate) -> str:
    if not found.high:
        return "0"
    unit, name = next((each for each in _UNITS if found.value >= each[0]), (1.0, "B"))
    return f"{format_estimate(found * (1 / unit))} {name}"


def format_estimate(found: Estimate) -> str:
    """Format a quantity; one that is not exact with its bounds, and three digits: 1.2 (0.9–1.5)."""
    if found.low == found.high:
        return _format_exact(found.value)
    return f"{_format_rounded(found.value)} ({_format_rounded(found.low)}–{_format_rounded(found.high)})"


def _format_exact(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _format_rounded(value: float) -> str:
    size, name = next((each for each in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if value >= each[0]), (1.0, ""))
    scaled = value / size
    return (f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.3g}") + name


def _list_assets(plan: Plan) -> list[str]:
    """Return the assets of all ways, in the order of a run."""
    longest = max((plan.ways[way].steps for way in WAYS), key=len)
    named = [each.asset for each in longest]
    named += [each.asset for way in WAYS for each in plan.ways[way].steps]
    return list(dict.fromkeys(named))


def _build_step_row(plan: Plan, asset: str, took: dict[str, StepActual] | None) -> tuple[str, ...]:
    by_way = {way: [each for each in plan.ways[way].steps if each.asset == asset] for way in WAYS}
    seconds = [_format_way(by_way[way]) for way in WAYS]
    shown = next(steps for steps in (by_way[plan.chosen_way], *by_way.values()) if steps)
    tokens = sum((each.tokens for each in shown[1:]), shown[0].tokens)
    there = sum(each.made_share for each in shown) / len(shown)
    compared: tuple[str, ...] = ()
    if took is not None:
        compared = ("", "")
        found = took.get(asset)
        if found is not None:
            ratio = "" if found.ratio is None else f"{found.ratio:.2f}"
            compared = ("" if found.seconds is None else format_seconds(Estimate.exactly(found.seconds)), ratio)
    source = shown[0].source
    tokens_text = format_estimate(tokens) if tokens.high else ""
    return (asset, tokens_text, f"{there:.0%}", *seconds, *compared, f"{source.kind}: {source.text}")


def _sum_actual(actual: Sequence[StepActual]) -> tuple[str, str]:
    """Return what these steps took together, and the ratio to their plans."""
    known = [(each.seconds, each.step.seconds.value) for each in actual if each.seconds is not None]
    seconds, planned = sum(taken for taken, _ in known), sum(plan for _, plan in known)
    return format_seconds(Estimate.exactly(seconds)), f"{seconds / planned:.2f}" if planned else ""


def _format_way(steps: Sequence[PlannedStep]) -> str:
    if not steps:
        return ""
    return format_seconds(sum((each.seconds for each in steps[1:]), steps[0].seconds))


def _describe_step(step: PlannedStep) -> dict[str, Any]:
    return {
        "asset": step.asset,
        "tokens": step.tokens.to_json(),
        "made_share": round(step.made_share, 4),
        "seconds": step.seconds.to_json(),
        "devices": step.devices,
        "gpu_hours": step.gpu_hours.to_json(),
        "feature_bytes": step.nbytes.to_json(),
        "source": asdict(step.source),
    }
