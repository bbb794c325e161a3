"""A target's tokenizer, chat template and configuration, from its files; nothing of a model is loaded, no code of others is run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from draftworks.config.run_files import TargetFiles
from draftworks.errors import DataError
from draftworks.storage.files import read_bytes, read_json
from draftworks.storage.words import shorten

_TYPES = ("llama", "qwen3")
"""Model types whose class in transformers takes these values as the file has them."""
_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
)
_ROPE = {"rope_type", "rope_theta"}
_BESIDE = {
    *("architectures", "attention_bias", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "hidden_act"),
    *("initializer_range", "layer_types", "max_window_layers", "mlp_bias", "pad_token_id", "pretraining_tp"),
    *("sliding_window", "transformers_version", "use_cache", "use_sliding_window"),
}
"""Keys that mean nothing to a draft."""


@dataclass(frozen=True)
class PlainConfig:
    """The values of a text model's configuration that drafts are built from, by transformers' names."""

    model_type: str
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_parameters: Mapping[str, Any]

    def get_text_config(self) -> PlainConfig:
        return self


def read_plain_config(path: Path) -> PlainConfig | None:
    """Return the configuration in a config.json; None if it takes transformers to read it, or to say what is wrong.

    To import a configuration's class takes transformers two seconds: with it come DTensor, sympy and torch's compiler.
    """
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not _says_all(found):
        return None
    return PlainConfig(**{each.name: found[each.name] for each in fields(PlainConfig)})


def _says_all(found: Mapping[str, Any]) -> bool:
    """Whether each value is there, valid, and what transformers would make of it, and nothing else is."""
    rope = found.get("rope_parameters")
    return (
        found.get("model_type") in _TYPES
        and found.keys() - _BESIDE == {each.name for each in fields(PlainConfig)}
        and all(type(found[key]) is int and found[key] > 0 for key in _SIZES)
        and found["hidden_size"] % found["num_attention_heads"] == 0
        and type(found["rms_norm_eps"]) is float
        and type(found["tie_word_embeddings"]) is bool
        and isinstance(rope, dict)
        and rope.keys() == _ROPE
        and rope["rope_type"] == "default"
        and type(rope["rope_theta"]) is float
    )


_MOST_TEMPLATE_BYTES = 4 << 20
_MOST_SAID = 100
"""Characters of what a tokenizer or template said."""


def load_tokenizer(target: TargetFiles) -> Any:
    """Return the fast tokenizer of a target. Raises DataError: files missing or unreadable, or only a slow one."""
    from transformers import AutoTokenizer

    revision = target.tokenizer_revision
    if revision is None and target.tokenizer == target.model:
        revision = target.revision
    if revision is None and not Path(target.tokenizer).is_dir():
        raise DataError(f"target {target.name}: the tokenizer's folder {target.tokenizer} does not exist")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target.tokenizer,
            config=_read_model_type(Path(target.tokenizer)),
            revision=revision,
            use_fast=True,
            trust_remote_code=False,
        )
    except Exception as error:  # whatever a broken or foreign tokenizer file raises, the remedy is the same
        raise DataError(
            f"target {target.name}: no tokenizer can be loaded from {target.tokenizer}: {first_line(error)}."
            " Expected tokenizer.json and tokenizer_config.json"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"target {target.name}: {target.tokenizer} has only a slow tokenizer ({type(tokenizer).__name__});"
            " loss masks need the character offsets of a fast one: convert it to tokenizer.json"
        )
    return tokenizer


def _read_model_type(folder: Path) -> Any:
    """Return a configuration for `AutoTokenizer` that has the model's type alone; None if it has to read the model's.

    Where tokenizer_config.json names a class, it asks the configuration for no more. The model's own class would come
    with torch's compiler, sympy and DTensor: more than a second.
    """
    plain = read_plain_config(folder / "config.json")
    try:
        named = read_json(folder / "tokenizer_config.json")
    except (OSError, ValueError):
        return None
    if plain is None or not isinstance(named, dict) or "auto_map" in named or not named.get("tokenizer_class"):
        return None
    from transformers import PreTrainedConfig

    return PreTrainedConfig.from_dict({"model_type": plain.model_type, "_name_or_path": str(folder)})


def load_template(target: TargetFiles, tokenizer: Any) -> str:
    """Return the chat template: the entry's own, else the tokenizer's. Raises DataError: unreadable, or there is none."""
    if target.chat_template is not None:
        try:
            return read_bytes(Path(target.chat_template), _MOST_TEMPLATE_BYTES).decode("utf-8")
        except (OSError, ValueError) as error:
            raise DataError(f"target {target.name}: chat template {target.chat_template}: {error}") from error
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise DataError(
            f"target {target.name}: the tokenizer in {target.tokenizer} has no chat template:"
            " set `chat_template` of the target to a Jinja file"
        ) from error


def find_eos_ids(target: TargetFiles, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that stop generation, ascending: the generation config's and the tokenizer's own."""
    found = {tokenizer.eos_token_id} - {None}
    path = Path(target.model) / "generation_config.json"
    if path.is_file():
        try:
            configured = read_json(path).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: not a JSON object: {error}") from error
        found |= set(configured if isinstance(configured, list) else [configured]) - {None}
    return tuple(sorted(found))


def first_line(error: Exception) -> str:
    """Return the first line of what a tokenizer or template said, in a user's words; the last one after a heading."""
    if "trust_remote_code" in str(error):
        return "it needs code of its own, which is never run"
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return shorten(lines[-1] if lines[0].endswith(":") else lines[0], _MOST_SAID)


class CpuTimeExceeded(BaseException):
    """The work used more CPU time than allowed. A BaseException, so that `except Exception` in the work does not catch it."""


@contextmanager
def limit_cpu_time(seconds: float) -> Iterator[None]:
    """Raise `CpuTimeExceeded` in the block after `seconds` of CPU time of this process.

    CPU time rather than wall time, so that a busy machine makes no difference. Interrupts Python code in the main thread
    only; in other threads, and on systems without this timer, there is no limit. Must not be nested.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _raise)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _raise(signum: int, frame: FrameType | None) -> NoReturn:
    raise CpuTimeExceeded
