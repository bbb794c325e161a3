"""Shares of slices: kept exactly, deterministic, as large as the data allows, nothing twice; thinking is asked by them.
Weights of slices: bounded, deterministic, stable as data is added, and without effect on what drafts are measured on.
A mix of data sets: each conversation once with slice columns, split as one set, served prompts held out as elsewhere.
Three training sets of one size: of one kind, of the other, and of both in the proportions of the data.
Held-out split and selection depend on the id alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_toys import body, message, served, write_log
from thinking import thinking_target

from draftworks.config.registry_files import DatasetSpec, DataSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.conversations import Conversation, Turn, read_conversations, select
from draftworks.data.prepare import (
    SliceShares,
    choose_parts,
    keep_supervised_rows,
    prepare_eval_set,
    prepare_mix,
    select_shared,
)
from draftworks.data.slices import (
    LARGEST_WEIGHT,
    THINKING_PAIR,
    WEIGHTS_FILE,
    SlicePlan,
    SliceWeight,
    compute_weight,
    read_asked_thinking,
    read_plan,
    save_plan,
    select_weighted,
)
from draftworks.data.split import hash_fraction, is_held_out
from draftworks.data.tokenized import TokenRow, choose_equal_sets, write_tokens
from draftworks.errors import ConfigError, DataError


def conversation_with(number: int, **columns: str) -> Conversation:
    return Conversation.of([Turn("user", f"question {number}"), Turn("assistant", "")], columns)


def by_language(**shares: float) -> SliceShares:
    return SliceShares("language", shares)


def by_thinking(on: float) -> SliceShares:
    return SliceShares("thinking", {"on": on, "off": 1 - on})


MADE = [conversation_with(number, language=("en", "de", "fr")[number % 3]) for number in range(90)]  # 30 of each
OPEN = [conversation_with(number, thinking="default") for number in range(200)]


@given(english=st.integers(0, 20), count=st.integers(0, 120), data=st.data())
def test_shares_are_kept_whatever_the_order_and_only_what_is_named_is_taken(english, count, data):
    share = english / 20
    shares = by_language(en=share, de=1 - share)
    found = select_shared(data.draw(st.permutations(MADE)), count, shares)
    assert found == select_shared(MADE, count, shares)
    assert len({one.id for one in found.conversations}) == len(found.conversations) == sum(found.taken.values())
    languages = [one.columns["language"] for one in found.conversations]
    assert {value: languages.count(value) for value in found.taken} == dict(found.taken)
    for value, wanted in shares.by_value.items():
        assert abs(found.taken.get(value, 0) - wanted * len(languages)) < 1
    scarce = min([count, *(30 / wanted for wanted in shares.by_value.values() if wanted)])
    assert scarce - 1 <= len(languages) <= scarce


def test_the_slice_with_the_least_data_for_its_share_decides():
    found = select_shared(MADE, 90, by_language(en=0.75, de=0.25))
    assert found.taken == {"en": 30, "de": 10}
    assert found.available == {"en": 30, "de": 30}


def test_weights_choose_inside_of_a_slice():
    made = [conversation_with(n, language="en", source="app" if n % 2 else "web") for n in range(400)]
    plan = SlicePlan("t", "s", "e", "n", "o", 9.0, (SliceWeight("source", "app", 9.0, 2.0, 1.0),))
    plain, weighted = (select_shared(made, 100, by_language(en=1.0), one).conversations for one in (None, plan))
    app = [sum(one.columns["source"] == "app" for one in chosen) for chosen in (plain, weighted)]
    assert app[0] < 65 < 80 < app[1]


def test_a_share_without_data_is_an_error_that_says_what_there_is():
    with pytest.raises(DataError, match=r"language: expected conversations of es .*found none. There are: de \(30\)"):
        select_shared(MADE, 9, by_language(en=0.5, es=0.5))
    assert select_shared(MADE, 9, by_language(en=1.0, es=0.0)).taken == {"en": 9}


@pytest.mark.parametrize("on", [0.0, 0.3, 1.0])
def test_prompts_that_leave_thinking_open_are_asked_by_the_shares(on: float):
    found = select_shared(OPEN, 100, by_thinking(on))
    ways = [read_asked_thinking(one.columns) for one in found.conversations]
    assert ways.count(True) == round(100 * on)
    assert ways.count(False) == 100 - round(100 * on)
    for one, way in zip(found.conversations, ways):
        assert one.id == f"{one.columns[THINKING_PAIR]}.{'on' if way else 'off'}"


def test_a_larger_share_of_thinking_asks_no_prompt_of_it_without():
    few, many = (
        {
            one.columns[THINKING_PAIR]
            for one in select_shared(OPEN, 200, by_thinking(on)).conversations
            if one.columns["thinking"] == "on"
        }
        for on in (0.2, 0.6)
    )
    both = {
        one.columns[THINKING_PAIR]: one.columns["thinking"]
        for one in select_shared(OPEN, 200, by_thinking(0.6)).conversations
    }
    assert len(few) < len(many)
    assert "off" not in {both.get(name) for name in few}


def test_prompts_whose_request_asked_are_asked_as_it_did():
    made = [conversation_with(n, thinking="on" if n % 4 == 0 else "off") for n in range(80)]
    found = select_shared(made, 80, by_thinking(0.5))
    assert found.taken == {"on": 20, "off": 20}
    asked = {one.id: one.columns["thinking"] for one in made}
    assert all(asked[str(one.columns[THINKING_PAIR])] == one.columns["thinking"] for one in found.conversations)


def test_what_is_measured_on_is_asked_both_ways_and_is_the_same_with_any_shares_of_thinking():
    data = DataSpec(held_out_share=0.2, max_conversations=100)
    plain = choose_parts(OPEN, data, None).parts
    parts = [choose_parts(OPEN, data, None, by_thinking(on)).parts for on in (0.0, 0.5, 1.0)]
    for one in parts:
        assert one["heldout"] == parts[0]["heldout"]
        assert [(each.columns[THINKING_PAIR], each.columns["thinking"]) for each in one["heldout"]] == [
            (each.id, way) for each in plain["heldout"] for way in ("off", "on")
        ]
        assert not any(is_held_out(each.prompt_key, 0.2) for each in one["train"])
    other = choose_parts(MADE, DataSpec(held_out_share=0.2), None, by_language(en=1.0)).parts
    assert other["heldout"] == choose_parts(MADE, DataSpec(held_out_share=0.2), None).parts["heldout"]


lengths = st.floats(0, 10)


def conversation(number: int, language: str = "en") -> Conversation:
    return Conversation.of([Turn("user", f"question {number}"), Turn("assistant", "")], {"language": language})


def plan(weight: float = 3.0, language: str = "de") -> SlicePlan:
    one = SliceWeight("language", language, weight, 2.0, 1.0)
    return SlicePlan("toy", "eagle3", "heldout", "new", "old", 3.0, (one,))


@given(before=lengths, after=lengths, bound=st.floats(1, LARGEST_WEIGHT))
def test_a_weight_is_between_1_and_its_bound_and_grows_with_the_loss(before, after, bound):
    weight = compute_weight(before, after, bound)
    assert 1 <= weight <= round(bound, 2)
    assert weight == 1 or after < before
    assert compute_weight(before, after / 2, bound) >= weight


def test_weights_of_known_losses():
    assert [compute_weight(2.0, after) for after in (2.0, 1.9, 1.8, 1.0, 0.0)] == [1.0, 1.5, 2.0, 3.0, 3.0]
    for bound in (0.5, 11.0, float("nan")):
        with pytest.raises(ConfigError, match="max_weight"):
            compute_weight(2.0, 1.0, bound)


@given(numbers=st.sets(st.integers(0, 999), min_size=1, max_size=40), count=st.integers(0, 40), data=st.data())
def test_the_choice_depends_on_content_only_and_one_more_replaces_at_most_one(numbers, count, data):
    made = [conversation(number, "de" if number % 3 else "en") for number in sorted(numbers)]
    mixed = data.draw(st.permutations(made))
    chosen = select_weighted(mixed, count, plan())
    assert chosen == select_weighted(made, count, plan())
    assert len(chosen) == min(count, len(made))
    more = select_weighted([*made, conversation(1000, "de")], count, plan())
    assert len({one.id for one in chosen} - {one.id for one in more}) <= 1
    for equal in (None, plan(1.0), plan(2.0, "fr")):
        assert select_weighted(mixed, count, equal) == select(made, count)


def test_a_slice_of_weight_w_is_taken_about_w_times_as_often():
    made = [conversation(number, "de" if number % 2 else "en") for number in range(8000)]
    chosen = select_weighted(made, 400, plan(3.0))
    german = sum(one.columns["language"] == "de" for one in chosen)
    assert 270 <= german <= 330  # three of four, a standard deviation is 9


@settings(max_examples=20)
@given(count=st.integers(10, 80), weight=st.floats(1, 10))
def test_weights_leave_the_held_out_part_and_the_size_of_the_other_alone(count, weight):
    made = [conversation(number, "de" if number % 4 == 0 else "en") for number in range(80)]
    data = DataSpec(max_conversations=count, held_out_share=0.2)
    plain, weighted = choose_parts(made, data, None).parts, choose_parts(made, data, plan(weight)).parts
    assert weighted["heldout"] == plain["heldout"]
    assert len(weighted["train"]) == len(plain["train"])
    assert not any(is_held_out(one.prompt_key, 0.2) for one in weighted["train"])
    german = [sum(one.columns["language"] == "de" for one in parts["train"]) for parts in (plain, weighted)]
    assert german[0] <= german[1]


def test_the_largest_weight_of_a_conversation_counts():
    both = SlicePlan("t", "s", "e", "n", "o", 3.0, (*plan(3.0).weights, SliceWeight("source", "app", 2.0, 2.0, 1.8)))
    assert both.weigh({"language": "de", "source": "app"}) == 3.0
    assert both.weigh({"language": "en", "source": "app"}) == 2.0
    assert both.weigh({}) == 1.0


def test_a_plan_comes_back_from_its_file_and_its_identity_is_that_of_its_weights(tmp_path):
    path = tmp_path / "weights.json"
    save_plan(path, plan())
    assert read_plan(path) == plan()
    other = SlicePlan("b", "dflash", "x", "y", "z", 9.0, (SliceWeight("language", "de", 3.0, 9.0, 1.0),))
    assert other.identity == plan().identity
    assert plan(2.0).identity != plan().identity != plan(language="fr").identity


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"weights": None},
        {"weights": [{}]},
        {"weights": [{"column": "a", "value": "b", "weight": 0.5, "before": 1, "after": 1}]},
        {"weights": [{"column": "a", "value": "b", "weight": 99, "before": 1, "after": 1}]},
        {"weights": [{"column": 1, "value": "b", "weight": 2, "before": 1, "after": 1}]},
        {"max_weight": True},
        {"target": None},
    ],
    ids=str,
)
def test_a_file_that_is_no_plan_is_one_clear_error(tmp_path, change):
    path = tmp_path / "weights.json"
    path.write_text(json.dumps({**plan().to_json(), **change}))
    with pytest.raises(ConfigError, match=r"weights.json: expected weights of slices, as `draftworks slices --save`"):
        read_plan(path)
    path.unlink()
    with pytest.raises(ConfigError, match="expected weights of slices"):
        read_plan(path)


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


def row(number: int, way: str, length: int) -> TokenRow:
    columns = {"thinking": way, "thinking_pair": f"p{number}"}
    return TokenRow(f"p{number}.{way}", np.zeros(length, dtype=np.int32), np.ones(length, dtype=np.bool_), columns)


lengths_of_sets = st.lists(st.integers(1, 30), min_size=1, max_size=30).filter(lambda found: sum(found) >= 30)


@given(on=lengths_of_sets, off=lengths_of_sets, limit=st.integers(30, 600), data=st.data())
def test_all_sets_have_the_tokens_of_the_smaller_kind_and_the_order_of_the_data_does_not_matter(on, off, limit, data):
    rows = [row(n, "on", length) for n, length in enumerate(on)] + [row(n, "off", size) for n, size in enumerate(off)]
    sets = choose_equal_sets(rows, limit)
    budget = min(sum(on), sum(off), limit)
    for members in sets.values():
        assert budget - 30 < sum(map(len, members)) <= budget  # the longest sample may not have fitted
    for way in ("on", "off"):
        assert {one.columns["thinking"] for one in sets[way]} == {way}
    mixed = choose_equal_sets(data.draw(st.permutations(rows)), limit)["mixed"]
    assert [one.sample_id for one in mixed] == [one.sample_id for one in sets["mixed"]]


def test_the_mixed_set_has_the_proportions_of_the_data():
    rows = [row(n, "on" if n % 4 == 0 else "off", 10) for n in range(800)]
    mixed = choose_equal_sets(rows, 2_000)["mixed"]
    assert 35 <= sum(one.columns["thinking"] == "on" for one in mixed) <= 65  # a quarter of 200


def test_a_kind_without_a_sample_is_an_error():
    with pytest.raises(DataError, match="there is none with thinking off: set its share in mix.shares above 0"):
        choose_equal_sets([row(1, "on", 4)], 100)
    with pytest.raises(DataError, match=r"no sample of off fits into 4 tokens: raise comparison.tokens"):
        choose_equal_sets([row(1, "on", 4), row(2, "off", 9)], 100)


ids = st.text(alphabet="0123456789abcdef", min_size=1, max_size=16)
shares = st.floats(0, 1)


@given(st.lists(ids, unique=True), st.lists(ids, unique=True), shares)
def test_adding_data_never_moves_a_sample(first, added, share):
    before = {each for each in first if is_held_out(each, share)}
    after = {each for each in {*first, *added} if is_held_out(each, share)}
    assert before == after & set(first)


@given(ids, shares, shares)
def test_a_larger_share_keeps_what_a_smaller_one_held_out(sample_id, one, other):
    assert is_held_out(sample_id, min(one, other)) <= is_held_out(sample_id, max(one, other))


def test_the_share_is_met():
    held = sum(is_held_out(str(n), 0.1) for n in range(20_000)) / 20_000
    assert abs(held - 0.1) < 0.01


def test_selection_and_split_are_independent():
    chosen = [str(n) for n in range(20_000) if hash_fraction(str(n), "select") < 0.2]
    assert abs(sum(is_held_out(each, 0.1) for each in chosen) / len(chosen) - 0.1) < 0.02


def spoken(n: int) -> Conversation:
    return Conversation.of([Turn("user", str(n)), Turn("assistant", "yes")])


@given(st.sets(st.integers(0, 500), min_size=1, max_size=40), st.integers(0, 500), st.integers(1, 40), st.randoms())
def test_a_selection_ignores_order_and_changes_by_at_most_one_for_each_addition(numbers, added, size, random):
    items = [spoken(n) for n in numbers]
    shuffled = random.sample(items, len(items))
    before = select(items, size)
    assert before == select(shuffled, size)
    assert len(before) == min(size, len(items))
    lost = {each.id for each in before} - {each.id for each in select([*items, spoken(added)], size)}
    assert len(lost) <= 1
    assert select(items, None)[:size] == before


def test_the_split_is_the_same_in_every_process_and_release():
    """Values that were computed once: a sample that moves between training and held-out data spoils every comparison."""
    assert hash_fraction("0f1e2d3c4b5a6978", "held-out") == 0.38365285888346534
    assert hash_fraction("sample", "held-out") == 0.022140176501515896
    assert hash_fraction("聊天", "held-out") == 0.3940456588783334
    assert [is_held_out(each, 0.1) for each in ("0f1e2d3c4b5a6978", "sample", "聊天")] == [False, True, False]
