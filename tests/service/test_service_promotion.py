"""Promotion and rollback over published results: what is refused and why, what is recorded, and kills at any point."""

from __future__ import annotations

import multiprocessing
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from coverings import gate_or_long
from kill_points import killed_before
from service_site import ServiceSite

from draftworks.errors import DraftworksError, StoreError
from draftworks.service.candidate import RefusedError, State, read_states
from draftworks.service.promotion import Request
from draftworks.service.register import ConflictError, require_present, resolve_draft
from draftworks.storage.event_log import LOCK


@pytest.fixture
def site(tmp_path: Path) -> ServiceSite:
    return ServiceSite(tmp_path)


def serving(site: ServiceSite) -> str:
    """The digest in service; its folder is whole."""
    record = site.open().register.require()
    require_present(site.artifacts.root, record.draft)
    for one in [] if record.canary is None else [record.canary.draft]:
        require_present(site.artifacts.root, one)
    return record.draft.digest


def refuse(site: ServiceSite, match: str, ask, error: type[DraftworksError] = RefusedError) -> None:
    """What is asked is an error with these words, and nothing has moved."""
    before = read_folder(site)
    with pytest.raises(error, match=match):
        ask()
    assert read_folder(site) == before


def read_folder(site: ServiceSite) -> dict[Path, bytes]:
    """All that is recorded of the draft in service, of those before it and of those that were accepted."""
    files = [path for path in site.open().register.folder.rglob("*") if path.is_file() and LOCK not in path.parts]
    return {path: path.read_bytes() for path in files}


def test_the_first_draft_of_a_target_needs_no_comparison(site: ServiceSite):
    first = site.publish("a", 1.0)
    record = site.promote(why="first")
    assert (record.number, record.draft.digest, record.previous, record.why) == (1, first, None, "first")
    assert [one.verdict for one in record.figures] == ["first"]
    folder = resolve_draft(site.artifacts.root, "small", "eagle3")
    assert (folder / "model.safetensors").read_text() == record.draft.weights
    assert read_states(site.open().register) == {first: State.PROMOTED}
    assert site.promote() == record  # again: nothing changes


def test_a_draft_within_the_margin_replaces_and_a_worse_one_is_refused_with_figures(site: ServiceSite):
    first = site.publish("a", 1.0)
    site.promote()
    second = site.publish("b", 0.98)
    record = site.promote()
    assert (record.number, record.draft.digest, record.previous) == (2, second, first)
    assert record.figures[0].difference == pytest.approx(-0.02)
    site.publish("c", 0.9)
    refuse(site, rf"(?s)worse: -0.100 accepted.*120 prompts.*{first}.*allowed -0.030.*--force", site.promote)


def test_small_losses_do_not_add_up(site: ServiceSite):
    first = site.publish("a", 1.0)
    site.promote()
    site.publish("b", 0.98)
    site.promote()
    site.publish("c", 0.96)
    refuse(site, rf"-0.040 .*against draft {first}", site.promote)


def test_after_new_eval_data_the_distance_to_the_best_draft_is_carried(site: ServiceSite):
    site.publish("a", 1.0)
    site.promote()
    second = site.publish("b", 0.98)
    site.promote()
    draft = site.artifacts.load_current("eagle3_draft", "small")
    site.publish("c", 0.98, answers="others")
    refuse(site, "no held-out prompt has the same tokens", site.promote)
    site.publish_report(draft, {"heldout": 0.98}, answers="others")
    judgement = site.open().judge()
    [found] = judgement.figures
    assert (found.reference, found.verdict) == (second, "non_inferior")
    assert found.carried == pytest.approx(0.02)
    site.publish("d", 0.96, answers="others")
    refuse(site, "which is 0.020 behind the best one", site.promote)


def test_every_eval_set_counts_and_has_its_margin(tmp_path: Path):
    site = ServiceSite(tmp_path, evals=("code",), entry={"service": {"margin": 0.05, "margins": {"code": 0.01}}})
    site.publish("a", 1.0)
    site.promote()
    site.publish("b", {"heldout": 0.96, "code": 0.98})
    refuse(site, r"code: worse: -0.020 .*allowed -0.010", site.promote)
    site.publish("c", {"heldout": 0.96, "code": 1.0})
    assert len(site.promote().figures) == 2
    site.publish("d", {"heldout": 2.0})
    refuse(site, "newest report is not about code.*draftworks run evaluate", site.promote)


def test_too_few_prompts_decide_nothing(site: ServiceSite):
    site.publish("a", 1.0, prompts=5)
    site.promote()
    site.publish("b", 3.0, prompts=5)
    refuse(site, "undecided.*5 shared prompts, at least 120 are needed: 115 more", site.promote)
    refuse(site, "only overruled with a reason", partial(site.promote, force=True))
    assert site.promote(force=True, why="seen by hand").forced


def test_what_is_not_sound_is_refused_even_by_force(site: ServiceSite):
    ask = partial(site.promote, force=True, why="please")
    refuse(site, "no eagle3 draft yet", ask)
    site.publish("a", 1.0, passed=False)
    refuse(site, "gates of its export failed: sglang: readable", ask)
    draft = site.publish_draft("b")
    refuse(site, "expected a report of it, found none.*draftworks run evaluate", ask)
    site.publish_report(draft, {"heldout": 1.0})
    refuse(site, "expected an export of it, found none.*train_eagle3", ask)
    export = site.publish_export(draft)
    (export.path / "sglang" / "model.safetensors").write_text("other")
    refuse(site, "its export is damaged", ask)


def test_a_draft_of_other_weights_or_of_another_target_is_refused(site: ServiceSite):
    site.add_target("other")
    elsewhere = site.publish("x", 1.0, target="other")
    site.publish("a", 1.0)
    refuse(site, f"draft {elsewhere} is an eagle3_draft of target other", partial(site.promote, elsewhere))
    refuse(site, "small, eagle3: no draft '0123'; there is", partial(site.promote, "0123"))
    refuse(site, "not a name", partial(site.promote, "../x"))
    site.promote()
    site.add_target("small", weights="second")
    refuse(site, "was trained for the weights .* Train a draft", site.promote)
    site.publish("b", 0.1)
    assert site.promote().figures[0].verdict == "first"  # for these weights
    refuse(site, "trained for the weights", site.rollback)
    assert site.rollback(force=True).number == 3


def test_another_digest_than_the_expected_one_in_service_moves_nothing(site: ServiceSite):
    site.publish("a", 1.0)
    site.promote()
    site.publish("b", 1.1)
    refuse(site, "expected draft 0123 in service", partial(site.promote, expected="0123"), ConflictError)
    refuse(site, "nothing to go back to", partial(site.rollback, expected="0123"))
    service = site.open()
    stale = service.judge()
    site.promote()
    refuse(
        site, "while this one was judged|expected draft", lambda: service.promote(stale, Request("me")), ConflictError
    )
    refuse(site, "expected draft 0123 in service", partial(site.rollback, expected="0123"), ConflictError)


def test_rollbacks_walk_back_through_the_promotions(site: ServiceSite):
    digests = []
    for index in range(3):
        digests.append(site.publish(f"d{index}", 1.0 + index))
        site.promote()
    assert site.rollback(why="slow").draft.digest == digests[1]
    assert site.rollback().draft.digest == digests[0]
    refuse(site, "is the first one", site.rollback)
    assert site.rollback(digests[2]).previous == digests[0]
    refuse(site, "in service already", partial(site.rollback, digests[2]))
    refuse(site, "was never in service", partial(site.rollback, "0123"))
    assert [one.action for one in site.open().register.read_history()] == ["promote"] * 3 + ["rollback"] * 3


def test_after_a_rollback_the_best_draft_is_still_the_measure(site: ServiceSite):
    site.publish("a", 1.0)
    site.promote()
    best = site.publish("b", 2.0)
    site.promote()
    site.rollback()
    site.publish("c", 1.0)
    refuse(site, f"-1.000 .*against draft {best}", site.promote)


def test_a_rollback_to_what_was_pruned_or_damaged_moves_nothing(site: ServiceSite):
    records = []
    for index in range(3):
        site.publish(f"d{index}", 1.0 + index)
        records.append(site.promote())
    first, second = (site.artifacts.root / record.draft.path for record in records[:2])
    shutil.rmtree(second)
    refuse(site, f"it was pruned.*Still there.*{records[0].draft.digest}", site.rollback)
    (first / "sglang" / "model.safetensors").write_text("x")
    refuse(site, "is damaged", partial(site.rollback, records[0].draft.digest))


def test_a_canary_stands_beside_the_draft_in_service(site: ServiceSite):
    first = site.publish("a", 1.0)
    refuse(site, "there is none: promote one first", partial(site.promote, share=0.1))
    site.promote()
    refuse(site, "cannot be its own canary", partial(site.promote, share=0.1))
    second = site.publish("b", 1.1)
    refuse(site, "between 0 and 1", partial(site.promote, share=1.0))
    record = site.promote(share=0.1)
    assert (record.draft.digest, record.canary and record.canary.draft.digest) == (first, second)
    assert record.figures[0].difference == pytest.approx(0.1)
    ended = site.rollback()
    assert (ended.action, ended.draft.digest, ended.canary) == ("end_canary", first, None)
    site.promote(share=0.2)
    done = site.promote()
    assert (done.draft.digest, done.canary, done.previous) == (second, None, first)
    assert site.rollback().draft.digest == first


def test_a_serving_check_that_is_asked_for_has_to_be_there_and_agree(tmp_path: Path):
    from draftworks.storage.artifacts import BuildResult

    site = ServiceSite(tmp_path, entry={"evaluation": {"serving": {"prompts": 4}}})
    digest = site.publish("a", 1.0)
    refuse(site, "expected a serving check.*draftworks run serve", site.promote)
    for agrees in (False, True):
        walk = {"agrees": agrees, "difference": -0.2, "allowed": 0.1}
        identity = {"export": f"export-{digest}", "agrees": agrees}
        site.artifacts.obtain(
            "eagle3_serving", "small", identity, lambda out, walk=walk: BuildResult("served", {"walk": walk})
        )
        if not agrees:
            refuse(site, r"a live server \(SGLang\) accepts -0.200", site.promote)
    assert site.promote().number == 1


def _act(site: ServiceSite, action: str) -> None:
    site.promote() if action == "promote" else site.rollback()


@pytest.mark.parametrize("action", gate_or_long(["promote", "rollback"], ["promote"]))
def test_killed_at_any_change_of_the_file_system_one_whole_draft_is_in_service(tmp_path: Path, action: str):
    prepared = ServiceSite(tmp_path / "prepared")
    for index in range(2):
        prepared.publish(f"d{index}", 1.0 + index)
        prepared.promote()
    prepared.publish("d2", 3.0)
    prepared.open().judge()  # digests of files are remembered
    before = serving(prepared)
    outcomes, killed = [], True
    while killed:
        site = _copy(prepared, tmp_path / str(len(outcomes)))
        killed = killed_before(len(outcomes), partial(_act, site, action))
        outcomes.append(serving(site))
        assert site.open().register.read_history()[-1].draft.digest == outcomes[-1]
        shutil.rmtree(site.root)
    changed = next(index for index, found in enumerate(outcomes) if found != before)
    assert len(set(outcomes[:changed])) == len(set(outcomes[changed:])) == 1
    assert len(outcomes) - changed > 2


def _copy(site: ServiceSite, root: Path) -> ServiceSite:
    shutil.copytree(site.root, root)
    return ServiceSite(root)


def _promote_and_take_back(site: ServiceSite, digest: str) -> None:
    for _ in range(3):
        for ask in (partial(site.promote, digest), site.rollback):
            with suppress(ConflictError, RefusedError):
                ask()


def test_concurrent_promotions_and_rollbacks_leave_one_whole_draft_at_every_moment(site: ServiceSite):
    site.publish("a", 1.0)
    site.promote()
    digests = [site.publish(f"d{index}", 1.0) for index in range(2)]
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_promote_and_take_back, args=(site, digest)) for digest in digests]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        serving(site)
    assert [worker.exitcode for worker in workers] == [0, 0]
    history = site.open().register.read_history()
    assert len(history) > 2
    for before, after in zip(history, history[1:]):
        assert after.previous == before.draft.digest


def test_a_draft_whose_folder_is_gone_is_said_to_the_server(site: ServiceSite):
    site.publish("a", 1.0)
    record = site.promote()
    with pytest.raises(StoreError, match="expected one of sglang, found vllm"):
        resolve_draft(site.artifacts.root, "small", "eagle3", "vllm")
    shutil.rmtree(site.artifacts.root / record.draft.path)
    with pytest.raises(StoreError, match="was it pruned"):
        resolve_draft(site.artifacts.root, "small", "eagle3")
