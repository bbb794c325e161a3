"""Before a run makes anything, the schedulers and the object storage of its steps are asked."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.reconstruct import ReconstructableJob
from launcher_harnesses import ToyHarness

from draftworks.errors import ConfigError
from draftworks.targets.registry import Registry
from spec_assets.common import PROGRAM_TAG
from spec_assets.definitions import REGISTRY
from spec_assets.executor import require_reachable

LOCATION = '''
from pathlib import Path
import dagster as dg
from launcher_harnesses import offer_toy
from draftworks.targets.registry import Registry
from spec_assets.common import asset
from spec_assets.executor import make_executor

offer_toy()
HERE = Path(__file__).parent

@asset(group="work", kinds=["python"], partitions_def=dg.StaticPartitionsDefinition(["small"]), program="capture")
def features(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """A step that costs a lot. Only in a step's process its context has a run."""
    (HERE / f"computed-{context.run.run_id}").touch()
    return dg.MaterializeResult()

@asset(group="work", kinds=["python"], partitions_def=dg.StaticPartitionsDefinition(["small"]), program="train",
       deps=["features"])
def draft(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """A step whose scheduler cannot be reached."""
    return dg.MaterializeResult()

defs = dg.Definitions(
    assets=[features, draft], jobs=[dg.define_asset_job("make", selection=[features, draft])],
    executor=make_executor(Registry(HERE / "registry"), preload=[]),
)

def make_job():
    return defs.resolve_job_def("make")
'''


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    (tmp_path / "registry" / "targets").mkdir(parents=True)
    shutil.copytree(REGISTRY / "datasets", tmp_path / "registry" / "datasets")
    return Registry(tmp_path / "registry")


def write(registry: Registry, deployment: dict, **entry: object) -> None:
    (registry.root / "deployment.yaml").write_text(yaml.safe_dump(deployment))
    strategies = {"eagle3": {"training": {"device": "cpu", "processes": 2}}}
    values = {"model": "/nowhere", "dataset": "tiny", "strategies": strategies, **entry}
    (registry.root / "targets" / "small.yaml").write_text(yaml.safe_dump(values))


def make_plan(*programs: str) -> SimpleNamespace:
    return SimpleNamespace(steps=[SimpleNamespace(tags={PROGRAM_TAG: program}) for program in programs])


def refuse(registry: Registry, *programs: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        require_reachable(make_plan(*programs), "small", registry)
    return str(caught.value).splitlines()


def test_a_run_ends_before_its_first_step_if_a_later_ones_scheduler_does_not_answer(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    harness = ToyHarness(tmp_path)
    write(registry, {"launcher": {"programs": {"train": harness.make_settings()}}})
    (harness.scheduler.root / "silent").touch()
    (tmp_path / "location.py").write_text(LOCATION)
    (tmp_path / "home").mkdir()
    shutil.copy(Path(__file__).parents[2] / ".dagster" / "dagster.yaml", tmp_path / "home")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    with dg.DagsterInstance.from_config(str(tmp_path / "home")) as instance:
        job = ReconstructableJob.for_file(str(tmp_path / "location.py"), "make_job")
        tags = {"dagster/partition": "small"}
        with dg.execute_job(job, instance=instance, tags=tags, raise_on_error=False) as result:
            (failed,) = [event for event in result.all_events if event.is_failure]
    assert "target small: jobs of train: " in str(failed.event_specific_data)
    assert not list(tmp_path.glob("computed-*"))


def test_only_the_places_of_the_steps_that_are_left_are_asked(registry: Registry, tmp_path: Path):
    harness = ToyHarness(tmp_path)
    write(registry, {"launcher": {"programs": {"train": harness.make_settings()}}})
    require_reachable(make_plan("capture", "train"), "small", registry)
    (harness.scheduler.root / "silent").touch()
    require_reachable(make_plan("capture", "evaluate"), "small", registry)
    require_reachable(make_plan("train"), None, registry)
    assert len(refuse(registry, "capture", "train")) == 1


def test_each_reason_is_given_once_with_the_programs_that_it_concerns(registry: Registry, tmp_path: Path):
    harness = ToyHarness(tmp_path)
    write(registry, {"launcher": harness.make_settings()})
    (harness.scheduler.root / "silent").touch()
    (line,) = refuse(registry, "regenerate", "capture", "train", "evaluate")
    assert line.startswith("target small: jobs of regenerate, capture, train and 2 more: ")


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ({"nodes": 2}, "kind local has this machine only"),
        ({"kind": "slurm", "commands": "/nowhere"}, "no command sbatch in /nowhere"),
        ({"kind": "slurm", "time_limit_s": 60}, "is over before anything is done"),
        ({"kind": "kubernetes", "image": "i", "kubeconfig": "/nowhere"}, "launcher.kubeconfig: /nowhere"),
        ({"kind": "ray", "address": "http://127.0.0.1:9"}, "ray"),
    ],
    ids=["local", "commands", "limit", "kubeconfig", "ray"],
)
def test_what_a_launcher_lacks_is_said(registry: Registry, launcher: dict, words: str):
    write(registry, {"launcher": launcher})
    assert words in refuse(registry, "capture")[0]


def test_storage_is_asked_by_those_that_write_there(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    storage = {"endpoint": "http://127.0.0.1:9", "retry_s": 0}
    write(
        registry,
        {
            "features": {"kind": "s3", "url": "s3://drafts/features"},
            "publish": {"url": "s3://drafts/published"},
            "object_storage": storage,
        },
    )
    require_reachable(make_plan("regenerate", "train"), "small", registry)
    (line,) = refuse(registry, "capture")
    assert line.startswith("deployment: features.url: s3://drafts/features")
    assert "could not be reached" in line
    assert len(refuse(registry, "capture", "evaluate")) == 2
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "the environment has no AWS_SECRET_ACCESS_KEY" in refuse(registry, "capture")[0]


def test_nodes_that_would_do_nothing_for_answers_are_refused(registry: Registry, tmp_path: Path):
    launcher = {"programs": {"regenerate": {**ToyHarness(tmp_path).make_settings(), "nodes": 2}}}
    write(registry, {"launcher": launcher}, capture={"backend": "sglang_server"})
    require_reachable(make_plan("regenerate"), "small", registry)
    for entry in ({}, {"capture": {"backend": "sglang_server", "server": {"url": "http://a:1", "spool": "/s"}}}):
        write(registry, {"launcher": launcher}, **entry)
        (line,) = refuse(registry, "regenerate", "capture")
        assert line.startswith(
            "target small: jobs of regenerate: launcher.nodes is 2, but answers are generated by one"
        )
