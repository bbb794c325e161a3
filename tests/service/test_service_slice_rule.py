"""Lost slices and promotion: a slice that is clearly lost holds a draft back, chance alone hardly ever does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promotion_worlds import EQUAL, EQUAL_SKEWED, World, measure_held_back
from service_site import ServiceSite, make_walk

from draftworks.data.conversations import Scalar
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.report.paired_slices import SliceDifference
from draftworks.service.candidate import RefusedError
from draftworks.service.register import EvalFigures
from draftworks.service.rule import Verdict, judge_slices

LANGUAGES = ("de", "en", "fr", "it")


@dataclass(frozen=True)
class SlicedSite(ServiceSite):
    """Prompts of four languages, 30 each, and of categories with 30, 15 and 75.

    Attributes:
        lost: by value of a column, the tokens per pass that its prompts have less.
    """

    lost: dict[str, float] = field(default_factory=dict)

    def name_columns(self, index: int) -> dict[str, Scalar]:
        category = "law" if index % 8 < 2 else "art" if index % 8 == 2 else "talk"
        return {"language": LANGUAGES[index // 30], "category": category}

    def make_walk(self, index: int, mean: float, weights: str) -> PromptAcceptance:
        lost = sum(self.lost.get(str(value), 0.0) for value in self.name_columns(index).values())
        return make_walk(index, mean - lost, weights)


@pytest.fixture
def site(tmp_path: Path) -> SlicedSite:
    site = SlicedSite(tmp_path, entry={"evaluation": {"slices": ["category"]}})
    site.publish("a", 2.0)
    site.promote()
    return site


@pytest.mark.parametrize("lost", ["de", "law"])
def test_a_lost_slice_holds_a_draft_back_that_is_better_on_average(site: SlicedSite, lost: str):
    """By a column that the data always has, and by one that the entry asks for."""
    replace(site, lost={lost: 0.4}).publish("b", 2.3)
    judgement = site.open().judge()
    [found] = judgement.figures
    assert found.low is not None
    assert found.low > 0
    assert (found.verdict, [one.value for one in found.slices]) == ("slice_lost", [lost])
    with pytest.raises(RefusedError, match=rf"(?s)slice-lost: .*{lost} loses 0.10. .*--force") as refused:
        site.promote()
    assert "30 prompts" in str(refused.value)


def test_force_overrules_a_lost_slice_and_the_record_says_which(site: SlicedSite):
    replace(site, lost={"de": 0.6}).publish("b", 2.3)
    record = site.promote(force=True, why="German is served elsewhere")
    assert record.forced
    again = site.open().register.require()
    assert again == record
    [lost] = again.figures[0].slices
    assert (lost.column, lost.value, lost.prompts) == ("language", "de", 30)
    assert lost.difference == pytest.approx(-0.3, abs=0.01)
    assert lost.low < lost.difference < lost.high < 0


@pytest.mark.parametrize(
    ("lost", "mean", "settings"),
    [
        ({"de": 0.08}, 2.0, {}),  # clear, and within the margin
        ({"de": 0.4}, 2.0, {"slice_margin": 0.5}),
        ({"art": 1.0}, 2.3, {}),  # of fifteen prompts
    ],
)
def test_a_slice_that_loses_little_or_has_few_prompts_holds_nothing_back(
    tmp_path: Path, lost: dict[str, float], mean: float, settings: dict[str, float]
):
    entry = {"evaluation": {"slices": ["category"]}, "service": {"margin": 0.2, **settings}}
    site = SlicedSite(tmp_path, entry=entry)
    site.publish("a", 2.0)
    site.promote()
    replace(site, lost=lost).publish("b", mean)
    assert site.promote().figures[0].slices == ()


P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@given(P_VALUES, P_VALUES, st.sampled_from(list(Verdict)))
def test_all_slices_of_all_eval_sets_are_one_family(first: list[float], second: list[float], verdict: Verdict):
    """By eval set the smallest of two families would be compared with twice the level."""
    figures = [EvalFigures(name, verdict, 0.03) for name in ("heldout", "code")]
    found = {
        name: [SliceDifference("part", str(n), 30, -0.5, -0.6, -0.4, p) for n, p in enumerate(values)]
        for name, values in (("heldout", first), ("code", second))
    }
    judged = judge_slices(figures, found, 0.1)
    is_held = min([*first, *second]) * (len(first) + len(second)) <= 0.05 + 1e-12
    assert any(one.slices for one in judged) == is_held
    for one in judged:
        expected = verdict if not one.slices or verdict is Verdict.WORSE else Verdict.SLICE_LOST
        assert one.verdict == expected
        assert all(lost.p_value <= 0.05 + 1e-12 for lost in one.slices)
    assert not any(one.slices for one in judge_slices(figures, found, 0.5)), "a loss of the margin is allowed"


def test_hardly_any_draft_without_a_loss_is_held_back():
    assert measure_held_back(EQUAL_SKEWED, 30, 20, trials=40, margin=0.0) <= 0.1


@pytest.mark.long
@pytest.mark.parametrize("world", [EQUAL, EQUAL_SKEWED], ids=lambda world: world.name)
@pytest.mark.parametrize("prompts", [20, 40])
def test_drafts_without_a_loss_are_held_back_by_thirty_slices_in_at_most_one_case_in_twenty(world: World, prompts: int):
    assert measure_held_back(world, 30, prompts, trials=2000, margin=0.0) <= 0.05
