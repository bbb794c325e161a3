"""The sensor of notifications: runs that failed, checks by which a draft is worse, each told once."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
import yaml
from json_server import Reply, Request, json_server

from draftworks.errors import ConfigError
from draftworks.targets.registry import Registry
from resources.workspace import Workspace
from sensors.notifications import is_regression, make_notification_sensor, shorten_cause
from spec_assets.gates import DRAFT_IS_CURRENT, NOT_WORSE
from spec_assets.promotion import NEWEST_IN_SERVICE

TARGET = dg.StaticPartitionsDefinition(["one"])


@dg.asset(partitions_def=TARGET)
def eagle3_report() -> None:
    """Stands for a report."""


@dg.asset_check(asset=eagle3_report)
def not_worse() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.WARN, description="lost 0.2")


@dg.asset(partitions_def=TARGET)
def broken() -> None:
    raise ConfigError("no room for the weights")


class Site:
    """A deployment with one webhook, and an instance of Dagster."""

    def __init__(self, root: Path, url: str | None, instance: dg.DagsterInstance, **values) -> None:
        self.root, self.instance = root, instance
        (root / "targets").mkdir()
        channels = [] if url is None else [{"kind": "webhook", "url": url, **values}]
        settings = {"var": "var", "notifications": channels, "ui_url": "https://dagster.example"}
        (root / "deployment.yaml").write_text(yaml.safe_dump(settings))

    def tick(self) -> str:
        context = dg.build_sensor_context(instance=self.instance)
        result = make_notification_sensor(Registry(self.root))(
            context, workspace=Workspace(registry_root=str(self.root))
        )
        assert isinstance(result, dg.SkipReason)
        return result.skip_message or ""

    def run(self, *assets) -> str:
        made = dg.materialize(assets, partition_key="one", instance=self.instance, raise_on_error=False)
        return made.run_id


@pytest.fixture
def site_instance():
    with dg.DagsterInstance.ephemeral() as found:
        yield found


def test_failures_and_regressions_are_told_once_with_cause_and_link(tmp_path: Path, site_instance) -> None:
    seen: list[Request] = []

    def answer(request: Request) -> Reply:
        seen.append(request)
        return Reply(200, "ok")

    with json_server(answer) as url:
        site = Site(tmp_path, url, site_instance)
        site.run(broken)
        assert site.tick() == "from now on is told what happens"
        assert site.tick() == "nothing new"
        failed, worse = site.run(broken), site.run(eagle3_report, not_worse)
        assert site.tick().startswith("2 new events")
        site.run(eagle3_report, not_worse)  # equal figures again
        assert site.tick() == "nothing new"
    events = {event["kind"]: event for each in seen for event in each.body["events"]}
    assert sorted(events) == ["failure", "regression"]
    assert events["failure"]["target"] == events["regression"]["target"] == "one"
    assert events["failure"]["text"] == "broken failed: no room for the weights"
    assert events["failure"]["link"] == f"https://dagster.example/runs/{failed}"
    assert events["regression"]["title"] == "eagle3_report: not_worse failed"
    assert events["regression"]["text"] == "lost 0.2"
    assert events["regression"]["link"].endswith(worse)
    assert len(seen) == 2


def test_what_cannot_be_sent_waits_and_runs_go_on(tmp_path: Path, site_instance) -> None:
    site = Site(tmp_path, "http://127.0.0.1:1", site_instance)
    site.tick()
    site.run(broken)
    assert "attempt 1 failed" in site.tick()
    assert site.tick() == "nothing new"


def test_the_sensor_is_off_unless_there_is_a_channel(tmp_path: Path, site_instance) -> None:
    for name, url, status in (
        ("on", "http://127.0.0.1:1", dg.DefaultSensorStatus.RUNNING),
        ("off", None, dg.DefaultSensorStatus.STOPPED),
    ):
        (tmp_path / name).mkdir()
        site = Site(tmp_path / name, url, site_instance)
        assert make_notification_sensor(Registry(site.root)).default_status is status


def test_regressions_are_the_checks_that_compare_drafts() -> None:
    assert is_regression("eagle3_report", NOT_WORSE)
    assert is_regression("dflash_promoted", NEWEST_IN_SERVICE)
    assert not is_regression("eagle3_report", DRAFT_IS_CURRENT)
    assert not is_regression("eagle3_export", "sound")


def test_a_traceback_is_cut_to_its_last_line() -> None:
    trace = "step failed: Traceback (most recent call last):\n  File x, line 1\nValueError: bad"
    assert shorten_cause(trace) == "step failed: ValueError: bad"
    assert shorten_cause("plain\nwords") == "plain\nwords"
