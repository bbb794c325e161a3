"""The acceptance length τ, the only form in which people are shown what a target accepts. Standard library only.

τ = 1 + a, with a = accepted draft tokens / passes of the target: the target's own token counts, as in SGLang's accept
length, vLLM's mean acceptance length and papers. Results store a: every metric `*_acc_len`, `best_metric`, margins,
losses. A difference of two lengths is the same number in both.
"""

from __future__ import annotations

import re

SYMBOL = "τ"
NAME = f"acceptance length {SYMBOL}"
NOTE = f"The {NAME} counts the target's own token: 1 is what decoding without a draft gives."
STORED_NOTE = f"Stored metrics (`*_acc_len`), `best_metric` and margins count accepted draft tokens only: {SYMBOL} - 1."

_OWN_TOKEN = 1.0
_METRIC = re.compile(r"(?:eval/)?(?:rung(?P<rung>\d)_)?(?P<what>[a-z]+?)(?P<early>_t[\d.]+)?_acc_len(?P<rest>.*)")
_RUNGS = {"simulated": "1"}


def count_own_token(accepted: float) -> float:
    """Return τ of a number of accepted draft tokens per pass."""
    return _OWN_TOKEN + accepted


def format_length(accepted: float | None, digits: int = 2, none: str = "none") -> str:
    """Format accepted draft tokens per pass as τ; `none` where nothing was measured."""
    return none if accepted is None else f"{count_own_token(accepted):.{digits}f}"


def format_interval(low: float, high: float, digits: int = 2, between: str = " to ") -> str:
    """Format an interval of accepted draft tokens per pass as one of τ."""
    return f"{format_length(low, digits)}{between}{format_length(high, digits)}"


def format_change(difference: float, low: float | None = None, high: float | None = None, digits: int = 3) -> str:
    """Format a difference of two lengths, with its interval if there is one: `-0.120 (-0.300 to +0.010)`."""
    if low is None or high is None:
        return f"{difference:+z.{digits}f}"
    return f"{difference:+z.{digits}f} ({low:+z.{digits}f} to {high:+z.{digits}f})"


def name_metric(metric: str) -> str:
    """Return a stored metric's name in words: `rung3_walk_acc_len` is `walk (rung 3)`; other names as they are."""
    found = _METRIC.fullmatch(metric)
    if found is None:
        return metric
    rung = found["rung"] or _RUNGS.get(found["what"])
    rest = f"{found['early'] or ''}{found['rest']}"
    about = re.sub(r"_t(?=\d)", " at temperature ", rest).replace("_", " ").strip()
    return f"{found['what']}{'' if rung is None else f' (rung {rung})'}{', ' if about else ''}{about}"
