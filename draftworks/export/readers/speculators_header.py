"""What the configs of all speculators exports begin with."""

from __future__ import annotations

from draftworks.export.readers.files import ExportFolder


def check_speculators_header(folder: ExportFolder, algorithm: str) -> None:
    """StoreError unless speculators 0.9.0 and vLLM find what they look at before they look at the model."""
    folder.must_be("speculators_model_type", algorithm)
    folder.must_be("speculators_config.algorithm", algorithm)
    folder.must_be("speculators_config.default_proposal_method", "greedy")
    folder.must_not_differ("tie_word_embeddings", False)
    if not folder.setting("speculators_config.verifier.name_or_path", str):
        folder.refuse("speculators_config.verifier.name_or_path", "the target's directory or hub id", "an empty string")
    if speculative_tokens(folder) < 1:
        folder.refuse(_METHODS, "at least one speculative token", "none")


def speculative_tokens(folder: ExportFolder) -> int:
    """How many tokens a server asks the draft for: vLLM reads the first proposal method."""
    methods = folder.setting(_METHODS, list)
    tokens = methods[0].get("speculative_tokens") if methods and isinstance(methods[0], dict) else None
    if not isinstance(tokens, int):
        folder.refuse(_METHODS, "a method with its number of speculative_tokens", str(methods))
    return tokens


_METHODS = "speculators_config.proposal_methods"
