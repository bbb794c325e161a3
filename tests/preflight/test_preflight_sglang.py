"""An environment that was named as SGLang's has SGLang, as far as its files tell."""

from __future__ import annotations

from pathlib import Path

import pytest

SETTINGS = "home = /usr/bin\ninclude-system-site-packages = {}\n"
CAPTURE = {"backend": "sglang"}


@pytest.fixture
def packages(fleet, monkeypatch) -> Path:
    """Site-packages of a virtual environment that the deployment names."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    prefix = fleet.root / "sglang"
    folder = prefix / "lib" / "python3.11" / "site-packages"
    folder.mkdir(parents=True)
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").touch()
    (prefix / "pyvenv.cfg").write_text(SETTINGS.format("false"))
    (fleet.registry.root / "deployment.yaml").write_text("sglang: {python: ../sglang/bin/python}\n")
    return folder


def sglang_errors(fleet, **entry) -> list[str]:
    fleet.write(**entry)
    return [text for text in fleet.check().errors if "named as sglang.python" in text]


@pytest.mark.parametrize("entry", [{"capture": CAPTURE}, {"evaluation": {"serving": {"prompts": 2}}}])
def test_one_without_sglang_is_an_error(fleet, packages: Path, entry):
    (packages / "torch-2.9.0.dist-info").mkdir()
    (error,) = sglang_errors(fleet, **entry)
    assert "has no SGLang: install it there" in error


def test_one_of_a_version_that_cannot_capture_is_an_error_where_it_captures(fleet, packages: Path):
    (packages / "sglang-0.5.9.dist-info").mkdir()
    (error,) = sglang_errors(fleet, capture=CAPTURE)
    assert "is SGLang 0.5.9, which cannot return hidden states" in error
    assert sglang_errors(fleet, evaluation={"serving": {"prompts": 2}}) == []


@pytest.mark.parametrize("way", ["installed", "system", "another folder", "no environment", "python path"])
def test_one_that_has_it_or_may_have_it_is_none(fleet, packages: Path, monkeypatch, way: str):
    if way == "installed":
        (packages / "sglang-0.5.23.dist-info").mkdir()
    elif way == "system":
        (packages.parents[2] / "pyvenv.cfg").write_text(SETTINGS.format("true"))
    elif way == "another folder":
        (packages / "more.pth").write_text("/opt/packages\n")
    elif way == "no environment":
        (packages.parents[2] / "pyvenv.cfg").unlink()
    else:
        (fleet.root / "more" / "sglang-0.5.23.dist-info").mkdir(parents=True)
        monkeypatch.setenv("PYTHONPATH", str(fleet.root / "more"))
    assert sglang_errors(fleet, capture=CAPTURE) == []
