"""A real SGLang that speculates, on CPU: observe counts what its answers say, knows its draft and its restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from observed_site import ObservedSite
from ports import reserve_port
from random_exports import sglang_eagle3
from sglang_toys import SGLANG

from draftworks.config.run_files import TargetFiles
from draftworks.export.names import DRAFT_FOLDER
from draftworks.production.readings import split_windows
from draftworks.sglang.client import GenerateRequest
from draftworks.sglang.server import ServerOptions, SGLangServer
from draftworks.sglang.speculating_client import SpeculatingClient
from draftworks.sglang.speculation import Speculation

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

COMMAND = (
    f"python -m sglang.launch_server --model-path MODEL --speculative-algorithm EAGLE3 --speculative-draft-model-path "
    f"{DRAFT_FOLDER} --speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3"
)
TOKENS = 4


def test_observe_counts_what_a_live_server_says_of_its_answers(tiny_target: TargetFiles, tmp_path: Path):
    """The draft has random weights: what is tested is what is counted, not that much is accepted."""
    draft = sglang_eagle3().write(tmp_path / "draft")
    options = ServerOptions(
        model=tiny_target.model, revision=None, tokenizer=tiny_target.tokenizer, context=tiny_target.context,
        dtype="float32", device="cpu", layer_ids=(), spool=tmp_path / "spool", mem_fraction=0.8, max_total_tokens=1024,
        draft=Speculation.of_command(COMMAND, DRAFT_FOLDER, draft),
    )  # fmt: skip
    port = reserve_port()
    entry = {"name": "front", "url": f"http://127.0.0.1:{port}", "kind": "sglang", "timeout_s": 60}
    site = ObservedSite.make(tmp_path, [entry])
    site.change_entry(model=tiny_target.model)
    for life in ("first", "second"):
        server = SGLangServer(Path(SGLANG.python), options, tmp_path / life, SGLANG.start_timeout_s, 10, port)
        server.start()
        try:
            [begun] = site.observe(60)
            assert (begun.problem, begun.remarks) == (None, ())
            if life == "first":
                answers = _ask(server.url)
                [seen] = site.observe(60)
        finally:
            server.stop()
    passes = sum(answer.passes for answer in answers)
    tokens = sum(len(answer.output_ids) for answer in answers)
    counted, restarted = split_windows(begun.readings)
    assert (counted.passes, counted.accepted) == (passes, tokens - len(answers) - passes)
    assert passes > 0
    assert not counted.restarted
    assert restarted.restarted  # by the seed of the process
    last = seen.readings[-1]
    assert (last.draft, last.by_server, last.version) == (str(draft), True, "0.5.23")


def _ask(url: str) -> list:
    client = SpeculatingClient(url, 300)
    sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    try:
        return [client.answer(GenerateRequest(f"{n}", tuple(range(5 + n, 15 + n)), sampling)) for n in range(2)]
    finally:
        client.close()
