"""What `plan --measure` found out: lengths of answers to sampled prompts, and how fast they were made. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.planning.estimates import Estimate
from draftworks.planning.lengths import ConversationSize
from draftworks.storage.files import publish_file, read_json
from draftworks.storage.identity import digest
from draftworks.storage.names import require_name

FOLDER = "measurements"
SCHEMA = 1


@dataclass(frozen=True)
class Speed:
    """Tokens of a piece of work, and the seconds that it took."""

    tokens: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class MeasuredSample:
    """Answers to a few prompts of a target's data.

    Attributes:
        identity: of what decides them, see `identify_sample`.
        made_at: seconds since the epoch.
        asked: prompts; `finished` of them have all of their answers.
        start_s: seconds until the engine could answer.
        answers, capture: by a job of one process; None where nothing was made.
    """

    identity: Mapping[str, Any]
    made_at: float
    asked: int
    finished: int
    size: ConversationSize
    start_s: float
    answers: Speed | None
    capture: Speed | None


def identify_sample(
    target: TargetSpec, files: TargetFiles, data: str | None, responses: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what decides the answers to a sample of a target's prompts, and how they are made.

    Args:
        data: content digest of the training data.
        responses: options that decide the answers.
    """
    return {
        "target": files.digest,
        "tokenizer": files.tokenizer_digest,
        "data": data,
        "responses": dict(responses),
        "max_length": target.max_length,
        "engine": target.capture.engine,
        "compute_dtype": target.capture.compute_dtype,
    }


def locate_sample(var: Path, identity: Mapping[str, Any]) -> Path:
    return var / FOLDER / require_name(identity["target"]) / f"{digest(dict(identity))}.json"


def save_sample(path: Path, found: MeasuredSample) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with publish_file(path) as staging:
        staging.write_text(json.dumps({"schema": SCHEMA, **asdict(found)}, indent=1))


def list_samples(var: Path, weights: str) -> list[MeasuredSample]:
    """Return what was measured with a target's weights, newest first; what cannot be read counts as not measured."""
    found = list(_read_all(var / FOLDER / require_name(weights)))
    return sorted(found, key=lambda each: -each.made_at)


def _read_all(folder: Path) -> Iterator[MeasuredSample]:
    for path in sorted(folder.glob("*.json")):
        try:
            read = read_json(path)
            if read["schema"] == SCHEMA:
                yield _parse(read)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the next measurement replaces it


def _parse(read: Mapping[str, Any]) -> MeasuredSample:
    sizes = {name: Estimate.from_json(read["size"][name]) for name in ("samples", "tokens", "generated")}
    speeds = [None if read[name] is None else Speed(**read[name]) for name in ("answers", "capture")]
    return MeasuredSample(
        identity=dict(read["identity"]),
        made_at=float(read["made_at"]),
        asked=int(read["asked"]),
        finished=int(read["finished"]),
        size=ConversationSize(**sizes),
        start_s=float(read["start_s"]),
        answers=speeds[0],
        capture=speeds[1],
    )


def add_unfinished(
    finished: ConversationSize | None, share: float, made: float, prompt: float, most: float
) -> ConversationSize:
    """Return the size of all sampled conversations where time ended before some were answered.

    Those have at least what was made of them, and at most what their limits allow; half of that and the mean of the finished
    ones is taken.

    Args:
        finished: mean of those that are answered; None if none is.
        share: of the conversations that are answered.
        made: tokens that were generated, of one conversation.
        prompt: tokens that a conversation asks with.
        most: tokens of a conversation's answers.
    """
    if finished is not None and share >= 1.0:
        return finished
    known = finished or ConversationSize(*(Estimate.exactly(each) for each in (1.0, prompt + made, made)))
    rest = 1.0 - share
    most = max(most, known.generated.value, made)

    def extend(mean: Estimate, limit: float) -> Estimate:
        value = share * mean.value + rest * (mean.value + limit) / 2
        low = share * mean.low + rest * min(made, mean.low)
        return Estimate(min(low, value), value, max(share * mean.high + rest * limit, value))

    return ConversationSize(
        known.samples,
        extend(known.tokens, max(prompt + most, known.tokens.value)),
        extend(known.generated, most),
    )
