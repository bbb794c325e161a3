"""The acceptance length τ, the only form in which people are shown what a target accepts. Torch-free.

τ = 1 + a, with a = accepted draft tokens / passes of the target: the target's own token counts, as in SGLang's accept
length, vLLM's mean acceptance length and papers. Results store a: every metric `*_acc_len`, `best_metric`, margins,
losses. A difference of two lengths is the same number in both.
"""

from __future__ import annotations

import re

from draftworks.config.decoding import Decoding

SYMBOL = "τ"
NAME = f"acceptance length {SYMBOL}"
NOTE = f"The {NAME} counts the target's own token: 1 is what decoding without a draft gives."
STORED_NOTE = f"Stored metrics (`*_acc_len`), `best_metric` and margins count accepted draft tokens only: {SYMBOL} - 1."

_OWN_TOKEN = 1.0
_DECODING = r"_t[\d.]+(?:_k\d+)?(?:_p[\d.]+)?(?:_[a-z_]+?)?"
_METRIC = re.compile(rf"(?:eval/)?(?:rung(?P<rung>\d)_)?(?P<what>[a-z]+?)(?P<early>{_DECODING})?_acc_len(?P<rest>.*)")
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
    about = _describe(rest) if re.fullmatch(_DECODING, rest) else rest.replace("_", " ").strip()
    return f"{found['what']}{'' if rung is None else f' (rung {rung})'}{', ' if about else ''}{about}"


def _describe(suffix: str) -> str:
    """Return the decoding at the end of a metric's name in words: `at temperature 0.7, top-k 20, by rejection`."""
    decoding = Decoding.parse(suffix.removeprefix("_"))
    if decoding.rule is None:
        return "at temperature 0"
    return f"at {decoding.describe()}, by {decoding.rule}"


RUNG_MEANINGS = {
    0: "How often the draft's token at a position is the target's own argmax, teacher-forced.",
    1: "a1 + a1 a2 + a1 a2 a3 + … of these accuracies: what would be accepted if positions were independent; "
    "at a temperature, of the probabilities that a server accepts the draft's token by the rule that the metric names, over "
    "the contexts of the stored answers.",
    2: "The accepted prefix of a proposal, counted jointly, at every position of the answers.",
    3: "The walk: greedy serving replayed from stored features. It visits only the positions at which a server asks the "
    "draft, jumping by what was accepted.",
    4: "Decoding with draft and target for real, beside plain decoding; at a temperature, tokens are accepted by the rule that "
    "the metric names. The speed-up is of one prompt at a time on the "
    "machine that evaluated.",
}
