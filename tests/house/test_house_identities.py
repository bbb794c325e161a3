"""Which settings decide a result: field by field, for every model of the registry and every strategy's options.

A field that is added to one of these models has to be entered here, on one side or the other: left out of an identity by
mistake, it would make two different results count as one; taken in by mistake, it would make everything again for nothing.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from other_values import another
from pydantic import BaseModel

from draftworks.config.base import Spec
from draftworks.config.capture import CaptureSpec, CustomEngineSpec, ServerSpec, SGLangSpec, StartedServer, VLLMSpec
from draftworks.config.data import EndpointSpec, MixSpec, RedactionSpec, ResponseSpec, ServedSpec
from draftworks.config.exports import ExportSettings, GgufSettings
from draftworks.config.features import (
    BucketAccess,
    ControlSpec,
    FeaturesSpec,
    ObjectStorageSpec,
    PublishSpec,
    StreamingSpec,
    StreamStoreSpec,
    UntilSpec,
    WatermarkSpec,
)
from draftworks.config.launchers import KINDS
from draftworks.config.observation import ObservationSpec, ObservedServerSpec, RequestsSpec
from draftworks.config.operations import (
    BudgetSpec,
    DecisionSpec,
    DeploymentSpec,
    NotificationSpec,
    PricesSpec,
    RetentionSpec,
)
from draftworks.config.registry_files import (
    DatasetSpec,
    DataSpec,
    EvalSpec,
    EvaluationSpec,
    LoopSpec,
    StrategyEntry,
    TargetSpec,
    TrainingSpec,
)
from draftworks.config.service import ComparisonSpec, GateSpec, HookSpec, ServiceSpec, ServingSpec, SwapSpec
from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.config.trackers import MlflowSpec, TrackersSpec, TrackioSpec, WandbSpec
from draftworks.targets.registry import Registry, resolve_recipe

ARRIVAL = StreamingSpec(order="arrival", until=UntilSpec(steps=1), vocabulary_samples=9)
OF_ARRIVAL = {"order", "source", "until", "vocabulary_samples"}
HOW_IT_STREAMS = {
    *("watermark", "keep", "free_at", "timeout_s", "lease_s"),
    *("control", "control_folder", "store", "share"),
}
OTHER_STREAMS = {
    "watermark": WatermarkSpec(samples=8),
    "control": ControlSpec(),
    "store": StreamStoreSpec(kind="mooncake"),
}
SERVER = CaptureSpec(backend="sglang_server")
CUSTOM = CustomEngineSpec(entry_point="a:b", engine="mine")
REDACTION = RedactionSpec(command=["true"])
HOOK = HookSpec(command=["true"])
SWAP = SwapSpec(url="http://127.0.0.1:8", folder="/served")
SERVED = ObservedServerSpec(name="a", url="https://a", kind="vllm", strategy="eagle3")
LOGS = RequestsSpec(files=["logs/*.jsonl"])
ENDPOINT = EndpointSpec(base_urls=["http://127.0.0.1:1/v1"], server="vllm")


@dataclass(frozen=True)
class Settings:
    """A model whose fields decide something, or nothing.

    Attributes:
        base: what is changed, a field at a time.
        identity: of a result that was made with it.
        decides: fields that are part of it; all others have to be in `leaves`.
        values: other values of fields, where none can be told from the type.
    """

    base: Spec
    identity: Callable[[Any], Any]
    decides: set[str]
    leaves: set[str]
    values: dict[str, Any] = field(default_factory=dict)


def own(spec: Any) -> Any:
    return spec.to_identity()


def inside(parent: Spec, name: str) -> Callable[[Spec], Any]:
    """Identity of `parent` with the model under test in one of its fields."""
    return lambda spec: parent.model_copy(update={name: spec}).to_identity()


def of_target(spec: TargetSpec) -> Any:
    return resolve_recipe(spec, Registry(typing.cast(Any, None)))


def of_loop(loop: LoopSpec) -> Any:
    return EvaluationSpec(loop=loop).to_identity(("dspark",))


def of_entry(entry: StrategyEntry) -> Any:
    return of_target(TARGET.model_copy(update={"strategies": {"eagle3": entry}}))


TARGET = TargetSpec(name="t", model="m", dataset="d")
BY_CONTENT = {"model", "revision", "tokenizer", "tokenizer_revision", "chat_template", "dataset", "mix"}
"""Their files are digested: the same content under another name is the same."""

SETTINGS = [
    Settings(
        DataSpec(),
        own,
        {"only_last_turn", "held_out_share", "max_conversations", "max_rejected_share", "min_supervised_share"},
        {"workers"},
    ),
    Settings(
        TrainingSpec(pack_tokens=64),
        own,
        {
            *("global_batch_size", "epochs", "max_steps", "lr", "schedule", "warmup_ratio", "decay_ratio"),
            *("min_lr_ratio", "weight_decay", "max_grad_norm", "compute_dtype", "seed", "eval_every", "publish"),
            *("best_metric", "best_mode", "best_min_delta", "patience"),
        },
        {
            *("processes", "micro_batch_size", "pack_tokens", "pack_overlong", "device", "compile", "log_every"),
            *("save_every", "keep_checkpoints", "save_async", "tensorboard", "trackers", "shard_within"),
        },
        {"trackers": TrackersSpec(trackio=TrackioSpec())},
    ),
    Settings(
        EvaluationSpec(),
        own,
        {"draft_tokens", "loop", "confidence", "resamples", "slices"},
        {"cron", "cron_timezone", "serving"},
        {"loop": LoopSpec(prompts=3), "serving": ServingSpec(prompts=3), "cron": "0 0 * * *"},
    ),
    Settings(LoopSpec(temperatures=[0.7]), of_loop, {*LoopSpec.model_fields}, set(), {"rules": ["block"]}),
    Settings(
        ServingSpec(),
        own,
        {"prompts", "concurrency", "compute_dtype", "format", "tolerance", "server", "engines", "urls", "temperatures"},
        {"device"},
        {
            "server": StartedServer(tp_size=2),
            "engines": ["sglang", "vllm"],
            "urls": {"sglang": "http://127.0.0.1:1"},
            "temperatures": [0.6],
        },
    ),
    Settings(
        StartedServer(),
        inside(ServingSpec(), "server"),
        {"tp_size", "dp_size", "mem_fraction", "max_total_tokens", "args"},
        set(),
    ),
    Settings(
        CaptureSpec(),
        own,
        {"backend", "dtype", "storage", "compute_dtype", "custom"},
        {"server", "device", "batch_tokens", "processes", "shard_mb", "budget_gb", "max_failed_share"}
        | {"probe_gb", "allow_unprobed", "in_flight_tokens", "in_flight_mb"},
        {"custom": CUSTOM, "server": ServerSpec(tp_size=2)},
    ),
    Settings(
        CUSTOM,
        inside(CaptureSpec(backend="custom", custom=CUSTOM), "custom"),
        {"engine", "numerics"},
        {"entry_point", "options"},
        {"options": {"a": 1}},
    ),
    Settings(
        ServerSpec(),
        inside(SERVER, "server"),
        {"args"},
        {
            *("tp_size", "dp_size", "mem_fraction", "max_total_tokens", "url", "urls", "spool", "mooncake"),
            *("model", "replicas", "max_outstanding"),
        },
    ),
    Settings(
        ResponseSpec(),
        own,
        {"mode", "endpoint", "thinking", "max_new_tokens", "temperature", "top_p", "top_k", "seed"}
        | {"repetition_penalty", "continue_after_cut"},
        {"batch_size"},
        {"endpoint": ENDPOINT},
    ),
    Settings(
        ENDPOINT,
        inside(ResponseSpec(endpoint=ENDPOINT), "endpoint"),
        {"model", "server", "token_ids"},
        {"base_urls", "api_key_env", "timeout_s", "attempts", "max_outstanding"},
    ),
    Settings(
        TARGET,
        of_target,
        {"max_length", "data", "responses", "capture", "evals", "evaluation", "strategies"},
        {"name", "description", "gates", "comparison", "service", "decision", "streaming", "launcher", *BY_CONTENT}
        | {"servers", "observation"},
        {
            "servers": [SERVED],
            "observation": ObservationSpec(recent_hours=1),
            "service": ServiceSpec(),
            "decision": DecisionSpec(),
            "mix": MixSpec(datasets=["other"]),
            "gates": GateSpec(not_worse="error"),
            "comparison": ComparisonSpec(steps=1),
            "streaming": StreamingSpec(),
            "data": DataSpec(only_last_turn=True),
            "responses": ResponseSpec(seed=1),
            "capture": CaptureSpec(dtype="float32"),
            "evaluation": EvaluationSpec(resamples=100),
            "strategies": {"dflash": StrategyEntry(options={"mask_token_id": 0})},
        },
    ),
    Settings(
        StrategyEntry(),
        of_entry,
        {"options", "training", "export"},
        {"start_from"},  # by the digest of its weights
        {
            "options": {"ttt_length": 3},
            "training": TrainingSpec(lr=1.0),
            "export": ExportSettings(formats=[]),
            "start_from": None,
        },
    ),
    Settings(
        ExportSettings(formats=["gguf_eagle3"]),
        lambda export: of_entry(StrategyEntry(export=export)),
        {"formats", "dtype", "gguf"},
        set(),
        {"formats": [], "gguf": GgufSettings(quantise="q8_0")},
    ),
    Settings(
        GgufSettings(),
        lambda gguf: of_entry(StrategyEntry(export=ExportSettings(formats=["gguf_eagle3"], gguf=gguf))),
        {"pre_tokenizer", "quantise", "least_kept"},
        set(),
        {"pre_tokenizer": "gpt-2", "quantise": "q8_0"},
    ),
    Settings(
        GateSpec(),
        lambda gates: of_target(TARGET.model_copy(update={"gates": gates})),
        set(),
        {"loss_falls", "beats_baselines", "not_worse", "agrees_with_walk", "answers_finished"}
        | {"fp8_max_loss", "fp8_samples", "fp8_steps", "fp8_seeds", "fp8_ungated"},
        {"fp8_max_loss": 0.5},
    ),
    Settings(
        ComparisonSpec(),
        lambda comparison: of_target(TARGET.model_copy(update={"comparison": comparison})),
        set(),
        {"tokens", "steps", "seeds"},
        {},
    ),
    Settings(
        ServiceSpec(),
        lambda service: of_target(TARGET.model_copy(update={"service": service})),
        set(),
        {"margin", "margins", "least_prompts", "slice_margin", "automatic", "hook", "bundle", "swap"},
        {"hook": HOOK, "swap": SWAP, "margins": {"heldout": 0.01}},
    ),
    Settings(
        DecisionSpec(),
        lambda decision: of_target(TARGET.model_copy(update={"decision": decision})),
        set(),
        {"tune_margin", "retrain_margin", "least_prompts", "act", "traffic", "hold"},
    ),
    Settings(
        SERVED,
        lambda server: of_target(TARGET.model_copy(update={"servers": [server]})),
        set(),
        {"name", "url", "kind", "strategy", "model", "api_key_env", "timeout_s"},
    ),
    Settings(
        ObservationSpec(),
        lambda observation: of_target(TARGET.model_copy(update={"observation": observation})),
        set(),
        {"baseline_hours", "recent_hours", "requests"},
        {"requests": LOGS},
    ),
    Settings(
        LOGS,
        lambda logs: of_target(TARGET.model_copy(update={"observation": ObservationSpec(requests=logs)})),
        set(),
        set(RequestsSpec.model_fields),
    ),
    Settings(
        HOOK,
        lambda hook: of_target(TARGET.model_copy(update={"service": ServiceSpec().model_copy(update={"hook": hook})})),
        set(),
        {"command", "url", "api_key_env", "timeout_s", "attempts", "pause_s"},
        {"command": None, "url": "https://a", "api_key_env": "KEY"},
    ),
    Settings(
        SWAP,
        lambda swap: of_target(TARGET.model_copy(update={"service": ServiceSpec().model_copy(update={"swap": swap})})),
        set(),
        {"url", "folder", "strategy", "format", "requests", "seconds", "every_s", "timeout_s"},
        {"url": "http://127.0.0.1:9", "folder": "/other", "strategy": "eagle3", "format": "sglang_eagle3"},
    ),
    Settings(
        ServedSpec(),
        own,
        {"mask", "redaction", "on_secret", "source_field"},
        {"max_rows", "max_line_mb"},
        {"mask": ["ip"], "redaction": REDACTION, "source_field": "user", "on_secret": "refuse"},
    ),
    Settings(
        REDACTION,
        own,
        {"command", "function"},
        {"timeout_s", "rows_per_call"},
        {"command": ["false"], "function": "a:b"},
    ),
    Settings(
        StreamingSpec(),
        lambda streaming: of_target(TARGET.model_copy(update={"streaming": streaming})),
        set(),
        HOW_IT_STREAMS | OF_ARRIVAL,
        {**OTHER_STREAMS, "until": UntilSpec(steps=1)},
    ),
    Settings(
        ARRIVAL,
        lambda streaming: of_target(TARGET.model_copy(update={"streaming": streaming})),
        OF_ARRIVAL,
        HOW_IT_STREAMS,
        {**OTHER_STREAMS, "until": UntilSpec(samples=8)},
    ),
    Settings(
        UntilSpec(steps=1),
        lambda until: of_target(TARGET.model_copy(update={"streaming": ARRIVAL.model_copy(update={"until": until})})),
        {"steps", "samples", "source"},
        set(),
    ),
    Settings(
        StreamStoreSpec(),
        lambda store: of_target(TARGET.model_copy(update={"streaming": StreamingSpec(store=store)})),
        set(),
        {"kind", "host", "timeout_s"},
    ),
    Settings(
        ControlSpec(),
        lambda control: of_target(TARGET.model_copy(update={"streaming": StreamingSpec(control=control)})),
        set(),
        {"listen"},
    ),
    Settings(
        WatermarkSpec(),
        lambda watermark: of_target(TARGET.model_copy(update={"streaming": StreamingSpec(watermark=watermark)})),
        set(),
        {"samples", "bytes", "steps"},
    ),
]
OBJECT_STORAGE = {ObjectStorageSpec, BucketAccess, PublishSpec}
IDENTIFIED_BY_CONTENT = {DatasetSpec, EvalSpec, MixSpec}
"""Name files and a selection: results have digests of what is in them."""
OF_THE_INSTALLATION = {
    BudgetSpec,
    NotificationSpec,
    TrackersSpec,
    TrackioSpec,
    WandbSpec,
    MlflowSpec,
    DeploymentSpec,
    FeaturesSpec,
    PricesSpec,
    RetentionSpec,
    SGLangSpec,
    VLLMSpec,
    *KINDS.values(),
    *OBJECT_STORAGE,
}
"""Where things run and lie."""
HOW_IT_IS_COMPUTED = {"attention", "objective_chunk_blocks"}
"""Options of strategies that change a draft by rounding at most."""


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: type(settings.base).__name__)
def test_every_field_decides_a_result_or_leaves_it_alone_as_declared(settings: Settings) -> None:
    fields = set(type(settings.base).model_fields)
    assert not settings.decides & settings.leaves
    assert settings.decides | settings.leaves == fields, "a field that is new or gone: does it decide a result?"
    before = settings.identity(settings.base)
    for name in sorted(fields):
        value = settings.values[name] if name in settings.values else another(settings.base, name)
        after = settings.identity(settings.base.model_copy(update={name: value}))
        assert (after != before) == (name in settings.decides), name


@pytest.mark.parametrize("strategy", list_strategies())
def test_every_option_of_a_strategy_decides_the_draft_but_those_of_how_it_is_computed(strategy: str) -> None:
    options = resolve_strategy(strategy).options
    required = {name: 1 for name, field in options.model_fields.items() if field.is_required()}
    base = options(**required)
    for name in options.model_fields:
        changed = base.model_copy(update={name: another(base, name)})
        assert (changed.to_identity() != base.to_identity()) == (name not in HOW_IT_IS_COMPUTED), name


def test_no_model_of_the_registry_is_left_out_here() -> None:
    known = {type(settings.base) for settings in SETTINGS} | IDENTIFIED_BY_CONTENT | OF_THE_INSTALLATION
    found: set[type[BaseModel]] = set()
    for root in (TargetSpec, DatasetSpec, EvalSpec, DeploymentSpec):
        collect_models(root, found)
    assert found == known


def collect_models(annotation: Any, found: set[type[BaseModel]]) -> None:
    """Add every pydantic model that a type is made of to `found`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in found:
        found.add(annotation)
        for each in annotation.model_fields.values():
            collect_models(each.annotation, found)
    for part in typing.get_args(annotation):
        collect_models(part, found)
