"""The registry sensor requests exactly the targets whose inputs changed, once each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import dagster as dg
import pytest

from resources.workspace import Workspace
from sensors.reevaluation import make_registry_sensor

TARGETS = ["one", "two"]


@pytest.fixture
def registry(tmp_path: Path, tiny_folder: Path) -> Path:
    root = tmp_path / "registry"
    for folder in ("targets", "datasets"):
        (root / folder).mkdir(parents=True)
    (root / "datasets" / "chats.yaml").write_text("files: [chats.jsonl]\n")
    (root / "chats.jsonl").write_text("{}\n")
    for name in ("one", "two"):
        (root / "targets" / f"{name}.yaml").write_text(f"model: {tiny_folder}\ndataset: chats\nmax_length: 64\n")
    return root


def tick(
    registry: Path, cursor: str | None = None, targets: Sequence[str] = TARGETS
) -> dg.SensorResult | dg.SkipReason:
    context = dg.build_sensor_context(cursor=cursor, resources={"workspace": Workspace(registry_root=str(registry))})
    return make_registry_sensor(targets)(context)


def requested(result: dg.SensorResult) -> list[str]:
    return [request.partition_key for request in result.run_requests]


def test_the_first_tick_asks_for_all_and_the_second_for_none(registry):
    first = tick(registry)
    assert requested(first) == ["one", "two"]
    assert isinstance(tick(registry, first.cursor), dg.SkipReason)


def test_a_changed_option_asks_for_its_own_target(registry):
    cursor = tick(registry).cursor
    path = registry / "targets" / "two.yaml"
    path.write_text(path.read_text().replace("64", "65"))
    assert requested(tick(registry, cursor)) == ["two"]


def test_changed_data_asks_for_all_that_use_it(registry):
    cursor = tick(registry).cursor
    (registry / "chats.jsonl").write_text("{}\n{}\n")
    assert requested(tick(registry, cursor)) == ["one", "two"]


def test_a_target_that_was_away_is_asked_for_only_if_it_changed_and_with_a_key_of_its_own(registry):
    def edit(target: str, old: str, new: str) -> None:
        path = registry / "targets" / f"{target}.yaml"
        path.write_text(path.read_text().replace(old, new))

    first = tick(registry)
    edit("two", "64", "65")
    moved = tick(registry, first.cursor)
    edit("one", "64", "66")
    away = tick(registry, moved.cursor, targets=["one"])
    assert requested(away) == ["one"]
    assert isinstance(tick(registry, away.cursor), dg.SkipReason)
    edit("two", "65", "64")
    back = tick(registry, away.cursor)
    assert requested(back) == ["two"]
    assert back.run_requests[0].run_key not in {request.run_key for request in first.run_requests}


def test_a_broken_entry_does_not_hide_the_others(registry):
    cursor = tick(registry).cursor
    (registry / "targets" / "one.yaml").write_text("model: [")
    path = registry / "targets" / "two.yaml"
    path.write_text(path.read_text().replace("64", "65"))
    result = tick(registry, cursor)
    assert requested(result) == ["two"]
    assert isinstance(tick(registry, result.cursor), dg.SkipReason)


def test_a_target_that_is_no_partition_yet_is_left_until_the_code_location_is_reloaded(registry):
    (registry / "targets" / "three.yaml").write_text((registry / "targets" / "two.yaml").read_text())
    assert requested(tick(registry)) == ["one", "two"]


def test_after_a_reset_of_the_cursor_the_same_inputs_are_asked_for_under_other_keys(registry):
    keys = [{request.run_key for request in tick(registry).run_requests} for _ in range(2)]
    assert not keys[0] & keys[1]
    assert [len(each) for each in keys] == [2, 2]


def test_run_keys_name_what_is_new(registry):
    first = tick(registry)
    path = registry / "targets" / "two.yaml"
    path.write_text(path.read_text().replace("64", "65"))
    second = tick(registry, first.cursor)
    path.write_text(path.read_text().replace("65", "64"))
    back = tick(registry, second.cursor)
    keys = {request.run_key for result in (first, second, back) for request in result.run_requests}
    assert len(keys) == 4


def test_it_is_off_by_default():
    assert make_registry_sensor(TARGETS).default_status is dg.DefaultSensorStatus.STOPPED
