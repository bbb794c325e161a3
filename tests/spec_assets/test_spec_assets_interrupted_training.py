"""An interrupted training continues: by itself after a pre-emption, at the next materialization after a cancellation."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dagster as dg
import psutil
import pytest
from coverings import gate_or_long
from waiting import find_now, meanwhile, wait_until

from draftworks.storage.artifacts import ArtifactStore

LONG = {"epochs": 15, "save_every": 10, "log_every": 30, "eval_every": 60}


def training_of(site) -> psutil.Process | None:
    """Return the process that the launcher has started on a run file of this site: the training, or torchrun."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        command = " ".join(process.info["cmdline"] or [])
        if "programs.train" in command and str(site.var) in command and "stop_signals" not in command:
            found.append(process)
    return min(found, key=lambda process: process.info["create_time"], default=None)  # ranks come after torchrun


@contextmanager
def once_saved(site, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` from a thread, once a checkpoint of the running training exists."""

    def wait_and_act() -> None:
        wait_until(lambda: find_now(site.var, "eagle3_draft/small/*.partial/checkpoints/*/checkpoint.json"))
        act()

    with meanwhile(wait_and_act):
        yield


def train(site, **draft) -> dg.ExecuteInProcessResult:
    config = {"ops": {"eagle3_draft": {"config": {"training": LONG, **draft}}}}
    return site.run("train_eagle3", run_config=config, asset_selection=[dg.AssetKey("eagle3_draft")])


def draft(site):
    return ArtifactStore(site.var).load_current("eagle3_draft", "small")


def starts(site) -> list[int]:
    return [session["from_step"] for session in draft(site).summary["sessions"]]


def set_ranks(site, ranks: int) -> None:
    text = site.target_file.read_text()
    site.target_file.write_text(re.sub(r"processes: \d", f"processes: {ranks}", text))


@pytest.fixture(scope="module", params=gate_or_long([1, 2], [1]), ids=["one rank", "two ranks"])
def ready(request, finished_site, tmp_path_factory):
    """A site with features, about to train for 90 or so steps."""
    site = finished_site.copy(tmp_path_factory.mktemp("ready"))
    set_ranks(site, request.param)
    return site


@pytest.fixture
def prepared(ready, tmp_path):
    return ready.copy(tmp_path)


@pytest.fixture(scope="module")
def once_cancelled(ready, tmp_path_factory):
    site = ready.copy(tmp_path_factory.mktemp("cancelled"))
    with once_saved(site, lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert not train(site).success
    assert training_of(site) is None
    return site


@pytest.fixture
def cancelled(once_cancelled, tmp_path):
    """A site whose training was cancelled after its first checkpoint."""
    return once_cancelled.copy(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(ready, tmp_path_factory) -> str:
    """The weights that a training without any interruption gives."""
    site = ready.copy(tmp_path_factory.mktemp("undisturbed"))
    assert train(site).success
    assert starts(site) == [0]
    return draft(site).data_version


@pytest.mark.slow
def test_a_pre_empted_training_is_retried_from_its_checkpoint(prepared, undisturbed):
    with once_saved(prepared, lambda: training_of(prepared).terminate()):
        result = train(prepared)
    assert result.success
    retried = [e for e in result.all_events if e.event_type is dg.DagsterEventType.STEP_UP_FOR_RETRY]
    assert len(retried) == 1
    assert "interrupted by SIGTERM" in retried[0].step_retry_data.error.to_string()
    first, second = starts(prepared)
    assert first == 0 < second
    assert draft(prepared).data_version == undisturbed


@pytest.mark.long
def test_a_cancelled_training_goes_on_at_the_next_materialization(cancelled, undisturbed):
    again = train(cancelled)
    assert again.success
    assert starts(cancelled)[1] > 0
    assert draft(cancelled).data_version == undisturbed
    shown = {e.asset_key.to_user_string(): e.materialization for e in again.get_asset_materialization_events()}
    metadata = shown["eagle3_draft"].metadata
    assert metadata["resume_history"].value.count("\n") == 3
    assert metadata["best_score"].value > 0
    assert "checkpoints" in metadata["checkpoints"].value


@pytest.mark.long
def test_start_over_forgets_an_interrupted_training(cancelled, undisturbed):
    assert train(cancelled, start_over=True).success
    assert starts(cancelled) == [0]
    assert draft(cancelled).data_version == undisturbed


@pytest.mark.long
def test_another_number_of_ranks_goes_on_from_what_was_saved(cancelled):
    before = 2 if "processes: 2" in cancelled.target_file.read_text() else 1
    set_ranks(cancelled, 3 - before)
    assert train(cancelled).success
    assert [session["ranks"] for session in draft(cancelled).summary["sessions"]] == [before, 3 - before]
