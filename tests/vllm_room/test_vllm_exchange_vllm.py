"""A live vLLM on a CPU loads another draft without a restart, and accepts of each draft what its walk says."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ladder_toys import TTT, Answers, Ladder, build_ladder, greedy_answers, make_draft
from recording_site import read_lines, recording_site, whole
from safetensors.torch import load_file, save_file
from service_site import ServiceSite
from waiting import HANG_S

from draftworks.config.draft_options import WEIGHTS
from draftworks.config.run_files import TargetFiles
from draftworks.drafts.draft_io import save_draft
from draftworks.errors import EngineError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.replay import replay_all
from draftworks.evaluation.ladder.server_acceptance import ServerPrompt, ask_server
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.conventions import DRAFT_FOLDER, SERVER_COMMANDS
from draftworks.export.exporting import export_draft
from draftworks.production.requests import ServedRequest
from draftworks.production.scrape import Address
from draftworks.production.serving_facts import ServingFacts, read_pages
from draftworks.production.silent_failures import DraftOnDisk, Evidence, find_causes
from draftworks.servers.client import Sampling
from draftworks.service.register import ServedDraft
from draftworks.service.swap_record import Outcome
from draftworks.storage.artifacts import RECORD, Artifact, BuildResult
from draftworks.storage.files import publish_json
from draftworks.swap.swapping import Clock, swap
from draftworks.vllm.client import VLLMClient
from draftworks.vllm.exchange import BACKEND, PLUGIN, exchange_draft
from draftworks.vllm.server import VLLMServer, VLLMServerOptions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
PROMPTS, LONGEST = 4, 24


class ExchangingOptions(VLLMServerOptions):
    """A server in development mode that knows the plug-in."""

    def build_environment(self) -> dict[str, str]:
        return super().build_environment() | {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(PLUGIN)}


@dataclass(frozen=True)
class Taught:
    """A draft that has learned the answers, and its export."""

    ladder: Ladder
    folder: Path

    def walk(self) -> dict[str, PromptAcceptance]:
        names = {sample.name for sample in self.ladder.samples}
        found = replay_all(
            self.ladder.strategy, [self.ladder.batch(self.ladder.samples)], TTT, torch.device("cpu"), names
        )
        return {one.walk.sample_id: one.walk for one in found}


@dataclass(frozen=True)
class Running:
    """A server, the folder of its draft, and the prompts that it is asked."""

    url: str
    served: Path
    prompts: list[ServerPrompt]

    def accept(self, prompts: int = PROMPTS) -> dict[str, PromptAcceptance]:
        with VLLMClient(self.url, HANG_S) as client:
            found = ask_server(
                self.prompts[:prompts],
                lambda each: client.answer("small", each.prompt, Sampling(each.max_new_tokens)),
                1,
            )
        assert found.identical_answers == found.answers == prompts
        return {one.sample_id: one for one in found.prompts}


@dataclass
class Traffic:
    """A clock by which each pause is so long that the server answers some prompts, another number each time."""

    running: Running
    now: float = 0.0
    pauses: int = 0
    answered: int = 0

    def sleep(self, seconds: float) -> None:
        self.pauses += 1
        self.now += seconds
        self.answered += len(self.running.accept(1 + self.pauses % PROMPTS))


@dataclass(frozen=True)
class LiveSite(ServiceSite):
    """Exports are the files that the server loads, by what the draft is called."""

    folders: Mapping[str, Path] = field(default_factory=dict)

    def publish_export(self, draft: Artifact, passed: bool = True) -> Artifact:
        made = super().publish_export(draft, passed)

        def build(out: Path) -> BuildResult:
            shutil.copytree(self.folders[draft.identity["name"]], out / "sglang")
            return BuildResult(made.data_version, made.summary)

        return self.artifacts.obtain(made.asset, made.target, {**made.identity, "live": True}, build)


@pytest.fixture(scope="module")
def answers(tiny_folder: Path) -> Answers:
    return greedy_answers(tiny_folder, PROMPTS, LONGEST)


def teach(answers: Answers, target: TargetFiles, folder: Path, steps: int, frequent: int) -> Taught:
    """A draft that learned for so many steps, and proposes what is frequent in the first answers alone."""
    make = partial(make_draft, "eagle3")
    ladder = build_ladder(answers, target, steps, lambda parts, samples: make(parts, samples[:frequent]))
    ladder.strategy.model.float()
    save_draft(folder / "draft", ladder.strategy, target.digest)
    ladder.strategy.model.double()
    export_draft(CanonicalDraft.load(folder / "draft", target), "speculators_eagle3", folder / "export", "float32")
    return Taught(ladder, folder / "export")


@pytest.fixture(scope="module")
def first(answers: Answers, tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory) -> Taught:
    return teach(answers, tiny_target, tmp_path_factory.mktemp("first"), 60, PROMPTS)


@pytest.fixture(scope="module")
def second(answers: Answers, tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory) -> Taught:
    return teach(answers, tiny_target, tmp_path_factory.mktemp("second"), 20, 1)


@pytest.fixture(scope="module")
def running(
    answers: Answers, first: Taught, tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("vllm")
    shutil.copytree(first.folder, folder / "served")
    with serving(answers, tiny_target, folder) as found:
        yield found


@contextmanager
def serving(answers: Answers, tiny_target: TargetFiles, folder: Path) -> Iterator[Running]:
    """A server of the draft in `served` of a folder."""
    served = folder / "served"
    options = ExchangingOptions(
        model=tiny_target.model, revision=None, tokenizer=tiny_target.tokenizer, name="small", context=256,
        dtype="float32", device="cpu", max_requests=4, counts_requests=True,
        speculative={"method": "eagle3", "model": str(served), "num_speculative_tokens": TTT},
        extra=(
            *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
            *("--additional-config", json.dumps({BACKEND: str(served)})),
        ),
    )  # fmt: skip
    server = VLLMServer(PYTHON, options, folder / "server", HANG_S, 10)
    server.start()
    asked = [ServerPrompt(each.name, each.prompt, each.answer, len(each.answer)) for each in answers.samples]
    try:
        yield Running(server.url, served, asked)
    finally:
        server.stop()


def count_equal(served: dict[str, PromptAcceptance], walk: dict[str, PromptAcceptance]) -> int:
    return sum(served[name] == walk[name] for name in walk)


def test_what_is_accepted_is_each_drafts_own_before_and_after(running: Running, first: Taught, second: Taught):
    before = running.accept()
    exchange_draft(running.url, second.folder, running.served, "second", HANG_S)
    after = running.accept()
    exchange_draft(running.url, first.folder, running.served, "first", HANG_S)
    # A near tie of float32 may decide otherwise than the walk's float64.
    assert count_equal(before, first.walk()) >= PROMPTS - 1
    assert count_equal(after, second.walk()) >= PROMPTS - 1
    assert running.accept() == before
    accepted = [sum(one.accepted for one in found.values()) for found in (before, after)]
    assert accepted[0] > accepted[1] > 0  # two drafts that accept alike would say little


def explain(running: Running, draft: DraftOnDisk, lines: Sequence[ServedRequest]) -> list[str]:
    """Names of the likely causes by a window of recorded requests and what the server says of itself now."""

    def fetch(path: str) -> Mapping[str, Any] | None:
        with suppress(EngineError):
            return Address(running.url, HANG_S).fetch_object(path)
        return None

    passes, accepted, drafted = (
        sum(getattr(line, name) or 0 for line in lines) for name in ("passes", "accepted", "drafted")
    )
    facts = ServingFacts.of(read_pages(fetch))
    evidence = Evidence.gather(accepted / passes, passes, None, facts, draft, drafted / passes)
    return [each.name for each in find_causes(evidence)]


def read_draft(taught: Taught, root: Path) -> DraftOnDisk:
    """The export of a draft as that in service, by the name `first`."""
    shutil.copytree(taught.folder, root / "var" / "export" / "speculators_eagle3")
    config = {"model": DRAFT_FOLDER, "method": "eagle3", "num_speculative_tokens": TTT}
    commands = {SERVER_COMMANDS["vllm"]: f"vllm serve small --speculative-config '{json.dumps(config)}'"}
    made = {"speculators_eagle3": {"commands": commands}}
    publish_json(root / "var" / "export" / RECORD, {"summary": {"formats": made}})
    origin = json.loads((taught.folder / "config.json").read_text())["provenance"]["target_digest"]
    served = ServedDraft("first", "export", {"speculators_eagle3": ""}, "v", "w", origin, "r")
    return DraftOnDisk.read(root / "var", served)


def record(running: Running, folder: Path) -> list[ServedRequest]:
    """Ask all prompts through the proxy; each line has the counts of its answer."""

    async def ask() -> int:
        site = recording_site(folder, whole(b""), None, upstream=running.url, looks=True)
        async with site as proxy:
            await proxy.know_engine()
            served = await asyncio.to_thread(replace(running, url=proxy.proxy.url).accept)
            assert len(await proxy.read_lines()) == PROMPTS
            return sum(one.passes for one in served.values())

    passes = asyncio.run(ask())
    lines = read_lines(folder)
    assert sum(line.passes or 0 for line in lines) == passes
    return lines


def test_weights_that_a_synchronisation_emptied_are_named_within_one_window(
    running: Running, first: Taught, tmp_path: Path
):
    """First the file that was loaded is empty too, then the memory alone."""
    draft = read_draft(first, tmp_path)
    empty = tmp_path / "empty"
    shutil.copytree(first.folder, empty)
    weights = load_file(empty / WEIGHTS)
    emptied = {
        name: torch.zeros_like(each) if each.is_floating_point() and "embed" not in name else each
        for name, each in weights.items()
    }
    save_file(emptied, empty / WEIGHTS)
    exchange_draft(running.url, empty, running.served, "first", HANG_S)
    lines = record(running, tmp_path / "emptied")
    assert {line.weight_version for line in lines} == {"first"}
    assert sum(line.accepted or 0 for line in lines) == 0
    assert explain(running, draft, lines) == ["empty weights"]
    shutil.copyfile(first.folder / WEIGHTS, running.served / WEIGHTS)
    assert explain(running, draft, lines) == ["weights in the server's memory"]
    exchange_draft(running.url, first.folder, running.served, "yesterday", HANG_S)
    lines = record(running, tmp_path / "other")
    assert sum(line.accepted or 0 for line in lines) > 0
    assert explain(running, draft, lines) == ["exchanged weights"]


def test_other_layers_are_named_by_the_folder_that_is_served(
    answers: Answers, first: Taught, tiny_target: TargetFiles, tmp_path: Path
):
    shutil.copytree(first.folder, tmp_path / "served")
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    layers = config["eagle_aux_hidden_state_layer_ids"]
    config["eagle_aux_hidden_state_layer_ids"] = [each + 1 for each in layers]
    (tmp_path / "served" / "config.json").write_text(json.dumps(config))
    with serving(answers, tiny_target, tmp_path) as running:
        lines = record(running, tmp_path / "lines")
        assert explain(running, read_draft(first, tmp_path), lines) == ["other layers"]
    walk = sum(one.accepted for one in first.walk().values())
    assert sum(line.accepted or 0 for line in lines) < walk


def test_a_draft_of_another_target_is_refused_and_the_former_one_serves_on(
    running: Running, second: Taught, tmp_path: Path
):
    before = running.accept()
    shutil.copytree(second.folder, tmp_path / "foreign")
    config = json.loads((tmp_path / "foreign" / "config.json").read_text())
    config["provenance"]["target_digest"] = "0" * 16
    (tmp_path / "foreign" / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="serves the former draft: .*other target_digest than at the start"):
        exchange_draft(running.url, tmp_path / "foreign", running.served, "foreign", HANG_S)
    assert running.accept() == before


def test_a_promotion_is_swapped_in_and_taken_back_as_the_server_accepts_less(
    running: Running, first: Taught, second: Taught, tmp_path: Path
):
    settings = {"url": running.url, "folder": str(running.served), "requests": 20, "seconds": 600}
    folders = {"first": first.folder, "second": second.folder}
    site = LiveSite(tmp_path, entry={"service": {"swap": settings}}, folders=folders)
    before = running.accept()
    former = site.publish("first", 1.0)
    site.promote()
    site.publish("second", 2.0)  # the reports say more than is true
    traffic = Traffic(running)
    done = swap(site.open(), site.promote(), "me", clock=Clock(lambda: traffic.now, traffic.sleep))
    result = done.result
    assert result is not None
    assert result.outcome is Outcome.BACK, result.describe()
    assert result.before is not None
    assert result.after is not None
    assert result.before.requests + result.after.requests == traffic.answered
    assert (done.record.action, done.record.draft.digest) == ("rollback", former)
    assert running.accept() == before
