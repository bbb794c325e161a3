"""Real SGLang as an OpenAI-compatible server, with a key and without; and two servers, one of which is killed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest
import torch
from answer_toys import answering_run, conversation, rows_of, spelt
from capture_toys import random_rows
from processes import kill_all
from sglang_toys import SGLANG, assert_key_is_kept, sglang_engine
from thinking import thinking_target

from draftworks.capture.answers.endpoint import EndpointAnswerer
from draftworks.capture.answers.regenerate import RegenerateSummary, find_max_sample_length, regenerate, regenerate_with
from draftworks.capture.engines.sglang_engine import SGLangEngine
from draftworks.config.registry_files import ResponseSpec
from draftworks.config.run_files import RegenerateRun, TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.errors import ConfigError
from draftworks.servers.start import make_key_file, read_key
from draftworks.sglang.server import ServerOptions, SGLangServer
from draftworks.storage.identity import LayerTap

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

SOURCES = [conversation(number) for number in range(2)]
LIMIT = 8
TAPS = (LayerTap(2), LayerTap(4))


@pytest.fixture(scope="module")
def thinker(tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory) -> TargetFiles:
    return thinking_target(tiny_target, tmp_path_factory.mktemp("templates"))


def server_like(engine: SGLangEngine, target: TargetFiles, folder: Path, key_file: Path | None = None) -> SGLangServer:
    """Another server of the same target that writes to the same spool, with a chat template that thinks; not started."""
    options = ServerOptions(
        model=target.model, revision=None, tokenizer=target.tokenizer, context=target.context, dtype="float32",
        device="cpu", layer_ids=tuple(range(target.num_layers - 1)), spool=engine.spool, mem_fraction=0.8,
        max_total_tokens=4096, extra=("--chat-template", str(target.chat_template)), key_file=key_file,
    )  # fmt: skip
    return SGLangServer(Path(SGLANG.python), options, folder, SGLANG.start_timeout_s, SGLANG.grace_s)


@dataclass(frozen=True)
class KeptServer:
    """A server that answers nobody without its key."""

    server: SGLangServer
    key: str


@pytest.fixture(scope="module")
def kept(
    tiny_sglang: SGLangEngine, thinker: TargetFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KeptServer]:
    folder = tmp_path_factory.mktemp("sglang")
    make_key_file(folder / "key")
    server = server_like(tiny_sglang, thinker, folder / "kept", folder / "key")
    server.start()
    yield KeptServer(server, read_key(folder / "key"))
    server.stop()


@pytest.fixture
def second(tiny_sglang: SGLangEngine, thinker: TargetFiles, tmp_path: Path) -> Iterator[SGLangServer]:
    server = server_like(tiny_sglang, thinker, tmp_path / "second")
    server.start()
    yield server
    server.stop()


def regenerate_by_endpoint(
    run: RegenerateRun, chat: ChatTokenizer | None = None, environment: Mapping[str, str] = MappingProxyType({})
) -> RegenerateSummary:
    chat = chat or ChatTokenizer.load(run.target, run.responses.thinking)
    answerer = EndpointAnswerer(run.responses, run.target, chat, find_max_sample_length(run), environment)
    try:
        return regenerate_with(run, lambda: answerer, chat)
    finally:
        answerer.close()


def make_endpoint_run(url: str, target: TargetFiles, folder: Path, **options) -> RegenerateRun:
    endpoint = {"base_urls": [f"{url}/v1"], "server": "sglang", "attempts": 1, **options.pop("endpoint", {})}
    sources = options.pop("sources", SOURCES)
    return answering_run(target, folder, sources, responses={"endpoint": endpoint, "max_new_tokens": LIMIT, **options})


def test_greedy_answers_of_the_endpoint_are_those_of_generate(tiny_sglang, tiny_target, tmp_path: Path):
    asked = make_endpoint_run(tiny_sglang.url, tiny_target, tmp_path / "a")
    generated = answering_run(tiny_target, tmp_path / "b", SOURCES, responses={"max_new_tokens": LIMIT})
    regenerate(generated, lambda: tiny_sglang, ChatTokenizer.load(tiny_target))
    regenerate_by_endpoint(asked)
    for ours, theirs in zip(rows_of(asked), rows_of(generated), strict=True):
        assert ours.input_ids.tolist() == theirs.input_ids.tolist()
        assert ours.loss_mask.tolist() == theirs.loss_mask.tolist()


def test_text_alone_says_the_same_in_words(tiny_sglang, tiny_target, tmp_path: Path):
    with_ids = make_endpoint_run(tiny_sglang.url, tiny_target, tmp_path / "a")
    from_text = make_endpoint_run(tiny_sglang.url, tiny_target, tmp_path / "b", endpoint={"token_ids": False})
    chat = ChatTokenizer.load(tiny_target)
    for run in (with_ids, from_text):
        regenerate_by_endpoint(run)
    for ours, theirs in zip(rows_of(from_text), rows_of(with_ids), strict=True):
        assert spelt(chat, theirs) == spelt(chat, ours)
        assert ours.supervised


def test_later_turns_are_asked_with_the_answers_before(tiny_sglang, tiny_target, tmp_path: Path):
    """Declare the third token of the first answer an end token, so that a second answer is generated."""
    first = make_endpoint_run(tiny_sglang.url, tiny_target, tmp_path / "a", sources=SOURCES[:1])
    regenerate_by_endpoint(first)
    (row,) = rows_of(first)
    chat = ChatTokenizer.load(tiny_target)
    chat.eos_ids = (int(row.input_ids[row.loss_mask][2]),)
    run = make_endpoint_run(tiny_sglang.url, tiny_target, tmp_path / "b", sources=[conversation(0, exchanges=2)])
    summary = regenerate_by_endpoint(run, chat)
    assert (summary.missing.dropped_turns, summary.generated_tokens > 3) == (0, True)
    assert "function 0 do, part 1" in spelt(chat, rows_of(run)[-1])


def test_sampling_options_are_understood(tiny_sglang, tiny_target, tmp_path: Path):
    options = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.3}
    assert (
        regenerate_by_endpoint(make_endpoint_run(tiny_sglang.url, tiny_target, tmp_path, **options)).tokens["samples"]
        == 2
    )


def test_no_request_without_the_key_is_answered_and_the_key_is_in_no_log_and_no_list_of_processes(kept):
    assert kept.server.pid is not None
    assert_key_is_kept(kept.server.url, kept.key, kept.server.pid, kept.server.log)


@pytest.mark.parametrize("thinking", [True, False])
def test_the_switch_for_thinking_reaches_the_servers_template(kept, thinker, tmp_path: Path, thinking):
    """The server returns the prompt that it rendered; a different prompt would end the run."""
    run = make_endpoint_run(kept.server.url, thinker, tmp_path, thinking=thinking, endpoint={"api_key_env": "KEY"})
    assert regenerate_by_endpoint(run, environment={"KEY": kept.key}).tokens["samples"] == 2
    chat = ChatTokenizer.load(thinker, thinking)
    assert ("<think>" in spelt(chat, rows_of(run)[0])) == (thinking is False)


def test_a_server_with_another_chat_template_is_refused(kept, tiny_target, thinker, tmp_path: Path):
    other = tmp_path / "other.jinja"
    other.write_text(Path(thinker.chat_template).read_text().replace("<|im_start|>", "<|im_start|>the "))
    target = tiny_target.model_copy(update={"chat_template": str(other)})
    run = make_endpoint_run(kept.server.url, target, tmp_path, endpoint={"api_key_env": "KEY"})
    with pytest.raises(ConfigError, match="they differ from token 1 on"):
        regenerate_by_endpoint(run, environment={"KEY": kept.key})


def test_a_wrong_key_ends_the_run(kept, thinker, tmp_path: Path):
    run = make_endpoint_run(kept.server.url, thinker, tmp_path, endpoint={"api_key_env": "KEY"})
    with pytest.raises(ConfigError, match=r"refused access \(401\)"):
        regenerate_by_endpoint(run, environment={"KEY": kept.key[:-1]})


@pytest.mark.long
def test_two_servers_share_the_work_and_one_that_is_killed_is_done_without(
    tiny_sglang, second, tiny_engine, tiny_target, tmp_path: Path
):
    rows = [row.input_ids.tolist() for row in random_rows(9, seed=5, longest=60)]
    streams = tiny_engine.capture(rows, TAPS)
    prompts, ids = rows[:3], ["a", "b", "c"]
    answers = tiny_engine.generate(prompts, ResponseSpec(max_new_tokens=5), ids, 200)
    engine = sglang_engine(
        tiny_target, tmp_path, TAPS, urls=[tiny_sglang.url, second.url], spool=str(tiny_sglang.spool)
    )
    for killed in (False, True):
        if killed:
            assert second.pid is not None
            process = psutil.Process(second.pid)
            kill_all([*process.children(recursive=True), process])
        for found, wanted in zip(engine.capture(rows, TAPS), streams, strict=True):
            assert all(torch.allclose(found[name], wanted[name], atol=1e-4) for name in wanted)
        assert engine.generate(prompts, ResponseSpec(max_new_tokens=5), ids, 200) == answers
    engine.close()
