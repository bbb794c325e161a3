"""A mix of data sets: each conversation once with slice columns, split as one set, served prompts held out as elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from served_toys import body, message, served, write_log
from thinking import thinking_target

from draftworks.config.registry_files import DatasetSpec, DataSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.conversations import read_conversations
from draftworks.data.prepare import SliceShares, keep_supervised_rows, prepare_eval_set, prepare_mix
from draftworks.data.slices import WEIGHTS_FILE, SlicePlan, SliceWeight, read_plan
from draftworks.data.tokenized import TokenRow, write_tokens
from draftworks.errors import ConfigError, DataError

DATA = DataSpec(held_out_share=0.3)
PLAIN = DatasetSpec(name="plain", files=["*.jsonl"])
PLAN = SlicePlan("t", "s", "served", "n", "o", 3.0, (SliceWeight("source", "served", 3.0, 2.0, 1.0),))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rows = [{"messages": [message("user", f"Wie geht das {n}?"), message("assistant", "so")]} for n in range(20)]
    rows[0]["source"] = "own"
    write_log(tmp_path / "a.jsonl", [*rows, "broken"])
    write_log(tmp_path / "a.log", [*(body(f"What is {n} of the {n}?") for n in range(20)), "broken"])
    return tmp_path


def prepare(
    root: Path,
    target: TargetFiles,
    plan: SlicePlan | None = None,
    data: DataSpec = DATA,
    shares: SliceShares | None = None,
) -> dict:
    spec = data.model_copy(update={"max_rejected_share": 0.5})
    return prepare_mix([PLAIN, served()], plan, spec, root, target, root / "out", shares)


def read_parts(root: Path) -> dict[str, list]:
    return {part: list(read_conversations(root / "out" / part)) for part in ("train", "heldout")}


def test_a_mix_holds_each_conversation_once_with_columns_and_its_origin(root: Path, tiny_target: TargetFiles):
    summary = prepare(root, tiny_target)
    parts = read_parts(root)
    everything = [one for part in parts.values() for one in part]
    assert (summary["rows"], summary["rejected"], summary["duplicates"]) == (42, 2, 0)
    assert len({one.id for one in everything}) == len(everything) == summary["conversations"] == 40
    assert {one.columns["source"] for one in everything} == {"plain", "own", "served"}
    assert {one.columns["language"] for one in everything} == {"de", "en"}
    sizes = summary["mix"]
    assert {part: sum(sizes[name][part] for name in sizes) for part in parts} == {p: len(parts[p]) for p in parts}
    assert list(summary["lineage"]) == ["served"]
    rejected = [json.loads(line) for line in (root / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert [Path(one["file"]).name for one in rejected] == ["a.jsonl", "a.log"]


def test_weights_take_more_of_a_slice_and_are_kept_beside_the_data(root: Path, tiny_target: TargetFiles):
    data = DataSpec(held_out_share=0.3, max_conversations=20)
    plain = prepare(root, tiny_target, None, data)
    heldout = read_parts(root)["heldout"]
    summary = prepare(root, tiny_target, PLAN, data)
    assert summary["mix"]["served"]["train"] > plain["mix"]["served"]["train"]
    assert summary["train"] == plain["train"]
    assert read_parts(root)["heldout"] == heldout
    assert summary["weights_have_effect"] is True
    assert summary["digest"] != plain["digest"]
    assert read_plan(root / "out" / WEIGHTS_FILE) == PLAN
    assert prepare(root, tiny_target, PLAN)["weights_have_effect"] is False  # all conversations are used anyway


def test_the_held_out_part_of_an_eval_set_is_what_a_mix_never_trains_on(root: Path, tiny_target: TargetFiles):
    prepare(root, tiny_target)
    parts = read_parts(root)
    data = DATA.model_copy(update={"max_rejected_share": 0.5})
    prepare_eval_set(served(), None, data, root, tiny_target, root / "eval", "held_out")
    measured = {one.id for one in read_conversations(root / "eval" / "all")}
    assert measured == {one.id for one in parts["heldout"] if one.columns["source"] == "served"}
    assert not measured & {one.id for one in parts["train"]}


def test_tokenized_data_cannot_be_mixed(root: Path, tiny_target: TargetFiles):
    write_log(root / "a.jsonl", [{"input_ids": [1, 2], "loss_mask": [0, 1]}])
    with pytest.raises(DataError, match="data set plain is tokenized already: only conversations can be mixed"):
        prepare(root, tiny_target)


def test_shares_of_thinking_are_counted_and_need_a_template_with_the_switch(root: Path, tiny_target: TargetFiles):
    shares = SliceShares("thinking", {"on": 0.25, "off": 0.75})
    with pytest.raises(ConfigError, match="no switch for thinking"):
        prepare(root, tiny_target, shares=shares)
    (root / "template").mkdir()
    summary = prepare(root, thinking_target(tiny_target, root / "template"), shares=shares)
    parts = read_parts(root)
    for way in ("on", "off"):
        taken = sum(one.columns["thinking"] == way for one in parts["train"])
        assert summary["shares"][way]["taken"] == taken <= summary["shares"][way]["available"]
    sizes = summary["mix"]
    assert {part: sum(sizes[name][part] for name in sizes) for part in parts} == {p: len(parts[p]) for p in parts}


def test_an_eval_set_asked_both_ways_has_each_prompt_twice(root: Path, tiny_target: TargetFiles):
    data = DATA.model_copy(update={"max_rejected_share": 0.5})
    prepare_eval_set(served(), 5, data, root, tiny_target, root / "eval", both_ways=True)
    measured = list(read_conversations(root / "eval" / "all"))
    assert len(measured) == len({one.id for one in measured}) == 10
    assert len({(one.columns["thinking_pair"], one.columns["thinking"]) for one in measured}) == 10


def test_samples_and_tokens_of_each_slice_are_counted(tmp_path: Path):
    rows = [
        TokenRow(f"s{n}", np.arange(4 + n, dtype=np.int32), np.arange(4 + n) > 2, {"thinking": "on" if n else "off"})
        for n in range(3)
    ]
    write_tokens(tmp_path / "all", rows)
    found = keep_supervised_rows(tmp_path / "all", tmp_path / "kept", "thinking")["slices"]
    assert found == {
        "off": {"samples": 1, "tokens": 4, "supervised_tokens": 1},
        "on": {"samples": 2, "tokens": 11, "supervised_tokens": 5},
    }
    assert "slices" not in keep_supervised_rows(tmp_path / "all", tmp_path / "kept")
