"""What a plan says of several registries while their results are made one after the other, as it was written down once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from planning_toys import PlannedTarget
from published_toys import ask_assets, publish_results

from draftworks.planning.estimates import Estimate
from draftworks.planning.plan import Plan, make_plan
from draftworks.planning.steps import PlannedStep
from draftworks.planning.subject import ALMOST, PlanSubject

GOLDEN = Path(__file__).with_name("golden_plans.json")
CPU: dict[str, Any] = {"capture": {"device": "cpu", "budget_gb": 1e6}, "responses": {"mode": "regenerate"}}
EAGLE = {"eagle3": {"training": {"device": "cpu"}}}
BOTH = {**EAGLE, "dflash": {"training": {"device": "cpu"}}}
CASES: dict[str, dict[str, Any]] = {
    "one draft": {**CPU, "strategies": EAGLE},
    "own answers, several drafts and eval sets": {
        **{**CPU, "responses": {"mode": "passthrough"}, "strategies": BOTH},
        **{"evals": ["others", "kept"], "data": {"max_conversations": 100}},
    },
    "streamed": {**CPU, "strategies": EAGLE, "streaming": {}},
    "one stream for several": {**CPU, "strategies": BOTH, "streaming": {"share": True}},
    "fp8": {**CPU, "strategies": EAGLE, "capture": {**CPU["capture"], "storage": "fp8", "dtype": "bfloat16"}},
    "several workers": {**CPU, "strategies": EAGLE, "launcher": {"workers": 3}},
    "thinking on and off": {
        **{**CPU, "strategies": EAGLE},
        **{"mix": {"datasets": ["talks2"], "shares": {"thinking": {"on": 0.4, "off": 0.6}}}},
    },
}
CHANGES: dict[str, dict[str, Any]] = {
    "more conversations": {"data": {"max_conversations": 2000}},
    "another learning rate": {"strategies": {"eagle3": {"training": {"device": "cpu", "lr": 0.5}}}},
    "another sampling": {"responses": {"mode": "regenerate", "temperature": 0.5}},
    "longer samples": {"max_length": 777},
    "another format": {"strategies": {"eagle3": {"training": {"device": "cpu"}, "export": {"formats": []}}}},
    "fewer formats": {"strategies": {"eagle3": {"training": {"device": "cpu"}, "export": {"dtype": "float32"}}}},
    "another strategy": {"strategies": BOTH},
    "a stream": {"streaming": {}},
    "fp8": {"capture": {"device": "cpu", "budget_gb": 1e6, "storage": "fp8", "dtype": "bfloat16"}},
    "another eval set": {"evals": ["others"]},
}
REMOVED = (
    "conversations",
    "responses",
    "tokenized_train",
    "training_features",
    "heldout_eval_features",
    "eagle3_draft",
)


def make_target(root: Path, entry: dict[str, Any]) -> PlannedTarget:
    (root / "registry" / "evals").mkdir(parents=True)
    target = PlannedTarget(root, entry=entry, rows=100)
    data, registry = root / "registry" / "data", root / "registry"
    for name in ("talks2", "questions"):
        (data / f"{name}.jsonl").write_text((data / "talks.jsonl").read_text() + "\n")
        (registry / "datasets" / f"{name}.yaml").write_text(f"files: [data/{name}.jsonl]\n")
    (registry / "evals" / "others.yaml").write_text("dataset: questions\nmax_conversations: 50\n")
    (registry / "evals" / "kept.yaml").write_text("dataset: talks\npart: held_out\n")
    return target


def format_estimate(found: Estimate) -> str:
    return "/".join(f"{value:.5g}" for value in (found.low, found.value, found.high))


def format_step(step: PlannedStep) -> str:
    seconds = "-" if "export" in step.asset else f"{step.seconds.value:.5g} s"  # of an export that was made, as it took
    return f"{step.made_share:.4g}, {step.tokens.value:.5g}, {seconds} x {step.devices}, {step.nbytes.value:.5g} B"


def describe(plan: Plan) -> dict[str, Any]:
    """Return everything that a plan says, but for what depends on when results were made."""
    told: dict[str, Any] = {
        name: " ".join([*map(format_estimate, (each.samples, each.tokens, each.generated)), each.source.kind])
        for name, each in plan.amounts.items()
    }
    for way in plan.ways.values():
        for each in way.steps:
            told[f"{way.way} {each.asset}"] = format_step(each)
        told[f"{way.way} peak, gate"] = " ".join(map(format_estimate, (way.peak_bytes, way.unasked_gate)))
    return told | {"comparison": format_estimate(plan.thinking_comparison), "own": plan.chosen_way}


def pass_states(target: PlannedTarget, changes: bool) -> Iterator[str]:
    """Make the results of a target one after the other, then change its entry; yield what was done."""
    yield "nothing is read"
    target.digest_files()
    yield "files are read"
    yield from publish_results(target.name, target.registry)
    path = target.root / "registry" / "targets" / "one.yaml"
    before = path.read_text()
    for name, change in CHANGES.items() if changes else ():
        path.write_text(yaml.safe_dump({**yaml.safe_load(before), **change}))
        yield name
    path.write_text(before)
    for asset in REMOVED if changes else ():
        aside = (made := target.artifacts.root / asset).with_name("aside")
        made.rename(aside)
        yield f"without {asset}"
        aside.rename(made)


def tell_case(root: Path, case: str) -> dict[str, dict[str, Any]]:
    """Return, of each state, what differs from the one before."""
    target, found, before = make_target(root, CASES[case]), {}, dict[str, Any]()
    for state in pass_states(target, changes=case == next(iter(CASES))):
        told = describe(target.plan())
        found[state] = {key: value for key, value in told.items() if before.get(key) != value}
        before = told
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_plan_says_what_it_said(tmp_path: Path, case: str):
    assert tell_case(tmp_path, case) == json.loads(GOLDEN.read_text())[case]


@pytest.mark.parametrize("case", CASES)
def test_a_plan_finds_made_what_the_assets_find_made(tmp_path: Path, case: str):
    target = make_target(tmp_path, CASES[case])
    for state in pass_states(target, changes=case == next(iter(CASES))):
        asked = ask_assets(target.name, target.registry)
        planned = {each.asset: each.is_made for each in target.plan().chosen.steps if each.asset in asked}
        if target.plan().chosen_way == "streamed":
            del planned["training_features"]  # a plan of them: what is captured is part of the training
        assert planned == {name: asked[name] for name in planned}, state


def test_what_assets_made_for_one_target_is_there_for_another_with_its_weights(tmp_path: Path):
    target = make_target(tmp_path, CASES["one draft"])
    target.digest_files()
    list(publish_results(target.name, target.registry))
    targets = tmp_path / "registry" / "targets"
    (targets / "other.yaml").write_text((targets / "one.yaml").read_text())
    plan = make_plan(PlanSubject.of("other", target.registry))
    there = {each.asset for each in plan.chosen.steps if each.made_share == ALMOST}
    assert there == {"responses", "heldout_responses", "heldout_eval_features", "training_features"}
    assert {name: each.source.kind for name, each in plan.amounts.items()} == {"train": "counted", "heldout": "counted"}
