"""Real vLLM on a CPU as an OpenAI-compatible server, with a key, a template that thinks and a parser of thoughts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from answer_toys import answering_run, conversation, rows_of, spelt
from thinking import thinking_target
from waiting import HANG_S

from draftworks.capture.answers.endpoint import EndpointAnswerer
from draftworks.capture.answers.regenerate import RegenerateSummary, find_max_sample_length, regenerate, regenerate_with
from draftworks.config.run_files import RegenerateRun, TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.errors import ConfigError
from draftworks.servers.start import make_key_file, read_key
from draftworks.vllm.server import VLLMServer, VLLMServerOptions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PYTHON = Path(__file__).resolve().parents[3] / ".venv-vllm" / "bin" / "python"
SOURCES = [conversation(number) for number in range(2)]
LIMIT = 12
OPTIONS = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def thinker(tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory) -> TargetFiles:
    return thinking_target(tiny_target, tmp_path_factory.mktemp("templates"))


@dataclass(frozen=True)
class KeptServer:
    """A server that answers nobody without its key."""

    server: VLLMServer
    key: str


@pytest.fixture(scope="module")
def kept(thinker: TargetFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptServer]:
    folder = tmp_path_factory.mktemp("vllm")
    make_key_file(folder / "key")
    options = VLLMServerOptions(
        model=thinker.model, revision=None, tokenizer=thinker.tokenizer, name=thinker.model, context=thinker.context,
        dtype="float32", device="cpu", max_requests=4, key_file=folder / "key",
        extra=(
            *("--chat-template", str(thinker.chat_template), "--reasoning-parser", "qwen3"),
            # What is left out of a request would be taken from here.
            *("--override-generation-config", '{"temperature": 1.5, "top_k": 3, "repetition_penalty": 1.9}'),
        ),
    )  # fmt: skip
    server = VLLMServer(PYTHON, options, folder / "server", HANG_S, 10)
    server.start()
    yield KeptServer(server, read_key(folder / "key"))
    server.stop()


def ask(
    kept: KeptServer, target: TargetFiles, folder: Path, chat: ChatTokenizer | None = None, **options
) -> tuple[RegenerateRun, RegenerateSummary]:
    endpoint = {"base_urls": [f"{kept.server.url}/v1"], "server": "vllm", "attempts": 1, "api_key_env": "KEY"}
    endpoint |= options.pop("endpoint", {})
    sources, environment = options.pop("sources", SOURCES), options.pop("environment", {"KEY": kept.key})
    run = answering_run(target, folder, sources, responses={"endpoint": endpoint, "max_new_tokens": LIMIT, **options})
    chat = chat or ChatTokenizer.load(target, run.responses.thinking)
    answerer = EndpointAnswerer(run.responses, target, chat, find_max_sample_length(run), environment)
    try:
        return run, regenerate_with(run, lambda: answerer, chat)
    finally:
        answerer.close()


def test_greedy_answers_of_the_endpoint_are_those_of_transformers(kept, thinker, tiny_engine, tmp_path: Path):
    asked, _ = ask(kept, thinker, tmp_path / "a", endpoint={"model": thinker.model})
    generated = answering_run(thinker, tmp_path / "b", SOURCES, responses={"max_new_tokens": LIMIT})
    regenerate(generated, lambda: tiny_engine, ChatTokenizer.load(thinker))
    for ours, theirs in zip(rows_of(asked), rows_of(generated), strict=True):
        assert ours.input_ids.tolist() == theirs.input_ids.tolist()
        assert ours.loss_mask.tolist() == theirs.loss_mask.tolist()


@pytest.mark.parametrize("thinking", [True, False])
def test_the_switch_for_thinking_reaches_the_servers_template(kept, thinker, tmp_path: Path, thinking):
    """The server returns the prompt that it rendered; a different prompt would end the run."""
    run, summary = ask(kept, thinker, tmp_path, thinking=thinking)
    assert summary.tokens["samples"] == 2
    assert ("<think>" in spelt(ChatTokenizer.load(thinker, thinking), rows_of(run)[0])) == (thinking is False)


def test_tokens_that_the_parser_takes_for_thoughts_are_labels_and_text_without_them_is_refused(
    kept, thinker, tmp_path: Path
):
    run, _ = ask(kept, thinker, tmp_path / "ids", thinking=True)
    assert all(sum(row.loss_mask) > 1 for row in rows_of(run))
    with pytest.raises(ConfigError, match="without a reasoning parser"):
        ask(kept, thinker, tmp_path / "text", thinking=True, endpoint={"token_ids": False})


def test_later_turns_are_asked_with_the_answers_before(kept, thinker, tmp_path: Path):
    """Declare the third token of the first answer an end token, so that a second answer is generated."""
    first, _ = ask(kept, thinker, tmp_path / "a", sources=SOURCES[:1])
    (row,) = rows_of(first)
    chat = ChatTokenizer.load(thinker)
    chat.eos_ids = (int(row.input_ids[row.loss_mask][2]),)
    run, summary = ask(kept, thinker, tmp_path / "b", chat, sources=[conversation(0, exchanges=2)])
    assert (summary.missing.dropped_turns, summary.generated_tokens > 3) == (0, True)
    assert "function 0 do, part 1" in spelt(chat, rows_of(run)[-1])


def test_sampled_answers_are_the_same_again_by_their_seed(kept, thinker, tmp_path: Path):
    rows = [rows_of(ask(kept, thinker, tmp_path / name, **OPTIONS)[0]) for name in ("a", "b")]
    assert [row.input_ids.tolist() for row in rows[0]] == [row.input_ids.tolist() for row in rows[1]]


def test_another_template_another_key_and_the_key_in_a_log_are_told(kept, thinker, tmp_path: Path):
    other = tmp_path / "other.jinja"
    other.write_text(Path(thinker.chat_template).read_text().replace("<|im_start|>", "<|im_start|>the "))
    with pytest.raises(ConfigError, match="they differ from token 1 on"):
        ask(kept, thinker.model_copy(update={"chat_template": str(other)}), tmp_path / "a")
    with pytest.raises(ConfigError, match=r"refused access \(401\)"):
        ask(kept, thinker, tmp_path / "b", environment={"KEY": kept.key[:-1]})
    assert kept.server.pid is not None
    server = psutil.Process(kept.server.pid)
    assert not [each for each in (server, *server.children(recursive=True)) if kept.key in " ".join(each.cmdline())]
    assert kept.key not in kept.server.log.read_text(errors="replace")
