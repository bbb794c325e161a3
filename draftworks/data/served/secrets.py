"""Known kinds of secrets and personal data in text: found by pattern, named, replaced by placeholders.

Patterns find what has a published form (the prefixes of providers' keys, PEM headers). A password in a sentence has none:
that is what the redaction hook is for.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from draftworks.config.data import RedactionSpec
from draftworks.errors import ConfigError
from draftworks.storage.identity import FileDigests, digest

REVISION = 1
"""Part of a data set's identity: raised when a pattern changes, so that prompts are read again."""


@dataclass(frozen=True)
class Kind:
    """A kind of secret.

    Attributes:
        marks: lower-case texts, one of which every secret of the kind has: looked for first, as that costs little.
    """

    pattern: re.Pattern[str]
    marks: tuple[str, ...]

    def may_be_in(self, lowered: str) -> bool:
        return any(mark in lowered for mark in self.marks)


def _kind(pattern: str, *marks: str) -> Kind:
    return Kind(re.compile(pattern), marks)


SECRETS: dict[str, Kind] = {
    "private_key": _kind(
        r"-----BEGIN (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:(?:[^-]|-(?!----)){0,20000}-----END (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----|[\sA-Za-z0-9+/=:,\\]{0,20000})",
        "private key",
    ),
    "api_key": _kind(r"(?<![A-Za-z0-9])sk-(?:[A-Za-z0-9]+-)*[A-Za-z0-9_-]{20,}", "sk-"),
    "stripe_key": _kind(r"(?<![A-Za-z0-9])[rs]k_(?:live|test)_[A-Za-z0-9]{16,}", "k_live_", "k_test_"),
    "aws_access_key": _kind(
        r"(?<![A-Za-z0-9])(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])", "akia", "asia", "abia", "acca"
    ),
    "aws_secret_key": _kind(
        r"(?i:aws_?secret_?(?:access_?)?key)[\"']?\s{0,5}[:=]\s{0,5}[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])", "secret"
    ),
    "github_token": _kind(
        r"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{40,})",
        *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
    ),
    "gitlab_token": _kind(r"(?<![A-Za-z0-9])glpat-[A-Za-z0-9_-]{20,}", "glpat-"),
    "hugging_face_token": _kind(r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{30,}", "hf_"),
    "google_api_key": _kind(r"(?<![A-Za-z0-9])AIza[A-Za-z0-9_-]{35}", "aiza"),
    "slack_token": _kind(r"(?<![A-Za-z0-9])xox[abeoprs]-[A-Za-z0-9-]{20,}", "xox"),
    "json_web_token": _kind(
        r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}", ".eyj"
    ),
    "bearer_token": _kind(
        r"(?i:authorization)[\"']?\s{0,5}[:=]\s{0,5}[\"']?(?i:bearer|basic)\s{1,5}[A-Za-z0-9._~+/=-]{16,}",
        "authorization",
    ),
    "password_in_url": _kind(r"(?<![A-Za-z0-9])[a-z][a-z0-9+.-]{1,20}://[^\s/:@]{1,100}:[^\s/@]{3,200}@", "://"),
}
PERSONAL: dict[str, re.Pattern[str]] = {
    "email": re.compile(r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}"),
    "phone": re.compile(r"(?<![\w.+])\+\d(?:[ ()./-]{0,2}\d){6,14}(?!\w)"),
    "ip": re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.]|\.\d)"),
}


def find_secret(texts: Iterable[str]) -> str | None:
    """Return the name of the first kind of secret found in any of the texts; None if there is none."""
    for text in texts:
        lowered = text.lower()
        for name, kind in SECRETS.items():
            if kind.may_be_in(lowered) and kind.pattern.search(text):
                return name
    return None


@dataclass(frozen=True)
class MaskedText:
    """A text with placeholders, and the kinds of what they stand for: keys of SECRETS and PERSONAL."""

    text: str
    kinds: frozenset[str]


def mask_text(text: str, kinds: Iterable[str]) -> MaskedText:
    """Replace what these kinds match by placeholders: [SECRET], [EMAIL], [PHONE], [IP].

    Args:
        kinds: of email, phone, ip, and secret, which is all of SECRETS.
    """
    wanted = set(kinds)
    patterns: dict[str, tuple[re.Pattern[str], str]] = {}
    if "secret" in wanted:
        lowered = text.lower()
        patterns |= {name: (kind.pattern, "[SECRET]") for name, kind in SECRETS.items() if kind.may_be_in(lowered)}
    for name, mark in (("email", "@"), ("phone", "+"), ("ip", ".")):
        if name in wanted and mark in text:
            patterns[name] = (PERSONAL[name], f"[{name.upper()}]")
    found: set[str] = set()
    for name, (pattern, placeholder) in patterns.items():
        text, count = pattern.subn(placeholder, text)
        found |= {name} if count else set()
    return MaskedText(text, frozenset(found))


def digest_hook(hook: RedactionSpec | None, folder: Path, digests: FileDigests) -> str | None:
    """Return a digest that changes with the hook: with its words, and with every word's file, seen from `folder`.

    A program that is found by PATH counts by its name, and what a script imports does not count.

    Raises:
        ConfigError: the module of a function is not installed.
    """
    if hook is None:
        return None
    if hook.command is not None:
        files = [folder / word for word in hook.command]
        known = [digests.of_file(path) if _is_file(path) else None for path in files]
        return digest([hook.command, known])
    module = str(hook.function).partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError(
            f"redaction.function: the module {module} is not installed: pip install the package that has it"
        )
    return digest([hook.function, digests.of_file(Path(found.origin)) if found.has_location and found.origin else None])


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
