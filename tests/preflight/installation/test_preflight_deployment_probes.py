"""What a deployment names: variables that are not set, storage and schedulers that do not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftworks.preflight.installation.deployment_probes import (
    find_named_variables,
    probe_object_storage,
    probe_registry,
    probe_schedulers,
    probe_variables,
)
from draftworks.targets.registry import Registry

ENDPOINT = "responses: {endpoint: {base_urls: ['http://127.0.0.1:1/v1'], server: vllm, api_key_env: MY_API_KEY}}"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    (tmp_path / "targets").mkdir()
    (tmp_path / "datasets").mkdir()
    (tmp_path / "targets" / "a.yaml").write_text("model: m\ndataset: d\n")
    return Registry(tmp_path)


def test_a_deployment_that_uses_nothing_is_fine(registry: Registry):
    for lines in (
        probe_registry(registry),
        probe_object_storage(registry, 1),
        probe_schedulers(registry, 1),
        probe_variables(registry, {}),
    ):
        assert [line.severity for line in lines] == ["ok"]


def test_variables_that_the_registry_names_must_be_set_and_are_never_shown(registry: Registry):
    (registry.root / "targets" / "b.yaml").write_text(f"model: m\ndataset: d\n{ENDPOINT}\n")
    assert list(find_named_variables(registry)) == ["MY_API_KEY"]
    [line] = probe_variables(registry, {"MY_API_KEY": ""})
    assert line.severity == "warning"
    assert "no MY_API_KEY, which target b: responses.endpoint.api_key_env names" in line.text
    [line] = probe_variables(registry, {"MY_API_KEY": "sk-abcdef"})
    assert line.severity == "ok"
    assert "sk-abcdef" not in line.text


def test_a_registry_file_that_cannot_be_read_is_a_problem(registry: Registry):
    (registry.root / "targets" / "b.yaml").write_text("modle: m\n")
    (registry.root / "deployment.yaml").write_text("vra: x\n")
    found = list(probe_registry(registry))
    assert {line.severity for line in found} == {"error"}
    assert any("unknown key vra" in line.text for line in found)
    assert [line.severity for line in probe_registry(Registry(registry.root / "none"))] == ["error"]


def test_object_storage_without_keys_is_a_problem_that_names_them(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    (registry.root / "deployment.yaml").write_text(
        "publish: {url: 's3://bucket/drafts'}\nobject_storage: {endpoint: 'http://127.0.0.1:1'}\n"
    )
    [line] = probe_object_storage(registry, 1)
    assert line.severity == "error"
    assert "AWS_ACCESS_KEY_ID" in line.text


def test_a_scheduler_whose_programs_are_missing_is_a_problem(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    (registry.root / "deployment.yaml").write_text("launcher: {kind: slurm}\n")
    monkeypatch.setenv("PATH", str(registry.root))
    found = list(probe_schedulers(registry, 60))
    assert [line.severity for line in found] == ["error"]
