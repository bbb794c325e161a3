"""An interrupted training continues: by itself after a pre-emption, at the next materialization after a cancellation."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dagster as dg
import psutil
import pytest
from waiting import meanwhile, wait_until

from draftworks.storage.artifacts import ArtifactStore

LONG = {"epochs": 15, "save_every": 10, "log_every": 30, "eval_every": 60}


def torchrun_of(site) -> psutil.Process | None:
    """Return the torchrun process that works on a run file of this site."""
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if "torch.distributed.run" in command and str(site.var) in command and "programs.train" in command:
            return process
    return None


@contextmanager
def once_saved(site, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` from a thread, once a checkpoint of the running training exists."""

    def wait_and_act() -> None:
        wait_until(lambda: list(site.var.glob("eagle3_draft/small/*.partial/checkpoints/*/checkpoint.json")))
        act()

    with meanwhile(wait_and_act):
        yield


def train(site, **draft) -> dg.ExecuteInProcessResult:
    """Train on two ranks."""
    config = {"ops": {"eagle3_draft": {"config": {"training": LONG, **draft}}}}
    return site.run("train_eagle3", run_config=config, asset_selection=[dg.AssetKey("eagle3_draft")])


def draft(site):
    return ArtifactStore(site.var).load_current("eagle3_draft", "small")


def starts(site) -> list[int]:
    return [session["from_step"] for session in draft(site).summary["sessions"]]


@pytest.fixture
def prepared(finished_site, tmp_path):
    """A site with features, about to train for 90 or so steps."""
    return finished_site.copy(tmp_path)


@pytest.fixture(scope="module")
def once_cancelled(finished_site, tmp_path_factory):
    site = finished_site.copy(tmp_path_factory.mktemp("cancelled"))
    with once_saved(site, lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert not train(site).success
    assert torchrun_of(site) is None
    return site


@pytest.fixture
def cancelled(once_cancelled, tmp_path):
    """A site whose training was cancelled after its first checkpoint."""
    return once_cancelled.copy(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(finished_site, tmp_path_factory) -> str:
    """The weights that a training without any interruption gives."""
    site = finished_site.copy(tmp_path_factory.mktemp("undisturbed"))
    assert train(site).success
    assert starts(site) == [0]
    return draft(site).data_version


@pytest.mark.slow
def test_a_pre_empted_training_is_retried_from_its_checkpoint(prepared, undisturbed):
    with once_saved(prepared, lambda: torchrun_of(prepared).terminate()):
        result = train(prepared)
    assert result.success
    retried = [e for e in result.all_events if e.event_type is dg.DagsterEventType.STEP_UP_FOR_RETRY]
    assert len(retried) == 1
    assert "interrupted by SIGTERM" in retried[0].step_retry_data.error.to_string()
    first, second = starts(prepared)
    assert first == 0 < second
    assert draft(prepared).data_version == undisturbed


@pytest.mark.slow
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


@pytest.mark.slow
def test_start_over_forgets_an_interrupted_training(cancelled, undisturbed):
    assert train(cancelled, start_over=True).success
    assert starts(cancelled) == [0]
    assert draft(cancelled).data_version == undisturbed


@pytest.mark.slow
def test_fewer_ranks_go_on_from_what_more_have_saved(cancelled):
    text = cancelled.target_file.read_text()
    cancelled.target_file.write_text(text.replace("processes: 2", "processes: 1"))
    assert train(cancelled).success
    assert [session["ranks"] for session in draft(cancelled).summary["sessions"]] == [2, 1]
