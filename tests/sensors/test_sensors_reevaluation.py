"""The re-evaluation sensor requests exactly the targets whose reports are outdated, once each."""

from __future__ import annotations

import subprocess
import sys
import time

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.sensor_definition import SensorExecutionData
from fleets import Fleet

from sensors.reevaluation import BECAUSE_TAG
from spec_assets.code_location import build_definitions


def tick(fleet: Fleet, instance: dg.DagsterInstance, cursor: str | None = None) -> SensorExecutionData:
    definitions = build_definitions(fleet.registry)
    sensor = definitions.get_repository_def().get_sensor_def("reevaluation_sensor")
    resources = {"workspace": fleet.workspace}
    return sensor.evaluate_tick(
        dg.build_sensor_context(instance=instance, cursor=cursor, definitions=definitions, resources=resources)
    )


def requested(result: SensorExecutionData) -> list[str]:
    return [request.partition_key for request in result.run_requests]


def keys(*results: SensorExecutionData) -> list[str]:
    return [request.run_key for result in results for request in result.run_requests]


def because(result: SensorExecutionData) -> str:
    return result.run_requests[0].tags[BECAUSE_TAG]


def change_weights(fleet: Fleet) -> None:
    (fleet.model("two") / "model.safetensors").write_text("trained on")


def change_tokenizer(fleet: Fleet) -> None:
    (fleet.model("two") / "tokenizer.json").write_text("another")


def change_template(fleet: Fleet) -> None:
    (fleet.model("two") / "chat_template.jinja").write_text("{{ messages }}")


def change_eval_data(fleet: Fleet) -> None:
    fleet.publish_eval_data("two", "second")


def change_draft(fleet: Fleet) -> None:
    fleet.publish_draft("two", "second")


def change_options(fleet: Fleet) -> None:
    """Publish a draft with other options and the same weights."""
    fleet.publish_draft("two", "first", options="others")


def change_named_set(fleet: Fleet) -> None:
    (fleet.registry / "chats.jsonl").write_text("{}\n{}\n")


def set_share(fleet: Fleet, share: float) -> None:
    entry = yaml.safe_load(fleet.target_file("two").read_text())
    fleet.target_file("two").write_text(yaml.safe_dump({**entry, "data": {"held_out_share": share}}))


CHANGES = [
    (change_weights, "weights of the target"),
    (change_tokenizer, "tokenizer or chat template"),
    (change_template, "tokenizer or chat template"),
    (change_eval_data, "eval set heldout"),
    (change_draft, "eagle3 draft"),
    (change_options, "eagle3 draft"),
]


def test_reports_of_what_is_there_start_nothing(fleet, instance):
    result = tick(fleet, instance)
    assert requested(result) == []
    assert result.skip_message == "no report is outdated"


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_a_change_asks_for_its_own_target_once_and_says_why(fleet, instance, change, reason):
    cursor = tick(fleet, instance).cursor
    change(fleet)
    first = tick(fleet, instance, cursor)
    assert requested(first) == ["two"]
    assert because(first) == f"changed: {reason}"
    assert requested(tick(fleet, instance, first.cursor)) == []


def test_features_of_another_strategy_beside_those_of_the_draft_start_nothing(fleet, instance):
    fleet.publish_features("two", beside=("hf3",))
    assert requested(tick(fleet, instance)) == []


def with_named_eval_set(fleet: Fleet) -> None:
    """Target `two` also lists the eval set `chats`, of which nothing is made yet."""
    for folder, text in (("datasets", "files: [chats.jsonl]\n"), ("evals", "dataset: chats\n")):
        (fleet.registry / folder).mkdir()
        (fleet.registry / folder / "chats.yaml").write_text(text)
    (fleet.registry / "chats.jsonl").write_text("{}\n")
    fleet.target_file("two").write_text(fleet.target_file("two").read_text() + "evals: [chats]\n")


def test_an_eval_set_that_a_target_newly_lists_is_asked_for(fleet, instance):
    with_named_eval_set(fleet)
    result = tick(fleet, instance)
    assert requested(result) == ["two"]
    assert because(result) == "changed: eval set chats"


def test_new_files_of_a_named_eval_set_are_asked_for(fleet, instance):
    with_named_eval_set(fleet)
    fleet.publish_set("two", "chats")
    fleet.publish_report("two")
    before = tick(fleet, instance)
    assert requested(before) == []
    change_named_set(fleet)
    result = tick(fleet, instance, before.cursor)
    assert requested(result) == ["two"]
    assert because(result) == "changed: eval set chats"
    assert requested(tick(fleet, instance, result.cursor)) == []


@pytest.mark.parametrize("change", [change_named_set, lambda fleet: set_share(fleet, 0.3)])
def test_new_training_files_or_another_held_out_share_are_asked_for_until_they_are_measured(fleet, instance, change):
    with_named_eval_set(fleet)
    entry = {"model": "models/two", "dataset": "chats"}
    fleet.target_file("two").write_text(yaml.safe_dump(entry))
    fleet.publish_set("two", "heldout")
    fleet.publish_report("two")
    before = tick(fleet, instance)
    assert requested(before) == []
    change(fleet)
    result = tick(fleet, instance, before.cursor)
    assert requested(result) == ["two"]
    assert because(result) == "changed: eval set heldout"
    fleet.publish_set("two", "heldout")
    fleet.publish_report("two")
    assert requested(tick(fleet, instance, result.cursor)) == []


def test_another_choice_of_a_named_eval_set_is_asked_for(fleet, instance):
    with_named_eval_set(fleet)
    fleet.publish_set("two", "chats")
    fleet.publish_report("two")
    (fleet.registry / "evals" / "chats.yaml").write_text("dataset: chats\nmax_conversations: 5\n")
    assert because(tick(fleet, instance)) == "changed: eval set chats"


def test_a_new_draft_without_a_report_is_asked_for(fleet, instance):
    fleet.add("three")
    fleet.publish_eval_data("three", "first")
    fleet.publish_draft("three", "first")
    assert requested(tick(fleet, instance)) == ["three"]


@pytest.mark.parametrize("published", [(), ("draft",), ("eval data",)])
def test_a_target_with_nothing_to_measure_is_not_asked_for(fleet, instance, published):
    fleet.add("three")
    if "draft" in published:
        fleet.publish_draft("three", "first")
    if "eval data" in published:
        fleet.publish_eval_data("three", "first")
    assert requested(tick(fleet, instance)) == []


def test_the_draft_of_a_strategy_that_the_target_no_longer_uses_is_not_asked_for(fleet, instance):
    change_draft(fleet)
    fleet.target_file("two").write_text("model: models/two\ndataset: none\nstrategies: {}\n")
    assert requested(tick(fleet, instance)) == []


def test_a_restart_with_the_old_cursor_gives_the_same_run_keys(fleet, instance):
    cursor = tick(fleet, instance).cursor
    change_draft(fleet)
    assert keys(tick(fleet, instance, cursor)) == keys(tick(fleet, instance, cursor)) != []


def test_after_a_reset_of_the_cursor_a_failed_evaluation_is_asked_for_under_another_key(fleet, instance):
    """Dagster never starts a run of a key that a failed one had."""
    change_draft(fleet)
    first, reset = tick(fleet, instance), tick(fleet, instance)
    assert len({*keys(first, reset)}) == 2
    later = tick(fleet, instance, reset.cursor)
    assert requested(later) == []
    change_weights(fleet)
    assert len({*keys(first, reset, tick(fleet, instance, later.cursor))}) == 3


def test_a_cursor_of_before_there_were_series_goes_on_with_its_keys(fleet, instance):
    change_draft(fleet)
    old = '{"two": {"subject": "a state of before", "times": 4}}'
    [key] = keys(tick(fleet, instance, old))
    assert key.startswith("two:")
    assert key.endswith(":5")


def test_a_failed_evaluation_is_asked_for_again_only_when_something_changes(fleet, instance):
    change_weights(fleet)
    first = tick(fleet, instance)
    fleet.publish_features("two")  # the evaluation got so far, and no further
    second = tick(fleet, instance, first.cursor)
    assert requested(second) == []
    assert second.skip_message.endswith("not again before another change: two")
    change_draft(fleet)
    third = tick(fleet, instance, second.cursor)
    assert requested(third) == ["two"]
    assert len({*keys(first, third)}) == 2


@pytest.mark.parametrize("change", [change_weights, change_tokenizer, change_eval_data, change_named_set])
def test_whatever_changes_after_a_failed_evaluation_is_asked_for(fleet, instance, change):
    with_named_eval_set(fleet)
    fleet.publish_set("two", "chats")
    change_draft(fleet)
    failed = tick(fleet, instance)
    change(fleet)
    assert requested(tick(fleet, instance, failed.cursor)) == ["two"]


def test_what_comes_back_to_what_it_once_was_is_asked_for_with_a_key_of_its_own(fleet, instance):
    cursor = None
    seen = []
    for draft in ("second", "first", "second"):
        fleet.publish_draft("two", draft)
        result = tick(fleet, instance, cursor)
        seen += keys(result)
        fleet.publish_report("two")
        cursor = tick(fleet, instance, result.cursor).cursor
    assert len(seen) == len(set(seen)) == 3


def test_a_target_that_was_away_comes_back_with_keys_of_its_own(fleet, instance):
    change_weights(fleet)
    asked = tick(fleet, instance)
    kept = fleet.target_file("two").read_text()
    fleet.target_file("two").unlink()
    away = tick(fleet, instance, asked.cursor)
    assert requested(away) == []
    assert "two" not in away.skip_message
    fleet.target_file("two").write_text(kept)
    change_draft(fleet)
    back = tick(fleet, instance, away.cursor)
    assert requested(back) == ["two"]
    assert keys(back)[0].split(":")[2] == "2"


def test_what_was_evaluated_is_asked_for_again_when_its_report_is_not_the_newest(fleet, instance):
    fleet.publish_draft("two", "second")
    first = tick(fleet, instance)
    fleet.publish_report("two")
    done = tick(fleet, instance, first.cursor)
    fleet.publish_draft("two", "third")
    fleet.publish_report("two")
    fleet.publish_draft("two", "second")
    again = tick(fleet, instance, done.cursor)
    assert requested(again) == ["two"]
    assert keys(again) != keys(first)


def test_a_target_on_which_a_run_is_under_way_is_left_to_a_later_tick(fleet, instance):
    """A training publishes its draft before its report: a tick between the two must not measure it a second time."""
    change_draft(fleet)
    tags = {"dagster/partition": "two"}
    run = instance.create_run_for_job(
        build_definitions(fleet.registry).resolve_job_def("train_eagle3"), tags=tags, status=dg.DagsterRunStatus.STARTED
    )
    waiting = tick(fleet, instance)
    assert requested(waiting) == []
    assert waiting.skip_message.endswith("checked again when their runs have ended: two")
    instance.report_run_failed(run)
    assert requested(tick(fleet, instance, waiting.cursor)) == ["two"]


def test_a_broken_entry_only_warns_and_what_was_asked_for_it_is_remembered(fleet, instance):
    change_draft(fleet)
    asked = tick(fleet, instance)
    entry = fleet.target_file("two").read_text()
    fleet.target_file("two").write_text("model: [")
    fleet.publish_draft("one", "second")
    broken = tick(fleet, instance, asked.cursor)
    assert requested(broken) == ["one"]
    fleet.target_file("two").write_text(entry)
    assert requested(tick(fleet, instance, broken.cursor)) == []


def test_a_damaged_record_does_not_hide_the_other_targets(fleet, instance):
    change_draft(fleet)
    (fleet.root / "var" / "eagle3_draft" / "one" / "current.json").write_text("{")
    assert requested(tick(fleet, instance)) == ["two"]


@pytest.mark.parametrize(("line", "running"), [("", False), ("automation: false", False), ("automation: true", True)])
def test_it_is_off_unless_one_line_of_the_deployment_says_otherwise(fleet, line, running):
    fleet.target_file("one").write_text(fleet.target_file("one").read_text() + "evaluation: {cron: '0 3 * * *'}\n")
    (fleet.registry / "deployment.yaml").write_text(f"{line}\n")
    repository = build_definitions(fleet.registry).get_repository_def()
    sensor = repository.get_sensor_def("reevaluation_sensor")
    statuses = [sensor.default_status, *(schedule.default_status for schedule in repository.schedule_defs)]
    assert [status.value for status in statuses] == ["RUNNING" if running else "STOPPED"] * 3


def test_a_tick_reads_no_weights_that_did_not_change(fleet, instance, monkeypatch):
    cursor = tick(fleet, instance).cursor

    def read(path):
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr("draftworks.storage.identity.file_digest", read)
    assert requested(tick(fleet, instance, cursor)) == []


def test_a_tick_over_hundreds_of_measured_targets_takes_seconds(fleet, instance):
    """CPU time, which other work on the machine does not affect."""
    for number in range(300):
        fleet.copy("one", f"copy{number}")
    fleet.publish_draft("copy7", "second")
    before = time.process_time()
    assert requested(tick(fleet, instance)) == ["copy7"]
    seconds = time.process_time() - before
    assert seconds < 9  # about 1 s; with a second per target it would be 300


TICK = """
import sys
from pathlib import Path
import dagster as dg
from resources.workspace import Workspace
from spec_assets.code_location import build_definitions
definitions = build_definitions(Path(sys.argv[1]))
sensor = definitions.get_repository_def().get_sensor_def("reevaluation_sensor")
resources = {"workspace": Workspace(registry_root=sys.argv[1])}
with dg.DagsterInstance.ephemeral() as instance:
    context = dg.build_sensor_context(instance=instance, definitions=definitions, resources=resources)
    result = sensor.evaluate_tick(context)
assert len(result.run_requests) == 1
print([name for name in ("torch", "transformers", "numpy", "pyarrow") if name in sys.modules])
"""


def test_a_tick_imports_no_heavy_module(fleet):
    change_draft(fleet)
    command = [sys.executable, "-c", TICK, str(fleet.registry)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == "[]"
