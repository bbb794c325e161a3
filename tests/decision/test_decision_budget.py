"""The ledger counts what is used of a week; concurrent charges, and killed ones, never exceed the budget."""

from __future__ import annotations

import multiprocessing
from functools import partial
from pathlib import Path

import pytest
from decision_toys import DAY, HOUR, NOW, WEEK, charged, ended
from hypothesis import given
from hypothesis import strategies as st
from kill_points import killed_before

from draftworks.decision.budget import BudgetFile, Correction, Ledger, Outcome
from draftworks.errors import StoreError

MAX_CHANGES = 200
HOURS = st.floats(0, 50)


def test_a_charge_counts_until_seven_days_after_the_end_of_its_run():
    charge = charged(hours=5.0)
    open_one = Ledger().add(charge)
    assert open_one.sum_hours(NOW + 100 * DAY) == 5.0
    closed = open_one.add(ended(charge, 3.0, NOW + DAY))
    assert closed.sum_hours(NOW + DAY) == 3.0
    assert closed.sum_hours(NOW + DAY + WEEK - 1) == 3.0
    assert closed.sum_hours(NOW + DAY + WEEK) == 0.0


def test_a_correction_may_go_both_ways_and_the_newest_one_counts():
    charge = charged(hours=5.0)
    longer = Ledger().add(charge, Correction("a", 9.0, NOW, Outcome.OPEN, "run-a"))
    assert longer.sum_hours(NOW) == 9.0
    assert longer.list_open()
    failed = longer.add(ended(charge, 2.0, NOW, Outcome.FAILED))
    assert failed.entries["a"].outcome is Outcome.FAILED
    assert failed.sum_hours(NOW) == 2.0
    again = failed.add(Correction("a", 7.0, NOW, Outcome.OPEN, "again"))
    assert (again.sum_hours(NOW), len(again.list_open())) == (7.0, 1)


def test_a_withdrawn_one_whose_run_comes_after_all_counts_again():
    charge = charged(hours=5.0)
    withdrawn = Ledger().add(charge, Correction("a", 0.0, NOW, Outcome.WITHDRAWN))
    assert withdrawn.sum_hours(NOW) == 0.0
    assert not withdrawn.list_open()
    assert withdrawn.add(ended(charge, 4.0, NOW + 1)).sum_hours(NOW + 1) == 4.0


@given(st.lists(st.tuples(HOURS, HOURS, st.integers(0, 4)), max_size=30), HOURS)
def test_no_moment_has_more_than_the_budget_where_estimates_are_kept(plan: list, limit: float):
    """Trainings that take at most their estimate; at every moment the last 7 days hold at most the budget."""
    ledger, now = Ledger(), NOW
    for number, (hours, taken, days) in enumerate(plan):
        charge = charged(str(number), hours, now)
        for each in ledger.select([charge], limit, now):
            ledger = ledger.add(each)
        if charge.id in ledger.entries:
            ledger = ledger.add(ended(charge, min(hours, taken), now + HOUR))
        assert ledger.sum_hours(now) <= limit + 1e-6
        now += days * DAY


def test_charges_fit_one_after_the_other_and_one_for_each_target():
    wanted = [charged("a", 6), charged("b", 5), charged("c", 4), charged("d", 0, target="t-a")]
    assert [each.id for each in Ledger().select(wanted, 10, NOW)] == ["a", "c"]
    assert Ledger().add(wanted[0]).select(wanted, 100, NOW) == wanted[1:3]


def test_the_file_gives_back_what_was_written(tmp_path: Path):
    file = BudgetFile(tmp_path)
    assert file.read() == Ledger()
    charge = charged(hours=5.0)
    assert file.charge([charge, charged("b", 6.0)], 10.0, NOW) == [charge]
    assert file.charge([charge], 10.0, NOW) == []
    file.correct([ended(charge, 3.0, NOW)])
    size = file.path.stat().st_size
    file.correct([ended(charge, 3.0, NOW)])
    assert file.path.stat().st_size == size
    assert file.read() == Ledger().add(charge, ended(charge, 3.0, NOW))


def test_a_correction_of_nothing_and_lines_that_contradict_each_other_are_clear_errors(tmp_path: Path):
    file = BudgetFile(tmp_path)
    with pytest.raises(StoreError, match="charge a, which is not there"):
        file.correct([ended(charged(), 3.0, NOW)])
    file.charge([charged()], 10.0, NOW)
    file.path.write_bytes(file.path.read_bytes() * 2)
    with pytest.raises(StoreError, match="charge a is there twice"):
        file.read()
    with pytest.raises(StoreError, match="is there twice"):
        file.charge([charged("b")], 10.0, NOW)


@pytest.mark.parametrize("work", ["charge", "correct"])
def test_killed_at_any_change_of_the_file_system_the_ledger_is_whole(tmp_path: Path, work: str):
    first, second = charged("a", 4.0), charged("b", 4.0)
    before = Ledger().add(first)
    after = before.add(second) if work == "charge" else before.add(ended(first, 1.0, NOW))
    found = []
    for event in range(MAX_CHANGES):
        file = BudgetFile(tmp_path / str(event))
        file.charge([first], 10.0, NOW)
        does = (
            partial(file.charge, [second], 10.0, NOW)
            if work == "charge"
            else partial(file.correct, [ended(first, 1.0, NOW)])
        )
        killed = killed_before(event, does)
        found.append(file.read())
        assert found[-1] in (before, after)
        does()  # whoever comes next ends the work
        assert file.read() == after
        if not killed:
            break
    assert not killed
    assert before in found
    assert found[-1] == after


def _contend(var: Path, worker: int, results: multiprocessing.SimpleQueue) -> None:
    file, done = BudgetFile(var), []
    for number in range(6):
        charge = charged(f"{worker}-{number}", 1.0)
        done += [each.id for each in file.charge([charge, charged("shared", 1.0)], 7.0, NOW)]
    results.put(done)


def test_concurrent_charges_never_exceed_the_budget(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    workers = [context.Process(target=_contend, args=(tmp_path, number, results)) for number in range(3)]
    for worker in workers:
        worker.start()
    file, most = BudgetFile(tmp_path), 0.0
    while any(worker.is_alive() for worker in workers):
        most = max(most, file.read().sum_hours(NOW))
    charged_ids = [each for _ in workers for each in results.get()]
    assert most <= 7.0
    assert file.read().sum_hours(NOW) == 7.0
    assert sorted(charged_ids) == sorted(file.read().entries)  # each of them by one process
    assert charged_ids.count("shared") == 1
