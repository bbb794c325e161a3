"""Signals to every process of a stream in arrival order: each sample is trained once, as it is, in the recorded order."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from arrival_cast import BATCH, ROWS, SAMPLES, STEPS, STOPPED, ArrivalCast, make_site
from coverings import gate_or_long
from cutting_proxy import CuttingProxy
from waiting import wait_until

from draftworks.config.run_files import TargetFiles

BAD = ROWS[9].input_ids.tolist()


def wait_for_step(cast: ArrivalCast, step: int) -> None:
    wait_until(lambda: cast.count_steps() >= step, lambda: f"step {step}: {cast.running}")


@pytest.mark.parametrize("first", gate_or_long(["both", "producer", "consumer"], ["both"]))
def test_a_consumer_that_a_signal_stops_goes_on_with_whatever_comes_back_first(
    tmp_path: Path, tiny_target: TargetFiles, first: str
):
    site = make_site(tmp_path / "site", tiny_target, engine={"sleep": 0.1}, pace_s=0.05)
    with ArrivalCast(site) as cast:
        cast.start("p0")
        cast.start("train")
        wait_for_step(cast, 5)
        cast.kill("t0", signal.SIGTERM)
        assert cast.wait("t0") == [STOPPED]
        cast.kill("p0", signal.SIGTERM)
        assert cast.wait("p0") == [0]
        for name in {"producer": ("p0", "train"), "consumer": ("train", "p0"), "both": ("p0", "train")}[first]:
            cast.start(name)
            time.sleep(0 if first == "both" else 1)
        assert cast.wait("t0", "p0") == [0, 0], cast.read_log("t0") + cast.read_log("p0")
        assert cast.list_problems() == []


def test_a_consumer_that_fails_ends_a_producer_with_its_reason_and_both_go_on_when_started_again(
    tmp_path: Path, tiny_target: TargetFiles
):
    site = make_site(tmp_path / "site", tiny_target, engine={"sleep": 0.05})
    with ArrivalCast(site) as cast:
        cast.start("p0")
        cast.start("train")
        wait_for_step(cast, 4)
        wait_until(lambda: (site.folder / "state-3-0-1.json").exists())
        (site.folder / "final-0.json").mkdir()  # where it writes its result
        assert cast.wait("p0") == [0]
        assert cast.wait("t0") == [1]
        (site.folder / "final-0.json").rmdir()
        cast.start("train")
        assert cast.wait("t0") == [0]
        assert cast.list_problems() == []


def test_a_producer_that_stands_still_beyond_its_lease_takes_nothing_away(tmp_path: Path, tiny_target: TargetFiles):
    mark = tmp_path / "stopped"
    site = make_site(tmp_path / "site", tiny_target, lease_s=1.0)
    with ArrivalCast(site) as cast:
        cast.start("p1", make_site(site.folder, tiny_target, lease_s=1.0, stop_at_put=mark))
        wait_until(mark.exists)
        time.sleep(1.5)
        cast.start("p0")
        committed = f"SELECT 1 FROM samples WHERE sample_id = '{mark.read_text()}' AND seq IS NOT NULL"
        wait_until(lambda: bool(cast.query(committed)))
        cast.start("train")
        wait_for_step(cast, 2)  # its features may be trained, and freed, by now
        mark.with_suffix(".go").touch()
        assert cast.wait("t0", "p0", "p1") == [0, 0, 0], cast.read_log("p1")
        assert cast.list_problems() == []


@pytest.mark.parametrize("how", gate_or_long(["kill", "error", "refused"], ["kill"]))
def test_a_sample_that_no_attempt_captures_ends_the_training_beyond_the_share(
    tmp_path: Path, tiny_target: TargetFiles, how: str
):
    site = make_site(tmp_path / "site", tiny_target, engine={"bad": BAD, "how": how}, lease_s=1.0)
    with ArrivalCast(site) as cast:
        cast.start("train")
        while cast.running["t0"].is_alive():
            cast.start("p0")
            wait_until(lambda: not all(cast.running[name].is_alive() for name in ("p0", "t0")))
            cast.end("p0")
        assert cast.wait("t0") == [1]
        assert "of 64 samples have no valid features, more than capture.max_failed_share = 0.01" in cast.read_log("t0")


def test_within_the_share_the_training_goes_on_without_the_sample(tmp_path: Path, tiny_target: TargetFiles):
    site = make_site(
        tmp_path / "site", tiny_target, engine={"bad": BAD, "how": "refused"}, max_failed_share=0.1, lease_s=1.0
    )
    with ArrivalCast(site) as cast:
        cast.start("train")
        cast.start("p0")
        assert cast.wait("p0", "t0") == [0, 0]
        lost = {row.sample_id for row in ROWS if row.input_ids.tolist() == BAD}
        taken = [sample_id for step in cast.read_order() for sample_id in step]
        assert len(taken) == len(set(taken)) == (SAMPLES - len(lost)) // BATCH * BATCH
        assert lost.isdisjoint(taken)
        assert site.open_store().health()["samples"] == 0, "what filled no last batch is freed, too"


@pytest.mark.parametrize(("seed", "remote"), gate_or_long([(seed, seed > 8) for seed in range(1, 17)], [(1, False)]))
def test_random_signals_change_nothing(tmp_path: Path, tiny_target: TargetFiles, seed: int, remote: bool):
    rng = random.Random(seed)
    engine, pace_s = {"sleep": rng.choice([0.0, 0.05, 0.2])}, rng.choice([0.01, 0.1])
    site = make_site(
        tmp_path / "site", tiny_target, remote, engine=engine, pace_s=pace_s, lease_s=4.0, graceful=rng.random() < 0.5
    )
    with ArrivalCast(site, producers=rng.choice([1, 2]), world=rng.choice([1, 1, 2])) as cast:
        cast.run_random(rng, kills=rng.randint(4, 7))
        assert len(cast.read_order()) == STEPS
        assert cast.list_problems() == []


def test_a_killed_consumer_of_two_ranks_goes_on_as_one_and_as_two_again(tmp_path: Path, tiny_target: TargetFiles):
    site = make_site(tmp_path / "site", tiny_target, pace_s=0.1)
    with ArrivalCast(site, world=2) as cast:
        cast.start("p0")
        cast.start("train")
        wait_for_step(cast, 6)
        for world, until in ((1, 11), (2, STEPS)):
            for name in [each for each in cast.running if each.startswith("t")]:
                cast.end(name)
            cast.world = world
            cast.start("train")
            wait_for_step(cast, until)
        assert cast.wait("p0", "t0", "t1") == [0, 0, 0]
        assert cast.list_problems(chains=False) == []


@pytest.mark.parametrize("seed", gate_or_long([501, 502, 503], [501]))
def test_connections_to_the_control_server_that_are_cut_at_any_moment_change_nothing(
    tmp_path: Path, tiny_target: TargetFiles, seed: int
):
    site = make_site(tmp_path / "site", tiny_target, remote=True, pace_s=0.1, lease_s=4.0)
    with CuttingProxy(site.control or "", random.Random(seed)) as proxy, ArrivalCast(site, producers=2) as cast:
        cast.start("control")
        for name in ("p0", "p1", "train"):
            cast.start(name, replace(site, control=proxy.address))
        assert cast.wait("p0", "p1", "t0") == [0, 0, 0]
        assert proxy.cuts > 5
        assert len(cast.read_order()) == STEPS
        assert cast.list_problems() == []
