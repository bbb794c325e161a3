"""Names of what a user could have instead of a draft, for nothing, and what each is. Standard library only."""

from __future__ import annotations

NO_DRAFT, BIGRAM = "no_draft", "bigram"
LOOKUP, LOOKUP_VLLM = "lookup", "lookup_vllm"
SUFFIX, SUFFIX_CACHED = "suffix", "suffix_cached"

RIVAL_MEANINGS = {
    NO_DRAFT: "decoding without a draft",
    BIGRAM: "a table of what most often followed a token in the training answers",
    LOOKUP: "prompt lookup: the last 3, else 2, else 1 tokens are found in the request at the most recent place, and what "
    "followed there is proposed",
    LOOKUP_VLLM: "the same by the defaults of vLLM 0.32 (`method: ngram`): 5 tokens only, at the earliest place",
    SUFFIX: "suffix decoding over the request (vLLM 0.32's `method: suffix` with `suffix_decoding_max_cached_requests: 0`)",
    SUFFIX_CACHED: "the same over the training answers too, the last 10,000, which stand for answers given before",
}
"""All propose from tokens alone, as many per pass as the draft. The request is prompt and answer so far."""
