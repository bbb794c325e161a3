"""Labels, prompts and continuations agree with the target's chat template, byte by byte.
Templates of models that think: the switch, and answers known by their text.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from chat_tokenizers import list_runs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thinking import THINKING_TEMPLATE, thinking_target
from transformers import AutoTokenizer

from draftworks.config.run_files import TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Conversation, Turn
from draftworks.data.target_files import read_plain_config
from draftworks.data.tokenized import TokenRow
from draftworks.data.tokenizing import encode_own_answers
from draftworks.errors import ConfigError, DataError

FAMILIES = ("llama3", "qwen", "vicuna")
VARIANTS = ("", "-plain", "-trimmed")
SPACED_END = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}{{- ' ' + m['content'].strip() + ' <|eot_id|>' -}}"
    "{%- else -%}{{- '[INST] ' + m['content'] + ' [/INST]' -}}{%- endif -%}{%- endfor -%}"
)
"""As Llama 2 prints a turn."""
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

texts = st.one_of(
    st.text(min_size=1, max_size=30),
    st.text(alphabet=" \n\tab'é漢🙂.", min_size=1, max_size=20),
    st.sampled_from(["Hello there.", "  indented\n\n    code()  ", "naïve café 漢字 🙂🙂", "\nfirst line"]),
).filter(str.strip)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    turns = [Turn("system", draw(texts))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns += [Turn("user", draw(texts)), Turn("assistant", draw(texts))]
    return Conversation.of(turns)


def bytes_of(chat: ChatTokenizer, ids: np.ndarray) -> list[bytes]:
    """The bytes each token stands for, by the definition of byte-level BPE: the oracle for offsets."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + n): byte for n, byte in enumerate(b for b in range(256) if b not in printable)}
    special = chat._tokenizer.added_tokens_decoder
    tokens = chat._tokenizer.convert_ids_to_tokens(ids.tolist())
    return [
        token.encode() if token_id in special else bytes(table[letter] for letter in token)
        for token_id, token in zip(ids.tolist(), tokens)
    ]


def encode(chat: ChatTokenizer, conversation: Conversation, only_last_turn: bool = False) -> TokenRow:
    """The sample of a conversation that gives one."""
    (row,) = encode_own_answers(chat, conversation, only_last_turn)
    return row


def spoken(chat: ChatTokenizer, row: TokenRow) -> bytes:
    return b"".join(piece for piece, on in zip(bytes_of(chat, row.input_ids), row.loss_mask) if on)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
@QUICK
@given(conversation=conversations())
def test_each_answer_is_learnt_byte_by_byte_after_the_bytes_of_its_prompt(chats, family, variant, conversation):
    chat, turns = chats[family + variant], conversation.turns
    end = "<|im_end|>" if family == "qwen" else "<|eot_id|>"
    runs = list_runs(encode_own_answers(chat, conversation))
    answers = [number for number, turn in enumerate(turns) if turn.role == "assistant"]
    assert len(runs) == len(answers)
    for (before, said), number in zip(runs, answers):
        content = turns[number].content if family == "qwen" else turns[number].content.strip()
        texts = [b"".join(bytes_of(chat, np.array(ids))).decode() for ids in (before, said)]
        assert texts == [chat.render(turns[:number], add_generation_prompt=True), content + end]
        assert before == chat.encode_prompt(turns[:number])


@pytest.mark.parametrize("family", FAMILIES)
@QUICK
@given(conversation=conversations(), last=st.booleans())
def test_samples_by_words_equal_samples_by_markers(chats, family, conversation, last):
    marked, plain, trimmed = (
        [(row.sample_id, row.input_ids.tolist(), row.loss_mask.tolist()) for row in rows]
        for rows in (encode_own_answers(chats[family + variant], conversation, last) for variant in VARIANTS)
    )
    assert marked == plain == trimmed


@QUICK
@given(conversation=conversations())
def test_one_sample_has_the_ids_and_the_mask_of_transformers(tiny_chat, conversation):
    messages = [{"role": turn.role, "content": turn.content} for turn in conversation.turns]
    theirs = tiny_chat._tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    rows = encode_own_answers(tiny_chat, conversation)
    if len(rows) == 1 and not any(
        turn.role == "assistant" and turn.content[0].isspace() for turn in conversation.turns
    ):
        assert rows[0].input_ids.tolist() == theirs["input_ids"][: len(rows[0])]
        assert rows[0].loss_mask.tolist() == [bool(on) for on in theirs["assistant_masks"]][: len(rows[0])]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_supervised_turn_ends_with_the_token_that_stops_generation(chats, family):
    conversation = Conversation.of(
        [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d")]
    )
    for variant in VARIANTS:
        chat = chats[family + variant]
        stops = {chat._tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|eot_id|>")}
        ends = [said[-1] for _, said in list_runs(encode_own_answers(chat, conversation))]
        assert len(ends) == 2
        assert set(ends) <= stops


def test_markers_that_leave_the_end_token_out_give_the_same_mask(chats, make_target, templates):
    outside = templates["qwen"].replace(
        "+ '<|im_end|>' -}}{%- endgeneration -%}", "-}}{%- endgeneration -%}{{- '<|im_end|>' -}}"
    )
    assert outside != templates["qwen"]
    conversation = Conversation.of(
        [Turn("user", "a"), Turn("assistant", "b c"), Turn("user", "d"), Turn("assistant", "e")]
    )
    row, expected = (encode(chat, conversation) for chat in (ChatTokenizer.load(make_target(outside)), chats["qwen"]))
    assert row.input_ids.tolist() == expected.input_ids.tolist()
    assert row.loss_mask.tolist() == expected.loss_mask.tolist()


def test_a_turn_that_the_templates_markers_leave_out_is_read_and_not_learnt(make_target, templates):
    marked = "m['role'] == 'assistant' and loop.index0 == 1"
    template = templates["qwen"].replace("m['role'] == 'assistant'", marked)
    turns = [Turn("user", "a"), Turn("assistant", "the b"), Turn("user", "c"), Turn("assistant", "d")]
    chat = ChatTokenizer.load(make_target(template))
    assert spoken(chat, encode(chat, Conversation.of(turns))) == b"the b<|im_end|>"
    with pytest.raises(DataError, match="marks none of its answers as generated"):
        encode_own_answers(chat, Conversation.of(turns), only_last_turn=True)


def test_markers_around_other_words_than_a_turns_are_refused(make_target, templates):
    """Such as those in a macro behind other text: jinja counts the characters from where the macro is called."""
    header = "{{- '<|im_start|>' + m['role'] + '\\n' -}}"
    in_macro = (
        "{%- macro said(m) -%}" + header + "{%- generation -%}{{- m['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
        "{%- endmacro -%}{%- for m in messages -%}{{- said(m) -}}{%- endfor -%}"
    )
    said = Conversation.of([Turn("user", "what is it"), Turn("assistant", "it is a model")])
    for template in ("{% generation %}x{% endgeneration %}" + templates["qwen"], in_macro):
        with pytest.raises(DataError, match="as generated, which are not the words of an assistant turn"):
            encode_own_answers(ChatTokenizer.load(make_target(template)), said)


def test_the_beginning_of_the_next_turn_is_no_end_of_an_answer(make_target):
    """Nothing closes an answer here: the target never generates the user's header."""
    template = (
        "{%- for m in messages -%}{%- if m['role'] == 'user' -%}{{- '<|im_start|>' + m['content'] + '<|im_end|>' -}}"
        "{%- else -%}{%- generation -%}{{- m['content'] -}}{%- endgeneration -%}{%- endif -%}{%- endfor -%}"
    )
    plain = template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    for text in (template, plain):
        chat = ChatTokenizer.load(make_target(text))
        said = [Turn("user", "a"), Turn("assistant", "the other"), Turn("user", "b"), Turn("assistant", "yes")]
        assert spoken(chat, encode(chat, Conversation.of(said))) == b"the otheryes"


@QUICK
@given(conversation=conversations())
def test_only_the_last_turn_is_the_last_run_of_all(tiny_chat, conversation):
    all_runs, last = (list_runs(encode_own_answers(tiny_chat, conversation, only)) for only in (False, True))
    assert last == all_runs[-1:]


def test_a_token_across_the_end_of_the_prompt_parts_the_turns(chats):
    """The template's space and the first word of an answer are one token where the next turn is asked."""
    turns = [Turn("user", "Hi"), Turn("assistant", "the other"), Turn("user", "and"), Turn("assistant", "the other")]
    for variant in VARIANTS:
        chat = chats["vicuna" + variant]
        rows = encode_own_answers(chat, Conversation.of(turns))
        assert len(rows) == 2
        assert [bytes_of(chat, row.input_ids).count(b" the") for row in rows] == [0, 1]
        assert [spoken(chat, row) for row in rows] == [b"the other<|eot_id|>"] * 2


def test_white_space_between_content_and_end_token_is_supervised_with_it(make_target):
    conversation = Conversation.of(
        [Turn("user", "a"), Turn("assistant", "b c"), Turn("user", "d"), Turn("assistant", "e")]
    )
    chat = ChatTokenizer.load(make_target(SPACED_END))
    assert spoken(chat, encode(chat, conversation)).count(b" <|eot_id|>") == 2


def test_decode_leaves_special_tokens_out_and_returns_the_words(tiny_chat):
    row = encode(tiny_chat, Conversation.of([Turn("user", "a"), Turn("assistant", "Déjà vu , isn't it ?")]))
    assert tiny_chat.decode(row.input_ids[row.loss_mask].tolist()) == "Déjà vu , isn't it ?"


def test_the_tiny_target_has_a_mask_token_markers_and_one_end(tiny_chat):
    assert tiny_chat.has_markers
    assert tiny_chat.mask_token_id == 3
    assert tiny_chat.eos_ids == (2,)


def test_digest_follows_the_template(make_target):
    first, same, other = (
        ChatTokenizer.load(make_target(text)) for text in ("a {{ messages }}", "a {{ messages }}", "b")
    )
    assert first.digest == same.digest != other.digest


def test_a_template_that_prints_todays_date_gives_the_same_ids_every_day(make_target):
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['content'] }}<|eot_id|>{% endfor %}"
    chat = ChatTokenizer.load(make_target(template))
    assert chat.render([Turn("user", "a")]) == "26 Jul 2024a<|eot_id|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "changes the assistant's words|exactly once"),
        ("{% for m in messages %}{{ m['content'] | replace('b', '') }}{% endfor %}", "changes the assistant's words"),
        ("{% for m in messages %}{{ m['content'] + m['content'] }}{% endfor %}", "exactly once"),
        ("{{ messages[0]['content'] }}", "exactly once"),
        ("{{ raise_exception('roles must alternate') }}", "refuses the conversation: roles must alternate"),
        ("{{ messages[7]['content'] + 1 }}", "refuses the conversation"),
        ("{{ nonsense( }}", "refuses the conversation"),
        ("{{ 1 / 0 }}", "refuses the conversation: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses the conversation: maximum recursion depth"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "refuses the conversation: Range too big"),
        ("{{ messages | map(attribute='x.y') | sum }}", "refuses the conversation"),
    ],
)
def test_a_template_that_hides_the_assistants_words_is_an_error(make_target, template, message):
    chat = ChatTokenizer.load(make_target(template))
    with pytest.raises(DataError, match=message):
        encode_own_answers(chat, Conversation.of([Turn("user", "a"), Turn("assistant", "abc")]))


def test_a_template_that_never_ends_is_an_error_once_and_for_all(make_target, monkeypatch):
    monkeypatch.setattr("draftworks.data.chat.RENDER_LIMIT_S", 0.2)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}"
    chat = ChatTokenizer.load(make_target(endless))
    with pytest.raises(ConfigError, match=r"has not finished one conversation after 0\.2 s"):
        encode_own_answers(chat, Conversation.of([Turn("user", "a"), Turn("assistant", "abc")]))


def test_a_tokenizer_without_chat_template_is_an_error_that_says_what_to_do(make_target):
    with pytest.raises(DataError, match=r"no chat template.*set `chat_template`"):
        ChatTokenizer.load(make_target(None))


def test_a_template_file_replaces_the_tokenizers(make_target, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}<|eot_id|>{{ m['content'] }}{% endfor %}")
    target = make_target(None).model_copy(update={"chat_template": str(path)})
    assert ChatTokenizer.load(target).render([Turn("user", "a")]) == "<|eot_id|>a"
    with pytest.raises(DataError, match=r"own2\.jinja"):
        ChatTokenizer.load(target.model_copy(update={"chat_template": str(tmp_path / "own2.jinja")}))


def test_missing_or_broken_tokenizer_files_are_an_error(make_target, tmp_path):
    missing = make_target("a").model_copy(update={"tokenizer": str(tmp_path / "nowhere")})
    with pytest.raises(DataError, match=r"toy.*nowhere does not exist"):
        ChatTokenizer.load(missing)
    broken = make_target("a")
    (Path(broken.tokenizer) / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        ChatTokenizer.load(broken)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "named",
    [
        None,
        "TokenizersBackend",
        "PreTrainedTokenizerFast",
        "LlamaTokenizerFast",
        "LlamaTokenizer",
        "Qwen2Tokenizer",
        "GPT2Tokenizer",
    ],
)
def test_a_tokenizer_is_that_which_transformers_finds_by_the_whole_config(make_target, tiny_folder, model_type, named):
    """Also where the class that tokenizer_config.json names, or the model's type, is one that transformers replaces."""
    target = make_target("a")
    folder = Path(target.tokenizer)
    config = json.loads((tiny_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    assert read_plain_config(folder / "config.json") is not None
    settings_of = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": named}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in settings_of.items() if value is not None})
    )
    found = ChatTokenizer.load(target)._tokenizer
    expected = AutoTokenizer.from_pretrained(folder)
    assert (type(found), repr(found), found.init_kwargs) == (type(expected), repr(expected), expected.init_kwargs)
    assert found("Hello  there.\n naïve 🙂<|im_end|>") == expected("Hello  there.\n naïve 🙂<|im_end|>")


def test_a_tokenizer_of_another_model_is_an_error(make_target):
    target = make_target("{% for m in messages %}{{ m['content'] }}<|eot_id|>{% endfor %}")
    chat = ChatTokenizer.load(target.model_copy(update={"vocab_size": 2048}))
    with pytest.raises(DataError, match="gives id 2051 of 2,048: it is of another model"):
        encode_own_answers(chat, Conversation.of([Turn("user", "a"), Turn("assistant", "b")]))


def test_end_ids_come_from_the_generation_config_too(make_target):
    target = make_target("a")
    path = Path(target.model) / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 2051]}))
    assert ChatTokenizer.load(target).eos_ids == (2, 2051)
    path.write_text("[")
    with pytest.raises(DataError, match="generation_config.json"):
        ChatTokenizer.load(target)


def test_a_tokenizer_that_needs_code_of_its_own_is_refused_in_these_words(tiny_target: TargetFiles, tmp_path: Path):
    """Not by the option of transformers that would run the code: a user cannot set it here."""
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(DataError, match="it needs code of its own, which is never run") as caught:
        ChatTokenizer.load(tiny_target.model_copy(update={"tokenizer": str(tmp_path)}))
    assert "trust_remote_code" not in str(caught.value)


ASKED = [Turn("user", "What is a pipe?")]


@pytest.fixture
def target(tiny_target: TargetFiles, tmp_path: Path) -> TargetFiles:
    return thinking_target(tiny_target, tmp_path)


def prompt(chat: ChatTokenizer, turns: list[Turn]) -> str:
    return chat._tokenizer.decode(chat.encode_prompt(turns))


def test_the_switch_reaches_the_template(target):
    by_default, on, off = (ChatTokenizer.load(target, thinking) for thinking in (None, True, False))
    assert prompt(on, ASKED) == prompt(by_default, ASKED)
    assert prompt(off, ASKED) == prompt(on, ASKED) + "<think>\n\n</think>\n\n"
    assert (on.template_options, off.template_options) == ({"enable_thinking": True}, {"enable_thinking": False})


def test_a_switch_of_another_name_is_found(target):
    path = Path(target.chat_template)
    path.write_text(THINKING_TEMPLATE.replace("enable_thinking", "thinking"))
    assert ChatTokenizer.load(target, False).template_options == {"thinking": False}


def test_a_template_without_a_switch_refuses_the_choice(tiny_target):
    for thinking in (True, False):
        with pytest.raises(
            ConfigError, match=r"no switch for thinking \(none of enable_thinking, thinking .*leave responses"
        ):
            ChatTokenizer.load(tiny_target, thinking)


def test_what_the_template_is_told_is_part_of_the_digest(target):
    assert len({ChatTokenizer.load(target, thinking).digest for thinking in (None, True, False)}) == 3


@pytest.mark.parametrize("family", FAMILIES)
@QUICK
@given(conversation=conversations())
def test_prompt_and_answer_from_text_spell_the_rendered_conversation(chats, family, conversation):
    chat = chats[f"{family}-plain"]
    turns = list(conversation.turns)
    if family != "qwen":
        turns[-1] = Turn("assistant", turns[-1].content.strip())
    end = "<|im_end|>" if family == "qwen" else "<|eot_id|>"
    spelt = "".join(
        chat._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        for ids in (chat.encode_prompt(turns[:-1]), chat.encode_answer(turns, ended=True))
    )
    assert chat.render(turns).startswith(spelt)
    assert spelt.endswith(turns[-1].content + end)
    assert (
        chat.encode_answer(turns, ended=False)
        == chat._tokenizer(turns[-1].content, add_special_tokens=False)["input_ids"]
    )
