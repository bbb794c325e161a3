"""The data that is trained on has an identity of its content: shares of slices are part of it, where there are some."""

from __future__ import annotations

from pathlib import Path

import yaml

from draftworks.config.registry_files import EvalSpec
from draftworks.storage.identity import FileDigests
from draftworks.targets.registry import Registry
from draftworks.targets.training_data import digest_training_data, identify_eval_set

ENTRY = {"model": "models/tiny", "dataset": "chats"}


def make_registry(root: Path) -> Registry:
    for folder in ("targets", "datasets"):
        (root / folder).mkdir()
    (root / "chats.jsonl").write_text('{"messages": []}\n')
    (root / "datasets" / "chats.yaml").write_text("files: [chats.jsonl]\n")
    return Registry(root)


def test_shares_are_part_of_the_data_and_their_order_is_not(tmp_path: Path):
    registry, found = make_registry(tmp_path), {}
    mixes = {
        "none": {},
        "half": {"shares": {"thinking": {"on": 0.5, "off": 0.5}}},
        "half again": {"shares": {"thinking": {"off": 0.5, "on": 0.5}}},
        "less": {"shares": {"thinking": {"on": 0.25, "off": 0.75}}},
    }
    for name, mix in mixes.items():
        (tmp_path / "targets" / "t.yaml").write_text(yaml.safe_dump({**ENTRY, "mix": mix}))
        target = registry.load_target("t")
        digests = FileDigests()
        of_evals = identify_eval_set(target, EvalSpec(name="e", dataset="chats"), "d", 9).to_json()
        assert of_evals.get("both_ways") == (True if "shares" in mix else None)
        assert ("both_ways" in of_evals) == ("shares" in mix)
        found[name] = digest_training_data(target, registry, digests)
    assert found["half"] == found["half again"]
    assert len(set(found.values())) == 3
