"""Answers of an OpenAI-compatible server: the target's own token ids if it returns them, else its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from answer_toys import Scripted, answering_run, conversation, rows_of, spelt, supervised
from fake_chat import FakeChat, echo
from json_server import Reply, json_server
from thinking import thinking_target

from draftworks.capture.answers.answer_sets import find_answers_file
from draftworks.capture.answers.endpoint import EndpointAnswerer
from draftworks.capture.answers.regenerate import RegenerateSummary, find_max_sample_length, regenerate_with
from draftworks.config.capture import CaptureSpec
from draftworks.config.run_files import RegenerateRun, TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import QUARANTINE_FILE, Conversation, Turn, write_conversations
from draftworks.data.slices import ask_both_ways
from draftworks.errors import ConfigError, DataError, EngineError

KEY = "sk-very-secret-1234"
SOURCES = [conversation(number, exchanges=1 + number % 3) for number in range(6)]


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftworks.capture.answers.endpoint._LONGEST_WAIT_S", 0.0)


@pytest.fixture
def chat(tiny_target: TargetFiles) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_target)


@contextmanager
def make_endpoint_run(folder: Path, target: TargetFiles, *fakes: FakeChat, **options) -> Iterator[RegenerateRun]:
    """A run that these servers answer; `options` are of the endpoint, and `responses`, `run` and `sources`."""
    responses, run, sources = (options.pop(name, {}) for name in ("responses", "run", "sources"))
    with ExitStack() as stack:
        urls = [f"{stack.enter_context(json_server(fake))}/v1" for fake in fakes]
        endpoint = {"base_urls": urls, "server": fakes[0].dialect, "attempts": 3, "timeout_s": 30, **options}
        yield answering_run(target, folder, sources or SOURCES, responses={"endpoint": endpoint, **responses}, **run)


def regenerate_run(run: RegenerateRun, **environment: str) -> RegenerateSummary:
    chat = ChatTokenizer.load(run.target, run.responses.thinking)
    answerer = EndpointAnswerer(run.responses, run.target, chat, find_max_sample_length(run), environment)
    try:
        return regenerate_with(run, lambda: answerer, chat)
    finally:
        answerer.close()


def join_answers(source: Conversation) -> str:
    """The supervised text of a sample if every question is answered by `echo`."""
    return "".join(f"{echo([turn])}<|im_end|>" for turn in source.turns if turn.role == "user")


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_the_tokens_that_the_server_tells_are_learnt(tiny_target, tmp_path: Path, chat, dialect):
    fake = FakeChat(tiny_target, dialect=dialect)
    with make_endpoint_run(tmp_path, tiny_target, fake) as run:
        regenerate_run(run)
    assert [supervised(chat, row) for row in rows_of(run)] == [join_answers(source) for source in SOURCES]
    prompt = chat.encode_prompt(SOURCES[0].turns[:1])
    assert rows_of(run)[0].input_ids.tolist()[: len(prompt)] == prompt


def test_text_alone_gives_the_same_labels_where_its_tokens_are_the_usual_ones(tiny_target, tmp_path: Path):
    digests = set()
    for dialect, ids in (("sglang", True), ("sglang", False), ("vllm", False), ("openai", False)):
        folder = tmp_path / f"{dialect}{ids}"
        with make_endpoint_run(folder, tiny_target, FakeChat(tiny_target, dialect=dialect), token_ids=ids) as run:
            digests.add(regenerate_run(run).tokens["digest"])
    assert len(digests) == 1


def test_an_answer_in_unusual_tokens_is_learnt_as_it_was_said_and_read_again_as_the_server_does(
    tiny_target, tmp_path: Path, chat
):
    """The target spelt a word in letters; the next prompt, rendered from text, has other tokens: a new sample."""
    unusual = [*(chat._tokenizer(letter)["input_ids"][0] for letter in "return"), chat.eos_ids[0]]
    assert unusual[:-1] != chat._tokenizer("return")["input_ids"]
    fake = FakeChat(tiny_target, says=lambda turns: "return")
    fake.changes = {"response_token_ids": unusual}
    with make_endpoint_run(tmp_path, tiny_target, fake, sources=[conversation(1, exchanges=2)]) as run:
        regenerate_run(run)
    first, second = rows_of(run)
    assert first.input_ids[first.loss_mask].tolist() == second.input_ids[second.loss_mask].tolist() == unusual
    assert spelt(chat, second).startswith(spelt(chat, first))


@pytest.mark.parametrize("thinking", [True, False])
def test_the_switch_for_thinking_reaches_the_servers_template(tiny_target, tmp_path: Path, thinking):
    target = thinking_target(tiny_target, tmp_path)
    fake = FakeChat(target, says=lambda turns: f"<think>\nHm.\n</think>\n\n{echo(turns)}" if thinking else echo(turns))
    with make_endpoint_run(tmp_path, target, fake, responses={"thinking": thinking}) as run:
        regenerate_run(run)
    assert {json.dumps(body["chat_template_kwargs"]) for body in fake.asked} == {
        json.dumps({"enable_thinking": thinking})
    }
    assert len(rows_of(run)) == sum(1 + number % 3 for number in range(6))


def test_a_request_asks_for_thinking_as_its_conversation_says(tiny_target, tmp_path: Path):
    fake = FakeChat(thinking_target(tiny_target, tmp_path))
    sources = [*ask_both_ways([conversation(1)]), conversation(2)]
    with make_endpoint_run(tmp_path, thinking_target(tiny_target, tmp_path), fake, sources=sources) as run:
        regenerate_run(run)
    asked = sorted(json.dumps(body.get("chat_template_kwargs")) for body in fake.asked)
    assert asked == ["null", '{"enable_thinking": false}', '{"enable_thinking": true}']


def test_endpoint_and_engine_make_the_same_samples_of_the_same_words(tiny_target, tmp_path: Path):
    target = thinking_target(tiny_target, tmp_path)
    thoughts = [f"<think>\nHm {number}.\n</think>\n\nIt returns {number}." for number in range(3)]
    fake = FakeChat(target, says=lambda turns: thoughts[sum(turn.role == "assistant" for turn in turns)])
    with make_endpoint_run(tmp_path / "a", target, fake, responses={"thinking": True}) as run:
        by_endpoint = regenerate_run(run)
    chat = ChatTokenizer.load(target, thinking=True)
    run = answering_run(target, tmp_path / "b", SOURCES, responses={"thinking": True})
    assert regenerate_with(run, Scripted(chat, *thoughts), chat).tokens["digest"] == by_endpoint.tokens["digest"]


def test_every_sampling_option_has_its_own_field_and_is_always_sent(tiny_target, tmp_path: Path):
    fake = FakeChat(tiny_target)
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.2, "max_new_tokens": 33}
    with make_endpoint_run(tmp_path, tiny_target, fake, sources=SOURCES[:1], responses=options, model="there") as run:
        regenerate_run(run)
    (body,) = fake.asked
    seed = body.pop("seed")
    assert 0 <= seed < 2**31
    assert body == {
        "model": "there", "messages": [{"role": "user", "content": SOURCES[0].turns[0].content}],
        "temperature": 0.7, "top_p": 0.9, "top_k": 7, "min_p": 0.0, "repetition_penalty": 1.2, "max_tokens": 33,
        "stop_token_ids": [2], "return_token_ids": True, "separate_reasoning": False,
    }  # fmt: skip
    with make_endpoint_run(tmp_path / "off", tiny_target, fake, sources=SOURCES[:1]) as run:
        regenerate_run(run)
    off = fake.asked[-1]
    assert (off["temperature"], off["top_p"], off["top_k"], off["repetition_penalty"]) == (0.0, 1.0, -1, 1.0)
    assert "seed" not in off


def test_a_plain_server_is_told_nothing_that_openai_has_no_field_for(tiny_target, tmp_path: Path):
    fake = FakeChat(tiny_target, dialect="openai")
    with make_endpoint_run(tmp_path, tiny_target, fake, token_ids=False) as run:
        regenerate_run(run)
    assert {name for body in fake.asked for name in body} == {"model", "messages", "temperature", "top_p", "max_tokens"}
    assert {body["model"] for body in fake.asked} == {tiny_target.model}


@pytest.mark.parametrize(("goes_on", "asked", "dropped"), [(True, 12, 0), (False, 6, 6)])
def test_a_conversation_goes_on_after_an_answer_that_the_limit_cut_unless_told_otherwise(
    goes_on, asked, dropped, tiny_target, tmp_path: Path
):
    fake, responses = FakeChat(tiny_target), {"max_new_tokens": 4, "continue_after_cut": goes_on}
    with make_endpoint_run(tmp_path, tiny_target, fake, responses=responses) as run:
        summary = regenerate_run(run)
    assert (len(fake.asked), summary.missing.unfinished_answers, summary.missing.dropped_turns) == (
        asked,
        asked,
        dropped,
    )
    assert sum(row.supervised for row in rows_of(run)) == 4 * asked


def test_a_server_that_renders_something_else_is_refused(tiny_target, tmp_path: Path):
    class Prefixed(FakeChat):
        def _completion(self, body, turns):
            return super()._completion(body, [Turn("system", "Be nice."), *turns])

    with (
        make_endpoint_run(tmp_path, tiny_target, Prefixed(tiny_target)) as run,
        pytest.raises(
            ConfigError, match=r"they differ from token 1 on, where the endpoint has 'system.* the registry 'user"
        ),
    ):
        regenerate_run(run)


@pytest.mark.parametrize("days", [-1, 0, 1])
def test_a_server_whose_template_prints_today_is_understood(days, tiny_target, tmp_path: Path):
    """It knows the day and we cannot: the samples have what it read, midnight and time zones included."""
    dated = tmp_path / "dated.jinja"
    dated.write_text(
        "{{- '<|im_start|>system\nToday is ' + strftime_now('%d %B %Y') + '<|im_end|>\n' -}}"
        + ChatTokenizer.load(tiny_target)._template
    )
    target = tiny_target.model_copy(update={"chat_template": str(dated)})
    today = datetime.now() + timedelta(days=days)

    class Dated(FakeChat):
        def _chat(self, thinking):
            return super()._chat(thinking).on_date(today)

    fake = Dated(target)
    with make_endpoint_run(tmp_path, target, fake) as run:
        regenerate_run(run)
    chat = ChatTokenizer.load(target)
    rows = rows_of(run)
    assert len(rows) == len(SOURCES)  # several answers stay in one sample
    for row in rows:
        assert f"Today is {today:%d %B %Y}<|im_end|>" in spelt(chat, row)
        assert row.supervised


def test_a_server_with_another_template_is_refused_though_it_prints_a_date(tiny_target, tmp_path: Path):
    dated = tmp_path / "dated.jinja"
    dated.write_text("{{- strftime_now('%Y') -}}" + ChatTokenizer.load(tiny_target)._template)
    target = tiny_target.model_copy(update={"chat_template": str(dated)})
    with (
        make_endpoint_run(tmp_path, target, FakeChat(tiny_target)) as run,
        pytest.raises(ConfigError, match="Serve the same target with the same chat template"),
    ):
        regenerate_run(run)


def test_a_server_that_only_counts_its_prompt_is_doubted_once(tiny_target, tmp_path: Path, caplog):
    class Prefixed(FakeChat):
        def _completion(self, body, turns):
            return super()._completion(body, [Turn("system", "Be nice."), *turns])

    with make_endpoint_run(tmp_path, tiny_target, Prefixed(tiny_target), token_ids=False) as run:
        regenerate_run(run)
    assert sum("check that it serves this target and adds nothing" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"response_token_ids": None}, {}, "returns no token ids. Set responses.endpoint.token_ids to false"),
        (
            {"message": {"content": "It.", "reasoning_content": "Hm."}},
            {"token_ids": False},
            "removes the reasoning from its answers.*without a reasoning parser, or set .*token_ids to true",
        ),
    ],
)
def test_what_a_server_does_not_tell_is_said_with_what_to_do(tiny_target, tmp_path: Path, changes, options, message):
    fake = FakeChat(tiny_target)
    fake.changes = changes
    with make_endpoint_run(tmp_path, tiny_target, fake, **options) as run, pytest.raises(ConfigError, match=message):
        regenerate_run(run)


def test_a_server_with_a_lower_limit_of_its_own_is_told(tiny_target, tmp_path: Path):
    """Answers that it cut would be taken for answers that the target ends so."""

    class Curt(FakeChat):
        def _completion(self, body, turns):
            return super()._completion({**body, "max_tokens": 3}, turns)

    with (
        make_endpoint_run(tmp_path, tiny_target, Curt(tiny_target), responses={"max_new_tokens": 20}) as run,
        pytest.raises(ConfigError, match=r"cut an answer after 3 tokens, expected up to 20: it has a limit of its own"),
    ):
        regenerate_run(run)


def test_a_server_that_does_not_keep_the_limit_is_told(tiny_target, tmp_path: Path):
    class Endless(FakeChat):
        def _completion(self, body, turns):
            return super()._completion({**body, "max_tokens": 99}, turns)

    with (
        make_endpoint_run(tmp_path, tiny_target, Endless(tiny_target), responses={"max_new_tokens": 3}) as run,
        pytest.raises(ConfigError, match=r"returned \d+ tokens, expected at most 3: it ignores the field max_tokens"),
    ):
        regenerate_run(run)


def test_a_conversation_that_is_refused_is_left_out_with_its_reason_and_asked_again_by_the_next_run(
    tiny_target, tmp_path: Path
):
    fake = FakeChat(tiny_target)
    fake.refuses = "function 4"
    with make_endpoint_run(tmp_path, tiny_target, fake, run={"max_rejected_share": 0.2}) as run:
        summary = regenerate_run(run)
        assert [each.sample_id for each in summary.missing.rejected] == [SOURCES[4].id]
        assert "refused a request (400)" in (run.out / QUARANTINE_FILE).read_text()
        fake.refuses = "\0"
        again = regenerate_run(run)
    assert (again.resumed, again.tokens["samples"], again.missing.rejected) == (5, 6, ())


def test_as_soon_as_too_many_are_refused_nobody_goes_on(tiny_target, tmp_path: Path):
    fake = FakeChat(tiny_target)
    fake.refuses = "function"
    sources = [conversation(number) for number in range(40)]
    with (
        make_endpoint_run(tmp_path, tiny_target, fake, sources=sources, responses={"batch_size": 1}) as run,
        pytest.raises(DataError, match="3 of 40 conversations give no sample"),
    ):
        regenerate_run(run)
    assert len(fake.asked) < 40


def test_an_answer_that_is_none_is_not_learnt(tiny_target, tmp_path: Path):
    fake = FakeChat(tiny_target)
    fake.changes = {"finish_reason": "content_filter"}
    with (
        make_endpoint_run(tmp_path, tiny_target, fake) as run,
        pytest.raises(DataError, match="ended an answer with 'content_filter'"),
    ):
        regenerate_run(run)


def test_a_busy_or_failing_server_is_asked_again(tiny_target, tmp_path: Path):
    fake = FakeChat(tiny_target)
    fake.replies = [Reply(429, {"error": "slow down"}), Reply(500, {"error": "oops"})]
    with make_endpoint_run(tmp_path, tiny_target, fake, responses={"batch_size": 1}) as run:
        assert regenerate_run(run).conversations == 6


def test_a_server_that_goes_on_failing_ends_the_run_and_what_was_answered_is_kept(tiny_target, tmp_path: Path):
    fake = FakeChat(tiny_target)
    with make_endpoint_run(tmp_path, tiny_target, fake, responses={"batch_size": 1}) as run:
        write_conversations(tmp_path / "two", SOURCES[:2])
        regenerate_run(run.model_copy(update={"conversations": tmp_path / "two"}))
        fake.replies = [Reply(500, {"error": "out of memory"})] * 20
        with pytest.raises(EngineError, match=r"(?s)none of 1 servers is available:.*out of memory"):
            regenerate_run(run)
        fake.replies = []
        assert regenerate_run(run).resumed == 2


def test_work_is_shared_and_one_server_that_dies_does_not_end_it(tiny_target, tmp_path: Path, caplog):
    first, second = FakeChat(tiny_target), FakeChat(tiny_target)
    with make_endpoint_run(tmp_path / "a", tiny_target, first, second) as run:
        whole = regenerate_run(run)
    assert min(len(first.asked), len(second.asked)) > 0
    first.replies = [Reply(0, None)] * 99
    with make_endpoint_run(tmp_path / "b", tiny_target, first, second) as run:
        degraded = regenerate_run(run)
    assert degraded.tokens["digest"] == whole.tokens["digest"]
    assert any("gets no requests for now" in record.message for record in caplog.records)


def test_the_key_is_read_from_the_named_variable_and_is_written_nowhere(tiny_target, tmp_path: Path, caplog):
    fake = FakeChat(tiny_target)
    fake.replies = [Reply(500, {"error": f"bad key {KEY}"})]
    caplog.set_level("DEBUG")
    with make_endpoint_run(tmp_path, tiny_target, fake, api_key_env="GATEWAY_KEY") as run:
        run.save(run.out / "run.yaml")
        regenerate_run(run, GATEWAY_KEY=KEY)
    assert fake.keys == {f"Bearer {KEY}"}
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert not any(KEY.encode() in content for content in written)
    assert KEY not in caplog.text


@pytest.mark.parametrize("key", ["sk-abc\ndef", "sk abc", "schlüssel"])
def test_a_key_that_cannot_be_one_is_refused_without_being_shown(tiny_target, tmp_path: Path, key):
    with (
        make_endpoint_run(tmp_path, tiny_target, FakeChat(tiny_target), api_key_env="GATEWAY_KEY") as run,
        pytest.raises(ConfigError, match="GATEWAY_KEY .* has characters that no API key has") as caught,
    ):
        regenerate_run(run, GATEWAY_KEY=key)
    assert key not in str(caught.value)


@pytest.mark.parametrize("environment", [{}, {"GATEWAY_KEY": " "}])
def test_a_missing_key_is_told_by_the_name_of_its_variable(tiny_target, tmp_path: Path, environment):
    with (
        make_endpoint_run(tmp_path, tiny_target, FakeChat(tiny_target), api_key_env="GATEWAY_KEY") as run,
        pytest.raises(
            ConfigError, match=r"environment variable GATEWAY_KEY \(responses.endpoint.api_key_env\) is not set"
        ),
    ):
        regenerate_run(run, **environment)


def test_a_refused_key_ends_the_run_at_once(tiny_target, tmp_path: Path):
    fake = FakeChat(tiny_target)
    fake.replies = [Reply(401, {"error": "who are you?"})] * 99
    with (
        make_endpoint_run(tmp_path, tiny_target, fake, responses={"batch_size": 1}) as run,
        pytest.raises(ConfigError, match=r"refused access \(401\): .*who are you.*api_key_env"),
    ):
        regenerate_run(run)
    assert len(fake.asked) < len(SOURCES)


def test_neither_the_engine_of_capture_nor_the_address_is_part_of_the_answers(tiny_target, tmp_path: Path):
    files = set()
    for name, run in (("a", {}), ("b", {"capture": CaptureSpec()})):
        with make_endpoint_run(tmp_path / name, tiny_target, FakeChat(tiny_target), run=run) as made:
            files.add(find_answers_file(made).name)
    assert len(files) == 1
    assert find_answers_file(answering_run(tiny_target, tmp_path, SOURCES)).name not in files
