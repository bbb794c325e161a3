"""Identity and settings of the answers of a target's conversations. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from draftworks.config.registry_files import TargetSpec
from draftworks.config.responses import ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.storage.data_records import AnswersIdentity

ANSWERS_REVISION = 3
"""Increased when the same conversations give other samples: 3 asks each turn as a server does, also in mode passthrough, with
whole answers as labels, and goes on after an answer that was cut."""


def make_answers_identity(
    spec: TargetSpec, files: TargetFiles, conversations: str, part: str, responses: ResponseSpec
) -> AnswersIdentity:
    """Return the identity of a set of answered conversations.

    Args:
        conversations: content version of the prepared conversations; `part` is the part of them that is answered.
    """
    taken = AnswersIdentity(
        conversations=conversations,
        part=part,
        responses=responses.model_dump(include={"mode", "thinking"}, exclude_none=True),
        target=None,
        tokenizer=files.tokenizer_digest,
        max_length=spec.max_length,
        only_last_turn=spec.data.only_last_turn,
        revision=ANSWERS_REVISION,
    )
    if responses.mode == "passthrough":
        return taken
    answered = replace(taken, responses=responses.to_identity(), target=files.digest)
    if responses.endpoint is not None:
        return answered
    capture = spec.capture
    return replace(
        answered, compute_dtype=capture.compute_dtype, backend=capture.engine, args=capture.engine_args or None
    )


def make_greedy_settings(target: TargetSpec, kind: str) -> ResponseSpec:
    """Return the settings for answers of eval sets: greedy, by the engine of capture, with the `thinking` of the
    training data.

    Data that is tokenized already is passed through, since it has no prompts.

    Args:
        kind: of the data set, "tokens" or "conversations".
    """
    mode = "passthrough" if kind == "tokens" else "regenerate"
    return ResponseSpec(mode=mode, max_new_tokens=target.responses.max_new_tokens, thinking=target.responses.thinking)
