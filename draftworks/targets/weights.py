"""Checks names and shapes of a target's weights against its configuration, with transformers' loader on device meta.

Torch-free to import: torch and transformers are imported inside the functions that need them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.files import cache_json, read_json
from draftworks.storage.identity import digest, read_version
from draftworks.storage.words import list_names, shorten
from draftworks.targets.safetensors_headers import (
    INDEX,
    WEIGHTS,
    ModelFiles,
    TensorHeader,
    read_model_headers,
    strip_quantization,
)
from draftworks.targets.stored_head import compare_heads

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CHECK_REVISION = 2
"""Increased with each change that can alter a verdict; cached verdicts of other revisions are ignored."""
_SHOWN = 3
_MOST = 100
"""Characters of what others' code said."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"^(.*\.experts\.)(\d+)(\..*)$")
_MASK = re.compile(r"(?:^|\.)(?:attn|attention)\.(?:masked_)?bias$")
"""Names of causal masks, which older versions of GPT-2 and GPT-NeoX saved among the weights."""
_LOOKAHEAD_NAME = re.compile(r"(?:^|\.)(?:mtp|nextn)")
_LOOKAHEAD_LAYER = re.compile(r"^(.*\blayers\.(\d+)\.)eh_proj\.")
"""Tensor of a multi-token-prediction layer, numbered after the model's own layers (DeepSeek's and GLM's layout)."""


@dataclass(frozen=True)
class WeightsCheck:
    """Result of a successful check of a target's weights.

    Attributes:
        model_class: name of the transformers class that gave the expected names; None if names were not checked.
        tensors: number of tensors in the files.
        note: a sentence about tensors that were not checked, or by name only; None if all were checked.
    """

    model_class: str | None
    tensors: int
    note: str | None = None


@dataclass(frozen=True)
class Discrepancies:
    """Differences between the tensors in the files and those of the model that config.json describes.

    Attributes:
        missing: names of tensors of the model that the files lack.
        unexpected: names of tensors in the files that the model lacks.
        mismatched: name to shape found and shape expected.
        broken: name to reason, for tensors that cannot be assembled from those in the files.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched or self.broken)


WEIGHT_CHECKS = "weight_checks"
"""Folder of cached verdicts, in `var`."""


def check_target_weights(target: TargetFiles, backend: str = "hf", cache_folder: Path | None = None) -> WeightsCheck:
    """Compare the names and shapes in a target's files with those of its model class. Reads headers, not weights.

    Args:
        backend: capture backend; unless it is `hf`, a family that transformers does not know is a note, not an error.
        cache_folder: folder of cached verdicts, keyed by the checked content: a second check of the same is a lookup.

    Raises:
        ConfigError: the configuration is unreadable, needs code of its own or is of an unknown family; the hub cannot
            be reached.
        StoreError: a file is absent or damaged; tensors are missing, unexpected or of another shape; a stored head differs
            from the embeddings that config.json ties it to.
    """
    verdict = None if cache_folder is None else cache_folder / f"{_make_verdict_key(target, backend)}.json"
    known = _read_verdict(verdict)
    if known is not None:
        return known
    found = _check(target, backend)
    heads = compare_heads(target, download=False)
    if heads.problem is not None:
        raise StoreError(heads.problem)
    if heads.note is not None:  # no verdict yet
        return replace(found, note=heads.note if found.note is None else f"{found.note}; {heads.note}")
    if verdict is not None:
        cache_json(verdict, asdict(found))
    return found


def is_checked(target: TargetFiles, backend: str, cache_folder: Path) -> bool:
    """Whether `check_target_weights` would only read a cached verdict."""
    return _read_verdict(cache_folder / f"{_make_verdict_key(target, backend)}.json") is not None


def require_loaded(target: TargetFiles, model: PreTrainedModel, loading: Mapping[str, Any]) -> None:
    """Raise StoreError unless every weight came from the files and every tensor of the files went into the model.

    Args:
        loading: the loading info that `from_pretrained` returns with `output_loading_info=True`.
    """
    missing = set(loading["missing_keys"]) | set(loading.get("error_msgs") or ())
    mismatched = {name: (tuple(found), tuple(expected)) for name, found, expected in loading["mismatched_keys"]}
    found = _make_discrepancies(missing, set(loading["unexpected_keys"]), mismatched, {}, model.config)
    if found:
        raise StoreError(_format_discrepancies(target, found, model.config))


def _check(target: TargetFiles, backend: str) -> WeightsCheck:
    config = read_model_config(target)
    _require_plain_files(target, config)
    headers = read_model_headers(target)
    if isinstance(config, str):
        if backend == "hf":
            raise ConfigError(f"target {target.name}: {config}. Capture with another backend, or update transformers")
        return WeightsCheck(
            None,
            len(headers.tensors),
            f"names and shapes of the weights were not checked: {config}; all files are complete",
        )
    plain = strip_quantization(headers.tensors, getattr(config, "quantization_config", None))
    with silence_transformers():
        model = _build_empty_model(target, config)
        found = _compare(model, plain.tensors, plain.unshaped)
    if found:
        raise StoreError(_format_discrepancies(target, found, model.config))
    return WeightsCheck(type(model).__name__, len(headers.tensors), plain.note)


def _require_plain_files(target: TargetFiles, config: PreTrainedConfig | str) -> None:
    """Raise ConfigError if transformers would load other weights than the model's own, which other engines read."""
    elsewhere = getattr(config, "transformers_weights", None)
    if elsewhere is not None:
        raise ConfigError(
            f"target {target.name}: {target.model}/config.json: transformers_weights names {elsewhere!r}, which only "
            f"transformers would load. Remove it, and call the weights {WEIGHTS}"
        )
    if target.revision is None and (Path(target.model) / "adapter_config.json").exists():
        raise ConfigError(
            f"target {target.name}: {target.model} has an adapter_config.json: merge the adapter into its model, and "
            "give the folder of the merged model"
        )


def read_model_config(target: TargetFiles) -> PreTrainedConfig | str:
    """Return the target's configuration from transformers, or a sentence that says why it does not know the family.

    Raises:
        ConfigError: config.json is absent or unreadable, or needs code of its own.
    """
    from transformers import AutoConfig

    path = _require_config_file(target)
    try:
        config = read_json(path)
        kind = config.get("model_type")
        needs_code = "auto_map" in config
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: expected the config.json of a Hugging Face model: {error}") from error
    try:
        return AutoConfig.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if kind in CONFIG_MAPPING:
            raise ConfigError(f"{path}: {_describe_refusal(error)}") from error
        code = " without code of its own (auto_map), which is never run" if needs_code else ""
        return f"transformers {read_version('transformers')} does not know the model_type {kind!r} of {path}{code}"
    except Exception as error:  # each configuration class may raise errors of its own
        raise ConfigError(f"{path}: {_describe_refusal(error)}") from error


def _describe_refusal(error: Exception) -> str:
    """Return in one line why a configuration class refuses values; checks of several fields name the reason last."""
    lines = str(error).split("\n")
    said = " ".join(lines[-1].split())
    return shorten(said if len(lines) > 1 and said else f"{type(error).__name__}: {said}", _MOST)


def _require_config_file(target: TargetFiles) -> Path:
    found = ModelFiles(target).find_file("config.json")
    if found is None:
        raise ConfigError(f"target {target.name}: {target.model} has no config.json: expected a Hugging Face model")
    return found


def _build_empty_model(target: TargetFiles, config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model of the class that the loader chooses, on device meta and without quantisation.

    Raises:
        ConfigError: the class cannot be built with this configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    known = type(config) in AutoModelForCausalLM._model_mapping
    loader = AutoModelForCausalLM if known else AutoModelForImageTextToText
    config = _remove_quantization(config)
    try:
        with torch.device("meta"):
            return loader.from_config(config, trust_remote_code=False)
    except Exception as error:  # a model may raise any error for an inconsistent configuration
        raise ConfigError(
            f"target {target.name}: no model can be built from {target.model}/config.json: "
            + shorten(f"{type(error).__name__}: {error}", _MOST)
        ) from error


def _remove_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    if getattr(config, "quantization_config", None) is None:
        return config
    import copy

    config = copy.deepcopy(config)
    delattr(config, "quantization_config")
    return config


def _compare(model: PreTrainedModel, tensors: Mapping[str, TensorHeader], unshaped: Collection[str]) -> Discrepancies:
    """Load meta tensors into a meta model with transformers' own loader, which renames, merges and ties them."""
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    state = {name: torch.empty(header.shape, device="meta") for name, header in tensors.items()}
    mapping: list[Any] = [*get_model_conversion_mapping(model)]
    how = LoadStateDictConfig(device_map={"": "meta"}, weight_mapping=mapping, ignore_mismatched_sizes=True)
    info, _ = type(model)._load_pretrained_model(model, state, None, how)
    model.mark_tied_weights_as_initialized(info)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    mismatched = {name: (tuple(found), tuple(expected)) for name, found, expected in info.mismatched_keys}
    broken = {name: _take_last_line(error) for name, error in info.conversion_errors.items()}
    missing = set(info.missing_keys) - set(broken)
    if unshaped:
        mismatched = {name: shapes for name, shapes in mismatched.items() if 0 not in shapes[0]}
        broken = {}
    broken |= _find_expert_gaps(tensors)
    return _make_discrepancies(missing, set(info.unexpected_keys), mismatched, broken, model.config)


def _take_last_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else "no reason given"


def _find_expert_gaps(tensors: Iterable[str]) -> dict[str, str]:
    """Return stacked expert tensors with absent expert numbers, and which numbers are absent.

    The loader stacks experts in ascending order and ignores their numbers, so a gap would shift all later experts.
    """
    numbers: dict[str, set[int]] = {}
    for name in tensors:
        if matched := _EXPERT.match(name):
            numbers.setdefault(f"{matched[1]}*{matched[3]}", set()).add(int(matched[2]))
    return {
        name: f"absent numbers between 0 and {max(found)}: {list_names(sorted(set(range(max(found))) - found), _SHOWN)}"
        for name, found in numbers.items()
        if found != set(range(len(found)))
    }


def _make_discrepancies(
    missing: set[str],
    unexpected: set[str],
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    broken: Mapping[str, str],
    config: PreTrainedConfig,
) -> Discrepancies:
    """Return the discrepancies; unexpected tensors of multi-token-prediction layers and old causal masks are ignored.

    No causal language model of transformers has multi-token-prediction layers.
    """
    layers = config.get_text_config().num_hidden_layers
    lookahead = [m for m in map(_LOOKAHEAD_LAYER.match, unexpected) if m and int(m[2]) >= layers]
    prefixes = tuple(m[1] for m in lookahead)
    strangers = {
        name
        for name in unexpected
        if not (_LOOKAHEAD_NAME.search(name) or _MASK.search(name) or name.startswith(prefixes))
    }
    return Discrepancies(tuple(sorted(missing)), tuple(sorted(strangers)), dict(sorted(mismatched.items())), broken)


def _format_discrepancies(target: TargetFiles, found: Discrepancies, config: PreTrainedConfig) -> str:
    """Return one line: how many tensors differ in each way, the first of them by name, and what to do."""
    layers = config.get_text_config().num_hidden_layers
    shapes = [f"{name} is {list(a)}, expected {list(b)}" for name, (a, b) in found.mismatched.items()]
    reasons = [f"{name} ({reason})" for name, reason in found.broken.items()]
    kinds = {
        "missing": found.missing,
        "unexpected": found.unexpected,
        "of another shape": shapes,
        "not to be assembled": reasons,
    }
    first, *others = [(len(of), kind, of) for kind, of in kinds.items() if of]
    told = f"{first[0]} tensors are {first[1]}: {next(iter(first[2]))}"
    more = "".join(f"; {count} are {kind}" for count, kind, _ in others)
    return (
        f"target {target.name}: the weights in {target.model} do not belong to its config.json: {told}{more}. "
        f"{_advise(found, layers)}"
    )


def _advise(found: Discrepancies, layers: int) -> str:
    """Return advice for the user, derived from the names that differ."""
    wrapped = [name.split(".")[0] for name in found.unexpected if name.partition(".")[2] in found.missing]
    if wrapped and len(wrapped) == len(found.unexpected) and len(set(wrapped)) == 1:
        return f"All names begin with `{wrapped[0]}.`: save the model inside that wrapper"
    if any(".lora_" in name for name in found.unexpected):
        return "It is an adapter: give the model it is merged into"
    there = {int(m[1]) for m in map(_LAYER.search, (*found.unexpected, *found.missing)) if m}
    if there and min(there) >= layers and not found.missing:
        return f"config.json says num_hidden_layers {layers}, the files have {max(there) + 1}"
    return "Take both of one origin"


def _make_verdict_key(target: TargetFiles, backend: str) -> str:
    index = None
    if target.revision is None and (path := Path(target.model) / INDEX).is_file():
        index = path.read_text(encoding="utf-8", errors="replace")
    return digest([CHECK_REVISION, read_version("transformers"), target.digest, index, backend == "hf"])


def _read_verdict(verdict: Path | None) -> WeightsCheck | None:
    if verdict is None or not verdict.is_file():
        return None
    try:
        return WeightsCheck(**read_json(verdict))
    except (OSError, ValueError, TypeError):
        return None  # an unreadable verdict is computed again


@contextmanager
def silence_transformers():
    """Turn off transformers' progress bars and log; this module's own error reports the same problems once."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
