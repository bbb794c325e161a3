"""Logged requests as servers and gateways write them, and data sets of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftworks.config.registry_files import DatasetSpec

SECRETS = {
    "private_key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA7\n-----END RSA PRIVATE KEY-----",
    "api_key": "sk-proj-" + "a1B2" * 8,
    "stripe_key": "sk_" + "live_" + "a1B2" * 6,
    "aws_access_key": "AKIA" + "A1B2" * 4,
    "aws_secret_key": "aws_secret_access_key = " + "a1B2" * 10,
    "github_token": "ghp_" + "a1B2" * 9,
    "gitlab_token": "glpat-" + "a1B2" * 5,
    "hugging_face_token": "hf_" + "a1B2" * 9,
    "google_api_key": "AIza" + "a1B2c" * 7,
    "slack_token": "xoxb-" + "1234567890-" * 2 + "a1B2" * 5,
    "json_web_token": "eyJ" + "a1B2" * 4 + ".eyJ" + "a1B2" * 4 + "." + "a1B2" * 4,
    "bearer_token": "Authorization: Bearer " + "a1B2" * 6,
    "password_in_url": "postgres://user:hunter22@db.example/app",
}
"""One of every kind; none was ever valid."""


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def body(*questions: str, **more: Any) -> dict[str, Any]:
    """A chat request: the questions with an answer between each two."""
    messages: list[dict[str, Any]] = []
    for question in questions:
        messages += [message("user", question), message("assistant", f"answer to {question}")]
    return {"model": "toy", "messages": messages[:-1], **more}


def answer(text: str = "fine") -> dict[str, Any]:
    return {"created": 1_700_000_000, "choices": [{"message": message("assistant", text)}]}


def shapes_of(request: dict[str, Any]) -> dict[str, Any]:
    """The same request in every shape that is read."""
    return {
        "body": request,
        "body and answer": {**request, "response": answer()},
        "body and choices": {**request, **answer()},
        "request and response": {"request": request, "response": answer()},
        "nested bodies": {"request": {"body": request}, "response": {"status_code": 200, "body": answer()}},
        "batch": {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": request},
        "sglang": {"timestamp": "2026-01-31T12:00:00", "event": "request.received.openai", "obj": request},
    }


def write_log(path: Path, rows: Sequence[Any], prefix: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{prefix}{line}\n" for line in lines), encoding="utf-8")


def served(files: str = "*.log", **options: Any) -> DatasetSpec:
    return DatasetSpec.model_validate({"name": "served", "files": [files], "format": "served", "served": options})
