"""Checks that a target satisfies its strategies: taps, vocabulary, options, exports, quantized weights. Torch-free.

The checks run before any expensive work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from draftworks.config.draft_options import find_embedding_scale, read_draft_config
from draftworks.config.exports import ExportSettings
from draftworks.config.features import StreamFollower, StreamSteps, require_one_schedule
from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import VOCAB_FILE, TargetFiles
from draftworks.config.strategies import StrategyOptions, StrategySpec, TargetSizes, resolve_strategy
from draftworks.config.trackers import require_tensorboard, require_trackers
from draftworks.errors import ConfigError, StoreError
from draftworks.preflight.findings import Findings
from draftworks.preflight.machine import runs_here
from draftworks.sglang.layers import check_capture, read_architecture, refuse_on_cpu, to_eagle3_ids
from draftworks.storage.identity import read_version
from draftworks.storage.words import shorten, suggest_or_list
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import read_text_config
from draftworks.targets.safetensors_headers import explain_unprobable, read_quantization
from draftworks.targets.training_data import name_target_in_errors, resolve_draft_vocab_size
from draftworks.targets.weights import read_model_config, silence_transformers
from draftworks.vllm.models import check_capture as check_vllm_capture

SGLANG_EAGLE3 = "sglang_eagle3"


@dataclass(frozen=True)
class UnmetRequirements:
    """What a model does not satisfy.

    Attributes:
        problems: a line for each.
        unsound: strategies whose own options are among them, of which no draft can be built or exported.
    """

    problems: tuple[str, ...] = ()
    unsound: frozenset[str] = frozenset()


def check_requirements(target: TargetSpec, files: TargetFiles, registry: Registry) -> None:
    """Raise ConfigError, a line for each problem, if the model does not satisfy its strategies (`find_unmet`)."""
    found = find_unmet(target, files, registry)
    if found.problems:
        raise ConfigError("\n".join(found.problems))


def find_unmet(target: TargetSpec, files: TargetFiles, registry: Registry) -> UnmetRequirements:
    """Return all that the model does not satisfy of its strategies, and what of a `start_from` draft does not fit its own."""
    findings = Findings()
    with findings.collect_errors():
        _check_serving(target)
    with findings.collect_errors():
        refuse_on_cpu(target, files)
    where, capture = f"target {target.name}", target.capture
    if capture.software == "sglang" and capture.starts_engine:
        with findings.collect_errors():
            check_capture(where, read_architecture(files), capture.server.args)
    if capture.software == "vllm":
        with findings.collect_errors():
            check_vllm_capture(where, read_architecture(files), read_text_config(files))
    with findings.collect_errors():
        _check_probe(target, files)
    unsound = {name for name in target.strategies if not _is_sound(target, name, files, registry, findings)}
    with findings.collect_errors():
        _check_shared_stream(target)
    with findings.collect_errors():
        _check_vocabulary(target, files)
    return UnmetRequirements(tuple(findings.errors), frozenset(unsound))


def _check_vocabulary(target: TargetSpec, files: TargetFiles) -> None:
    size = resolve_draft_vocab_size(target)
    if size is not None and size > files.vocab_size:
        raise ConfigError(
            f"target {target.name}: draft_vocab_size {size} is larger than the model's vocabulary of {files.vocab_size}. "
            f"Set options.draft_vocab_size to at most that"
        )


def _is_sound(target: TargetSpec, name: str, files: TargetFiles, registry: Registry, findings: Findings) -> bool:
    """Report what one strategy's entry asks of the model in vain; return whether its draft can be built and exported."""
    entry, strategy = target.strategies[name], resolve_strategy(name)
    where = f"target {target.name}: strategies.{name}"
    options: StrategyOptions | None = None
    before = len(findings.errors)
    with findings.collect_errors(), name_target_in_errors(target):
        options = strategy.parse_options(entry.options, where=name)
        strategy.taps(files.num_layers, options)
    sizes = TargetSizes(files.num_layers, files.hidden_size, files.vocab_size, target.max_length)
    if strategy.check is not None and options is not None:
        with findings.collect_errors(), name_target_in_errors(target):
            strategy.check(options, sizes)
    size = getattr(options, "draft_vocab_size", None) if strategy.uses_vocab_mapping else None
    if options is not None and len(findings.errors) == before:
        with findings.collect_errors():
            _check_export(strategy, options, files, entry.export, f"{where}.export")
        with findings.collect_errors():
            _check_served_taps(target, files, name, entry.export)
        if entry.start_from is not None:
            with findings.collect_errors():
                folder = registry.resolve_path(entry.start_from)
                check_start_from(folder, strategy, options, files, f"{where}.start_from")
    sound = len(findings.errors) == before and (size is None or size <= files.vocab_size)
    with findings.collect_errors():
        require_tensorboard(entry.training.tensorboard, f"{where}.training.tensorboard")
    with findings.collect_errors():
        require_trackers(entry.training.trackers, f"{where}.training.trackers")
    with findings.collect_errors():
        _check_watermark(target, name, entry.training.global_batch_size)
    if options is not None:
        _check_training(target, name, options, findings)
    return sound


def _check_training(target: TargetSpec, name: str, options: StrategyOptions, findings: Findings) -> None:
    """Report settings of a training that its options do not allow."""
    training = target.strategies[name].training
    if training.device == "cpu" and getattr(options, "attention", None) == "flex":
        findings.error(
            f"target {target.name}: {name}: attention flex has no gradients on a CPU, and training.device is cpu: "
            "set options.attention to sdpa or auto"
        )
    if training.pack_tokens is not None:
        with findings.collect_errors():
            resolve_strategy(name).check_packing(options, f"target {target.name}: strategies.{name}.training")


def _check_probe(target: TargetSpec, files: TargetFiles) -> None:
    """Raise ConfigError if what the engine captures can be compared with nothing, and the entry does not allow that."""
    reason = "" if target.capture.allow_unprobed else explain_unprobable(files, target.capture.server.args)
    if reason:
        raise ConfigError(
            f"target {target.name}: what is captured cannot be compared with the target's weights: {reason}. Allow it: "
            "capture.allow_unprobed: true"
        )


def _check_watermark(target: TargetSpec, name: str, global_batch_size: int) -> None:
    """Raise ConfigError if producers may not be as far ahead as one optimizer step needs."""
    samples = None if target.streaming is None else target.streaming.watermark.samples
    if samples is not None and samples < global_batch_size:
        raise ConfigError(
            f"target {target.name}: streaming.watermark.samples is {samples}, expected at least the global batch of {name}, "
            f"{global_batch_size}, for which its trainer would wait. Raise it, or lower global_batch_size"
        )


def _check_shared_stream(target: TargetSpec) -> None:
    """Raise ConfigError if strategies that are to follow one stream take different samples at a step."""
    if target.streaming is None or not target.streaming.share:
        return
    with name_target_in_errors(target):
        require_one_schedule(
            [
                StreamFollower(
                    name=name,
                    streams=[],
                    steps=StreamSteps(
                        global_batch_size=entry.training.global_batch_size, seed=entry.training.seed, total_steps=0
                    ),
                )
                for name, entry in target.strategies.items()
            ]
        )


def _check_served_taps(target: TargetSpec, files: TargetFiles, name: str, export: ExportSettings) -> None:
    """Raise ConfigError for an EAGLE-3 draft that SGLang could only serve with other taps than it is trained on."""
    written = [made.name for made in resolve_strategy(name).exports]
    if SGLANG_EAGLE3 not in (written if export.formats is None else export.formats):
        return
    options = resolve_strategy(name).parse_options(
        target.strategies[name].options, where=f"target {target.name}: {name}"
    )
    with name_target_in_errors(target):
        to_eagle3_ids(resolve_strategy(name).taps(files.num_layers, options), read_architecture(files))


def _check_serving(target: TargetSpec) -> None:
    """Raise ConfigError if no strategy of the target writes the serving format.

    Without this check its absence would be noticed only after all other work.
    """
    wanted = target.evaluation.serving.format
    known = [made.name for name in target.strategies for made in resolve_strategy(name).exports]
    if wanted is not None and wanted not in known:
        raise ConfigError(
            f"target {target.name}: evaluation.serving.format: no export format {wanted}; {suggest_or_list(wanted, known)}"
        )


def _check_export(
    strategy: StrategySpec, options: StrategyOptions, files: TargetFiles, settings: ExportSettings, where: str
) -> None:
    """Raise ConfigError if a requested format cannot hold the draft, or, without `formats`, if no format can.

    A draft without any export has to be requested with an empty `formats`.
    """
    refused = strategy.find_refusals(options, strategy.taps(files.num_layers, options), settings.formats)
    exports = [strategy.export(name) for name in settings.formats or ()]
    if any(export.uses_unscaled_embeddings for export in exports):
        scale = find_embedding_scale(read_text_config(files).get("model_type"), files.hidden_size)
        refused |= {export.name: why for export in exports if (why := export.find_embedding_refusal(scale))}
    useless = settings.formats is None and bool(refused) and len(refused) == len(strategy.usual_exports)
    if refused and (useless or settings.formats is not None):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise ConfigError(f"{where}: it cannot be written as {reasons}. Train without it, or set other formats")


def check_start_from(
    folder: Path, strategy: StrategySpec, options: StrategyOptions, files: TargetFiles, where: str
) -> None:
    """Raise ConfigError if a training with these options cannot begin with the draft in a folder."""
    try:
        found = read_draft_config(folder)
    except StoreError as error:
        raise ConfigError(f"{where}: {error}. `draftworks import` makes a draft of a peer's checkpoint") from error
    if found.strategy != strategy.name:
        raise ConfigError(f"{where}: {folder}: expected a draft of {strategy.name}, found one of {found.strategy}")
    former = strategy.parse_options(found.draft.get("options", {}), where=str(folder))
    wanted = {"hidden_size": files.hidden_size, "vocab_size": files.vocab_size, **options.select_structural()}
    given = {**found.draft, **former.select_structural()}
    if strategy.uses_vocab_mapping:
        wanted["draft_vocab_size"] = options.model_dump()["draft_vocab_size"]
    wanted |= {key: value for key, value in _list_inputs(strategy, options, files).items() if key in found.draft}
    wrong = [
        f"{key}: expected {value}, found {given.get(key)}" for key, value in wanted.items() if given.get(key) != value
    ]
    if wrong:
        raise ConfigError(f"{where}: {folder}: {'; '.join(wrong)}")
    if strategy.uses_vocab_mapping and not (folder / VOCAB_FILE).is_file():
        raise ConfigError(f"{where}: {folder}: {VOCAB_FILE} is missing. Import the draft again")


def _list_inputs(strategy: StrategySpec, options: StrategyOptions, files: TargetFiles) -> dict[str, object]:
    """Return what a draft of these options reads, under the keys of a draft's config."""
    inputs: dict[str, object] = {"feature_names": list(strategy.list_features(files.num_layers, options))}
    if "mask_token_id" in type(options).model_fields:
        chosen = options.model_dump()["mask_token_id"]
        inputs["mask_token_id"] = files.vocab_size - 1 if chosen is None else chosen
    return inputs


_MODULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("fp8", "mxfp8", "mxfp4", "bitnet"), ("accelerate",)),
    "aqlm": ("aqlm", "accelerate"),
    "auto-round": ("auto_round",),
    "awq": ("gptqmodel", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed_tensors",),
    "eetq": ("kernels", "accelerate"),
    "fbgemm_fp8": ("fbgemm_gpu", "accelerate"),
    "fp_quant": ("fp_quant",),
    "gptq": ("optimum", "gptqmodel"),
    "higgs": ("flute", "fast_hadamard_transform", "accelerate"),
    "hqq": ("hqq",),
    "quark": ("quark",),
    "sinq": ("sinq",),
    "spqr": ("spqr_quant", "accelerate"),
    "torchao": ("torchao",),
    "vptq": ("vptq", "accelerate"),
}
"""Modules without which transformers 5.23 loads no checkpoint of a method (`validate_environment` of its quantizers).
It is asked itself too, but names one at a time."""
_PACKAGES = {"quark": "amd-quark", "flute": "flute-kernel"}
"""Packages whose name is not their module's."""
_OF_SGLANG = frozenset(
    (
        *("fp8", "mxfp8", "mxfp4", "blockwise_int8", "modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mixed"),
        *("w8a8_int8", "w8a8_fp8", "w4afp8", "awq", "gptq", "bitsandbytes", "gguf", "compressed-tensors", "quark"),
        *("auto-round", "petit_nvfp4", "modelslim"),
    )
)
"""Methods that SGLang 0.5.23 loads (`sglang/srt/layers/quantization/__init__.py`)."""


@dataclass(frozen=True)
class _Obstacle:
    """Why a checkpoint cannot be loaded, and what removes that, if anything does."""

    reason: str
    remedy: str | None = None

    def describe(self, alternative: str) -> str:
        return f"{self.reason}: {alternative if self.remedy is None else f'{self.remedy}, or {alternative}'}"


def check_quantizer(target: TargetSpec, files: TargetFiles, registry: Registry, findings: Findings) -> None:
    """Check that a quantised target can be loaded where it has to: by the engine of capture, and by rung 4's."""
    method, backend = read_quantization(files), target.capture.backend
    if not method:
        return
    where = f"target {target.name}"
    obstacle = _find_obstacle(method, files) if backend == "hf" or target.evaluation.loop.prompts else None
    other = "backend sglang, which loads it" if method in _OF_SGLANG else "another backend"
    if obstacle is not None and backend == "hf":
        told = obstacle.describe(f"use {other}")
        _choose(target, registry, findings, "capture")(f"{where}: capture.backend hf: {told}")
    if obstacle is not None and target.evaluation.loop.prompts:
        told = obstacle.describe("set evaluation.loop.prompts: 0")
        _choose(target, registry, findings, "evaluate")(f"{where}: evaluation.loop: {told}")
    if target.capture.software == "sglang" and target.capture.starts_engine and method not in _OF_SGLANG:
        findings.warning(
            f"{where}: capture.backend {backend}: quantised ({method}), which SGLang 0.5.23 does not know: use backend hf, or the "
            "checkpoint without quantisation"
        )


def _find_obstacle(method: str, files: TargetFiles) -> _Obstacle | None:
    """Return why transformers cannot load the checkpoint here; None if it can."""
    given = f"quantised ({method})"
    missing = [name for name in _MODULES.get(method, ()) if find_spec(name) is None]
    if missing:
        packages = " ".join(_PACKAGES.get(name, name.replace("_", "-")) for name in missing)
        return _Obstacle(f"{given}, which needs {', '.join(missing)}", f"pip install {packages}")
    told = _ask_transformers(files)
    return None if told is None else _Obstacle(f"{given}; transformers {read_version('transformers')} {told}")


def _ask_transformers(files: TargetFiles) -> str | None:
    """Return what transformers has against loading the checkpoint on this machine; None if nothing."""
    config = read_model_config(files)
    if isinstance(config, str):
        return None  # another check says that the family is unknown
    from transformers.quantizers.auto import get_hf_quantizer

    try:
        with silence_transformers():
            quantizer = get_hf_quantizer(copy.deepcopy(config), None, None, True, {})[0]
    except Exception as error:  # each quantizer raises errors of its own
        return f"says: {shorten(' '.join(str(error).split()), 80) or type(error).__name__}"
    if quantizer is None and getattr(config, "quantization_config", None) is not None:
        return "does not know it, and would take packed weights for plain ones"
    return None


def _choose(target: TargetSpec, registry: Registry, findings: Findings, program: str) -> Callable[[str], None]:
    """Return how to report what is missing: as an error where the program's jobs run on this machine."""
    return findings.error if runs_here(target, registry, program) else findings.warning
