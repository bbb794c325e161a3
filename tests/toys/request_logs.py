"""Logs of served requests: lines of ours, of gateways and of SGLang, and traffic with a slice that falls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from draftworks.production.requests import ServedRequest

HOUR_S = 3600.0
BEGIN = 1_780_000_000.0
PLAIN = ServedRequest(
    id="",
    time=BEGIN,
    server="front",
    engine="vllm",
    model="models/small",
    temperature=0.0,
    completion_tokens=16,
    finish="stop",
    passes=10,
    drafted=50,
    accepted=5,
)


def make_request(number: int, **changes: Any) -> ServedRequest:
    """A request with an id of its own, a second after the one before."""
    return replace(PLAIN, **{"id": f"r{number}", "time": BEGIN + number, **changes})


def make_traffic(
    chances: Mapping[str, tuple[float, float]], hours: int = 72, each: int = 20, seed: int = 0
) -> list[ServedRequest]:
    """Requests of several sources, `each` an hour of each. A proposed token is accepted with the first chance on the first day,
    with the second one afterwards; languages are drawn."""
    rng = np.random.default_rng(seed)
    made = []
    for hour in range(hours):
        for source, (first, later) in chances.items():
            for place in range(each):
                passes = int(rng.integers(5, 30))
                accepted = int(rng.binomial(passes * 3, first if hour < 24 else later))
                made.append(
                    replace(
                        PLAIN,
                        id=f"{hour}-{source}-{place}",
                        time=BEGIN + (hour + place / each) * HOUR_S,
                        source=source,
                        language=str(rng.choice(["en", "de"])),
                        passes=passes,
                        accepted=accepted,
                        drafted=passes * 5,
                        completion_tokens=1 + passes + accepted,
                    )
                )
    return made


def write_log(path: Path, requests: Iterable[ServedRequest]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(each.to_line() for each in requests))
    return path


def vllm_answer(**changes: Any) -> dict[str, Any]:
    """An answer of /v1/chat/completions with counts: 3 tokens accepted in 4 passes."""
    counted = {"acceptance_histogram": [2, 1, 1], "num_spec_steps": 4, "num_draft_tokens": 8}
    return {
        "id": "chatcmpl-1",
        "created": BEGIN,
        "model": "models/small",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 8},
        "metrics": {"speculative_decoding": counted},
        **changes,
    }


def sglang_finished(**meta: Any) -> dict[str, Any]:
    """SGLang's log line of a request that has ended: 3 tokens accepted in 4 passes."""
    counted = {"spec_verify_ct": 4, "spec_num_correct_drafts": 3, "spec_correct_drafts_histogram": [2, 1, 1]}
    known = {"id": "r", "finish_reason": {"type": "stop"}, "completion_tokens": 8, "weight_version": "default"}
    return {
        "timestamp": "2026-06-01T00:00:00+00:00",
        "event": "request.finished",
        "rid": "r",
        "obj": {"input_ids": [1, 2, 3], "sampling_params": {"temperature": 0.0}},
        "out": {"text": "x", "meta_info": {**known, **counted, **meta}},
    }


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path
