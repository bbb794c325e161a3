"""The benchmark of the demo reads what its report says, and copies no result that would be a hit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from demo import choose_left_out, read_walk


def test_the_walk_is_that_of_the_trained_draft_with_its_interval(tmp_path: Path) -> None:
    folder = tmp_path / "eagle3_report" / "tiny" / "digest" / "heldout"
    folder.mkdir(parents=True)
    walk = {"rung": 3, "acceptance": {"micro": 1.0918, "low": 1.0, "high": 1.2}}
    drafts = {"trained": {"rungs": [{"rung": 1, "acceptance": None}, walk]}}
    (folder / "report.json").write_text(json.dumps({"drafts": drafts}))
    assert read_walk(tmp_path, "eagle3") == "2.092 (2.000 to 2.200)"


def test_a_copy_of_a_checkout_has_its_registry_and_no_results(tmp_path: Path) -> None:
    for name in ("var/eagle3_draft", "draftworks/storage", ".venv/lib", ".venv-sglang", ".dagster/storage"):
        (tmp_path / "one" / name).mkdir(parents=True)
    (tmp_path / "one" / ".dagster" / "dagster.yaml").touch()
    shutil.copytree(tmp_path / "one", tmp_path / "two", ignore=choose_left_out)
    copied = {path.relative_to(tmp_path / "two").as_posix() for path in (tmp_path / "two").rglob("*")}
    assert copied == {"draftworks", "draftworks/storage", ".dagster", ".dagster/dagster.yaml"}
