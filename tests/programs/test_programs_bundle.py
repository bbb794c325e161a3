"""`draftworks bundle`, as whoever deploys a draft calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
from bundle_site import BundleSite
from click.testing import Result
from typer.testing import CliRunner

from draftworks.programs.cli import app


@pytest.fixture
def site(tmp_path: Path) -> BundleSite:
    site = BundleSite(tmp_path)
    site.publish("a", 1.0)
    return site


def call(site: BundleSite, *words: object) -> Result:
    return CliRunner().invoke(app, ["bundle", *map(str, words), "--registry", str(site.registry)])


def test_it_is_written_in_both_forms_verified_and_compared_with_the_record(site: BundleSite, tmp_path: Path):
    made = call(site, "small/eagle3", "--oci", tmp_path / "oci", "--folder", tmp_path / "plain")
    assert made.exit_code == 0, made.output
    (oci, plain) = (line.split()[0] for line in made.stdout.splitlines())
    assert oci == plain
    stored = call(site, "small", "eagle3").stdout.split()
    assert stored[0] == oci
    shown = call(site, "--verify", tmp_path / "plain")
    assert f"{oci}  {tmp_path / 'plain'}: whole, 2 files" in shown.stdout
    assert "eagle3 draft" in shown.stdout
    assert "--expect" in shown.stderr
    assert call(site, "--verify", stored[1], "--expect", oci).exit_code == 0
    (tmp_path / "plain" / "sglang" / "model.safetensors").write_text("altered")
    told = call(site, "--verify", tmp_path / "plain")
    assert told.exit_code == 1
    assert "expected" in told.stderr


def test_what_is_in_service_is_bundled_and_asked_for(tmp_path: Path):
    site = BundleSite(tmp_path, entry={"service": {"bundle": True}})
    first = site.publish("a", 1.0)
    site.promote()
    second = site.publish("b", 1.5)
    out = tmp_path / "out"
    assert call(site, "small", "eagle3", "--folder", out).exit_code == 0
    assert f"draft {first}" in call(site, "small", "eagle3", "--verify", out).stdout
    assert call(site, "small", "eagle3", "--draft", second[:8], "--folder", out).exit_code == 0
    told = call(site, "small", "eagle3", "--verify", out)
    assert told.exit_code == 1
    assert "expected the bundle sha256:" in told.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected a target and a strategy, or --verify FOLDER"),
        (("small",), "found one of them"),
        (("small", "eagle3", "--expect", "sha256:0"), "--expect is what --verify compares with"),
        (("small", "eagle3", "--verify", "/nowhere"), "no eagle3 draft in service"),
        (("--verify", "/nowhere"), "found neither"),
        (("small", "eagle3", "--draft", "ffff"), "no draft 'ffff'"),
        (("small", "dflash"), "does not use 'dflash'"),
    ],
    ids=range(7),
)
def test_a_mistake_is_told_in_one_line(site: BundleSite, words: tuple[str, ...], said: str):
    told = call(site, *words)
    assert told.exit_code == 1
    [line] = told.stderr.splitlines()
    assert said in line
