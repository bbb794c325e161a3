"""Why a server accepts almost nothing, or far less than was promised, without an error: causes that can be read.

Each cause was met by users (vLLM #49559, SGLang #21272 and #31674, miles #1926). A server goes on with a draft of another
kind, with other layers, or with weights that a synchronisation emptied: every answer is right, and every proposal is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.config.draft_options import CONFIG, WEIGHTS
from draftworks.errors import ConfigError, StoreError
from draftworks.evaluation.acceptance_length import SYMBOL, format_length
from draftworks.export.conventions import DRAFT_FOLDER, PROVENANCE, SERVER_COMMANDS
from draftworks.production.serving_facts import ServingFacts
from draftworks.service.register import ServedDraft
from draftworks.sglang.speculation import Speculation
from draftworks.storage.artifacts import RECORD
from draftworks.storage.files import parse_json, read_json
from draftworks.storage.words import list_names
from draftworks.vllm.speculation import RUNNER_V2, parse_speculation

ABOUT_NOTHING = 0.05
"""Accepted tokens per pass below which a draft is of no use, whatever was promised."""
FAR_BELOW = 0.5
"""Of what was promised."""
LEAST_PASSES = 100
FEWER_TOKENS = 0.75
EMPTY = 0.005
_SAMPLE_BYTES, _MAX_HEADER_BYTES = 64 << 10, 16 << 20
_MAX_CONFIG_BYTES = 1 << 20


def is_silent(accepted: float, passes: int, promised: float | None) -> bool:
    """Whether so many accepted tokens per pass are about none, or far below the promise, over enough passes to say so."""
    limit = max(ABOUT_NOTHING, 0.0 if promised is None else FAR_BELOW * promised)
    return passes >= LEAST_PASSES and accepted < limit


@dataclass(frozen=True)
class DraftOnDisk:
    """The draft in service, with what its export says of how it is to be served.

    Attributes:
        configs: config.json of each export format.
        commands: command line of each format by the engine that reads it.
    """

    digest: str
    target_digest: str
    configs: Mapping[str, Any]
    commands: Mapping[str, Mapping[str, str]]

    @classmethod
    def read(cls, var: Path, draft: ServedDraft) -> DraftOnDisk:
        """Read them from the export. Raises StoreError if it is not there any more."""
        folder = var / draft.path
        try:
            made = read_json(folder / RECORD)["summary"]["formats"]
            configs = {name: found for name in draft.formats if (found := read_config(folder / name)) is not None}
            engines = {
                name: {
                    engine: made[name]["commands"][said]
                    for engine, said in SERVER_COMMANDS.items()
                    if said in made[name]["commands"]
                }
                for name in draft.formats
            }
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise StoreError(f"draft {draft.digest}: its export {folder} cannot be read: {error}") from None
        return cls(draft.digest, draft.target_digest, configs, engines)

    def list_served(self, engine: str) -> dict[str, _Served]:
        """Return how an engine is to serve each format that it reads."""
        found = {name: _read_command(engine, made[engine]) for name, made in self.commands.items() if engine in made}
        return {name: served for name, served in found.items() if served is not None}


@dataclass(frozen=True)
class _Served:
    method: str
    draft_tokens: int | None


def _read_command(engine: str, command: str) -> _Served | None:
    """Return what a command line says of drafting; None if it says nothing."""
    try:
        if engine == "sglang":
            options = Speculation.of_command(command, DRAFT_FOLDER, Path())
            tokens = options.options.get("--speculative-num-draft-tokens", "")
            return _Served(options.algorithm, int(tokens) - 1 if tokens.isdecimal() else None)
        config = parse_speculation(command, DRAFT_FOLDER, Path())
        tokens = config.get("num_speculative_tokens")
        return _Served(str(config["method"]), tokens if isinstance(tokens, int) else None)
    except (ConfigError, KeyError):
        return None


@dataclass(frozen=True)
class Evidence:
    """What is known of a window of traffic of one server.

    Attributes:
        accepted: accepted tokens per pass.
        proposed: proposed tokens per pass; None if it is not counted.
        draft: the draft in service; None without one.
        served: config.json in the folder that the server says it drafts with; None if that cannot be read from here.
    """

    accepted: float
    passes: int
    promised: float | None
    facts: ServingFacts
    draft: DraftOnDisk | None
    proposed: float | None = None
    served: Mapping[str, Any] | None = None

    @classmethod
    def gather(
        cls, accepted: float, passes: int, promised: float | None, facts: ServingFacts, draft: DraftOnDisk | None,
        proposed: float | None = None,
    ) -> Evidence:  # fmt: skip
        """Return the evidence, with the configuration of the draft that is served, if its folder is on this machine."""
        served = None if facts.draft is None else read_config(Path(facts.draft))
        return cls(accepted, passes, promised, facts, draft, proposed, served)

    @property
    def form(self) -> str | None:
        """Export format of the draft in service that the server has; None if it is none of them, or not known."""
        if self.draft is None or self.served is None:
            return None
        return next((name for name, config in self.draft.configs.items() if config == self.served), None)


@dataclass(frozen=True)
class LikelyCause:
    """Why a draft may accept so little.

    Attributes:
        name: of the row of `CAUSES`.
        seen: what was read that says so.
        remedy: what to do.
    """

    name: str
    seen: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}. {self.remedy}"


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the config.json of a draft's folder; None if there is none, or it cannot be read from here."""
    try:
        found = read_json(folder / CONFIG, _MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def find_causes(evidence: Evidence) -> list[LikelyCause]:
    """Return the likely causes, the surest first; one that says what to measure where nothing that is read explains it."""
    found = [
        LikelyCause(cause.name, seen, cause.remedy) for cause in CAUSES if (seen := cause.find(evidence)) is not None
    ]
    if found:
        return found
    last = EMPTIED if evidence.accepted < EMPTY else UNEXPLAINED
    return [LikelyCause(last.name, last.find(evidence) or "", last.remedy)]


def describe(evidence: Evidence) -> str:
    """Return what a server accepts beside what was promised, in words."""
    beside = "" if evidence.promised is None else f", where {format_length(evidence.promised, 2)} was promised"
    return f"{SYMBOL} {format_length(evidence.accepted, 2)} over {evidence.passes:,} passes{beside}"


@dataclass(frozen=True)
class Cause:
    """A row of the table: `find` returns what speaks for it, or None."""

    name: str
    find: Callable[[Evidence], str | None]
    remedy: str


def _find_other_method(evidence: Evidence) -> str | None:
    facts = evidence.facts
    if evidence.draft is None or facts.engine is None or facts.method is None:
        return None
    known = [served.method for served in evidence.draft.list_served(facts.engine).values()]
    if not known or facts.method.lower() in map(str.lower, known):
        return None
    return f"the server drafts by {facts.method}, this draft is for {list_names(sorted(set(known)))}"


def _find_other_layers(evidence: Evidence) -> str | None:
    """A draft loads and runs on the streams of any layers of the right number."""
    if evidence.draft is None or evidence.served is None or evidence.form is not None:
        return None
    rest = _drop_layers(evidence.served)
    form = next((name for name, each in evidence.draft.configs.items() if _drop_layers(each) == rest), None)
    return None if form is None else f"{evidence.facts.draft}/{CONFIG} names other layers than the export {form}"


def _drop_layers(config: Any) -> Any:
    """Return a config.json without the keys that name layers."""
    if not isinstance(config, dict):
        return config
    return {name: _drop_layers(value) for name, value in config.items() if not name.endswith("layer_ids")}


def _find_other_form(evidence: Evidence) -> str | None:
    """The same weights, in a file that this engine may read otherwise."""
    engine, form = evidence.facts.engine, evidence.form
    if evidence.draft is None or engine is None or form is None or engine in evidence.draft.commands[form]:
        return None
    right = [name for name, made in evidence.draft.commands.items() if engine in made]
    return f"it serves the form {form}, which is not for it; its own: {list_names(right)}"


def _find_stale_draft(evidence: Evidence) -> str | None:
    if evidence.draft is None or evidence.served is None or evidence.form is not None:
        return None
    origin = evidence.served.get(PROVENANCE)
    made_for = origin.get("target_digest") if isinstance(origin, Mapping) else None
    if made_for is None or made_for == evidence.draft.target_digest:
        return None
    return f"it was trained for the target's weights {made_for}, in service is one for {evidence.draft.target_digest}"


def _find_other_draft(evidence: Evidence) -> str | None:
    if evidence.draft is None or evidence.served is None or evidence.form is not None:
        return None
    if _find_stale_draft(evidence) or _find_other_layers(evidence):
        return None
    return f"{evidence.facts.draft} has another config.json than the exports of {evidence.draft.digest}"


def _find_exchanged(evidence: Evidence) -> str | None:
    version = evidence.facts.weight_version
    if evidence.draft is None or version in (None, "default", evidence.draft.digest):
        return None
    return f"its weights were exchanged for version {version}, in service is {evidence.draft.digest}"


def _find_zeros(evidence: Evidence) -> str | None:
    path = None if evidence.facts.draft is None else Path(evidence.facts.draft) / WEIGHTS
    if path is None or evidence.served is None or not _is_empty(path):
        return None
    return f"half of the matrices in {path}, or more, are zeros"


def _is_empty(path: Path) -> bool:
    """Whether half of the matrices in a file of tensors, or more, begin with zeros; embeddings often stay in such a file."""
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = parse_json(stream.read(size)) if size <= _MAX_HEADER_BYTES else {}
            entries = [each for each in header.values() if _is_matrix(each)]
            empty = 0
            for each in entries:
                begin, end = each["data_offsets"]
                stream.seek(8 + size + begin)
                empty += not any(stream.read(min(end - begin, _SAMPLE_BYTES)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    return bool(entries) and 2 * empty >= len(entries)


def _is_matrix(entry: Any) -> bool:
    return isinstance(entry, dict) and len(entry.get("shape") or ()) > 1 and "F" in str(entry.get("dtype"))


def _find_runner(evidence: Evidence) -> str | None:
    classes = [str(name).lower() for name in (evidence.served or {}).get("architectures") or ()]
    if evidence.facts.runner != "v1" or not any(kind in name for kind in RUNNER_V2 for name in classes):
        return None
    return f"{list_names(classes)} is drafted by vLLM's Model Runner V2 alone, and the server was told to use V1"


def _find_fewer_tokens(evidence: Evidence) -> str | None:
    facts = evidence.facts
    if evidence.draft is None or facts.engine is None:
        return None
    every = evidence.draft.list_served(facts.engine)
    planned = [served.draft_tokens for served in every.values() if served.draft_tokens]
    proposed = evidence.proposed if evidence.proposed is not None else facts.draft_tokens
    if not planned or proposed is None or proposed >= FEWER_TOKENS * min(planned):
        return None
    return f"it proposes {proposed:.1f} tokens a pass, and {min(planned)} were measured"


_COMMAND = "Start it by the command in the export's README"
CAUSES: Sequence[Cause] = (
    Cause("another way of drafting", _find_other_method, _COMMAND),
    Cause("other layers", _find_other_layers, _COMMAND),
    Cause("another engine's form", _find_other_form, _COMMAND),
    Cause("another model runner", _find_runner, "Unset VLLM_USE_V2_MODEL_RUNNER"),
    Cause("empty weights", _find_zeros, "Export or exchange it again, and look at what wrote that file"),
    Cause("a stale draft", _find_stale_draft, "Serve the draft in service: draftworks in-service --folder"),
    Cause("another draft", _find_other_draft, "Serve the draft in service: draftworks in-service --folder"),
    Cause("exchanged weights", _find_exchanged, "Exchange the draft again, after every update of the target too"),
    Cause("fewer proposals", _find_fewer_tokens, "Look at the server's depth by batch size or confidence"),
)
"""In the order in which they are told."""
EMPTIED = Cause(
    "weights in the server's memory",
    lambda evidence: "not one proposal is accepted, and all that can be read of the server is as it should be",
    "Restart it: a synchronisation of weights may have emptied the draft, or renamed what it loads",
)
UNEXPLAINED = Cause(
    "nothing that can be read",
    lambda evidence: "way, form, weights and depth are those of the draft in service, as far as the server says them",
    "Compare chat template, weights of the target, and prompts: draftworks run evaluate, and observe with logged requests",
)
