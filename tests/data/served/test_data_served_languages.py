"""The rough language of a prompt: right on plain sentences, defined on any text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.slices import detect_language

SENTENCES = {
    "en": "What is the difference between a list and a tuple, and when do you use which?",
    "de": "Wie kann ich eine Liste sortieren, und was ist der Unterschied zu einem Tupel?",
    "fr": "Comment est-ce que je peux trier une liste dans ce langage, et avec quelle fonction ?",
    "es": "¿Cómo puedes ordenar una lista en este lenguaje, y cuál es la más rápida?",
    "pt": "Como você pode ordenar uma lista em Python? Quais são as opções, e qual não é boa?",
    "it": "Come si può ordinare una lista, e quali sono le differenze con gli altri tipi della libreria?",
    "nl": "Hoe kun je een lijst sorteren, en wat is het verschil met de andere manier?",
    "pl": "Jak mogę posortować listę i czy to jest szybkie? Proszę o przykład dla mnie.",
    "zh": "请用 Python 写一个排序函数，并解释它的复杂度。",
    "ja": "Pythonでリストを並べ替える関数を書いてください。",
    "ko": "파이썬으로 리스트를 정렬하는 방법을 알려 주세요.",
    "ru": "Как отсортировать список на Python?",
    "uk": "Як відсортувати список і чому це швидко?",
    "ar": "كيف يمكنني ترتيب قائمة في بايثون؟",
    "hi": "मैं पायथन में सूची को कैसे क्रमबद्ध करूँ?",
    "el": "Πώς ταξινομώ μια λίστα;",
    "he": "איך ממיינים רשימה?",
    "th": "ฉันจะเรียงลำดับรายการได้อย่างไร",
    "none": "1 + 1 = ?",
    "other": "xyzzy plugh qwrt",
}


@pytest.mark.parametrize("language", SENTENCES)
def test_plain_sentences(language):
    assert detect_language(SENTENCES[language]) == language


@given(st.text(max_size=200))
def test_any_text_has_one_short_answer_that_does_not_depend_on_case_or_repetition(text):
    found = detect_language(text)
    assert found in ("none", "other") or (len(found) == 2 and found.isalpha())
    assert detect_language(text) == found
