"""Rough language of a text, by script and by frequent words: for slices, where an error of some prompts does no harm.

Mixed, very short and transliterated texts are often wrong, and languages that are not in the lists are `other`.
"""

from __future__ import annotations

import re
from collections import Counter

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
