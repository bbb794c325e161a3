"""`EvalConfig`: target, eval set and taps of an evaluation, the key of its cached features. No torch.

Fields, their order and the split between identity and execution follow `EvalConfig` of SpecForge (pull request 639).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from os import PathLike

from draftworks.errors import ConfigError
from draftworks.storage.identity import DIGEST_LENGTH


@dataclass(frozen=True)
class EvalConfig:
    """One evaluation: a target, an eval set and a tap set.

    Attributes:
        target_revision: of a hub model; None and "" are the same.
        aux_hidden_state_layer_ids: the captured streams, in their order.
        micro_batch_size: how the evaluation is run; not part of the identity.
        cache_dir: where features are stored; not part of the identity.

    Raises:
        ConfigError: a layer id is not an integer, or a text is not a string that UTF-8 can encode.
    """

    eval_data_path: str
    target_model_path: str = ""
    target_revision: str | None = ""
    tokenizer_path: str = ""
    chat_template: str = ""
    aux_hidden_state_layer_ids: tuple[int, ...] = ()
    max_len: int = 2048
    micro_batch_size: int = 1
    cache_dir: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        ids = tuple(self.aux_hidden_state_layer_ids)
        if any(type(layer) is not int for layer in ids):
            raise ConfigError(f"aux_hidden_state_layer_ids: expected integers, found {ids}")
        object.__setattr__(self, "aux_hidden_state_layer_ids", ids)
        for text in self.identity_fields():
            # Half a surrogate pair has no UTF-8 form, and JSON writes two halves as it writes their character: two
            # different configs would have the same key.
            if not isinstance(text, str) or any("\ud800" <= char <= "\udfff" for char in text):
                raise ConfigError(f"identity of an evaluation: expected strings valid in UTF-8, found {text!a}")

    def identity_fields(self) -> tuple[str, str, str, str, str, str, str]:
        """Return all values that decide the features, in SpecForge's order."""
        return (
            self.eval_data_path,
            self.target_model_path,
            self.target_revision or "",
            self.tokenizer_path,
            self.chat_template,
            ",".join(map(str, self.aux_hidden_state_layer_ids)),
            str(self.max_len),
        )

    @property
    def cache_key(self) -> str:
        """SHA-256 of the identity as JSON, 16 hex digits; equal to SpecForge's key."""
        text = json.dumps(self.identity_fields(), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]
