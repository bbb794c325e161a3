"""A target's tokenizer and chat template: conversations as text and token ids, and the spans of text that are answers."""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from draftworks.config.run_files import TargetFiles
from draftworks.data.conversations import Conversation, Turn
from draftworks.data.slices import read_asked_thinking
from draftworks.data.target_files import (
    CpuTimeExceeded,
    find_eos_ids,
    first_line,
    limit_cpu_time,
    load_template,
    load_tokenizer,
)
from draftworks.errors import ConfigError, DataError
from draftworks.storage.identity import digest


class Span(NamedTuple):
    """Characters start..end-1 of a text."""

    start: int
    end: int


class Rendered(NamedTuple):
    """A rendered conversation and the spans that its template marks as generated, in order."""

    text: str
    spans: tuple[Span, ...]


SENTINEL = "\ue0f0draftworks\ue0f1"
"""Placeholder for an assistant turn's content; private-use characters, which no data or template contains."""

_NAME_OF_THOUGHT = r"(?:\w+:)?\w*think\w*(?::\w+)?|thought|reasoning"
_BEGIN_OF_THOUGHT = re.compile(rf"[<\[◁]({_NAME_OF_THOUGHT})[▷\]>]|<\|(?:START_)?(THINK(?:ING)?)\|>", re.IGNORECASE)
_END_OF_THOUGHT = re.compile(rf"[<\[◁]/(?:{_NAME_OF_THOUGHT})[▷\]>]|<\|END_THINK(?:ING)?\|>", re.IGNORECASE)
_EMPTY_THOUGHT = re.compile(rf"({_BEGIN_OF_THOUGHT.pattern})(\s*)(?={_END_OF_THOUGHT.pattern})", re.IGNORECASE)
_MARKUP = re.compile(r"<[^<>\n]*>|\[/?\w+\]|◁[^▷\n]*▷")


def find_last_words(text: str, words: str) -> int | None:
    """Return where the words that end a text begin; None if it ends with others. White space does not matter."""
    position = len(text)
    for letter in reversed("".join(words.split())):
        position -= 1
        while position >= 0 and text[position].isspace():
            position -= 1
        if position < 0 or text[position] != letter:
            return None
    return position


def holds_words(text: str, words: str) -> bool:
    """Whether a text has these words, however white space is moved."""
    return "".join(words.split()) in "".join(text.split())


def find_marked_turns(text: str, marked: Sequence[Span], contents: Sequence[str]) -> list[int]:
    """Return the assistant turns that a template's generation markers mark, by their place among the assistant turns.

    jinja counts characters where the markers are evaluated, so in a macro or a set block it counts others than are printed.

    Args:
        contents: of the assistant turns, without thoughts, in order; a template may mark some of them only.

    Raises:
        DataError: a span does not hold the words of a turn, after those of the span before it.
    """
    found: list[int] = []
    for span in marked:
        said, begin = text[span.start : span.end], found[-1] + 1 if found else 0
        holding = (n for n in range(begin, len(contents)) if holds_words(said, contents[n]))
        number = next(holding, None)
        if number is None:
            raise DataError(
                f"the chat template marks {said[:60]!r} as generated, which are not the words of an assistant turn. Markers do "
                "not work inside a macro or a set block: write them where the words are printed"
            )
        found.append(number)
    return found


def measure_common_prefix(first: str, second: str) -> int:
    """Return how many characters two texts begin with, without the beginning of a mark such as `<think>` that parts them."""
    common = len(os.path.commonprefix([first, second]))
    marks = (mark for text in (first, second) for mark in _MARKUP.finditer(text, max(0, common - 100), common + 100))
    return min((mark.start() for mark in marks if mark.start() < common < mark.end()), default=common)


def find_leading_thought(text: str) -> re.Match[str] | None:
    """Return the mark, such as `<think>`, with which a text begins a thought; None if it begins otherwise."""
    return _BEGIN_OF_THOUGHT.match(text, len(text) - len(text.lstrip()))


def take_thought(text: str) -> str:
    """Return the thought of a text that begins with one, without its marks."""
    begin = find_leading_thought(text)
    ends = list(_END_OF_THOUGHT.finditer(text))
    return "" if begin is None or not ends else text[begin.end() : ends[-1].start()].strip()


def find_open_thought(text: str) -> re.Match[str] | None:
    """Return the mark of the thought that a text begins and does not end; None if there is none."""
    return _BEGIN_OF_THOUGHT.search(text, find_end_of_thought(text))


def make_end_of_thought(begin: re.Match[str]) -> str:
    """Return the mark that ends a thought which `begin` begins: `</think>`."""
    name = begin[1] or begin[2]
    return begin[0].replace(name, f"/{name}", 1) if begin[1] else begin[0].replace("START", "END", 1)


def fill_empty_thought(text: str, thought: str) -> str | None:
    """Return the text with a thought between the first marks that have none between them; None without such marks."""
    empty = _EMPTY_THOUGHT.search(text)
    if empty is None:
        return None
    line = "\n" if "\n" in empty[empty.lastindex or 0] else ""
    return f"{text[: empty.start()]}{empty[1]}{line}{thought.strip()}{line}{text[empty.end() :]}"


def find_end_of_thought(text: str) -> int:
    """Return the position after the last mark that ends a thought, such as `</think>`; 0 if there is none."""
    return max((found.end() for found in _END_OF_THOUGHT.finditer(text)), default=0)


class EndOfTurn:
    """Finds what closes a turn, such as `<|im_end|>`: the model must learn to stop.

    Args:
        special_tokens: the texts of the tokenizer's special tokens.
        swallowing: those of them that the tokenizer joins with the white space after them.
        ending: those of them at which a server stops.
    """

    def __init__(
        self, special_tokens: Iterable[str], swallowing: Collection[str] = (), ending: Collection[str] = ()
    ) -> None:
        tokens = sorted((token for token in special_tokens if token), key=len, reverse=True)
        written = {token: re.escape(token) + r"\s*" * (token in swallowing) for token in tokens}
        anything, end = ("|".join(written[each] for each in chosen) or "(?!)" for chosen in (
            tokens, [token for token in tokens if token in ending],
        ))  # fmt: skip
        self._to_the_end = re.compile(rf"(?:\s*(?:{anything}))*?\s*(?:{end})")
        self._follows = re.compile(rf"\s*(?:{anything})")

    def after(self, text: str, position: int) -> int:
        """Return the end of the special tokens at `position`, after optional white space; `position` if there is none.

        They go as far as the first one at which a server stops; where none does, only the first one closes the turn.
        """
        match = self._to_the_end.match(text, position) or self._follows.match(text, position)
        return match.end() if match else position


_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
FIXED_DATE = datetime(2024, 7, 26)
"""Templates that print today's date would give other tokens every day; this is the date Llama 3 falls back to."""

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that switch thinking on or off: the first of Qwen 3 and GLM, the second of DeepSeek."""
RENDER_LIMIT_S = 20.0
"""Processor seconds for rendering one conversation. Templates are programs; they normally take milliseconds."""
_MOST_TEXT = 64 << 20
_QUESTION = (Turn("user", "?"),)


class OutsideVocabulary(DataError):
    """The tokenizer gives ids that the target's vocabulary does not have."""


class ChatTokenizer:
    """A fast tokenizer with a chat template. Create it with `load`.

    Attributes:
        end_of_turn: finds the token that closes an answer.
        template_options: variables passed to the template beside the conversation.
    """

    def __init__(self, tokenizer: Any, template: str, vocab_size: int, eos_ids: tuple[int, ...], name: str) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.has_markers = _MARKER.search(template) is not None
        self._tokenizer = tokenizer
        self._template = template
        self._date = FIXED_DATE
        added = tokenizer.added_tokens_decoder.values()
        special = [*tokenizer.all_special_tokens, *(token.content for token in added if token.special)]
        swallowing = {token.content for token in added if token.special and token.rstrip}
        self.end_of_turn = EndOfTurn(special, swallowing, set(tokenizer.convert_ids_to_tokens(list(eos_ids))))
        self.template_options: Mapping[str, bool] = {}
        self._switched: dict[bool, ChatTokenizer] = {}

    @classmethod
    def load(cls, target: TargetFiles, thinking: bool | None = None) -> ChatTokenizer:
        """Load the tokenizer and template of a target.

        Args:
            thinking: whether the template switches thinking on; None leaves it to the template.

        Raises:
            DataError: files missing or unreadable, no fast tokenizer, or no chat template.
            ConfigError: `thinking` is set, and the template has no such switch.
        """
        tokenizer = load_tokenizer(target)
        template = load_template(target, tokenizer)
        chat = cls(tokenizer, template, target.vocab_size, find_eos_ids(target, tokenizer), target.tokenizer)
        return chat if thinking is None else chat.switch_thinking(thinking)

    def switch_thinking(self, thinking: bool) -> ChatTokenizer:
        """Return the same tokenizer with thinking on or off. Raises ConfigError if the template has no such switch."""
        if thinking not in self._switched:
            switched = copy.copy(self)
            switched.template_options = {self._find_thinking_switch(): thinking}
            self._switched[thinking] = switched
        return self._switched[thinking]

    @property
    def prints_date(self) -> bool:
        """Whether the template asks for the date."""
        return "strftime_now" in self._template

    def on_date(self, date: datetime) -> ChatTokenizer:
        """Return the same tokenizer with another date for the template than `FIXED_DATE`."""
        other = copy.copy(self)
        other._date, other._switched = date, {}
        return other

    def choose(self, conversation: Conversation) -> ChatTokenizer:
        """Return the tokenizer that asks a conversation as the mix says: with thinking on or off, or this one."""
        thinking = read_asked_thinking(conversation.columns)
        return self if thinking is None else self.switch_thinking(thinking)

    @property
    def digest(self) -> str:
        """Content digest of everything that decides which ids a conversation gets."""
        parts = [self._tokenizer.backend_tokenizer.to_str(), self._template, self._tokenizer.special_tokens_map]
        date = [self._date.isoformat()] if self.prints_date else []
        return digest([*parts, *([dict(self.template_options)] if self.template_options else []), *date])

    @property
    def mask_token_id(self) -> int | None:
        """Id of the mask token for block strategies, None if the tokenizer reserves none."""
        return self._tokenizer.mask_token_id

    @property
    def largest_id(self) -> int:
        """Largest id of the tokenizer; the model's vocabulary may be larger or smaller."""
        return max(self._tokenizer.get_vocab().values(), default=0)

    def find_ordinary_token(self, token_id: int) -> str | None:
        """Return the text of a token; None for a special token or an id the tokenizer never produces."""
        added = self._tokenizer.added_tokens_decoder.get(token_id)
        if (added is not None and added.special) or token_id in self._tokenizer.all_special_ids:
            return None
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return None if token is None else self._tokenizer.convert_tokens_to_string([token])

    def render(self, turns: Sequence[Turn], add_generation_prompt: bool = False) -> str:
        """Return the conversation as text. Raises DataError if the template refuses it."""
        return self._render(turns, add_generation_prompt=add_generation_prompt).text

    def render_after_answer(self, turns: Sequence[Turn]) -> str:
        """Return what the template prints after the words of the last turn, an assistant's.

        Raises:
            DataError: it does not print the turn exactly once.
        """
        return self._render_after(turns, len(turns) - 1)

    def _render_after(self, turns: Sequence[Turn], number: int) -> str:
        text = self.render([replace(turn, content=SENTINEL) if n == number else turn for n, turn in enumerate(turns)])
        _, found, after = text.partition(SENTINEL)
        if not found or SENTINEL in after:
            raise DataError(f"{self.name}: the chat template does not print the last assistant turn exactly once")
        return after

    def marks_last(self, turns: Sequence[Turn]) -> bool:
        """Whether the last turn, an assistant's, is generated: by the template's own markers, if it has any.

        Raises:
            DataError: a marker is around other words than those of an assistant turn.
        """
        if not self.has_markers:
            return True
        rendered = self._render(turns, tracked=True)
        answers = [turn.content[find_end_of_thought(turn.content) :] for turn in turns if turn.role == "assistant"]
        return len(answers) - 1 in find_marked_turns(rendered.text, rendered.spans, answers)

    def require_words(self, turns: Sequence[Turn]) -> None:
        """Raise DataError if the template does not print the words of a turn that is asked; white space does not matter."""
        printed = "".join(self.render(turns, add_generation_prompt=True).split())
        for number, turn in enumerate(turns, start=1):
            if "".join(turn.content.split()) not in printed:
                raise DataError(
                    f"{self.name}: the chat template does not print turn {number} ({turn.role}), {turn.content[:24]!r} (does it "
                    "expect lists?): use another, chat_template"
                )

    def encode_prompt(self, turns: Sequence[Turn]) -> list[int]:
        """Return the ids of the conversation so far and of the header that opens the assistant's turn."""
        return self.encode_text(self.render(turns, add_generation_prompt=True))

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text. Raises DataError if one is outside the target's vocabulary."""
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if (largest := max(ids, default=0)) >= self.vocab_size:
            raise OutsideVocabulary(
                f"{self.name}: the tokenizer gives id {largest} of {self.vocab_size:,}: it is of another model"
            )
        return ids

    def encode_answer(self, turns: Sequence[Turn], ended: bool) -> list[int]:
        """Return the ids of an answer known by its text, with the token that closes the turn if it `ended`.

        They are those that follow the prompt where prompt and answer are tokenized at once, if the prompt's own ids begin
        them; else the answer's words are tokenized on their own.

        Raises:
            DataError: the template does not print the turn exactly once, or an id is outside the target's vocabulary.
        """
        before = self.render(turns[:-1], add_generation_prompt=True)
        prompt = self.encode_text(before)
        whole = self.encode_text(before + turns[-1].content)
        words = whole[len(prompt) :] if whole[: len(prompt)] == prompt else self.encode_text(turns[-1].content)
        return [*words, *self.encode_closing(turns)] if ended else words

    def encode_closing(self, turns: Sequence[Turn]) -> list[int]:
        """Return the ids of what closes the last turn, an assistant's; empty if nothing does. Raises as `find_closing`."""
        return self.encode_text(self.find_closing(turns, self.render_after_answer(turns)))

    def find_closing(self, turns: Sequence[Turn], after: str) -> str:
        """Return the special tokens that close the last turn, an assistant's, as text; empty if there are none.

        Some templates leave the last turn open. There it is the token behind the turn where the user goes on, if a server
        stops at it: `<|user|>` for GLM.

        Args:
            after: what the template prints after the turn's words.
        """
        closing = after[: self.end_of_turn.after(after, 0)]
        if closing or after.strip():
            return closing
        try:
            following = self._render_after([*turns, *_QUESTION], len(turns) - 1)
        except DataError:
            return ""
        closing = following[: self.end_of_turn.after(following, 0)]
        return closing if self._tokenizer.convert_tokens_to_ids(closing.strip()) in self.eos_ids else ""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _find_thinking_switch(self) -> str:
        """Return the first known switch that changes a rendered prompt."""
        for name in THINKING_SWITCHES:
            on, off = (self._render(_QUESTION, add_generation_prompt=True, options={name: on}) for on in (True, False))
            if on.text != off.text:
                return name
        raise ConfigError(
            f"{self.name}: its chat template has no switch for thinking (none of {', '.join(THINKING_SWITCHES)} changes what it "
            "prints): leave responses.thinking or mix.shares out"
        )

    def _render(
        self,
        turns: Sequence[Turn],
        tracked: bool = False,
        add_generation_prompt: bool = False,
        options: Mapping[str, bool] | None = None,
    ) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [turn.to_message() for turn in turns]
        variables: dict[str, Any] = {
            **self._tokenizer.special_tokens_map,
            **(self.template_options if options is None else options),
        }
        try:
            with limit_cpu_time(RENDER_LIMIT_S):
                texts, spans = render_jinja_template(
                    [messages],
                    chat_template=f"{_define_date(self._date)}{self._template}" if self.prints_date else self._template,
                    return_assistant_tokens_mask=tracked,
                    add_generation_prompt=add_generation_prompt,
                    **variables,
                )
        except CpuTimeExceeded:
            raise ConfigError(
                f"{self.name}: the chat template has not finished one conversation after {RENDER_LIMIT_S:g} s of processor time:"
                " it probably loops. Use another (chat_template)"
            ) from None
        except Exception as error:  # a template is a third-party program: whatever it raises, the remedy is the same
            raise DataError(f"{self.name}: the chat template refuses the conversation: {first_line(error)}") from error
        if len(texts[0]) > _MOST_TEXT:
            raise ConfigError(
                f"{self.name}: the chat template prints {len(texts[0]):,} characters for one conversation"
            )
        return Rendered(texts[0], tuple(Span(int(start), int(end)) for start, end in spans[0]) if tracked else ())


@functools.lru_cache(maxsize=8)
def _define_date(date: datetime) -> str:
    """Return a macro in place of transformers' `strftime_now`, which prints today. A template gets no function of ours."""
    letters = "aAbBcCdDeFgGhHIjklmMpPrRsSTuUVwWxXyYzZ"
    forms = [f"%{flag}{letter}" for letter in letters for flag in ("", "-")]
    values = {form: date.strftime(form) for form in forms}
    replaced = [("%%", "\0"), *values.items(), ("\0", "%")]
    return (
        "{%- macro strftime_now(format) -%}{%- set written = namespace(text=format) -%}"
        f"{{%- for form, value in {replaced!r} -%}}{{%- set written.text = written.text | replace(form, value) -%}}{{%- endfor -%}}"
        "{{- written.text -}}{%- endmacro -%}"
    )
