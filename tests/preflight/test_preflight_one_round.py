"""One round of the check tells all problems of an entry: whatever else is wrong, none of them waits for another.
A rule of acceptance that no server has for a strategy is warned of, and only then.
A metric that decides which draft is the best has to be a number that the strategy's evaluations report.
Packing as a training option: it only divides the global batch, and is refused for strategies without it.
Features that are likely not to fit are a warning: how long answers are is known only later.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from draftworks.config.registry_files import StrategyEntry, TargetSpec, TrainingSpec
from draftworks.config.strategies import StrategyOptions, StrategySpec, resolve_strategy
from draftworks.errors import ConfigError
from draftworks.preflight.compatibility import check_requirements
from draftworks.programs.cli import app
from draftworks.storage.identity import LayerTap
from draftworks.targets.entry_reading import parse_all
from draftworks.targets.registry import Registry

SOUND = {
    "model": None,
    "dataset": "chats",
    "max_length": 96,
    "responses": {"max_new_tokens": 24},
    "strategies": {"eagle3": {"options": {"ttt_length": 2, "draft_vocab_size": 64}}},
}
MISTAKES: dict[str, tuple[Mapping[str, Any], str]] = {
    "a key that nobody knows": ({"responce": {}}, "unknown key responce"),
    "a value that is no number": ({"capture": {"batch_tokens": "many"}}, "capture.batch_tokens"),
    "a value that another forbids": ({"responses": {"temperature": -1}}, "responses.temperature"),
    "an option that nobody knows": (
        {"strategies": {"dflash": {"options": {"blok_size": 4}}}},
        "dflash.options: unknown key blok_size",
    ),
    "options that contradict each other": (
        {"strategies": {"peagle": {"options": {"num_depths": 9, "sliding_window": 4, "draft_vocab_size": 64}}}},
        "sliding_window 4 is shorter",
    ),
    "a format that nobody knows": (
        {"strategies": {"eagle3": {"export": {"formats": ["sglang_eagle4"]}}}},
        "no export format 'sglang_eagle4'",
    ),
    "a strategy that nobody knows": ({"strategies": {"eagle9": {}}}, "unknown strategy 'eagle9'"),
    "a batch that does not divide": (
        {"strategies": {"eagle3": {"training": {"global_batch_size": 7, "micro_batch_size": 2}}}},
        "global_batch_size 7 is not a multiple",
    ),
    "a launcher's key": ({"launcher": {"thread": 2}}, "launcher: unknown key thread"),
    "an eval set that is absent": ({"evals": ["nosuch"]}, "nosuch.yaml"),
    "layers that the model lacks": (
        {"strategies": {"domino": {"options": {"layer_ids": [1, 99], "mask_token_id": 3}}}},
        "[99] outside",
    ),
    "a token that the model lacks": (
        {"strategies": {"dspark": {"options": {"mask_token_id": 9999, "layer_ids": [1, 2]}}}},
        "mask_token_id 9999 is outside",
    ),
    "a draft that no format holds": (
        {"strategies": {"lilicorr": {"options": {"candidate_topk": 3, "mask_token_id": 3, "layer_ids": [1, 2]}}}},
        "candidate_topk 3",
    ),
    "a stream that starves": (
        {"streaming": {"watermark": {"samples": 2}}},
        "streaming.watermark.samples is 2",
    ),
    "a template that is absent": ({"chat_template": "no.jinja"}, "no.jinja is not a file"),
}


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(below))
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def check(fleet, *mistakes: str) -> list[str]:
    entry = merge(SOUND, {"model": str(fleet.tiny_folder)})
    for mistake in mistakes:
        entry = merge(entry, MISTAKES[mistake][0])
    (fleet.registry.root / "targets" / "small.yaml").write_text(yaml.safe_dump(entry))
    return fleet.check().errors


def find_untold(errors: list[str], mistakes: tuple[str, ...]) -> list[str]:
    return [each for each in mistakes if not any(MISTAKES[each][1] in error for error in errors)]


def test_a_sound_entry_has_none_of_them(fleet):
    assert check(fleet) == []


def test_all_mistakes_are_told_at_once(fleet):
    """But for what only a model whose template was found can be asked."""
    every = tuple(each for each in MISTAKES if each != "a template that is absent")
    assert find_untold(check(fleet, *every), every) == []
    assert find_untold(check(fleet, *MISTAKES), ("a template that is absent", "an eval set that is absent")) == []


PAIRS = list(itertools.combinations([each for each in MISTAKES if each != "a template that is absent"], 2))


@pytest.mark.parametrize("pair", PAIRS[::13], ids="+".join)
def test_no_mistake_hides_another(fleet, pair: tuple[str, str]):
    assert find_untold(check(fleet, *pair), pair) == []


def test_what_is_wrong_in_the_data_is_told_beside_what_is_wrong_in_the_entry(fleet):
    fleet.write_rows([{"messages": []}] * 3)
    errors = check(fleet, "a key that nobody knows", "a draft that no format holds")
    assert find_untold(errors, ("a key that nobody knows", "a draft that no format holds")) == []
    assert any("none of its first 3 rows can be used" in error for error in errors)


def test_a_problem_is_told_once(fleet):
    errors = check(fleet, *MISTAKES)
    assert len(errors) == len(set(errors))


def test_a_run_refuses_the_entry_with_all_of_them(fleet):
    check(fleet, "a key that nobody knows", "an option that nobody knows", "a launcher's key")
    with pytest.raises(ConfigError) as refusal:
        fleet.registry.load_target("small")
    assert len(str(refusal.value).splitlines()) == 3


def test_the_command_ends_with_an_error_for_an_entry_that_is_salvaged(fleet):
    check(fleet, "a key that nobody knows")
    found = CliRunner().invoke(app, ["check", "--registry", str(fleet.registry.root), "--json"])
    assert found.exit_code == 1
    assert "unknown key responce" in json.loads(found.output)["targets"]["small"]["errors"][0]


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        ({"dataset": "d", "model": "m"}, 0),
        ({"dataset": 5, "model": "m"}, 1),
        ({"model": "m"}, 1),
        ({}, 2),
        ({"model": "m", "dataset": "d", "decision": {}}, 1),
        ({"model": "m", "dataset": "d", "mix": {"datasets": 3}, "capture": {"device": "gpu"}, "max_length": 0}, 3),
    ],
)
def test_values_are_parsed_as_far_as_they_are_right(values: dict[str, Any], problems: int):
    found = parse_all(TargetSpec, {"name": "t", **values}, "t.yaml")
    assert len(found.problems) == problems
    assert found.spec is None or TargetSpec.model_validate(found.spec.model_dump()) == found.spec
    assert (found.spec is None) == ("decision" in values or not isinstance(values.get("dataset"), str))


OPTIONS = {"eagle3": {"draft_vocab_size": 32}, "xpress": {"mask_token_id": 3, "block_size": 4}}


def warnings_of(fleet, strategy: str, rules: list[str] | None) -> list[str]:
    loop = {"temperatures": [0, 0.7], "rules": rules}
    fleet.write(evaluation={"loop": loop}, strategies={strategy: {"options": OPTIONS[strategy]}})
    return [line for line in fleet.check().warnings if "evaluation.loop.rules" in line]


def test_a_rule_that_servers_do_not_have_is_named_with_those_that_they_have(fleet):
    [warning] = warnings_of(fleet, "xpress", ["greedy_draft", "block"])
    assert warning == (
        "target small: evaluation.loop.rules: found block; servers accept drafts of xpress by greedy_draft only"
    )


@pytest.mark.parametrize(
    ("strategy", "rules"),
    [("xpress", ["greedy_draft"]), ("xpress", None), ("eagle3", ["greedy_draft", "rejection", "block"])],
)
def test_rules_that_servers_have_are_taken(fleet, strategy: str, rules: list[str] | None):
    assert warnings_of(fleet, strategy, rules) == []


DFLASH = {"mask_token_id": 3, "block_size": 4}
EAGLE = {"ttt_length": 2, "draft_vocab_size": 64}


@pytest.mark.parametrize(
    ("strategy", "options", "metric"),
    [
        ("eagle3", EAGLE, "eval/acceptance_len"),
        ("eagle3", EAGLE, "eval/per_position_acc"),
        ("eagle3", EAGLE, "eval/ploss_2"),
        ("dflash", DFLASH, "eval/acceptance_rate_0"),
        ("dflash", DFLASH, "eval/accept_len"),
    ],
)
def test_one_that_is_never_reported_is_refused_beside_those_that_are(fleet, strategy, options, metric):
    fleet.write(strategies={strategy: {"options": options, "training": {"best_metric": metric}}})
    (error,) = fleet.check().errors
    assert f"strategies.{strategy}.training.best_metric: no evaluation has '{metric}' as a number" in error
    assert re.search("did you mean eval/|there are: eval/rung", error)


@pytest.mark.parametrize(
    ("strategy", "options", "metric"),
    [
        ("eagle3", EAGLE, "eval/ploss_1"),
        ("eagle3", EAGLE, "eval/acceptance_rate_0"),
        ("eagle3", EAGLE, "eval/unconditional_acceptance_rate_1"),
        ("eagle3", EAGLE, "eval/rung3_walk_acc_len"),
        ("dflash", DFLASH, "eval/rung2_block_acc_len"),
        ("dflash", DFLASH, "eval/supervised_tokens"),
    ],
)
def test_one_that_is_reported_is_not(fleet, strategy, options, metric):
    fleet.write(strategies={strategy: {"options": options, "training": {"best_metric": metric}}})
    assert fleet.check().errors == []


def test_packing_is_no_identity():
    padded = TrainingSpec(global_batch_size=8, micro_batch_size=4)
    packed = TrainingSpec(global_batch_size=8, pack_tokens=1024, pack_overlong="own_row", processes=3)
    assert packed.to_identity() == padded.to_identity()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"global_batch_size": 2, "processes": 3, "pack_tokens": 64}, "2 leaves some of 3 processes without a sample"),
        ({"pack_overlong": "own_row"}, "pack_overlong own_row has no effect without pack_tokens"),
        ({"pack_tokens": 1}, "greater than or equal to 2"),
        ({"pack_tokens": 64, "pack_overlong": "cut"}, "'refuse' or 'own_row'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        TrainingSpec(**values)


def test_a_loss_that_is_made_of_padding_is_refused_before_any_cost(tmp_path, tiny_target):
    options = {"draft_vocab_size": 64, "loss": "specforge"}
    entry = StrategyEntry(options=options, training=TrainingSpec(pack_tokens=64))
    target = TargetSpec(name="small", model="m", dataset="d", max_length=32, strategies={"eagle3": entry})
    with pytest.raises(ConfigError, match=r"strategies\.eagle3\.training: pack_tokens is set, but eagle3 with loss"):
        check_requirements(target, tiny_target, Registry(tmp_path))


def test_a_strategy_that_does_not_say_it_packs_is_refused():
    plain = StrategySpec("plain", "", StrategyOptions, lambda layers, options: (LayerTap(1),), "nowhere:none")
    with pytest.raises(ConfigError, match="here: pack_tokens is set, but plain does not support packed samples"):
        plain.check_packing(StrategyOptions(), "here")
    for name in ("eagle3", "dflash"):
        spec = resolve_strategy(name)
        spec.check_packing(spec.parse_options({}, "here"), "here")


def budget_warnings(fleet, **entry) -> list[str]:
    fleet.write(**entry)
    found = fleet.check()
    assert found.errors == []
    return [text for text in found.warnings if "capture.budget_gb" in text or "GB left" in text]


def test_more_than_the_budget_is_told_for_each_set(fleet):
    told = budget_warnings(fleet, capture={"budget_gb": 1e-6})
    assert any("training_features will take about" in text for text in told)
    assert all("more than 1e-06 GB is refused" in text for text in told)


@pytest.mark.parametrize("entry", [{}, {"strategies": {}}, {"capture": {"budget_gb": 1e-6}, "streaming": {}}])
def test_what_fits_or_is_not_stored_is_not_told(fleet, entry):
    assert not [text for text in budget_warnings(fleet, **entry) if "training_features" in text]


def test_more_than_the_disk_has_is_told_unless_another_store_holds_it(fleet, monkeypatch):
    class Full:
        free = 1000

    monkeypatch.setattr("draftworks.preflight.services.shutil.disk_usage", lambda path: Full)
    (told,) = budget_warnings(fleet)
    assert "its features will take about" in told
    s3 = {
        "features": {"kind": "s3", "url": "s3://drafts/features"},
        "object_storage": {"endpoint": "http://127.0.0.1:9"},
    }
    (fleet.registry.root / "deployment.yaml").write_text(yaml.safe_dump(s3))
    fleet.write()
    assert not [text for text in fleet.check().warnings if "GB left" in text]
