"""The registry: an error of an entry names file, key, expected and found value."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from draftworks.config.registry_files import TargetSpec, TrainingSpec
from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.config.strict_yaml import parse_spec
from draftworks.data.sources import digest_dataset, find_files
from draftworks.errors import ConfigError, DataError
from draftworks.storage.identity import FileDigests, ReadOnceDigests
from draftworks.strategies.eagle3.options import Eagle3Options, choose_eagle3_taps
from draftworks.targets.registry import ReadOnceRegistry, Registry
from draftworks.targets.resolve import resolve_target

SHIPPED = Path(__file__).resolve().parents[2] / "registry"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    for folder in ("targets", "datasets"):
        (tmp_path / folder).mkdir()
    (tmp_path / "datasets" / "chats.yaml").write_text("files: ['data/*.jsonl']\n")
    return Registry(tmp_path)


def write_target(registry: Registry, text: str, name: str = "mine") -> None:
    (registry.root / "targets" / f"{name}.yaml").write_text(text)


GOOD = "model: models/mine\ndataset: chats\nmax_length: 64\n"


def test_shipped_entries_are_valid():
    assert Registry(SHIPPED).find_problems() == []
    assert "tiny" in Registry(SHIPPED).list_targets()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "max_lenght: 3\n", r"mine.yaml: unknown key max_lenght; did you mean max_length\?"),
        (GOOD + "capture: {batch_token: 3}\n", r"unknown key capture.batch_token; did you mean batch_tokens"),
        ("model: m\ndataset: chats\nmax_length: -1\n", r"max_length: expected more than 2, found -1"),
        ("dataset: chats\n", r"key model is missing"),
        ("model: [\n", r"not valid YAML"),
        ("- a\n", r"expected a mapping of keys to values, found a list"),
        (GOOD + "revision: main\n", r"commit of 40 hex digits, found 'main'"),
        (GOOD + "strategies: {eagle: {}}\n", r"unknown strategy 'eagle': did you mean peagle or eagle3\?"),
        (GOOD + "strategies: {eagle3: {options: {ttt_len: 3}}}\n", r"unknown key ttt_len; did you mean ttt_length"),
        (
            GOOD + "strategies: {eagle3: {training: {global_batch_size: 3, micro_batch_size: 2}}}\n",
            r"strategies.eagle3.training: global_batch_size 3 is not a multiple of micro_batch_size 2 x processes 1 = 2$",
        ),
        (
            GOOD + "strategies: {dspark: {options: {markov_rank: 0}}}\n",
            r"strategies.dspark.options: markov_rank 0 leaves .*: set confidence_with_markov: false$",
        ),
        ("model: m\ndataset: ../x\n", r"not a name"),
        (GOOD + "name: other\n", r"name follows from the name of the file, mine: leave the key out"),
        (GOOD + "description: 2025-02-30\nname: 2025-02-30", r"name follows from the name of the file"),
        (GOOD + "max_length: 65\n", r"line 4: the key max_length is given twice, first in line 3"),
        (GOOD + "strategies: {eagle3: {training: {lr: .inf}}}\n", r"training.lr: expected a finite number, found inf"),
    ],
)
def test_a_bad_entry_is_refused_with_file_key_and_reason(registry: Registry, text: str, message: str):
    write_target(registry, text)
    with pytest.raises(ConfigError, match=message) as caught:
        registry.load_target("mine")
    assert "mine.yaml" in str(caught.value)
    assert len(registry.find_problems()) == 1


def test_a_date_is_a_description_like_any_other(registry: Registry):
    write_target(registry, GOOD + "description: 2025-02-30\n")
    assert registry.load_target("mine").description == "2025-02-30"


def test_targets_are_found_by_a_word_though_other_entries_are_broken(registry: Registry):
    write_target(registry, GOOD + "service: {}\n", "with")
    write_target(registry, GOOD, "without")
    write_target(registry, "service: [", "broken")
    (registry.root / "targets" / "gone.yaml").symlink_to("nowhere")
    (registry.root / "targets" / "folder.yaml").mkdir()
    assert registry.list_targets_with("service") == ["broken", "with"]


def test_what_was_read_once_stays_as_it_was(registry: Registry):
    (registry.root / "data").mkdir()
    rows = registry.root / "data" / "a.jsonl"
    rows.write_text("one")
    digests = FileDigests()
    once, files = ReadOnceRegistry(registry.root), ReadOnceDigests(digests)
    chats, version, deployment = once.load_dataset("chats"), files.of_file(rows), once.load_deployment()
    (registry.root / "datasets" / "chats.yaml").write_text("files: ['other/*.jsonl']\n")
    (registry.root / "datasets" / "later.yaml").write_text("files: ['later/*.jsonl']\n")
    (registry.root / "deployment.yaml").write_text("var: elsewhere\n")
    rows.write_text("another")
    assert (once.load_dataset("chats"), once.load_deployment()) == (chats, deployment)
    assert once.load_dataset("later").name == "later"
    assert registry.load_dataset("chats") != chats
    assert files.remembers(rows)
    assert (files.of_file(rows), digests.of_file(rows) == version) == (version, False)


def test_a_budget_may_be_without_end(registry: Registry):
    write_target(registry, GOOD + "capture: {budget_gb: .inf}\n")
    assert registry.load_target("mine").capture.budget_gb == float("inf")


def odd_files(registry: Registry) -> dict[str, str]:
    """Files that are not entries, by the message about them."""
    targets = registry.root / "targets"
    (targets / "second.yml").write_text(GOOD)
    (targets / "third.YAML").write_text(GOOD)
    (targets / "a...b.yaml").write_text(GOOD)
    (targets / "two\nlines.yaml").write_text(GOOD)
    (targets / "My Model.yaml").write_text(GOOD)
    (targets / "folder.yaml").mkdir()
    (targets / "dangling.yaml").symlink_to("nowhere")
    os.mkfifo(targets / "pipe.yaml")
    (registry.root / "deployment.yml").write_text("automation: true\n")
    (registry.root / "datasets" / "more.yml").write_text("files: [a]\n")
    return {
        "second.yml": "rename it to second.yaml",
        "third.YAML": "rename it to third.yaml",
        "a...b.yaml": "never '...'",
        "two\\nlines.yaml": "not a name",
        "My Model": "not a name",
        "folder.yaml": "found a folder",
        "dangling.yaml": "a link to nowhere",
        "pipe.yaml": "pipe",
        "deployment.yml": "only deployment.yaml and the folders",
        "more.yml": "rename it to more.yaml",
    }


def test_odd_files_are_a_line_each_and_no_other_target(registry: Registry):
    write_target(registry, GOOD)
    expected = odd_files(registry)
    (registry.root / "targets" / ".#mine.yaml").symlink_to("somebody@host:1")  # an editor's lock
    (registry.root / "targets" / "README.md").touch()
    problems = registry.find_problems()
    assert len(problems) == len(expected)
    for name, message in expected.items():
        assert [line for line in problems if name in line and message in line], name
    assert not any("\n" in line for line in problems)
    assert registry.list_targets() == ["My Model", "dangling", "folder", "mine", "pipe"]
    assert registry.load_target("mine").max_length == 64


def test_what_the_deployment_says_wrongly_is_a_problem(registry: Registry):
    (registry.root / "deployment.yaml").symlink_to("nowhere")
    assert [line for line in registry.find_problems() if "deployment.yaml: a link to nowhere" in line]


def test_an_unknown_target_names_the_closest(registry: Registry):
    write_target(registry, GOOD)
    with pytest.raises(ConfigError, match="did you mean mine"):
        registry.load_target("mein")


def test_binary_junk_is_a_clear_error(registry: Registry):
    (registry.root / "targets" / "mine.yaml").write_bytes(b"\xff\xfe\x00junk")
    with pytest.raises(ConfigError, match="mine.yaml"):
        registry.load_target("mine")


def test_a_folder_that_is_no_registry_is_said_to_be_none(tmp_path: Path):
    with pytest.raises(ConfigError, match="Is .* a registry"):
        Registry(tmp_path).list_targets()


def test_a_missing_model_directory_is_named(registry: Registry):
    write_target(registry, GOOD)
    with pytest.raises(ConfigError, match=r"models/mine is not a directory"):
        resolve_target(registry.load_target("mine"), registry, FileDigests())


@pytest.fixture
def copied(registry: Registry, tiny_folder: Path) -> Registry:
    shutil.copytree(tiny_folder, registry.root / "models" / "mine")
    write_target(registry, GOOD)
    return registry


def resolved(registry: Registry):
    return resolve_target(registry.load_target("mine"), registry, FileDigests())


def test_a_target_is_identified_by_content_not_by_place(copied: Registry, tiny_folder: Path):
    before = resolved(copied)
    write_target(copied, GOOD.replace("models/mine", str(tiny_folder)))
    moved = resolved(copied)
    assert (before.digest, before.tokenizer_digest) == (moved.digest, moved.tokenizer_digest)
    assert (before.num_layers, before.hidden_size, before.vocab_size) == (8, 128, 2048)


def test_weights_and_template_change_only_their_own_digest(copied: Registry):
    before = resolved(copied)
    weights = copied.root / "models" / "mine" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    other_weights = resolved(copied)
    assert other_weights.digest != before.digest
    assert other_weights.tokenizer_digest == before.tokenizer_digest
    (copied.root / "models" / "mine" / "chat_template.jinja").write_text("{{ messages }}")
    assert resolved(copied).tokenizer_digest != before.tokenizer_digest


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("config.json", "config.json"),
        ("model.safetensors", "expected .*safetensors"),
        ("tokenizer.json", "tokenizer.json"),
    ],
)
def test_a_missing_model_file_is_named(copied: Registry, removed: str, message: str):
    (copied.root / "models" / "mine" / removed).unlink()
    with pytest.raises(ConfigError, match=message):
        resolved(copied)


def test_a_hub_target_is_loaded_without_the_network(registry: Registry):
    for path in (SHIPPED / "examples").glob("*.yaml"):
        shutil.copy(path, registry.root / "targets")
        spec = registry.load_target(path.stem)
        assert spec.is_hub
        assert spec.dataset in {found.stem for found in (SHIPPED / "datasets").iterdir()}
    assert registry.load_target("qwen3-8b").model == "Qwen/Qwen3-8B"


def test_the_streamed_example_is_a_deployment_whose_features_stream():
    example = Registry(SHIPPED / "examples" / "streamed")
    target = example.load_target("tiny")
    assert target.streaming is not None
    assert example.resolve_path(target.model) == SHIPPED / "models" / "tiny"
    assert example.resolve_var_folder() != Registry(SHIPPED).resolve_var_folder()
    corpus = find_files(example.load_dataset(target.dataset).files, example.root)
    assert [path.resolve() for path in corpus] == [SHIPPED / "models" / "tiny" / "corpus.parquet"]


def test_the_example_of_data_that_still_comes_is_a_deployment_of_its_own():
    example = Registry(SHIPPED / "examples" / "arriving")
    assert example.load_target("tiny").arrives
    assert example.resolve_var_folder() / "rows.jsonl" == example.resolve_path(example.load_dataset("growing").files[0])


def test_a_dataset_without_files_says_which_pattern_found_nothing(registry: Registry):
    with pytest.raises(DataError, match=r"'data/\*.jsonl' matches no file"):
        find_files(registry.load_dataset("chats").files, registry.root)


def test_a_dataset_version_is_its_content(registry: Registry):
    folder = registry.root / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text("1")
    spec = registry.load_dataset("chats")
    before = digest_dataset(spec, registry.root, FileDigests())
    (folder / "a.jsonl").rename(folder / "b.jsonl")
    assert digest_dataset(spec, registry.root, FileDigests()) == before
    (folder / "c.jsonl").write_text("2")
    assert digest_dataset(spec, registry.root, FileDigests()) != before


def test_default_taps_are_the_references_and_in_a_shallow_target_those_that_it_has():
    assert [tap.hf_index for tap in choose_eagle3_taps(36, Eagle3Options())] == [2, 18, 33]
    shallow = {layers: [tap.hf_index for tap in choose_eagle3_taps(layers, Eagle3Options())] for layers in range(1, 8)}
    assert shallow == {1: [0], 2: [1], 3: [1, 2], 4: [1, 2, 3], 5: [1, 2, 4], 6: [1, 3, 5], 7: [2, 3, 4]}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 8], r"\[8\] outside 0..7"),
        ([1, 1, 2], "collide"),
        ([3, 2, 1], "ascending"),
    ],
)
def test_bad_layer_ids_are_refused(ids: list[int], message: str):
    with pytest.raises(ConfigError, match=message):
        choose_eagle3_taps(8, Eagle3Options(layer_ids=ids))


def test_every_strategy_says_which_features_it_needs():
    for name in list_strategies():
        strategy = resolve_strategy(name)
        features = strategy.list_features(36, strategy.parse_options({}, where="test"))
        assert ("last" in features) == strategy.uses_last_hidden
        assert len(set(features)) == len(features) > 0


def test_how_a_global_batch_is_cut_is_no_identity():
    one = TrainingSpec(global_batch_size=8, micro_batch_size=8, processes=1)
    two = TrainingSpec(global_batch_size=8, micro_batch_size=2, processes=2)
    assert one.to_identity() == two.to_identity()
    assert one.to_identity() != TrainingSpec(global_batch_size=16).to_identity()


def test_several_problems_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        parse_spec(TargetSpec, {"name": "x", "dataset": "y", "wrong": 1}, where="here")
    assert len(str(caught.value).splitlines()) == 2
