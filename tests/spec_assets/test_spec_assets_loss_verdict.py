"""A training whose loss does not fall blocks later assets, unless it started from another draft."""

from dagster import AssetCheckSeverity

from spec_assets.drafts import judge_loss

ROSE = {"first_loss": 2.0, "last_loss": 2.1, "steps": 100}


def test_a_loss_that_rose_stops_what_follows():
    verdict = judge_loss(ROSE, continued=False)
    assert (verdict.passed, verdict.severity) == (False, AssetCheckSeverity.ERROR)


def test_of_a_continued_draft_it_is_told_and_stops_nothing():
    verdict = judge_loss(ROSE, continued=True)
    assert (verdict.passed, verdict.severity) == (False, AssetCheckSeverity.WARN)
    assert "loss went from 2.000 to 2.100 in 100 steps" in verdict.description


def test_a_loss_that_fell_is_fine_and_so_is_a_course_too_short_to_tell():
    assert judge_loss(ROSE | {"last_loss": 1.9}, continued=False).passed
    assert judge_loss(ROSE | {"steps": 3}, continued=False).passed
