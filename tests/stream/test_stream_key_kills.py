"""SIGKILL of producers and of the consumer between put, commit, ack and free, and within them: no committed sample is lost."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path

import pytest
from coverings import gate_or_long
from key_actors import SAMPLES, act, add_tasks, is_over, make_ref, open_plane, open_store_at

from draftworks.stream.step_acks import free_unused

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["key_actors"])


@pytest.fixture(params=["shared", pytest.param("mooncake", marks=pytest.mark.mooncake)])
def address_file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | None]:
    if request.param == "mooncake":
        from mooncake_toys import running_mooncake
    context = running_mooncake(tmp_path / "mooncake") if request.param == "mooncake" else nullcontext()
    with context as service:
        yield None if service is None else service.address_file


@pytest.mark.parametrize("free_at", ["step", "checkpoint"])
@pytest.mark.parametrize("seed", gate_or_long(range(6), range(1)))
def test_kills_lose_no_committed_sample_and_train_none_twice(
    tmp_path: Path, address_file: Path | None, free_at: str, seed: int
):
    most = 8 if seed else 2  # deaths of each
    controller = open_plane(tmp_path)
    refs = [make_ref(number, random.Random(number)) for number in range(SAMPLES)]
    add_tasks(controller, refs, 1 + seed % 3)
    deaths = dict.fromkeys(("consumer", "one", "two"), 0)

    def start(name: str):
        dies = deaths[name] < most
        words = (name, tmp_path, address_file, free_at, 100 * seed + deaths[name], dies)
        process = FORKS.Process(target=act, args=words, daemon=True)
        process.start()
        return process

    actors = {name: start(name) for name in deaths}
    while actors:
        for name, process in list(actors.items()):
            process.join(0.02)
            if process.exitcode == 0:
                del actors[name]
            elif process.exitcode is not None:
                assert process.exitcode == -signal.SIGKILL, name
                deaths[name] += 1
                actors[name] = start(name)
    assert is_over(controller)
    assert set(deaths.values()) == {most}
    order = [each for step in controller.read_order() for each in step.sample_ids]
    assert len(order) == len(set(order)) >= SAMPLES - 1
    store = open_store_at(address_file, tmp_path)
    kept = {key for ref in controller.iterate_refs(acked=False) for key in ref.feature_keys.values()}
    assert store.find_missing(kept) == []
    free_unused(controller, store, everything=True)
    keys = {key for ref in refs for key in ref.feature_keys.values()}
    left = keys - set(store.find_missing(keys))
    assert len(left) <= 2 * 6 * most, "left is what was put and never committed, at most"
    store.close()
