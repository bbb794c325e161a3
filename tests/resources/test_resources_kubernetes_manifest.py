"""TrainJobs as they are written: the schemas of Trainer and Kubernetes take them, and no secret stands in them."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_kubelet import RUNTIME, WORKERS_RUNTIME, build_pod, expand
from fake_kubernetes import find_unknown_fields

from draftworks.config.launchers import KubernetesLauncherSpec
from draftworks.errors import ConfigError
from resources.kubernetes_manifest import (
    FAILED_BEFORE,
    QUEUE,
    locate_environment,
    require_runtime,
    write_environment,
    write_train_job,
)
from resources.scheduler import JobRequest
from resources.torch_job import RunDir, TorchJob

KUBERNETES = "1.37"
RICH: dict[str, Any] = {
    "queue": "research",
    "priority_class": "nightly",
    "resources": {"cpu": "16", "memory": "128Gi"},
    "env": {"NCCL_DEBUG": "WARN"},
    "secrets": {"HF_TOKEN": "hub/token"},
    "service_account": "trainer",
    "image_pull_secrets": ["registry"],
    "time_limit_s": 3600,
    "pod": {
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
        "volumes": [{"name": "scratch", "emptyDir": {}}],
    },
    "labels": {"team": "drafts"},
    "annotations": {"contact": "drafts@example.org"},
}


def settings(tmp_path: Path, **rest: Any) -> KubernetesLauncherSpec:
    volumes = {str(tmp_path): "shared", "/models": "models/checkpoints"}
    return KubernetesLauncherSpec(**{"image": "draftworks:1", "volumes": volumes, **rest})


def request(tmp_path: Path, **rest: Any) -> JobRequest:
    files = RunDir.create(tmp_path / "runs", "0123456789", 0)
    values: dict[str, Any] = {"procs_per_node": 8, "gpus_per_node": 8, **rest}
    least = values.pop("min_nodes", None)
    job = TorchJob("draftworks.programs.train", ("run.yaml",), **values)
    env = {"DAGSTER_PIPES_MESSAGES": "m", "JOB_TOKEN": "s3cret's", "TORCHELASTIC_ERROR_FILE": str(files.error)}
    return JobRequest("dw-" + 10 * "0af7", job, env, files, tmp_path / "job.json", least)


def validate(manifest: dict[str, Any]) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def read_runtime(file: Path = RUNTIME) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("more", [{}, RICH], ids=["least", "rich"])
def test_schemas_take_the_train_job_and_its_pods(tmp_path: Path, nodes: int, more: dict[str, Any]) -> None:
    manifest = write_train_job(request(tmp_path, nodes=nodes), settings(tmp_path, **more), "drafts")
    assert find_unknown_fields(manifest) == []
    validate(build_pod(read_runtime(), manifest, 0))
    assert manifest["spec"]["trainer"]["numNodes"] == nodes
    assert manifest["spec"]["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "8"
    assert manifest["metadata"]["labels"].get(QUEUE) == more.get("queue")


def test_schemas_find_a_misspelt_field(tmp_path: Path) -> None:
    import kubernetes_validate

    wrong = settings(tmp_path, overrides={"spec": {"trainer": {"numNode": 2}}})
    assert find_unknown_fields(write_train_job(request(tmp_path), wrong, "drafts")) == ["spec.trainer.numNode"]
    spec = settings(tmp_path, pod={"nodeSelectr": {"gpu": "h200"}})
    manifest = write_train_job(request(tmp_path), spec, "drafts")
    assert [each.rsplit(".", 1)[1] for each in find_unknown_fields(manifest)] == ["nodeSelectr"]
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(build_pod(read_runtime(), manifest, 0))


def test_nothing_of_the_environment_stands_in_the_train_job(tmp_path: Path) -> None:
    asked, spec = request(tmp_path), settings(tmp_path, **RICH)
    text = json.dumps(write_train_job(asked, spec, "drafts"))
    assert "s3cret" not in text
    assert "JOB_TOKEN" not in text
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in json.loads(text)[
        "spec"
    ]["trainer"]["env"]
    write_environment(asked, spec)
    file = locate_environment(asked, spec)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "export JOB_TOKEN='s3cret'\"'\"'s'\n" in file.read_text()


def test_commands_survive_the_expansion_of_kubernetes(tmp_path: Path) -> None:
    asked = request(tmp_path)
    odd = JobRequest(asked.name, TorchJob("m", ("$(HOME)", "$$", "${A}")), asked.env, asked.files, asked.claim)
    trainer = write_train_job(odd, settings(tmp_path, env={"A": "$(HOME)$"}), "drafts")["spec"]["trainer"]
    assert [expand(word, {"HOME": "/root"}) for word in trainer["args"][-3:]] == ["$(HOME)", "$$", "${A}"]
    assert expand(trainer["env"][-1]["value"], {"HOME": "/root"}) == "$(HOME)$"
    assert '"$(mktemp -d)/store"' in expand(trainer["command"][-1], {})


def test_overrides_come_last_and_fewer_nodes_are_the_callers_word(tmp_path: Path) -> None:
    spec = settings(
        tmp_path, overrides={"spec": {"managedBy": "kueue.x-k8s.io/multikueue", "trainer": {"image": "other"}}}
    )
    manifest = write_train_job(request(tmp_path, nodes=4, min_nodes=2), spec, "drafts", nodes=3)
    assert manifest["spec"]["managedBy"] == "kueue.x-k8s.io/multikueue"
    assert manifest["spec"]["trainer"]["image"] == "other"
    assert manifest["spec"]["trainer"]["numNodes"] == 3
    assert "--nnodes=3" in manifest["spec"]["trainer"]["args"]


def test_a_run_on_no_volume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launcher.volumes: none holds the folder of the run, .*\(found /data\)"):
        write_train_job(request(tmp_path), settings(tmp_path, volumes={"/data": "shared"}), "drafts")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"env": {"WANDB_API_KEY": "1234"}}, "WANDB_API_KEY would be readable in the TrainJob"),
        ({"secrets": {"HF_TOKEN": "hf_abcdef"}}, "expected NAME/KEY of a Secret"),
        ({"volumes": {"data": "shared"}}, "expected ABSOLUTE_PATH: CLAIM"),
        ({"image": ""}, "image"),
    ],
    ids=["secret-in-env", "value-for-reference", "relative-path", "no-image"],
)
def test_settings_that_cannot_be_right_are_refused(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        settings(tmp_path, **values)
    assert "hf_abcdef" not in str(caught.value).replace(str(values), "").split("input_value")[0]


@pytest.mark.parametrize("more", [{}, RICH], ids=["least", "rich"])
def test_copies_are_pods_of_one_train_job_each_a_torchrun_of_its_own(tmp_path: Path, more: dict[str, Any]) -> None:
    manifest = write_train_job(request(tmp_path, copies=5), settings(tmp_path, **more), "drafts")
    assert find_unknown_fields(manifest) == []
    validate(build_pod(read_runtime(WORKERS_RUNTIME), manifest, 4))
    assert manifest["spec"]["runtimeRef"]["name"] == read_runtime(WORKERS_RUNTIME)["metadata"]["name"]
    assert manifest["spec"]["trainer"]["numNodes"] == 5
    assert "--nnodes=1" in manifest["spec"]["trainer"]["args"]
    assert manifest["spec"]["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "8"
    assert manifest["metadata"]["labels"].get(QUEUE) == more.get("queue")


@pytest.mark.parametrize(("file", "copies"), [(RUNTIME, 1), (WORKERS_RUNTIME, 8)], ids=["training", "workers"])
def test_what_deploy_brings_is_valid(file: Path, copies: int) -> None:
    from kubeflow_trainer_api.models import TrainerV1alpha1ClusterTrainingRuntime

    runtime = read_runtime(file)
    known = TrainerV1alpha1ClusterTrainingRuntime.from_dict(runtime)
    assert known is not None
    assert known.to_dict()["spec"]["template"]["spec"] == runtime["spec"]["template"]["spec"]
    require_runtime(runtime, 60.0, copies)
    job = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    rules = job["spec"].get("podFailurePolicy", {"rules": []})["rules"]
    assert [each["onExitCodes"]["values"] for each in rules if "onExitCodes" in each] == [[FAILED_BEFORE]] * (
        copies > 1
    )
    validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": job["spec"]})
    for manifest in yaml.safe_load_all(RUNTIME.with_name("access.yaml").read_text()):
        validate(manifest)


def test_a_runtime_that_restarts_pods_or_hurries_them_is_refused() -> None:
    runtime = read_runtime()
    spec = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    del spec["backoffLimit"]
    spec["template"]["spec"] |= {"restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 10}
    with pytest.raises(ConfigError, match=r"backoffLimit 0 .*; restartPolicy Never .*; terminationGracePeriodSeconds"):
        require_runtime(runtime, grace_s=60.0)
    with pytest.raises(
        ConfigError, match=r"launcher.workers_runtime: .* needs backoffLimitPerIndex.*workers-runtime.yaml"
    ):
        require_runtime(read_runtime(), 60.0, copies=2)
    with pytest.raises(ConfigError, match="has no replicated job 'node'"):
        require_runtime({"metadata": {"name": "other"}, "spec": {"template": {"spec": {}}}}, grace_s=60.0)
