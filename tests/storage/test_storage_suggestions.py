"""Suggestions: a name that was misspelt, or is another tool's word, leads to the one that was meant."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from draftworks.config.registry_files import TargetSpec, TrainingSpec
from draftworks.storage.words import OTHER_WORDS, find_close, list_fitting, suggest, suggest_or_list

NAMES = [*TrainingSpec.model_fields, *TargetSpec.model_fields]
LONG = sorted(name for name in NAMES if len(name) >= 6)


@given(name=st.sampled_from(LONG), data=st.data())
def test_two_letters_that_are_swapped_or_one_that_lacks_are_forgiven(name: str, data: st.DataObject):
    at = data.draw(st.integers(0, len(name) - 2))
    swapped = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    lacking = name[:at] + name[at + 1 :]
    for wrong in (swapped, lacking, name.upper(), name.replace("_", "-"), f" {name} "):
        assume(wrong not in NAMES)
        assert name in find_close(wrong, NAMES), wrong


@pytest.mark.parametrize(
    ("found", "known", "meant"),
    [
        ("gpu", ["auto", "cpu", "cuda"], ["cuda"]),
        ("fp16", ["float32", "bfloat16"], ["bfloat16"]),
        ("learning_rate", TrainingSpec.model_fields, ["lr"]),
        ("ttt_steps", ["ttt_length", "lr", "layer_ids"], ["ttt_length"]),
        ("Slurm", ["local", "slurm"], ["slurm"]),
        ("feature", ["drafts", "features", "eval_features"], ["features", "eval_features"]),
    ],
)
def test_a_word_of_other_tools_leads_to_the_one_here(found: str, known: list[str], meant: list[str]):
    assert find_close(found, known) == meant


def test_other_words_count_only_where_what_they_mean_is_known():
    assert find_close("learning_rate", ["margin", "hook"]) == []
    assert all(meant for meant in OTHER_WORDS.values())


@given(found=st.text(max_size=30), known=st.lists(st.text(min_size=1, max_size=12), max_size=40, unique=True))
def test_any_text_gets_a_sentence_about_names_that_exist(found: str, known: list[str]):
    assert set(find_close(found, known)) <= set(known)
    assert len(find_close(found, known)) <= 2
    text = suggest_or_list(found, known)
    assert text.startswith(("did you mean ", "there is: ", "there are: "))
    assert (suggest(found, known) == "") == (not find_close(found, known))


def test_a_list_that_does_not_fit_says_how_many_it_leaves_out():
    names = [f"name{number}" for number in range(100)]
    shown = list_fitting(names, room=40)
    assert shown == "name0, name1, name2, name3, name4, name5 and 94 more"
    assert list_fitting([]) == "none"
    assert list_fitting(["a" * 60], room=10) == "a" * 60
