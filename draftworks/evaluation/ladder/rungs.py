"""Explanations of the rungs of the acceptance ladder, for reports and model cards. Imports nothing."""

from __future__ import annotations

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
