"""A target with `streaming.order: arrival`: its draft is trained on rows as they come, and is a draft like any other."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import dagster as dg
import pytest
import yaml
from test_spec_assets_stream_kills import killing
from test_spec_assets_streaming import metadata_of

from draftworks.data.formats import parse_conversation
from draftworks.data.split import is_held_out
from draftworks.fleet.staleness import TrainedDraft
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.identity import FileDigests
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import resolve_target

HEAD, ROWS, STEPS, BATCH = 60, 110, 8, 8
TRAINED = ("conversations", "responses", "heldout_responses", "tokenized_train", "vocab_mapping", "eagle3_draft")


def let_arrive(site: Any, **streaming: Any) -> None:
    entry = yaml.safe_load(site.target_file.read_text())
    entry["strategies"]["eagle3"]["training"] |= {"epochs": 1, "save_every": 2, "processes": 1}
    order = {"order": "arrival", "vocabulary_samples": HEAD, "watermark": {"samples": 16}, "lease_s": 4}
    site.target_file.write_text(yaml.safe_dump({**entry, "streaming": {**order, **streaming}}))


def run(site: Any, *more: str) -> dg.ExecuteInProcessResult:
    """Make the draft and what it needs, and more."""
    selection = [dg.AssetKey(each) for each in (*TRAINED, *more)]
    result = site.run(instance=dg.DagsterInstance.ephemeral(), asset_selection=selection)
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    return result


def read_draft(site: Any) -> Any:
    return ArtifactStore(site.var).load_current("eagle3_draft", "small")


def digest_source_order(site: Any, steps: int = STEPS) -> str:
    """The digest of the rows in the order in which they stand, without those that are held out."""
    rows = [parse_conversation(json.loads(line)) for line in site.chats.read_text().splitlines()]
    ids = [row.id for row in rows if not is_held_out(row.prompt_key, 0.2)]
    taken = [[step + 1, *ids[step * BATCH : (step + 1) * BATCH]] for step in range(steps)]
    return hashlib.sha256(b"".join(json.dumps(each).encode() + b"\n" for each in taken)).hexdigest()[:16]


@pytest.fixture(scope="module")
def arrived(finished_site, tmp_path_factory) -> Any:
    """A site whose data set has grown since its first rows; the trainer in arrival order was killed once."""
    site = finished_site.copy(tmp_path_factory.mktemp("arrived"))
    site.write_chats(ROWS)
    let_arrive(site, until={"steps": STEPS})
    with killing(site, {3: "train"}, rank=0):
        result = run(site, "heldout_eval_features", "eagle3_report")
    return site, result


def test_a_killed_training_goes_on_with_the_same_order_and_ends_with_a_report(arrived):
    site, result = arrived
    draft = read_draft(site)
    assert [each["from_step"] for each in draft.summary["sessions"]] == [0, 2]
    assert draft.summary["steps"] == STEPS
    assert draft.summary["order"] == digest_source_order(site)
    assert draft.summary["arrived"]["held_out"] > 0
    assert metadata_of(result, "eagle3_draft")["source_rows"] >= STEPS * BATCH
    assert ArtifactStore(site.var).load_current("eagle3_report", "small").created > draft.created
    assert not list((site.var / "streams").glob("small/*"))


def test_its_draft_is_a_hit_while_the_data_set_grows_and_says_that_more_has_come(arrived, tmp_path):
    site = arrived[0].copy(tmp_path)
    site.write_chats(ROWS + 40)
    assert metadata_of(run(site), "eagle3_draft")["cache"] == "hit"
    registry, digests = Registry(site.registry), FileDigests(site.root / "digests.json")
    target = registry.load_target("small")
    files = resolve_target(target, registry, digests)
    trained = TrainedDraft(read_draft(site), target, files, registry, ArtifactStore(site.var), digests)
    (change,) = trained.changes()
    assert "more rows have come" in str(change)
    let_arrive(site, until={"steps": STEPS + 1})
    assert "streaming.until" in str(
        trained.__class__(**{**vars(trained), "target": registry.load_target("small")}).changes()
    )


@pytest.mark.long
def test_kills_of_a_producer_and_of_the_trainer_change_neither_order_nor_weights(finished_site, tmp_path):
    """Until the source ends, which is read before: the steps are known then."""
    drafts = []
    for name, plan in (("undisturbed", {}), ("killed", {1: "produce", 5: "train", 7: "produce"})):
        site = finished_site.copy(tmp_path / name)
        site.write_chats(ROWS)
        let_arrive(site, until={"source": True})
        with killing(site, plan, rank=0):
            run(site)
        drafts.append(read_draft(site))
        steps = drafts[-1].summary["steps"]
        assert drafts[-1].summary["order"] == digest_source_order(site, steps)
        assert (
            0
            <= ROWS
            - sum(drafts[-1].summary["arrived"].get(each, 0) for each in ("held_out", "duplicates"))
            - steps * BATCH
            < BATCH
        )
    assert drafts[0].data_version == drafts[1].data_version
    assert len(drafts[1].summary["sessions"]) == 2
