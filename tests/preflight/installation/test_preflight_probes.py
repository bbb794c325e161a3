"""Probes run at once and bounded in time; one that hangs or fails is a warning, and the others are heard.
What Dagster's own program reports is taken line by line, also where it hangs or ends with an error.
Versions are compared with the ranges and pins of the checkout; what is missing or outside is a problem.
What a deployment names: variables that are not set, storage and schedulers that do not answer.
Locks, interrupted results and stores of other versions are told; looking changes none of them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from retention_toys import make_result
from waiting import HANG_S, growing_limits

from draftworks.errors import ConfigError
from draftworks.preflight.findings import Finding
from draftworks.preflight.installation.deployment_probes import (
    OLD_S,
    find_named_variables,
    probe_dagster,
    probe_leftovers,
    probe_object_storage,
    probe_registry,
    probe_schedulers,
    probe_stores,
    probe_variables,
)
from draftworks.preflight.installation.machine_probes import Probe, SupportedVersions, probe_versions, run_probes
from draftworks.storage.lease import LeasePath
from draftworks.targets.registry import Registry


def test_a_probe_that_hangs_is_a_warning_and_keeps_nobody_waiting():
    never = threading.Event()

    def hang():
        yield Finding("ok", "the first half", "slow")
        never.wait()

    for limit_s in growing_limits(0.3):
        found = run_probes(
            [Probe("slow", hang), Probe("quick", lambda: [Finding("ok", "here", "quick")])], limit_s=limit_s
        )
        if len(found) == 3 and found[2].severity == "ok":
            break
    assert [(line.where, line.severity) for line in found] == [("slow", "ok"), ("slow", "warning"), ("quick", "ok")]
    assert "no answer within" in found[1].text
    never.set()


def test_a_probe_that_raises_is_a_warning_with_what_it_found_before():
    def fail():
        yield Finding("ok", "before", "broken")
        raise PermissionError("no right")

    found = run_probes([Probe("broken", fail)], limit_s=HANG_S)
    assert [(line.severity, line.text) for line in found] == [
        ("ok", "before"),
        ("warning", "could not be looked at: PermissionError('no right')"),
    ]
    assert found[1].remedy


def test_a_probe_that_a_broken_registry_file_stops_says_what_to_do_after_it():
    def fail():
        raise ConfigError("deployment.yaml: unknown key vra; did you mean var?\nand more")

    [line] = run_probes([Probe("stores", fail)], limit_s=HANG_S)
    assert line.text == "could not be looked at: deployment.yaml: unknown key vra; did you mean var?"
    assert "run draftworks doctor again" in line.remedy


def test_probes_run_at_once():
    """Each waits for all others: one after the other they would never end."""
    barrier = threading.Barrier(4, timeout=HANG_S)

    def look():
        barrier.wait()
        yield Finding("ok", "met", "area")

    assert [line.severity for line in run_probes([Probe("area", look)] * 4, limit_s=HANG_S)] == ["ok"] * 4


GOOD = '{"severity": "ok", "text": "the storage answers", "where": "dagster", "remedy": ""}'


@pytest.mark.parametrize(
    ("ending", "states", "words"),
    [
        ("", ["ok"], "the storage answers"),
        ("import time; time.sleep(2000)", ["ok", "warning"], "not looked at within"),
        ("raise SystemExit('no module named x')", ["ok", "error"], "no module named x"),
    ],
)
def test_lines_are_kept_whatever_comes_after(tmp_path: Path, ending: str, states: list[str], words: str):
    program = tmp_path / "jobs" / "instance_report.py"
    program.parent.mkdir()
    (program.parent / "__init__.py").touch()
    program.write_text(f"print('a warning of a library')\nprint({GOOD!r}, flush=True)\n{ending}\n")
    for limit_s in growing_limits(2.0) if "sleep" in ending else [HANG_S]:
        found = list(probe_dagster(tmp_path, {"PATH": os.environ["PATH"]}, tmp_path, limit_s=limit_s))
        if len(found) == len(states):
            break
    assert [line.severity for line in found] == states
    assert words in found[-1].text


CHECKOUT = Path(__file__).resolve().parents[3]


def write_checkout(root: Path, required: str = "", extra: str = "", python: str = ">=3.11", pins: str = "") -> Path:
    dependencies, optional = ([each] if each else [] for each in (required, extra))
    (root / "pyproject.toml").write_text(
        f"[project]\nrequires-python = {python!r}\ndependencies = {dependencies}\n"
        f"[project.optional-dependencies]\nmore = {optional}\n"
    )
    (root / "constraints.txt").write_text(f"# pins\n{pins}\n")
    return root


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"required": "pydantic>=99"}, "expected >=99"),
        ({"required": "no-such-library>=1"}, "no-such-library: expected >=1, found none"),
        ({"extra": "pydantic<1"}, "expected <1"),
        ({"python": "<3"}, "expected <3"),
    ],
)
def test_what_is_missing_or_outside_its_range_is_a_problem_with_a_command(tmp_path: Path, given, words: str):
    found = [line for line in probe_versions(write_checkout(tmp_path, **given)) if line.severity == "error"]
    assert len(found) == 1
    assert words in found[0].text
    assert found[0].remedy


def test_a_library_of_an_extra_may_be_missing(tmp_path: Path):
    found = probe_versions(write_checkout(tmp_path, extra="no-such-library>=1"))
    assert {line.severity for line in found} == {"ok"}


def test_a_supported_version_that_was_not_tested_is_told(tmp_path: Path):
    version = importlib.metadata.version("pydantic")
    for pin, told in ((version, False), (f"{version}+cpu", False), ("2.0.1", True)):
        found = list(probe_versions(write_checkout(tmp_path, "pydantic>=2", pins=f"Pydantic=={pin}")))
        assert {line.severity for line in found} == {"ok"}
        assert any("(tested: 2.0.1)" in line.text for line in found) is told


def test_without_a_checkout_it_says_so(tmp_path: Path):
    assert [line.severity for line in probe_versions(tmp_path)] == ["warning"]


def test_this_environment_has_what_it_needs():
    supported = SupportedVersions.read(CHECKOUT)
    assert "torch" in supported.required
    assert not [line for line in probe_versions(CHECKOUT) if line.severity == "error"]


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


def list_states(lines: list[Finding]) -> list[str]:
    return [line.severity for line in lines]


@pytest.fixture
def var(tmp_path: Path) -> Path:
    make_result(tmp_path, "x_draft")
    return tmp_path


def test_what_is_as_it_should_be_is_ok(var: Path):
    held = LeasePath(var / "x_draft" / "a" / ".lock").try_acquire()
    assert held is not None
    [line] = probe_leftovers(var)
    assert "1 held on this machine, none of a dead process" in line.text
    held.release()
    [line] = probe_stores(var)
    assert "1 current results, all of this version" in line.text
    assert list_states(list(probe_stores(var / "none"))) == ["ok"]


def test_the_lock_of_a_process_that_was_killed_is_told_and_left(var: Path):
    lock = var / "y_draft" / "a" / ".lock"
    lock.parent.mkdir(parents=True)
    code = f"from pathlib import Path; from draftworks.storage.lease import LeasePath; import os, signal\n\
LeasePath(Path({str(lock)!r})).try_acquire(); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", code])
    before = {path: path.read_bytes() for path in lock.iterdir()}
    [line] = probe_leftovers(var)
    assert "1 of processes that are gone" in line.text
    assert {path: path.read_bytes() for path in lock.iterdir()} == before


def test_a_lock_that_another_host_does_not_renew_is_a_warning(var: Path):
    lock = var / "x_draft" / "a" / ".lock"
    held = LeasePath(lock).try_acquire()
    assert held is not None
    [file] = [path for path in lock.iterdir() if path.name.isdigit()]
    values = json.loads(file.read_text())
    values["place"] = {"host": "elsewhere", "machine": "m", "boot": "b", "namespace": "n"}
    held.release()
    file.write_text(json.dumps(values))
    assert list_states(list(probe_leftovers(var))) == ["ok"]
    long_ago = time.time() - 3600
    for path in (file, lock):
        os.utime(path, (long_ago, long_ago))
    found = list(probe_leftovers(var))
    assert list_states(found) == ["warning", "ok"]
    assert "elsewhere" in found[0].text


def test_an_old_interrupted_result_is_a_warning(var: Path):
    partial = var / "x_draft" / "a" / "0123456789abcdef.partial"
    partial.mkdir()
    assert list_states(list(probe_leftovers(var))) == ["ok"]
    long_ago = time.time() - OLD_S - 60
    os.utime(partial, (long_ago, long_ago))
    assert list_states(list(probe_leftovers(var))) == ["ok", "warning"]


@pytest.mark.parametrize(("text", "words"), [('{"schema": 99}', "(schema 99)"), ("{", "cannot be read")])
def test_a_record_of_another_version_or_a_damaged_one_is_a_problem(var: Path, text: str, words: str):
    [record] = var.glob("x_draft/a/*/artifact.json")
    record.write_text(text)
    [line] = probe_stores(var)
    assert (line.severity, words in line.text) == ("error", True)


def test_stores_by_target_name_are_those_of_an_earlier_version(var: Path):
    (var / "feature_store" / "0123456789abcdef").mkdir(parents=True)
    assert len(list(probe_stores(var))) == 1
    (var / "feature_store" / "tiny").mkdir()
    (var / "feature_store" / "aaaaaaaaaaaaaaaa").symlink_to("tiny")
    found = list(probe_stores(var))
    assert list_states(found) == ["ok", "ok"]
    assert "by target name: tiny;" in found[1].text
