"""`draftworks doctor` as a user calls it: it changes nothing, shows no secret, and ends with 1 where a problem is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from retention_toys import make_result
from typer.testing import CliRunner

from draftworks.preflight.findings import Finding
from draftworks.preflight.installation.doctor import Installation, probe_ui_port
from draftworks.programs.cli import app

SECRET = "hunter2-and-more"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry with results, and an instance whose database needs a password and is not there."""
    for folder in ("targets", "datasets"):
        (tmp_path / "registry" / folder).mkdir(parents=True)
    (tmp_path / "registry" / "targets" / "a.yaml").write_text("model: m\ndataset: d\n")
    make_result(tmp_path / "var", "x_draft")
    (tmp_path / "home").mkdir()
    url = f"postgresql://me:{SECRET}@127.0.0.1:1/db"
    (tmp_path / "home" / "dagster.yaml").write_text(f"storage: {{postgres: {{postgres_url: '{url}'}}}}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MY_PASSWORD", SECRET)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path


def list_tree(root: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def test_it_changes_nothing_and_shows_no_secret(site: Path):
    before = list_tree(site)
    code = (
        "import sys; from typer.testing import CliRunner; from draftworks.programs.cli import app; "
        "done = CliRunner().invoke(app, sys.argv[1:]); sys.stdout.write(done.stdout); "
        "assert 'torch' not in sys.modules; sys.exit(done.exit_code)"
    )
    words = ["doctor", "--json", "--limit", "60", "--registry", str(site / "registry")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == sum(line["severity"] == "error" for line in found["lines"]) > 0
    areas = {line["where"] for line in found["lines"]}
    assert areas >= {
        "versions",
        "disk",
        "permissions",
        "gpu",
        "sglang",
        "dagster",
        "clocks",
        "secrets",
        "ports",
        "stores",
    }
    assert all(line["remedy"] for line in found["lines"] if line["severity"] == "error")
    assert SECRET not in done.stdout + done.stderr
    assert list_tree(site) == before


def test_the_exit_code_is_that_of_the_worst_line(site: Path, monkeypatch: pytest.MonkeyPatch):
    for state, code in (("ok", 0), ("warning", 0), ("error", 1)):
        line = Finding(state, "one\ntwo", "disk", "mend it")
        monkeypatch.setattr(Installation, "examine", lambda self, limit, line=line: [line])
        done = CliRunner().invoke(app, ["doctor", "--registry", str(site / "registry")])
        assert done.exit_code == code
        assert f"{state:<7}  disk: one" in done.stdout
        assert "-> mend it" in done.stdout


def test_a_port_in_use_is_a_warning_with_another_one():
    assert [line.severity for line in probe_ui_port(1, True, "127.0.0.1")] == ["ok"]
    [line] = probe_ui_port(1, False, "127.0.0.1")
    assert (line.severity, line.remedy) == ("warning", "draftworks ui --port 2")
