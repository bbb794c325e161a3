"""Known kinds of secrets and personal data in text: found by pattern, named, replaced by placeholders.

Patterns find what has a published form (the prefixes of providers' keys, PEM headers). A password in a sentence has none:
that is what the redaction hook is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

REVISION = 1
"""Part of a data set's identity: raised when a pattern changes, so that prompts are read again."""

SECRETS: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "private_key": r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
        r"(?:[\s\S]{0,20000}?-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|[\sA-Za-z0-9+/=:,\\-]{0,20000})",
        "api_key": r"(?<![A-Za-z0-9])sk-(?:[A-Za-z0-9]+-)*[A-Za-z0-9_-]{20,}",
        "stripe_key": r"(?<![A-Za-z0-9])[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
        "aws_access_key": r"(?<![A-Za-z0-9])(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])",
        "aws_secret_key": r"(?i:aws_?secret_?(?:access_?)?key)[\"']?\s{0,5}[:=]\s{0,5}[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
        "github_token": r"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{40,})",
        "gitlab_token": r"(?<![A-Za-z0-9])glpat-[A-Za-z0-9_-]{20,}",
        "hugging_face_token": r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{30,}",
        "google_api_key": r"(?<![A-Za-z0-9])AIza[A-Za-z0-9_-]{35}",
        "slack_token": r"(?<![A-Za-z0-9])xox[abeoprs]-[A-Za-z0-9-]{20,}",
        "json_web_token": r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
        "bearer_token": r"(?i:authorization)[\"']?\s{0,5}[:=]\s{0,5}[\"']?(?i:bearer|basic)\s{1,5}[A-Za-z0-9._~+/=-]{16,}",
        "password_in_url": r"(?<![A-Za-z0-9])[a-z][a-z0-9+.-]{1,20}://[^\s/:@]{1,100}:[^\s/@]{3,200}@",
    }.items()
}
PERSONAL: dict[str, re.Pattern[str]] = {
    "email": re.compile(r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}"),
    "phone": re.compile(r"(?<![\w.+])\+\d(?:[ ()./-]{0,2}\d){6,14}(?!\w)"),
    "ip": re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.]|\.\d)"),
}


def find_secret(texts: Iterable[str]) -> str | None:
    """Return the name of the first kind of secret found in any of the texts; None if there is none."""
    for text in texts:
        for name, pattern in SECRETS.items():
            if pattern.search(text):
                return name
    return None


def mask_text(text: str, kinds: Iterable[str]) -> str:
    """Return the text with what these kinds match replaced by placeholders: [SECRET], [EMAIL], [PHONE], [IP]."""
    wanted = set(kinds)
    if "secret" in wanted:
        for pattern in SECRETS.values():
            text = pattern.sub("[SECRET]", text)
    for kind in ("email", "phone", "ip"):
        if kind in wanted:
            text = PERSONAL[kind].sub(f"[{kind.upper()}]", text)
    return text
