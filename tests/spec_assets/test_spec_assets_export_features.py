"""`draftworks export-features` on the results of a run."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from typer.testing import CliRunner

from draftworks.programs.cli import app


def export(site, *arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["export-features", *map(str, arguments), "--registry", str(site.registry)])
    return done.exit_code, done.output


def test_the_stored_features_are_written_and_wrong_requests_refused(finished_site, tmp_path: Path) -> None:
    out = tmp_path / "features"
    code, said = export(finished_site, "small", out, "--samples", "3")
    assert code == 0, said
    assert "--target-layer-ids 2 4 5 --hidden-states-backend file --on-missing raise" in said
    states = load_file(out / "hidden_states" / "hs_2.safetensors")["hidden_states"]
    assert states.shape[1:] == (4, 128)
    for arguments, message in (
        (("small", out), "expected a folder that does not exist yet"),
        (("small", tmp_path / "x", "--strategy", "dflash"), "has no strategy 'dflash'; there is: eagle3"),
        (("large", tmp_path / "x"), "large"),
    ):
        code, said = export(finished_site, *arguments)
        assert code == 1
        assert "error: " in said
        assert message in " ".join(said.split())
    assert not (tmp_path / "x").exists()


def test_streamed_features_are_refused(finished_site, tmp_path: Path) -> None:
    site = finished_site.copy(tmp_path / "site")
    for record in (site.var / "training_features").rglob("artifact.json"):
        record.write_text(record.read_text().replace('"samples":', '"planned": true, "samples":'))
    code, said = export(site, "small", tmp_path / "x")
    assert code == 1
    assert "are not stored" in " ".join(said.split())
