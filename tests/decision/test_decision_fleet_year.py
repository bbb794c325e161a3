"""A year of a fleet in simulated time, against known true values: what `make test` and `make test-long` run of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from decision_oracle import oracle_count_prompts, oracle_decide, oracle_promote
from fleet_figures import Year, simulate
from fleet_simulation import Settings

SHORT = (Settings(seed=1, targets=24, step_hours=24, resamples=200),)
FULL = tuple(Settings(seed=seed, targets=100, step_hours=1, resamples=500) for seed in range(10, 13))


@pytest.fixture(scope="module")
def years(tmp_path_factory: pytest.TempPathFactory) -> list[Year]:
    return [simulate(settings, tmp_path_factory.mktemp("year")) for settings in SHORT]


def test_at_most_one_promotion_in_twenty_is_wrong(years: list[Year]):
    require_few_wrong_promotions(years)


def test_the_draft_in_service_stays_within_the_margin_of_the_best_one(years: list[Year]):
    require_little_loss(years)


def test_no_week_takes_more_than_the_budget(years: list[Year]):
    require_budget(years)


def test_nothing_starts_on_hold_or_twice_for_the_same_cause(years: list[Year]):
    require_rules_of_starts(years)


def test_everything_is_explained(years: list[Year]):
    require_reasons(years)


def test_the_verdicts_and_choices_are_those_of_the_oracle(years: list[Year]):
    require_oracle(years)


def test_a_year_is_the_same_every_time(tmp_path: Path):
    settings = Settings(seed=3, targets=4, days=120, step_hours=24, resamples=50)
    first, second = (simulate(settings, tmp_path / name) for name in ("a", "b"))
    assert first.outcome.judged == second.outcome.judged
    assert first.outcome.decided == second.outcome.decided
    assert first.acting.reasons == second.acting.reasons


@pytest.mark.long
def test_years_of_a_large_fleet(tmp_path: Path):
    years = [simulate(settings, tmp_path / str(settings.seed)) for settings in FULL]
    require_few_wrong_promotions(years)
    require_little_loss(years)
    require_budget(years)
    require_rules_of_starts(years)
    require_reasons(years)
    require_oracle(years)


def require_few_wrong_promotions(years: list[Year]) -> None:
    """Of the drafts that had an earlier one to be compared with: a first one cannot be wrong, and would hide others."""
    compared = [each for year in years for each in year.outcome.compared]
    wrong = [each for each in compared if each.is_wrong]
    assert len(compared) >= 10
    assert len(wrong) <= 0.05 * len(compared), wrong


def require_little_loss(years: list[Year]) -> None:
    """A draft that is truly at the margin passes with a chance of at most 2.5%, as the bound of a two-sided 95% interval
    is what is compared with it. So the loss is beyond the margin for at most 5% of the time (2.5%, and the same again for
    a best draft that was taken for another), and on average it is within the tightest margin of any target."""
    for year in years:
        assert year.figures.hours_beyond <= 0.05, year.figures
        assert 0 <= year.figures.mean_loss <= 0.015, year.figures


def require_budget(years: list[Year]) -> None:
    """What the ledger holds never exceeds the budget when a training is charged. What is truly taken in 7 days exceeds it
    at most by what the trainings within them took beyond their estimates."""
    for year in years:
        assert year.acting.spent
        assert year.acting.charged <= year.figures.budget + 1e-6
        for week in year.acting.list_weeks():
            assert week.taken <= week.promised + 1e-6


def require_rules_of_starts(years: list[Year]) -> None:
    for year in years:
        assert year.acting.violations == []
    held = [member for year in years for member in year.acting.year.members.values() if member.target.decision.hold]
    assert held, "a target is on hold by its entry"
    assert sum(year.figures.steps["start"] for year in years) >= 20


def require_reasons(years: list[Year]) -> None:
    """Verdicts, decisions and steps of the plan have figures or say what is missing."""
    for year in years:
        for said in year.acting.reasons:
            words, _, figures = said.partition("; ")
            assert words
            assert "accepted tokens per pass (" in figures or "no loss is known" in figures, said
        for said in year.outcome.reasons:
            has_figures = any(character.isdigit() for character in said)
            assert has_figures or "no draft" in said or "nothing was measured" in said, said
        for promotion in year.outcome.promotions:
            assert promotion.reason


def require_oracle(years: list[Year]) -> None:
    outcomes = [year.outcome for year in years]
    for facts, verdict in (each for outcome in outcomes for each in outcome.judged):
        assert oracle_promote(facts) == verdict, facts
    for facts, choice in (each for outcome in outcomes for each in outcome.decided):
        assert oracle_decide(facts) == choice, facts
    for margins, facts, needed in (each for outcome in outcomes for each in outcome.needed):
        assert oracle_count_prompts(margins, facts) == needed, facts
    verdicts = {verdict for outcome in outcomes for _, verdict in outcome.judged}
    choices = {choice for outcome in outcomes for _, choice in outcome.decided}
    assert verdicts == {"first", "non_inferior", "worse", "undecided"}
    assert choices == {"keep", "tune", "retrain", "undecided"}
