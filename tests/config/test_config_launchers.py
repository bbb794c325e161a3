"""The launcher of a job: the deployment's settings, with those of its program and of its target merged in key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from draftworks.config import launchers
from draftworks.config.launchers import LocalLauncherSpec, SchedulerLauncherSpec
from draftworks.errors import ConfigError
from draftworks.targets.registry import Registry


class QueueSpec(SchedulerLauncherSpec):
    """A kind with keys of its own, since only some kinds are offered at any time."""

    kind: Literal["queue"] = "queue"
    partition: str = "small"
    lines: list[str] = Field(default_factory=list)
    labels: dict[str, str] = Field(default_factory=dict)


@pytest.fixture(autouse=True)
def _offer_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(launchers.KINDS, "queue", QueueSpec)


def parse(**values: Any) -> launchers.LauncherSpec:
    return launchers.parse_launcher(values, "launcher")


def merge(deployment: launchers.LauncherSpec, target: dict[str, Any], program: str = "train") -> launchers.LauncherSpec:
    return launchers.merge_launcher(deployment, target, program, "target t: launcher")


def test_later_layers_count_before_earlier_ones_and_leave_other_keys():
    deployment = parse(
        kind="queue", partition="a", grace_s=1, labels={"x": "1", "y": "1"}, programs={"train": {"partition": "b"}}
    )
    assert merge(deployment, {}, "capture").partition == "a"
    assert merge(deployment, {}).partition == "b"
    target = {"partition": "c", "labels": {"y": "2"}, "programs": {"train": {"nodes": 4, "lines": ["l"]}}}
    merged = merge(deployment, target)
    assert (merged.partition, merged.nodes, merged.lines, merged.grace_s) == ("c", 4, ["l"], 1)
    assert merged.labels == {"x": "1", "y": "2"}
    assert merge(deployment, target, "export").nodes == 1
    assert merge(deployment, {**target, "programs": {"train": {"partition": "d"}}}).partition == "d"
    assert merged.programs == {}


def test_another_kind_inherits_the_common_keys_only():
    deployment = parse(kind="queue", partition="a", grace_s=1, programs={"export": {"kind": "local"}})
    local = merge(deployment, {}, "export")
    assert type(local) is LocalLauncherSpec
    assert local.grace_s == 1
    back = merge(deployment, {"programs": {"export": {"kind": "queue"}}}, "export")
    assert (back.partition, back.grace_s) == ("small", 1)
    assert merge(parse(threads=3), {"kind": "queue", "partition": "b"}).threads == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{kind: slrm}", "launcher: kind: expected one of local.*, found 'slrm'; did you mean slurm"),
        ("{partition: a}", "launcher: unknown key partition; it is one of kind .*queue.*, and the kind here is local"),
        ("{kind: queue, partitoin: a}", "launcher: unknown key partitoin; did you mean partition"),
        (
            "{programs: {trian: {nodes: 2}}}",
            "programs: unknown program trian; did you mean train",
        ),
        ("{programs: {train: {grace: 2}}}", "programs.train: unknown key grace; did you mean grace_s"),
        ("{grace_s: -1, threads: 0}", "grace_s: .*found -1.*; threads: .*found 0"),
        ("{nodes: 2, min_nodes: 3}", "min_nodes 3 is more than nodes 2"),
        ("{programs: {train: {min_nodes: 3}}}", "programs.train: min_nodes 3 is more than nodes 1"),
    ],
)
def test_what_a_deployment_cannot_mean_is_refused_with_file_and_reason(tmp_path: Path, text: str, message: str):
    (tmp_path / "deployment.yaml").write_text(f"launcher: {text}\n")
    with pytest.raises(
        ConfigError, match=f"{tmp_path}/deployment.yaml: launcher: .*{message.removeprefix('launcher: ')}"
    ):
        Registry(tmp_path).load_deployment()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{partitoin: a}", "launcher: unknown key partitoin; did you mean partition"),
        ("{programs: {train: {parti: a}}}", "launcher.programs.train: unknown key parti; did you mean partition"),
        ("{programs: {trian: {}}}", "launcher.programs: unknown program trian; did you mean train"),
        ("{programs: {train: 3}}", "launcher.programs: expected settings by program"),
        ("{kind: local, partition: a}", "launcher: unknown key partition; it is one of kind .*queue"),
        ("{nodes: many}", "launcher: nodes: .*found 'many'"),
    ],
)
def test_what_a_target_cannot_override_is_refused_with_its_file(tmp_path: Path, text: str, message: str):
    (tmp_path / "targets").mkdir()
    (tmp_path / "deployment.yaml").write_text("launcher: {kind: queue}\n")
    path = tmp_path / "targets" / "t.yaml"
    path.write_text(f"model: m\ndataset: d\nlauncher: {text}\n")
    with pytest.raises(ConfigError, match=f"{path}: {message}"):
        Registry(tmp_path).load_target("t")


def test_a_registry_resolves_the_launcher_of_a_program(tmp_path: Path):
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "t.yaml").write_text(
        "model: m\ndataset: d\nlauncher: {programs: {train: {partition: b}}}\n"
    )
    registry = Registry(tmp_path)
    (tmp_path / "deployment.yaml").write_text("launcher: {kind: queue, partition: a}\n")
    target = registry.load_target("t")
    assert [registry.resolve_launcher(target, program).partition for program in ("capture", "train")] == ["a", "b"]


def test_without_settings_jobs_run_here():
    assert parse() == LocalLauncherSpec()
    assert merge(LocalLauncherSpec(), {}) == LocalLauncherSpec()
