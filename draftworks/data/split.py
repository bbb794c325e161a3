"""Splits and selections by hash: adding data never moves existing data, and a prompt is on one side only."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable

from draftworks.storage.identity import digest

SPLIT_KEY = "prompt/1"
"""What decides who is held out; part of the identity of every set that the split decides."""


def hash_fraction(sample_id: str, purpose: str) -> float:
    """Return a number in [0, 1) that depends on id and purpose only; different purposes are independent."""
    raw = hashlib.sha256(f"{purpose}\0{sample_id}".encode()).digest()
    return int.from_bytes(raw[:6], "big") / 2**48


def is_held_out(prompt_key: str, share: float) -> bool:
    """Whether the rows of a prompt belong to the eval set `heldout`. A larger share keeps all that a smaller one held out.

    The key is that of `Conversation` or `TokenRow`, so other answers to a prompt, and conversations that go on differently,
    are on its side.
    """
    return hash_fraction(prompt_key, "held-out") < share


def digest_prompt(texts: Iterable[str]) -> str:
    """Return the digest of a prompt's texts, equal for texts that differ in case, white space or Unicode composition."""
    return digest([_normalize(text) for text in texts])


def _normalize(text: str) -> str:
    composed = unicodedata.normalize("NFC", text).casefold()
    return " ".join(unicodedata.normalize("NFC", composed).split())
