"""A strategy of another package has all that built-in ones have, without any change here.

It joins a finished site in one run of the main job, started from a terminal as CI starts it.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from test_spec_assets_command_line import execute

from draftworks.storage.artifacts import ArtifactStore

if TYPE_CHECKING:
    from conftest import Site

PLUGIN = Path(__file__).with_name("plugin")
ENTRY = """
  one_head:
    options: {layer_id: 3}
    training: {global_batch_size: 8, micro_batch_size: 4, epochs: 2, lr: 0.01, compute_dtype: float32, device: cpu, log_every: 2}
"""


@dataclass(frozen=True)
class Joined:
    """The site after the run, and what the terminal showed."""

    site: Site
    run: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def joined(finished_site, tmp_path_factory) -> Joined:
    site = finished_site.copy(tmp_path_factory.mktemp("joined"))
    site.target_file.write_text(site.target_file.read_text() + ENTRY)
    done = execute(site, "everything", "small", PYTHONPATH=str(PLUGIN))
    assert done.returncode == 0, done.stderr[-3000:]
    return Joined(site, done)


@pytest.mark.slow
def test_the_main_job_runs_from_the_command_line_and_makes_only_what_is_missing(joined):
    shown = joined.run.stderr
    # Conversations, two sets of answers, tokens, vocabulary; draft, report and export of the strategy that was there.
    assert shown.count("unchanged, nothing to do") == 8
    # Features of both sets; draft and report of the one that joined.
    assert shown.count("made in") == 4


@pytest.mark.slow
def test_a_plugged_in_strategy_goes_from_capture_to_the_leaderboard(finished_site, joined):
    made, before = ArtifactStore(joined.site.var), ArtifactStore(finished_site.var)
    features = made.load_current("training_features", "small").summary
    assert features["streams"] == ["hf2", "hf3", "hf4", "hf5", "last"]
    assert features["captured_bytes"] * 5 == features["bytes"]  # its own tap and nothing else
    eagle3 = [store.load_current("eagle3_draft", "small").path.name for store in (made, before)]
    assert eagle3[0] == eagle3[1]
    draft = made.load_current("one_head_draft", "small")
    assert draft.summary["last_loss"] < draft.summary["first_loss"]
    report = made.load_current("one_head_report", "small").summary
    assert 0 < report["drafts"]["trained"]["eval/rung3_walk_acc_len"] <= 1
    rows = pq.read_table(joined.site.var / "leaderboard" / "leaderboard.parquet").to_pylist()
    assert {row["strategy"] for row in rows} == {"eagle3", "one_head"}
