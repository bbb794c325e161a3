"""A target's tokenizer and chat template: conversations to token ids with a loss mask, and prompts for generation.

Every conversation is rendered to text and tokenized in one call. The assistant's tokens follow from the tokens'
character offsets, never from tokenizing parts of the text again.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from draftworks.config.run_files import TargetFiles
from draftworks.data.conversations import Conversation, Turn
from draftworks.data.slice_columns import read_asked_thinking
from draftworks.data.spans import EndOfTurn, Rendered, Span, build_label_mask, locate, make_sentinel, narrow_to_words
from draftworks.data.tokenizer_files import find_eos_ids, first_line, load_template, load_tokenizer
from draftworks.distributed.time_limit import CpuTimeExceeded, limit_cpu_time
from draftworks.errors import ConfigError, DataError
from draftworks.storage.identity import digest

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
FIXED_DATE = datetime(2024, 7, 26)
"""Templates that print today's date would give other tokens every day; this is the date Llama 3 falls back to."""

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that switch thinking on or off: the first of Qwen 3 and GLM, the second of DeepSeek."""
RENDER_LIMIT_S = 20.0
"""Processor seconds for rendering one conversation. Templates are programs; they normally take milliseconds."""
_MOST_TEXT = 64 << 20
_QUESTION = (Turn("user", "?"),)


class Encoded(NamedTuple):
    """Token ids int32 (S,) and loss mask bool (S,)."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


class ChatTokenizer:
    """A fast tokenizer with a chat template. Create it with `load`.

    Attributes:
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
        self._end_of_turn = EndOfTurn(special, {token.content for token in added if token.special and token.rstrip})
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

    def encode(self, conversation: Conversation, only_last_turn: bool = False) -> Encoded:
        """Encode a conversation; the mask covers the assistant's words and the token that ends each of its turns.

        Raises:
            DataError: the template refuses the conversation, its assistant turns cannot be located, or an id is outside
                the target's vocabulary.
        """
        rendered = self._add_generated_blanks(conversation.turns, self.render(conversation.turns))
        spans = self._last_turn(conversation.turns, rendered.spans) if only_last_turn else rendered.spans
        encoding = self._tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        input_ids = self._require_ids(encoding["input_ids"])
        offsets = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return Encoded(input_ids, build_label_mask(offsets, spans))

    def render(self, turns: Sequence[Turn]) -> Rendered:
        """Return the conversation as text with the assistant's spans, closing tokens included; errors as `encode`."""
        if self.has_markers:
            text, marked = self._render(turns, tracked=True)
            contents = [turn.content for turn in turns if turn.role == "assistant"]
            spans = narrow_to_words(text, marked, contents)
            return self._without_next_headers(turns, text, spans, self._end_of_turn.complete)
        text = self._render(turns).text
        assistant_turns = [number for number, turn in enumerate(turns) if turn.role == "assistant"]
        template_text = self._render(_with_sentinels(turns, assistant_turns)).text
        spans = locate(text, template_text, assistant_turns, [turns[number].content for number in assistant_turns])
        return self._without_next_headers(turns, text, spans, self._end_of_turn.append)

    def _without_next_headers(
        self, turns: Sequence[Turn], text: str, spans: Sequence[Span], close: Callable[[str, Span], Span]
    ) -> Rendered:
        """Return the spans, each with the token that closes its turn, unless that token begins the next turn."""
        closed = [close(text, span) for span in spans]
        assistant_turns = [number for number, turn in enumerate(turns) if turn.role == "assistant"]
        if len(spans) == len(assistant_turns):
            for place, number in enumerate(assistant_turns[:-1]):
                added = text[spans[place].end : closed[place].end].strip()
                if added and self._tokenizer.convert_tokens_to_ids(added) not in self.eos_ids:
                    alone = self._render(turns[: number + 1]).text
                    if len(alone) < closed[place].end and text.startswith(alone):
                        closed[place] = spans[place]
        return Rendered(text, tuple(closed))

    def _add_generated_blanks(self, turns: Sequence[Turn], rendered: Rendered) -> Rendered:
        """Return the spans with the white space that the template prints between the prompt and the answer's words.

        The target generates it, since the prompt ends before it, often in one token with the first word.
        """
        assistant_turns = [number for number, turn in enumerate(turns) if turn.role == "assistant"]
        spans, text = list(rendered.spans), rendered.text
        if len(spans) != len(assistant_turns):
            return rendered
        for place, (number, span) in enumerate(zip(assistant_turns, spans)):
            blanks = text[: span.start][len(text[: span.start].rstrip()) :]
            if not number or not blanks:
                continue
            prompt = self._render(turns[:number], add_generation_prompt=True).text
            if len(prompt) >= span.start - len(blanks) and text[: span.start].startswith(prompt):
                spans[place] = Span(len(prompt), span.end)
        return Rendered(text, tuple(spans))

    def require_words(self, turns: Sequence[Turn]) -> None:
        """Raise DataError if the template does not print the words of a turn that is asked; white space does not matter."""
        printed = "".join(self._render(turns, add_generation_prompt=True).text.split())
        for number, turn in enumerate(turns, start=1):
            if "".join(turn.content.split()) not in printed:
                raise DataError(
                    f"{self.name}: the chat template does not print turn {number} ({turn.role}), {turn.content[:24]!r} (does it "
                    "expect lists?): use another, chat_template"
                )

    def encode_prompt(self, turns: Sequence[Turn]) -> list[int]:
        """Return the ids of the conversation so far and of the header that opens the assistant's turn."""
        return self._plain_ids(self._render(turns, add_generation_prompt=True).text)

    def encode_answer(self, turns: Sequence[Turn], ended: bool) -> list[int]:
        """Return the ids of an answer known by its text, with the token that closes the turn if it `ended`.

        They are those that follow the prompt where prompt and answer are tokenized at once, if the prompt's own ids begin
        them; else the answer's words are tokenized on their own.

        Raises:
            DataError: the template does not print the turn exactly once, or an id is outside the target's vocabulary.
        """
        before = self._render(turns[:-1], add_generation_prompt=True).text
        prompt = self._plain_ids(before)
        whole = self._plain_ids(before + turns[-1].content)
        words = whole[len(prompt) :] if whole[: len(prompt)] == prompt else self._plain_ids(turns[-1].content)
        return [*words, *self.encode_closing(turns)] if ended else words

    def encode_closing(self, turns: Sequence[Turn]) -> list[int]:
        """Return the ids of the special token that closes the last turn, an assistant's; empty if there is none.

        Raises:
            DataError: the template does not print the turn exactly once.
        """
        after = self._render_after_answer(turns)
        return self._plain_ids(after[: self._end_of_turn.after(after, 0)])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _render_after_answer(self, turns: Sequence[Turn]) -> str:
        """Return what the template prints after the last turn's words."""
        last = len(turns) - 1
        text = self._render(_with_sentinels(turns, [last])).text
        _, found, after = text.partition(make_sentinel(last))
        if not found or make_sentinel(last) in after:
            raise DataError(f"{self.name}: the chat template does not print the last assistant turn exactly once")
        return after

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

    def _last_turn(self, turns: Sequence[Turn], spans: Sequence[Span]) -> Sequence[Span]:
        assistant_turns = sum(turn.role == "assistant" for turn in turns)
        if len(spans) != assistant_turns:
            raise DataError(
                f"the chat template marks {len(spans)} generations in {assistant_turns} assistant turns,"
                " so the last turn is not known: set only_last_turn to false"
            )
        return spans[-1:]

    def _render(
        self,
        turns: Sequence[Turn],
        tracked: bool = False,
        add_generation_prompt: bool = False,
        options: Mapping[str, bool] | None = None,
    ) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
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

    def _plain_ids(self, text: str) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        self._require_ids(ids)
        return ids

    def _require_ids(self, ids: list[int]) -> np.ndarray:
        array = np.array(ids, dtype=np.int32)
        if array.size and int(array.max()) >= self.vocab_size:
            raise DataError(
                f"{self.name}: the tokenizer gives id {array.max()} of {self.vocab_size:,}: it is of another model"
            )
        return array


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


def _with_sentinels(turns: Sequence[Turn], numbers: Sequence[int]) -> list[Turn]:
    return [Turn(turn.role, make_sentinel(n)) if n in numbers else turn for n, turn in enumerate(turns)]
