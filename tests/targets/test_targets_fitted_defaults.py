"""Defaults become what the model and the machine can have; what an entry says never changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from draftworks.capture.engine import make_engine_identity
from draftworks.config.registry_files import TargetSpec
from draftworks.config.strategies import TargetSizes, list_strategies, resolve_strategy
from draftworks.targets.fitted_defaults import Machine, describe_fitted
from draftworks.targets.registry import Registry, apply_overrides, resolve_recipe

AVX2, AVX512_BF16, GPU = Machine(0, False, False), Machine(0, False, True), Machine(1, False, False)
SLURM = {"kind": "slurm"}


class Site:
    """A registry with one target, whose model is a config.json."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("targets", "datasets", "model"):
            (root / folder).mkdir()
        self.write_model()

    def write_model(self, **sizes: Any) -> None:
        config = {"num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256, "max_position_embeddings": 131072}
        (self.root / "model" / "config.json").write_text(json.dumps({"model_type": "llama", **config, **sizes}))

    def load(self, launcher: dict[str, Any] | None = None, **entry: Any) -> TargetSpec:
        (self.root / "deployment.yaml").write_text(yaml.safe_dump({"launcher": launcher or {}}))
        (self.root / "targets" / "t.yaml").write_text(yaml.safe_dump({"model": "model", "dataset": "d", **entry}))
        return self.registry.load_target("t")

    @property
    def registry(self) -> Registry:
        return Registry(self.root)

    def describe(self) -> list[str]:
        return describe_fitted(self.registry.read_target("t"), self.registry.load_target("t"))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def put(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr("draftworks.targets.fitted_defaults.read_machine", lambda: machine)


def dtypes(spec: TargetSpec) -> tuple[str, str]:
    return spec.capture.compute_dtype, spec.strategies["eagle3"].training.compute_dtype


SLOW = ("float32", "float32")
FAST = ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("machine", "device", "launcher", "expected"),
    [
        (AVX2, "auto", {}, SLOW),
        (AVX2, "cpu", {}, SLOW),
        (AVX2, "cuda", {}, FAST),
        (AVX512_BF16, "auto", {}, FAST),
        (AVX512_BF16, "cpu", {}, FAST),
        (GPU, "auto", {}, FAST),
        (GPU, "cpu", {}, SLOW),
        (AVX2, "auto", SLURM, FAST),
        (AVX2, "auto", {"nodes": 2}, FAST),
        (AVX2, "auto", {"programs": {"train": SLURM}}, ("float32", "bfloat16")),
        (AVX2, "auto", {"programs": {"regenerate": SLURM}}, ("bfloat16", "float32")),
    ],
)
def test_the_dtype_is_one_that_is_fast_where_the_jobs_compute(site, monkeypatch, machine, device, launcher, expected):
    put(monkeypatch, machine)
    trained = {"eagle3": {"training": {"device": device}}}
    spec = site.load(launcher, capture={"device": device}, strategies=trained)
    assert dtypes(spec) == expected
    said = [line for line in site.describe() if "compute_dtype: float32" in line]
    assert len(said) == expected.count("float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("machine", [AVX2, AVX512_BF16, GPU])
def test_a_dtype_that_an_entry_names_stands(site, monkeypatch, machine: Machine, dtype: str):
    put(monkeypatch, machine)
    trained = {"eagle3": {"training": {"compute_dtype": dtype}}}
    spec = site.load(capture={"compute_dtype": dtype}, strategies=trained)
    assert dtypes(spec) == (dtype, dtype)
    assert site.describe() == []


def test_what_a_machine_chose_is_in_every_identity_and_in_run_files(site, monkeypatch):
    """So results of two machines that choose differently are two, and neither is taken for the other."""
    found = {}
    for machine, said in ((AVX2, "float32"), (AVX512_BF16, "bfloat16")):
        put(monkeypatch, machine)
        chosen = site.load()
        put(monkeypatch, GPU)
        written = site.load(
            capture={"compute_dtype": said}, strategies={"eagle3": {"training": {"compute_dtype": said}}}
        )
        entry = apply_overrides("t", resolve_strategy("eagle3"), chosen.strategies["eagle3"], {}, {})
        assert entry.training.model_dump()["compute_dtype"] == said
        assert TargetSpec.model_validate(chosen.model_dump()) == chosen
        found[said] = resolve_recipe(chosen, site.registry)
        assert found[said] == resolve_recipe(written, site.registry)
        assert make_engine_identity(chosen.capture) == make_engine_identity(written.capture)
    assert found["float32"]["capture"] != found["bfloat16"]["capture"]
    assert found["float32"]["strategies"] != found["bfloat16"]["strategies"]


@pytest.mark.parametrize(
    ("machine", "serving", "expected"),
    [
        (AVX512_BF16, {"prompts": 2}, "float32"),
        (GPU, {"prompts": 2, "device": "cpu"}, "float32"),
        (GPU, {"prompts": 2}, "bfloat16"),
        (AVX2, {"prompts": 2, "device": "cuda"}, "bfloat16"),
        (AVX2, {"prompts": 2, "compute_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_a_draft_is_served_on_a_processor_in_the_only_dtype_that_sglang_has(
    site, monkeypatch, machine: Machine, serving: dict[str, Any], expected: str
):
    put(monkeypatch, machine)
    assert site.load(evaluation={"serving": serving}).evaluation.serving.compute_dtype == expected


def test_a_server_elsewhere_keeps_its_dtype(site, monkeypatch):
    put(monkeypatch, AVX2)
    server = {"backend": "sglang_server", "server": {"url": "http://h:1", "spool": "/tmp"}}
    assert dtypes(site.load(capture=server)) == ("bfloat16", "float32")


def test_a_deployment_that_is_wrong_chooses_nothing(site, monkeypatch):
    put(monkeypatch, AVX2)
    site.load()
    (site.root / "deployment.yaml").write_text("launcher: {kind: nothing}")
    assert dtypes(site.registry.load_target("t")) == FAST


SIZES = {"layers": st.integers(1, 12), "hidden": st.integers(8, 96), "vocabulary": st.integers(16, 40_000)}


@given(**SIZES, length=st.integers(8, 4096), strategy=st.sampled_from(list_strategies()))
def test_defaults_of_every_strategy_fit_every_target(
    layers: int, hidden: int, vocabulary: int, length: int, strategy: str
):
    """Neither the strategy's own check nor its taps refuse what nobody asked for."""
    spec, target = resolve_strategy(strategy), TargetSizes(layers, hidden, vocabulary, length)
    options = spec.parse_options(spec.fit_defaults({}, target), where="t")
    taps = [tap.hf_index for tap in spec.taps(layers, options)]
    assert sorted(set(taps)) == taps
    assert all(0 <= tap < layers for tap in taps)
    if spec.check is not None:
        spec.check(options, target)
    if spec.uses_vocab_mapping:
        assert options.draft_vocab_size <= vocabulary
    if strategy == "lilicorr":
        assert options.resolve_lattice_size(hidden) % options.lattice_heads == 0


@given(strategy=st.sampled_from(list_strategies()), layers=st.integers(7, 100))
def test_defaults_of_a_model_of_usual_size_are_those_that_the_strategy_names(strategy: str, layers: int):
    """Their identities are those of drafts from before."""
    spec = resolve_strategy(strategy)
    target = TargetSizes(layers, 4096, 128256, 2048)
    assert spec.fit_defaults({}, target) == {}
    given_ids = {"layer_ids": [1], "seed": 3}
    assert spec.fit_defaults(given_ids, TargetSizes(2, 4096, 128256, 2048)) == given_ids


@given(**SIZES, strategy=st.sampled_from(list_strategies()))
def test_an_option_that_an_entry_names_is_never_changed(layers: int, hidden: int, vocabulary: int, strategy: str):
    spec, target = resolve_strategy(strategy), TargetSizes(layers, hidden, vocabulary, 16)
    named = {name: spec.options.model_fields[name].default for name in spec.fitted}
    assert spec.fit_defaults(named, target) == named


def test_a_small_model_lowers_the_defaults_of_its_entry_and_nothing_that_it_names(site, monkeypatch):
    put(monkeypatch, GPU)
    site.write_model(num_hidden_layers=4, vocab_size=600, max_position_embeddings=512)
    spec = site.load(strategies={"eagle3": {}, "dflash": {"options": {"block_size": 4}}})
    assert (spec.max_length, spec.responses.max_new_tokens) == (512, 256)
    assert spec.strategies["eagle3"].options == {"draft_vocab_size": 600}
    assert spec.strategies["dflash"].options == {"block_size": 4, "num_taps": 3}
    assert len(site.describe()) == 4
    named = site.load(max_length=2048, strategies={"eagle3": {"options": {"draft_vocab_size": 32000}}})
    assert named.max_length == 2048
    assert named.strategies["eagle3"].options == {"draft_vocab_size": 32000}
    assert site.describe() == []


@pytest.mark.parametrize(
    "text", [None, "[]", "{", '{"num_hidden_layers": "4"}', '{"text_config": [], "vocab_size": 9}']
)
def test_a_model_whose_sizes_are_not_known_changes_nothing(site, monkeypatch, text: str | None):
    put(monkeypatch, GPU)
    (site.root / "model" / "config.json").unlink()
    if text is not None:
        (site.root / "model" / "config.json").write_text(text)
    assert site.load() == site.registry.read_target("t")


def test_a_wrapper_has_the_sizes_of_its_text_model(site, monkeypatch):
    put(monkeypatch, GPU)
    text = {"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 700, "max_position_embeddings": 4096}
    site.write_model(text_config=text)
    assert site.load().strategies["eagle3"].options == {"draft_vocab_size": 700}


def test_published_models_have_the_defaults_that_strategies_name(site, monkeypatch):
    put(monkeypatch, GPU)
    published = sorted((Path(__file__).parents[1] / "preflight" / "published").glob("*.json"))
    assert len(published) > 30
    for path in published:
        (site.root / "model" / "config.json").write_text(path.read_text())
        spec = site.load(strategies={name: {} for name in list_strategies()})
        assert site.describe() == [], path.stem
        assert spec == site.registry.read_target("t")
