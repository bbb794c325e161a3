"""Masks secrets in texts that are shown: values of environment variables, and credentials in URLs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

MASK = "***"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|WEBHOOK", re.IGNORECASE)
_CREDENTIALS = re.compile(r"//[^/\s@]+@")
_SHORTEST = 4
"""Shorter values are common words or numbers, which could not be masked without harm."""


def mask_secrets(text: str, env: Mapping[str, str], named: Collection[str] = ()) -> str:
    """Return the text without credentials in URLs and values of variables that hold secrets: by their names, or in `named`.

    Values of `named` are masked whatever their length.
    """
    likely = {value.strip() for name, value in env.items() if _SECRET_NAME.search(name)}
    secret = {value for value in likely if len(value) >= _SHORTEST} | {env.get(name, "").strip() for name in named}
    for value in sorted(secret - {""}, key=len, reverse=True):
        text = text.replace(value, MASK)
    return _CREDENTIALS.sub(f"//{MASK}@", text)
