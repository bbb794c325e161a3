"""Slices of conversations: the columns that name them (language and length among them), their weights and shares."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftworks.config.data import OFF, ON, THINKING
from draftworks.data.split import hash_fraction
from draftworks.errors import ConfigError
from draftworks.storage.files import publish_json, read_json
from draftworks.storage.identity import digest

if TYPE_CHECKING:
    from draftworks.data.conversations import Conversation, Scalar  # it imports pyarrow


SCHEMA = 1
WEIGHTS_FILE = "weights.json"
"""In a set of conversations that was chosen by weights: the plan."""
MAX_FILE_BYTES = 1 << 20
LARGEST_WEIGHT = 10.0
DEFAULT_MAX_WEIGHT = 3.0
GAIN = 10.0
"""Weight over 1 for each unit of relative loss: a slice that accepts 10% less counts double."""


@dataclass(frozen=True)
class SliceWeight:
    """How often conversations of a slice are taken, compared with one of no fallen slice.

    Attributes:
        column, value: the slice.
        before, after: accepted tokens per pass that it had at promotion, and has now.
    """

    column: str
    value: str
    weight: float
    before: float
    after: float


@dataclass(frozen=True)
class SlicePlan:
    """Weights of the slices that fell.

    Attributes:
        eval_set: eval set on which they fell.
        report, reference: names of the reports with the figures now, and with those at promotion.
    """

    target: str
    strategy: str
    eval_set: str
    report: str
    reference: str
    max_weight: float
    weights: tuple[SliceWeight, ...]

    @property
    def identity(self) -> str:
        """Digest of what decides a selection: slices and weights, not the figures they come from."""
        return digest(sorted([one.column, one.value, one.weight] for one in self.weights))

    def weigh(self, columns: Mapping[str, Any]) -> float:
        """Return the weight of a conversation: the largest of its slices' weights, 1 outside of them."""
        found = (one.weight for one in self.weights if str(columns.get(one.column)) == one.value)
        return max(found, default=1.0)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "weights": [asdict(one) for one in self.weights]}


def compute_weight(before: float, after: float, max_weight: float = DEFAULT_MAX_WEIGHT) -> float:
    """Return the weight of a slice that fell: 1 + 10 x relative loss, at least 1, at most `max_weight`, two decimals.

    Raises:
        ConfigError: `max_weight` is not between 1 and 10.
    """
    if not 1 <= max_weight <= LARGEST_WEIGHT:
        raise ConfigError(f"max_weight: expected 1 to {LARGEST_WEIGHT:g}, found {max_weight:g}")
    if before <= 0 or after >= before:
        return 1.0
    return round(min(max_weight, 1.0 + GAIN * (before - after) / before), 2)


def select_weighted(
    conversations: Iterable[Conversation], count: int | None, plan: SlicePlan | None
) -> list[Conversation]:
    """Return `count` conversations, chosen by hash, one of weight w about w times as often as one of weight 1.

    Sampling without replacement by the smallest -ln(1 - u) / w (Efraimidis and Spirakis 2006), u from the id: the order of
    the data does not matter, an added conversation replaces at most one other, and with equal weights the choice is that of
    `conversations.select`.
    """

    def order(one: Conversation) -> tuple[float, str]:
        drawn = hash_fraction(one.id, "select")
        if plan is None or not plan.weights:
            return drawn, one.id
        return -math.log1p(-drawn) / plan.weigh(one.columns), one.id

    return sorted(conversations, key=order)[:count]


def save_plan(path: Path, plan: SlicePlan) -> None:
    """Write the plan, atomically."""
    publish_json(path, plan.to_json())


def read_plan(path: Path) -> SlicePlan:
    """Read a plan of weights.

    Raises:
        ConfigError: missing, unreadable, of another schema, or a weight outside 1 to 10.
    """
    try:
        found = read_json(path, MAX_FILE_BYTES)
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']!r}, expected {SCHEMA}")
        plan = SlicePlan(
            **{name: _require_text(found[name]) for name in ("target", "strategy", "eval_set", "report", "reference")},
            max_weight=_require_number(found["max_weight"], 1, LARGEST_WEIGHT),
            weights=tuple(_parse_weight(one) for one in found["weights"]),
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path}: expected weights of slices, as `draftworks slices --save` writes them: {error}"
        ) from error
    return plan


def _parse_weight(found: Any) -> SliceWeight:
    figures = {name: _require_number(found[name], 0, 1e6) for name in ("before", "after")}
    weight = _require_number(found["weight"], 1, LARGEST_WEIGHT)
    return SliceWeight(_require_text(found["column"]), _require_text(found["value"]), weight, **figures)


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {type(value).__name__}")
    return value


def _require_number(value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"expected a number from {low:g} to {high:g}, found {value!r}")
    return float(value)


UNKNOWN, OTHER = "none", "other"
MAX_CHARACTERS = 4000
"""Of a text: its beginning decides."""
MIN_LETTERS = 3

_SCRIPTS = (
    ("kana", 0x3040, 0x30FF),
    ("han", 0x3400, 0x4DBF),
    ("han", 0x4E00, 0x9FFF),
    ("ko", 0x1100, 0x11FF),
    ("ko", 0xAC00, 0xD7AF),
    ("cyrillic", 0x0400, 0x04FF),
    ("arabic", 0x0600, 0x06FF),
    ("he", 0x0590, 0x05FF),
    ("el", 0x0370, 0x03FF),
    ("hi", 0x0900, 0x097F),
    ("bn", 0x0980, 0x09FF),
    ("ta", 0x0B80, 0x0BFF),
    ("te", 0x0C00, 0x0C7F),
    ("th", 0x0E00, 0x0E7F),
    ("ka", 0x10A0, 0x10FF),
    ("hy", 0x0530, 0x058F),
)
_WORDS = {
    "en": "the and of to is are in that it you for with this what how can not have be as on do does please write",
    "de": "der die das und ist nicht ich du wie ein eine mit für auf den von zu was kann bitte werden im dem sich",
    "fr": "le la les et est une des je vous pour dans que qui pas avec sur du ce comment sont au peux être donne",
    "es": "el los las y es una de que por para con no cómo qué en del se como puedes más está mi escribe un",
    "pt": "o os as e é um uma de que por para com não como em do da se mais você está meu isso são quais",
    "it": "il lo gli e è un una di che per con non come in del della sono si più questo quali cosa mi puoi",
    "nl": "de het een en is van niet ik je voor met dat op te zijn wat hoe kun maar ook deze wordt naar",
    "pl": "i w nie na się jest to z do że jak co dla po czy od proszę są mi jaki może napisz",
    "tr": "bir ve bu için ile ne mi nasıl da de olarak çok var daha gibi olan ben bana nedir yaz",
    "sv": "och att det är en ett som på för med inte jag du hur kan av till den vad skriv om",
    "id": "yang dan di itu dengan untuk tidak ini dari saya apa ke adalah bagaimana pada akan bisa tolong buat",
    "vi": "và là của có không cho một những được trong với này tôi bạn để các như viết hãy thế",
}
_LANGUAGES_OF: dict[str, tuple[str, ...]] = {}
for _language, _list in _WORDS.items():
    for _word in _list.split():
        _LANGUAGES_OF[_word] = (*_LANGUAGES_OF.get(_word, ()), _language)
_WORD = re.compile(r"[^\W\d_]+")


def detect_language(text: str) -> str:
    """Return an ISO 639-1 code such as `en`, `other` for a language that is not known, or `none` without letters."""
    text = text[:MAX_CHARACTERS]
    scripts = Counter(_find_script(character) for character in text if character.isalpha())
    letters = sum(scripts.values())
    if letters < MIN_LETTERS:
        return UNKNOWN
    # One character of Chinese or Japanese says as much as several letters.
    dense = scripts["han"] + scripts["kana"]
    if 4 * dense >= letters:
        return "ja" if 10 * scripts["kana"] >= dense else "zh"
    script = max(sorted(scripts), key=scripts.__getitem__)
    if script == "latin":
        return _detect_by_words(text)
    if script == "cyrillic":
        return "uk" if re.search("[іїєґІЇЄҐ]", text) else "ru"
    if script == "arabic":
        return "fa" if re.search("[پچژگ]", text) else "ar"
    return script if len(script) == 2 else OTHER


def _find_script(character: str) -> str:
    point = ord(character)
    if point < 0x0250 or 0x1E00 <= point <= 0x1EFF:
        return "latin"
    return next((name for name, first, last in _SCRIPTS if first <= point <= last), OTHER)


def _detect_by_words(text: str) -> str:
    """Return the language most of whose frequent words occur; a word of several languages counts in parts."""
    scores: dict[str, float] = dict.fromkeys(_WORDS, 0.0)
    for word in _WORD.findall(text.lower()):
        languages = _LANGUAGES_OF.get(word, ())
        for language in languages:
            scores[language] += 1 / len(languages)
    best = max(scores, key=scores.__getitem__)  # of equal scores the first in the list, so English
    return best if scores[best] > 0 else OTHER


LANGUAGE, PROMPT_LENGTH, SOURCE = "language", "prompt_length", "source"
LENGTH = "length"
"""Column that every sample of an eval set has: its number of tokens."""
SLICE_COLUMNS = (LANGUAGE, PROMPT_LENGTH, THINKING, SOURCE)
THINKING_UNKNOWN = "default"
THINKING_PAIR = "thinking_pair"
"""Column of conversations that a mix asks with thinking on or off: the id of the prompt, the same for both ways."""
_LENGTHS = ((500, "under 500"), (2_000, "500 to 2k"), (8_000, "2k to 8k"), (32_000, "8k to 32k"))
_LONGEST = "32k or more"
PROMPT_LENGTHS = (*(name for _, name in _LENGTHS), _LONGEST)
"""Values of the column `PROMPT_LENGTH`."""


def name_prompt_length(characters: int) -> str:
    """Return the name of the bin of a prompt's length. Bins are fixed: those of two reports are the same."""
    return next((name for limit, name in _LENGTHS if characters < limit), _LONGEST)


def add_slice_columns(conversation: Conversation, source: str) -> Conversation:
    """Return the conversation with every slice column; a column that it has already stays as it is."""
    known = conversation.columns
    found: dict[str, Scalar] = {
        LANGUAGE: detect_language(_join_questions(conversation)),
        PROMPT_LENGTH: name_prompt_length(count_prompt_characters(conversation)),
        THINKING: THINKING_UNKNOWN,
        SOURCE: source,
    }
    return replace(conversation, columns={**found, **known})


def count_prompt_characters(conversation: Conversation) -> int:
    """Return the number of characters before the last answer."""
    turns = conversation.turns
    prompt = turns[:-1] if turns and turns[-1].role == "assistant" else turns
    return sum(len(turn.content) for turn in prompt)


def select_slice_columns(columns: Mapping[str, Scalar]) -> dict[str, str]:
    """Return the slice columns among the columns of a sample, as text."""
    return {name: str(columns[name]) for name in SLICE_COLUMNS if name in columns}


def ask_with_thinking(conversation: Conversation, thinking: bool) -> Conversation:
    """Return the conversation as one that is asked with thinking on or off, under an id of its own."""
    way = ON if thinking else OFF
    columns = {**conversation.columns, THINKING: way, THINKING_PAIR: conversation.id}
    return replace(conversation, id=f"{conversation.id}.{way}", columns=columns)


def ask_both_ways(conversations: Iterable[Conversation]) -> list[Conversation]:
    """Return every conversation twice: asked with thinking off, and with thinking on."""
    return [ask_with_thinking(one, thinking) for one in conversations for thinking in (False, True)]


def read_asked_thinking(columns: Mapping[str, Scalar]) -> bool | None:
    """Return how a mix asks a conversation with these columns; None where it leaves that to the template."""
    return columns[THINKING] == ON if THINKING_PAIR in columns else None


def _join_questions(conversation: Conversation) -> str:
    return "\n".join(turn.content for turn in conversation.turns if turn.role == "user")
