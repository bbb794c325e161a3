"""Resolves a target's registry entry to files with digests. Torch-free; only a hub target uses the network."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.storage.files import read_json
from draftworks.storage.hub import fetch_hub_file
from draftworks.storage.identity import FileDigests, digest
from draftworks.storage.words import list_fitting, suggest
from draftworks.targets.gguf_model import read_gguf_sizes
from draftworks.targets.gguf_store import find_converted, identify_gguf, locate_gguf, names_gguf
from draftworks.targets.registry import Registry

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NEEDED = ("max_position_embeddings", "num_hidden_layers", "hidden_size", "vocab_size")
_SHAPE = (*_NEEDED, "num_attention_heads")
GENERATION_CONFIG = "generation_config.json"
"""Names the tokens that end an answer, so its digest is part of the tokenizer's, although it lies in the model's
folder."""


_MAX = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1 << 20,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
}
"""Upper bounds beyond any real model; without them a draft would be built layer by layer until memory runs out."""


def resolve_target(spec: TargetSpec, registry: Registry, digests: FileDigests) -> TargetFiles:
    """Locate model and tokenizer, digest them, and read the shape of the model from its config.json.

    A directory is identified by the content of config.json and its safetensors files, a hub model by id and commit, a GGUF
    file by the directory that it was dequantised into. The tokenizer's digest also covers the model's
    generation_config.json, which names the tokens that end an answer.

    Raises:
        ConfigError: a path that is absent or not a model directory, a hub id that cannot be read, a config without the
            usual fields, or a `max_length` beyond the model's context.
        NotConvertedError: a GGUF file that is not dequantised yet.
    """
    if names_gguf(spec):
        model = str(find_converted(spec, registry, digests))
    else:
        model = _locate(spec.model, spec.revision, registry, f"target {spec.name}: model")
    tokenizer, tokenizer_revision = model, spec.revision
    if spec.tokenizer:
        tokenizer_revision = spec.tokenizer_revision
        tokenizer = _locate(spec.tokenizer, tokenizer_revision, registry, f"target {spec.name}: tokenizer")
    template = _locate_template(spec, registry)
    config = _complete_config(spec, model)
    context = _require_integer(config, model, "max_position_embeddings")
    if spec.max_length > context:
        raise ConfigError(
            f"target {spec.name}: max_length {spec.max_length} is longer than the model's context of {context} tokens "
            f"({model}). Lower max_length"
        )
    return TargetFiles(
        name=spec.name,
        model=model,
        revision=spec.revision,
        tokenizer=tokenizer,
        tokenizer_revision=tokenizer_revision,
        chat_template=None if template is None else str(template),
        digest=_digest_weights(model, spec.revision, digests),
        tokenizer_digest=digest(
            [
                _digest_tokenizer(tokenizer, tokenizer_revision, template, digests),
                _digest_generation_config(model, spec.revision, digests),
            ]
        ),
        digests=None if digests.cache_file is None else digests.cache_file.absolute(),
        num_layers=_require_integer(config, model, "num_hidden_layers"),
        hidden_size=_require_integer(config, model, "hidden_size"),
        vocab_size=_require_integer(config, model, "vocab_size"),
        context=context,
        num_heads=_read_num_heads(config),
    )


def identify_inputs(spec: TargetSpec, registry: Registry, digests: FileDigests) -> list[str | None]:
    """Return digests of a target's model and tokenizer; of a GGUF file its own, which is known before it is dequantised.

    Raises:
        ConfigError: as `resolve_target`.
    """
    if not names_gguf(spec):
        files = resolve_target(spec, registry, digests)
        return [files.digest, files.tokenizer_digest]
    template, tokenizer = _locate_template(spec, registry), None
    if spec.tokenizer:
        folder = _locate(spec.tokenizer, spec.tokenizer_revision, registry, f"target {spec.name}: tokenizer")
        tokenizer = _digest_tokenizer(folder, spec.tokenizer_revision, None, digests)
    return [identify_gguf(spec, registry, digests), tokenizer, None if template is None else digests.of_file(template)]


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a target's model that its config.json names; `vocab_size` is None where it is not known without more."""

    num_layers: int
    hidden_size: int
    vocab_size: int | None = None


def read_shape(spec: TargetSpec, registry: Registry) -> TargetShape:
    """Return the sizes of a target's model, without reading its weights.

    Raises:
        ConfigError: a path that is absent or not a model directory, or a config without the usual fields.
        StoreError: a GGUF file that cannot be read.
    """
    where = f"target {spec.name}: model"
    if names_gguf(spec):
        sizes = read_gguf_sizes(locate_gguf(spec.model, registry, where))
        return TargetShape(sizes.num_layers, sizes.hidden_size, sizes.vocab_size)
    model = _locate(spec.model, spec.revision, registry, where)
    config = _complete_config(spec, model)
    return TargetShape(
        num_layers=_require_integer(config, model, "num_hidden_layers"),
        hidden_size=_require_integer(config, model, "hidden_size"),
        vocab_size=found if isinstance(found := config.get("vocab_size"), int) and found > 0 else None,
    )


def read_num_layers(spec: TargetSpec, registry: Registry) -> int:
    """Return the number of decoder layers of a target's model. Raises as `read_shape`."""
    return read_shape(spec, registry).num_layers


def _complete_config(spec: TargetSpec, model: str) -> dict[str, Any]:
    config = _read_model_config(model, spec.revision, f"target {spec.name}")
    if any(config.get(name) is None for name in _NEEDED):  # only if needed: imports transformers, even in a sensor
        config = _fill_defaults(model, spec.revision, config)
    return config


def digest_target_files(target: TargetFiles) -> TargetFiles:
    """Return the target with the current digests of its files; a file with an up-to-date cached digest is not reread.

    Raises:
        ConfigError: files are absent.
    """
    digests = FileDigests(target.digests)
    template = None if target.chat_template is None else Path(target.chat_template)
    tokenizer = _digest_tokenizer(target.tokenizer, target.tokenizer_revision, template, digests)
    return target.model_copy(
        update={
            "digest": _digest_weights(target.model, target.revision, digests),
            "tokenizer_digest": digest([tokenizer, _digest_generation_config(target.model, target.revision, digests)]),
        }
    )


def require_unchanged(target: TargetFiles) -> None:
    """Raise ConfigError if a target's files changed after its run file was written; programs call it before loading.

    Raises:
        ConfigError: weights, config.json, tokenizer, template or generation_config.json changed or are absent.
    """
    found = digest_target_files(target)
    parts = {
        f"weights and config.json in {target.model}": (target.digest, found.digest),
        f"tokenizer, template and generation_config.json of {target.tokenizer}": (
            target.tokenizer_digest,
            found.tokenizer_digest,
        ),
    }
    for what, (expected, actual) in parts.items():
        if expected != actual:
            raise ConfigError(
                f"target {target.name}: {what} are not those that the run file was written for: expected digest "
                f"{expected}, found {actual}. They were replaced later, or the run file is wrong: materialize "
                "target_model again, and what depends on it"
            )


def _locate(model: str, revision: str | None, registry: Registry, where: str) -> str:
    folder = registry.resolve_path(model)
    if revision is not None:
        if folder.is_dir():
            raise ConfigError(
                f"{where}: {folder} is a directory: leave `revision` out, or, if the id of that name is meant, move the "
                "directory away"
            )
        return model
    if not folder.is_dir():
        raise ConfigError(f"{where}: {folder} is not a directory; {_advise_model(model, folder)}")
    return str(folder)


def _advise_model(model: str, folder: Path) -> str:
    """Return what a path that is no directory may mean: one beside it, an id without its commit, or neither."""
    beside = [each.name for each in folder.parent.iterdir() if each.is_dir()] if folder.parent.is_dir() else []
    hint = suggest(folder.name, beside)
    if hint or beside:
        return hint or f"in {folder.parent.name} there are: {list_fitting(sorted(beside))}"
    if _HUB_ID.fullmatch(model):
        return "for the Hugging Face id, add `revision`: its commit, 40 hex digits"
    return "give one, relative to the registry, or a Hugging Face id with `revision`, its commit"


def _locate_template(spec: TargetSpec, registry: Registry) -> Path | None:
    if spec.chat_template is None:
        return None
    path = registry.resolve_path(spec.chat_template)
    if not path.is_file():
        raise ConfigError(f"target {spec.name}: chat_template: {path} is not a file")
    return path


def read_text_config(target: TargetFiles) -> dict[str, Any]:
    """Return the fields of the language model in config.json, without the defaults of its class. Raises ConfigError."""
    return _read_model_config(target.model, target.revision, f"target {target.name}")


def _read_model_config(model: str, revision: str | None, where: str) -> dict[str, Any]:
    path = Path(model) / "config.json"
    if revision is not None:
        found = fetch_hub_file(where, model, revision, "config.json")
        if found is None:
            raise ConfigError(
                f"{where}: {model} at commit {revision} has no config.json: expected a Hugging Face model"
            )
        path = found
    try:
        config = read_json(path)
    except FileNotFoundError:
        adapter = (Path(model) / "adapter_config.json").exists()
        advice = "it is an adapter: merge it into its model" if adapter else "expected a Hugging Face model"
        raise ConfigError(f"{path}: no such file; {advice}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected the config.json of a Hugging Face model: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object, the config.json of a Hugging Face model")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ConfigError(f"{path}: expected a JSON object as text_config, found {type(text).__name__}")
    return text


def _fill_defaults(model: str, revision: str | None, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the defaults of its transformers class for absent fields of `_SHAPE`.

    The files of some multimodal models, such as Gemma 3, give only those fields of the text model that differ from the
    default.
    """
    from transformers import AutoConfig

    try:
        text = AutoConfig.from_pretrained(model, revision=revision or "main", trust_remote_code=False).get_text_config()
    except Exception:  # each configuration class may raise errors of its own
        return config  # the caller reports each missing field by name
    return {name: getattr(text, name, None) for name in _SHAPE} | {k: v for k, v in config.items() if v is not None}


def _require_integer(config: dict[str, Any], model: str, name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{model}/config.json: expected an integer {name}, found {value!r}")
    if not 1 <= value <= _MAX[name]:
        found = f"{value:,}" if abs(value) < 10**30 else "a number of more than 30 digits"
        raise ConfigError(f"{model}/config.json: expected {name} from 1 to {_MAX[name]:,}, found {found}")
    return value


def _read_num_heads(config: dict[str, Any]) -> int | None:
    found = config.get("num_attention_heads")
    return found if isinstance(found, int) and found > 0 else None


def _digest_weights(model: str, revision: str | None, digests: FileDigests) -> str:
    """Return the digest of a model: over its directory's config.json and safetensors files, or over hub id and commit.

    Raises:
        ConfigError: the directory has no safetensors file or no config.json.
    """
    if revision is not None:
        return digest(["hub", model, revision])
    names = sorted(os.listdir(model)) if os.path.isdir(model) else []
    weights = [Path(model, name) for name in names if name.endswith(".safetensors")]
    if not weights:
        raise ConfigError(f"{model}: expected *.safetensors weights, found none (pickled weights are not read)")
    try:
        return digest([[p.name, digests.of_file(p)] for p in [Path(model) / "config.json", *weights]])
    except OSError as error:
        raise ConfigError(f"{model}: expected config.json and readable weights: {error}") from error


def _digest_tokenizer(tokenizer: str, revision: str | None, template: Path | None, digests: FileDigests) -> str:
    override = None if template is None else digests.of_file(template)
    if revision is not None:
        return digest(["hub", tokenizer, revision, override])
    files = [Path(tokenizer) / name for name in TOKENIZER_FILES]
    present = [p for p in files if p.is_file()]
    if files[0] not in present:
        raise ConfigError(
            f"{tokenizer}: expected tokenizer.json (a fast tokenizer), found {sorted(p.name for p in present)}"
        )
    return digest([[[p.name, digests.of_file(p)] for p in present], override])


def _digest_generation_config(model: str, revision: str | None, digests: FileDigests) -> str | None:
    """Return the digest of generation_config.json (on the hub, of id and commit); None if a directory has none."""
    if revision is not None:
        return digest(["hub", model, revision])
    path = Path(model) / GENERATION_CONFIG
    return digests.of_file(path) if path.is_file() else None
