"""`draftworks status` names what each draft needs, the most urgent first, and reads no weights."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from acting_fleet import ActingFleet
from measured_fleet import MeasuredFleet, may, walk
from typer.testing import CliRunner

from draftworks.decision.fleet_status import DraftStatus, Need, read_status
from draftworks.evaluation.report import text_tables
from draftworks.programs.cli import app
from draftworks.service.register import InService, ServedDraft, ServiceRegister
from draftworks.storage import identity
from draftworks.targets.registry import Registry

NOW = may(9).timestamp()


@pytest.fixture
def fleet(tmp_path: Path) -> MeasuredFleet:
    return MeasuredFleet(tmp_path)


def status(fleet: MeasuredFleet, *targets: str) -> dict[str, DraftStatus]:
    fleet.standings()  # which reads the weights once
    return {one.target: one for one in read_status(fleet.registry, targets or None, NOW)}


def serve(fleet: MeasuredFleet, target: str) -> None:
    """Put the newest draft into service by its newest report."""
    draft, report = (fleet.artifacts.load_current(f"eagle3_{what}", target) for what in ("draft", "report"))
    served = ServedDraft(
        digest=draft.path.name,
        path=f"eagle3_export/{target}/{draft.path.name}",
        formats={},
        version="v",
        weights="w",
        target_digest="t",
        report=report.path.name,
    )
    register = ServiceRegister(fleet.artifacts.root, target, "eagle3")
    register.folder.mkdir(parents=True, exist_ok=True)
    when = datetime.fromtimestamp(NOW, UTC).isoformat()
    record = InService(
        number=1,
        action="promote",
        target=target,
        strategy="eagle3",
        draft=served,
        previous=None,
        rollback_to=None,
        who="a person",
        why="",
        when=when,
        forced=False,
    )
    (register.folder / "in_service.json").write_text(json.dumps(record.to_json()))


def test_what_needs_a_person_comes_first_with_a_command(fleet: MeasuredFleet):
    fleet.add_measured("good", walk(2.0))
    fleet.add("empty")
    fleet.target_file("broken").write_text("model: [")
    found = list(status(fleet).values())
    assert [(one.target, one.need) for one in found] == [
        ("broken", Need.BROKEN),
        ("empty", Need.NOTHING_MADE),
        ("good", Need.NOT_SERVED),
    ]
    assert [one.command for one in found] == [
        "draftworks check --target broken",
        "draftworks run everything --target empty",
        "draftworks promote good eagle3",
    ]


def test_the_promise_is_of_the_draft_in_service_and_a_better_one_is_offered(fleet: MeasuredFleet):
    fleet.add_measured("one", walk(2.0))
    serve(fleet, "one")
    assert status(fleet)["one"].need is Need.NOT_OBSERVED
    fleet.publish("eagle3_draft", "one", "second draft", {})
    fleet.publish_report("one", walk(2.5), day=2)
    found = status(fleet)["one"]
    assert found.promised is not None
    assert (found.promised.value, found.newer) == (2.0, 0.5)
    assert (found.need, found.command) == (Need.BETTER, "draftworks promote one eagle3")


def test_a_changed_file_is_not_read_and_said_to_be_unsure(fleet: MeasuredFleet, monkeypatch: pytest.MonkeyPatch):
    fleet.add_measured("one", walk(2.0))
    fleet.standings()
    (fleet.model("one") / "model.safetensors").write_text("other weights, other size")
    monkeypatch.setattr(identity, "file_digest", lambda path: pytest.fail(f"{path} was read"))
    [found] = read_status(fleet.registry, None, NOW)
    assert found.need is Need.UNSURE
    assert "not looked at" in found.why


def test_it_fits_eighty_columns_and_says_the_same_as_json(fleet: MeasuredFleet, monkeypatch: pytest.MonkeyPatch):
    fleet.add_measured("a-target-with-a-name", walk(2.0))
    fleet.add_measured("other", walk(2.5))
    monkeypatch.setattr(text_tables, "find_terminal_width", lambda: 80)
    shown = CliRunner().invoke(app, ["status", "--registry", str(fleet.registry.root)])
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "a-target-with-a-name/eagle3  3.00 ±0.10" in shown.stdout
    told = CliRunner().invoke(app, ["status", "other", "--json", "--registry", str(fleet.registry.root)])
    [draft] = json.loads(told.stdout)["drafts"]
    assert (draft["target"], draft["promised"]["value"], draft["need"]) == ("other", 3.5, "not_served")
    assert draft["command"] in shown.stdout


def test_a_decision_that_would_start_reads_no_weights_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    acting = ActingFleet(tmp_path)
    acting.set_budget(100.0)
    acting.add("one")
    registry = Registry(acting.fleet.registry)
    [weights] = (registry.root / registry.load_target("one").model).glob("*.safetensors")
    weights.write_bytes(weights.read_bytes() + b" ")
    monkeypatch.setattr(identity, "file_digest", lambda path: pytest.fail(f"{path} was read"))
    [found] = read_status(registry, None, NOW)
    assert "not looked at" in found.next
