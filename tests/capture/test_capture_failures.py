"""Failed samples are left out up to the allowed share; a failing engine ends the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from capture_toys import WatchedEngine, capture_run, random_rows

from draftworks.capture.session import capture_features
from draftworks.data.conversations import QUARANTINE_FILE
from draftworks.errors import CaptureError, EngineError
from draftworks.features.manifest import read_feature_set


class Failing(WatchedEngine):
    """Engine that refuses batches with a certain token, as a server that answers a whole batch with one error."""

    token = -1

    def capture(self, sequences, taps):
        if any(self.token in row for row in sequences):
            raise CaptureError("the engine lost rows")
        return super().capture(sequences, taps)


def make_failing_engine(engine, tokens, index: int) -> Failing:
    """An engine that fails on one sample, recognised by a token that no other sample has."""
    failing = Failing(engine)
    failing.token = 1999
    tokens[index].input_ids[0] = failing.token
    return failing


def test_failing_samples_are_left_out_with_their_reason(tiny_target, tmp_path: Path, tiny_engine):
    tokens = random_rows(8, vocab=1900)
    engine = make_failing_engine(tiny_engine, tokens, 3)
    twin = replace(tokens[3], sample_id="twin")
    run = capture_run(tiny_target, tmp_path, max_failed_share=0.25)
    run.out.mkdir()
    summary = capture_features(run, engine, [*tokens, twin])
    manifest = read_feature_set(run.out)
    assert summary.captured == 7
    assert [ref.sample_id for ref in manifest.refs] == [row.sample_id for row in tokens if row is not tokens[3]]
    lines = [json.loads(line) for line in (run.out / QUARANTINE_FILE).read_text().splitlines()]
    assert [line["sample_id"] for line in lines] == [tokens[3].sample_id, "twin"]
    assert all("the engine lost rows" in line["reason"] for line in lines)
    assert [ref.metadata["row"] for ref in manifest.refs] == [0, 1, 2, 4, 5, 6, 7]


def test_more_failing_samples_than_allowed_stop_the_run_and_keep_the_rest(tiny_target, tmp_path: Path, tiny_engine):
    tokens = random_rows(8, vocab=1900)
    engine = make_failing_engine(tiny_engine, tokens, 3)
    run = capture_run(tiny_target, tmp_path)
    with pytest.raises(CaptureError, match=f"sample {tokens[3].sample_id}: the engine lost rows"):
        capture_features(run, engine, tokens)
    engine.token = -1
    assert capture_features(run, engine, tokens).captured < len(tokens)


def test_an_engine_that_cannot_go_on_stops_the_run_at_once(tiny_target, tmp_path: Path, tiny_engine):
    class Dead(WatchedEngine):
        def capture(self, sequences, taps):
            self.rows += sequences
            raise EngineError("it does not start")

    dead = Dead(tiny_engine)
    with pytest.raises(EngineError, match="it does not start"):
        capture_features(capture_run(tiny_target, tmp_path, max_failed_share=0.9), dead, random_rows(8))
    assert len(dead.rows) < 8
