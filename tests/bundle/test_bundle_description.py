"""What a bundle says: promised tokens with rule and interval, what costs nothing, flags, licences, lineage; no private path."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bundle_site import CARD, BundleSite

from draftworks.bundle.description import BundleSubject, describe_bundle
from draftworks.bundle.layout import encode
from draftworks.errors import StoreError

COMMANDS = {
    "SGLang": "python -m sglang.launch_server --model-path MODEL --speculative-draft-model-path DRAFT_FOLDER --trust=no --flag",
    "vLLM, target first": 'vllm serve MODEL --speculative-config \'{"model": "DRAFT_FOLDER"}\'',
}


@pytest.fixture
def site(tmp_path: Path) -> BundleSite:
    site = BundleSite(tmp_path, evals=("coding",))
    site.publish("a", {"heldout": 1.5, "coding": 1.0})
    site.promote()
    return site


def test_the_promise_is_tau_with_rule_and_interval_by_slice_beside_what_costs_nothing(site: BundleSite):
    said = describe_bundle(site.find_subject())
    heldout, coding = said["promised"]
    assert (heldout["eval_set"], coding["eval_set"]) == ("heldout", "coding")
    walk = next(one for one in heldout["acceptance"] if one["rung"] == 3)
    assert (walk["rule"], walk["temperature"], walk["prompts"]) == ("greedy", 0.0, 120)
    assert walk["acceptance_length"] == pytest.approx(2.5)  # 1.5 accepted, and the target's own token
    assert walk["low"] < 2.5 < walk["high"]
    assert {"greedy"} == said["meanings"]["rules"].keys()
    code, chat = sorted(
        (one for one in heldout["slices"] if one["column"] == "topic"), key=lambda one: one["value"], reverse=True
    )
    assert (code["value"], chat["value"], code["prompts"], chat["prompts"]) == ("code", "chat", 60, 60)
    assert code["low"] < code["acceptance_length"] < code["high"]
    assert (code["acceptance_length"] + chat["acceptance_length"]) / 2 == pytest.approx(2.5)
    [free] = heldout["free"]["walk"]
    assert (free["name"], free["acceptance_length"]) == ("lookup", pytest.approx(1.5))
    best = heldout["free"]["best"]
    assert (best["name"], best["difference"]) == ("lookup", pytest.approx(1.0))
    assert 0 < best["low"] < best["high"]


def test_equal_records_give_equal_text(site: BundleSite):
    assert encode(describe_bundle(site.find_subject())) == encode(describe_bundle(site.find_subject()))


def with_commands(subject: BundleSubject) -> BundleSubject:
    lines = {server: line.replace("MODEL", subject.target.model) for server, line in COMMANDS.items()}
    made = {name: {**each, "commands": lines} for name, each in subject.export.summary["formats"].items()}
    return replace(subject, export=replace(subject.export, summary={"formats": made}))


def test_flags_are_data_with_the_versions_that_they_are_known_for(site: BundleSite):
    sglang, vllm = describe_bundle(with_commands(site.find_subject()))["formats"]["sglang"]["servers"]
    assert sglang["flags"] == {
        "--model-path": "TARGET_MODEL",
        "--speculative-draft-model-path": "DRAFT_FOLDER",
        "--trust": "no",
        "--flag": True,
    }
    assert (sglang["engine"], sglang["versions"]) == ("sglang", ["0.5.23"])
    assert (vllm["engine"], vllm["versions"]) == ("vllm", ["0.32", "0.33"])
    assert json.loads(vllm["flags"]["--speculative-config"]) == {"model": "DRAFT_FOLDER"}
    assert vllm["command"][:3] == ["vllm", "serve", "TARGET_MODEL"]


def test_a_path_of_this_machine_is_in_no_description(site: BundleSite):
    subject = with_commands(site.find_subject())
    assert str(site.root) not in encode(describe_bundle(subject)).decode()
    assert describe_bundle(subject)["target"]["model"] is None
    hub = replace(subject, target=subject.target.model_copy(update={"model": "org/name", "revision": "0" * 40}))
    assert describe_bundle(hub)["target"]["model"] == "org/name"


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        (CARD, "apache-2.0"),
        ("---\nlicense: other\nlicense_name: llama3\n---\n", "llama3"),
        ("---\nlicense: [mit, apache-2.0]\n---\n", "mit, apache-2.0"),
        ("# no front matter\nlicense: mit\n", None),
        ("---\nlicense: |\n  a\n  b\n---\n", None),
        ("---\nlicense: !!python/object/apply:os.system [id]\n---\n", None),
        ("---\n- a\n---\n", None),
        (f"---\n{'[' * 5000}\n---\n", None),
        ("", None),
    ],
    ids=range(9),
)
def test_licences_are_what_cards_and_registry_say_and_nothing_else(site: BundleSite, card: str, licence: str | None):
    (site.registry / "models" / "small" / "README.md").write_text(card)
    found = describe_bundle(site.find_subject())["licences"]
    assert found["target"]["licence"] == licence
    assert found["data"] == [{"dataset": "none", "licence": "CC-BY-4.0", "from": "registry"}]


def test_the_lineage_names_what_it_was_made_from(site: BundleSite):
    subject = site.find_subject()
    said = describe_bundle(subject)
    assert said["lineage"]["target_weights"] == said["target"]["digest"] == subject.target.digest
    assert said["lineage"]["report"] == subject.report.path.name
    assert said["lineage"]["eval_data"].keys() == {"heldout", "coding"}
    assert said["draft"]["digest"] == subject.draft.path.name


def test_a_report_that_was_altered_promises_nothing(site: BundleSite):
    path = site.find_subject().report.path / "heldout" / "report.json"
    path.write_text(path.read_text().replace("1.5", "4.5"))
    with pytest.raises(StoreError, match="altered"):
        describe_bundle(site.find_subject())
