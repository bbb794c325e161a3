"""A strategy that another package brings has everything that the built-in ones have, and nothing here knows of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from test_spec_assets_command_line import DAGSTER, ROOT

from draftworks.artifacts import ArtifactStore

PLUGIN = Path(__file__).with_name("plugin")
ENTRY = """
  one_head:
    options: {layer_id: 3}
    training: {global_batch_size: 8, micro_batch_size: 4, epochs: 2, lr: 0.01, compute_dtype: float32, device: cpu, log_every: 2}
"""


@pytest.mark.slow
def test_a_plugged_in_strategy_goes_from_capture_to_the_leaderboard(finished, tmp_path):
    site = finished.site.copy(tmp_path)
    made = ArtifactStore(site.var)
    eagle3 = made.current("eagle3_draft", "small").path
    site.target_file.write_text(site.target_file.read_text() + ENTRY)
    home = tmp_path / "dagster_home"
    home.mkdir()
    shutil.copy(ROOT / ".dagster" / "dagster.yaml", home)
    command = [DAGSTER, "job", "execute", "-f", site.module(), "-j", "everything", "--tags"]
    environment = {**os.environ, "DAGSTER_HOME": str(home), "PYTHONPATH": str(PLUGIN)}

    done = subprocess.run(
        [*map(str, command), json.dumps({"dagster/partition": "small"})],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    features = made.current("training_features", "small").summary
    assert features["streams"] == ["hf2", "hf3", "hf4", "hf5", "last"]
    assert features["captured_bytes"] * 5 == features["bytes"]  # its own tap and nothing else
    assert made.current("eagle3_draft", "small").path == eagle3
    draft = made.current("one_head_draft", "small")
    assert draft.summary["last_loss"] < draft.summary["first_loss"]
    report = made.current("one_head_report", "small").summary
    assert 0 < report["drafts"]["trained"]["eval/rung3_walk_acc_len"] <= 1
    rows = pq.read_table(site.var / "leaderboard" / "leaderboard.parquet").to_pylist()
    assert {row["strategy"] for row in rows} == {"eagle3", "one_head"}
