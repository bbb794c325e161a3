"""Plans beside a real run: everything made is zero, bytes are those on disk, and the run stands beside its plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from draftworks.features.tensor_bytes import encode_stream
from draftworks.planning.amounts import count_token_bytes
from draftworks.planning.plan import compare_plan, estimate_gpu_hours, load_plan, make_plan
from draftworks.planning.subject import PlanSubject
from draftworks.programs.cli import app
from draftworks.storage.identity import FileDigests
from draftworks.targets.registry import Registry
from spec_assets import recipes
from spec_assets.recipes import describe_plans


def subject_of(finished) -> PlanSubject:
    return PlanSubject.of("small", Registry(finished.site.registry))


def test_a_plan_with_everything_made_is_zero(finished):
    stored = make_plan(subject_of(finished)).ways["stored"]
    assert [step.asset for step in stored.steps if not step.is_made] == []
    assert stored.gpu_hours.high == 0
    assert stored.new_bytes.high == 0


def test_bytes_of_a_plan_are_those_on_disk(finished):
    """Before anything is made the plan knows neither the answers nor repeated samples, so it is asked afterwards."""
    plan = make_plan(subject_of(finished)).ways["stored"]
    stores = list((finished.site.var / "feature_store").rglob("*"))
    on_disk = sum(path.stat().st_size for path in stores if path.is_file())
    assert plan.nbytes.value == pytest.approx(on_disk, rel=0.02)
    subject = subject_of(finished)
    features = subject.list_results("training_features")[0].summary
    per_token = count_token_bytes(subject, subject.target.capture)
    assert features["tokens"] * per_token == pytest.approx(features["bytes"], rel=0.02)


@pytest.mark.parametrize("storage", ["fp8", "fp8_taps"])
def test_the_share_of_fp8_is_that_of_the_encoder(finished, storage: str):
    subject = subject_of(finished)
    capture = subject.target.capture.model_copy(update={"dtype": "bfloat16"})
    plain = torch.zeros(10, subject.shape.hidden_size, dtype=torch.bfloat16)
    encoded = encode_stream(plain).nbytes
    taps = len(make_taps(subject))
    last = encoded if storage == "fp8" else plain.nbytes
    found = count_token_bytes(subject, capture.model_copy(update={"storage": storage}))
    assert found / count_token_bytes(subject, capture) == (taps * encoded + last) / ((taps + 1) * plain.nbytes)


def make_taps(subject: PlanSubject) -> list[int]:
    return recipes.resolve_recipes(subject.target, subject.registry)["recipe"]["taps"]


def test_the_run_stands_beside_the_plan_of_its_beginning(finished):
    saved = load_plan(finished.site.var, "small")
    assert saved is not None
    assert saved.made_at < min(each.created for each in subject_of(finished).list_results("responses"))
    compared = {each.step.asset: each for each in compare_plan(saved, subject_of(finished))}
    assert set(compared) == {
        *("responses", "heldout_responses", "heldout_eval_features", "training_features"),
        *("eagle3_draft", "eagle3_report", "eagle3_export"),
    }
    for asset, each in compared.items():
        made = subject_of(finished).list_results(asset)[0]
        assert each.seconds == made.seconds
        assert each.step.source.kind == "documented"
    features = compared["training_features"]
    assert features.nbytes == subject_of(finished).list_results("training_features")[0].summary["bytes"]


def test_twice_the_samples_go_on_from_what_is_there(finished, tmp_path: Path):
    """Rates are those of the first run, and the data that it has is not made again."""
    site = finished.site.copy(tmp_path)
    site.write_chats(120)
    describe_plans_of(site)  # another data set, which nobody has read yet: nothing of it is known to exist
    steps = {each.asset: each for each in make_plan(PlanSubject.of("small", Registry(site.registry))).chosen.steps}
    assert steps["responses"].made_share == 0
    assert steps["responses"].source.kind == "measured"
    entry = yaml.safe_load(finished.site.target_file.read_text())
    limited = finished.site.copy(tmp_path / "limited")
    limited.target_file.write_text(yaml.safe_dump({**entry, "data": {**entry["data"], "max_conversations": 30}}))
    FileDigests(limited.var / "digests.json").of_file(limited.chats)  # a copy, which a run would have read by now
    steps = {each.asset: each for each in make_plan(PlanSubject.of("small", Registry(limited.registry))).chosen.steps}
    assert steps["responses"].made_share > 0.99
    assert steps["training_features"].made_share > 0.99
    assert steps["eagle3_draft"].made_share == 0
    whole = {each.asset: each for each in make_plan(subject_of(finished), anew=True).chosen.steps}
    assert 0.3 < steps["eagle3_draft"].tokens.value / whole["eagle3_draft"].tokens.value < 0.7


def describe_plans_of(site) -> dict:
    definitions = site.definitions()
    return describe_plans(definitions.resources["workspace"], "small")


def test_another_training_costs_what_the_last_one_took(finished):
    hours = estimate_gpu_hours(Registry(finished.site.registry), "small", "eagle3")
    subject = subject_of(finished)
    made = {name: subject.list_results(f"eagle3_{name}")[0].seconds for name in ("draft", "report", "export")}
    expected = (2 * made["draft"] + 2 * made["report"] + made["export"]) / 3600
    assert hours.value == pytest.approx(expected, rel=0.05)
    assert hours.low < hours.value < hours.high
    training = subject.target.strategies["eagle3"].training
    shorter = training.model_copy(update={"max_steps": 1})
    assert estimate_gpu_hours(subject.registry, "small", "eagle3", shorter).value < hours.value


def test_the_recipe_has_the_plan_on_its_page(finished):
    made = finished.result.asset_materializations_for_node("recipe")
    of_strategy = {each.asset_key.to_user_string(): each.metadata for each in made}["eagle3_recipe"]
    assert "training_features" in of_strategy["plan"].value
    assert of_strategy["gpu_hours_left"].value > 0


def test_a_plan_that_cannot_be_made_ends_no_run(finished, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("draftworks.planning.plan.make_plan", fail)
    assert describe_plans_of(finished.site) == {}
    assert "cannot be shown" in caplog.text


def test_the_command_shows_plan_actual_and_ratio(finished):
    arguments = ["plan", "small", "--registry", str(finished.site.registry)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "took / plan" in shown.output
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert found["ways"]["stored"]["gpu_hours"]["high"] == 0
    assert {each["asset"] for each in found["actual"]} >= {"eagle3_draft", "training_features"}
    assert all(each["ratio"] > 0 for each in found["actual"])
    unknown = CliRunner().invoke(app, [*arguments, "--strategy", "dflash"])
    assert unknown.exit_code == 1
    assert "does not use the strategy 'dflash'" in unknown.output
