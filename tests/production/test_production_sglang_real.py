"""A real SGLang that speculates, on CPU: observe counts what its answers say, knows its draft and its restart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from observed_site import ObservedSite
from ports import reserve_port
from random_exports import sglang_eagle3
from sglang_toys import SGLANG
from waiting import HANG_S

from draftworks.config.run_files import TargetFiles
from draftworks.export.conventions import DRAFT_FOLDER
from draftworks.production.observer import Observation
from draftworks.production.readings import split_windows
from draftworks.production.requests import read_answer
from draftworks.servers.client import GenerateRequest
from draftworks.sglang.server import ServerOptions, SGLangServer
from draftworks.sglang.speculation import SpeculatingClient, Speculation

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

COMMAND = (
    f"python -m sglang.launch_server --model-path MODEL --speculative-algorithm EAGLE3 --speculative-draft-model-path "
    f"{DRAFT_FOLDER} --speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3"
)
TOKENS = 4


@dataclass(frozen=True)
class Production:
    """A site that observes one server, and that server, not started."""

    site: ObservedSite
    server: SGLangServer
    draft: Path

    @classmethod
    def make(cls, target: TargetFiles, folder: Path) -> Production:
        """The draft has random weights: what is tested is what is counted, not that much is accepted."""
        draft = sglang_eagle3().write(folder / "draft")
        options = ServerOptions(
            model=target.model, revision=None, tokenizer=target.tokenizer, context=target.context, dtype="float32",
            device="cpu", layer_ids=(), spool=folder / "spool", mem_fraction=0.8, max_total_tokens=1024,
            draft=Speculation.of_command(COMMAND, DRAFT_FOLDER, draft),
        )  # fmt: skip
        port = reserve_port()
        site = ObservedSite.make(
            folder, [{"name": "front", "url": f"http://127.0.0.1:{port}", "kind": "sglang", "timeout_s": 60}]
        )
        site.change_entry(model=target.model)
        server = SGLangServer(Path(SGLANG.python), options, folder / "server", SGLANG.start_timeout_s, 10, port)
        return cls(site, server, draft)

    @contextmanager
    def serving(self) -> Iterator[str]:
        self.server.start()
        try:
            yield self.server.url
        finally:
            self.server.stop()

    def observe(self) -> Observation:
        [seen] = self.site.observe(60)
        assert (seen.problem, seen.remarks) == (None, ())
        return seen


def test_observe_counts_what_a_live_server_says_of_its_answers(tiny_target: TargetFiles, tmp_path: Path):
    production = Production.make(tiny_target, tmp_path)
    with production.serving() as url:
        production.observe()
        answers = _ask(url)
        seen = production.observe()
        _require_the_same_counts_of_one_request(url)
    passes = sum(answer.passes for answer in answers)
    tokens = sum(len(answer.output_ids) for answer in answers)
    [counted] = split_windows(seen.readings)
    assert (counted.passes, counted.accepted) == (passes, tokens - len(answers) - passes)
    assert passes > 0
    assert not counted.restarted
    last = seen.readings[-1]
    assert (last.draft, last.by_server, last.version) == (str(production.draft), True, "0.5.23")


@pytest.mark.long
def test_observe_knows_a_live_server_that_was_started_again(tiny_target: TargetFiles, tmp_path: Path):
    production = Production.make(tiny_target, tmp_path)
    with production.serving() as url:
        production.observe()
        _ask(url)
        production.observe()
    with production.serving():
        begun = production.observe()
    counted, restarted = split_windows(begun.readings)
    assert counted.passes > 0
    assert not counted.restarted
    assert restarted.restarted  # by the seed of the process


def _ask(url: str) -> list:
    client = SpeculatingClient(url, HANG_S)
    sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    try:
        return [client.answer(GenerateRequest(f"{n}", tuple(range(5 + n, 15 + n)), sampling)) for n in range(2)]
    finally:
        client.close()


def _require_the_same_counts_of_one_request(url: str) -> None:
    """By /generate, by the completion that is asked for its counts, and by the chunks of its stream."""
    prompt, sampling = list(range(5, 15)), {"temperature": 0.0, "ignore_eos": True}
    generated = _post(
        url, "/generate", {"input_ids": prompt, "sampling_params": {**sampling, "max_new_tokens": TOKENS}}
    )
    body = {"model": "default", "prompt": prompt, "max_tokens": TOKENS, "return_spec_tokens_details": True, **sampling}
    whole = [json.loads(line) for line in _post(url, "/v1/completions", body)]
    streamed = [
        json.loads(line.removeprefix(b"data: "))
        for line in _post(url, "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
        if line.startswith(b"data: {")
    ]
    found = [read_answer("sglang", each) for each in ([json.loads(line) for line in generated], whole, streamed)]
    counts = found[0].counts
    assert counts is not None
    assert counts.passes > 0
    assert [each.counts for each in found] == [counts] * 3
    assert {(each.completion_tokens, each.finish, each.prompt_tokens) for each in found} == {
        (TOKENS, "length", len(prompt))
    }
    assert found[0].weight_version == found[1].weight_version == "default"


def _post(url: str, path: str, body: Mapping[str, Any]) -> list[bytes]:
    """The lines of an answer."""
    request = Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=HANG_S) as answer:
        return answer.read().splitlines()
