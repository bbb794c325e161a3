"""Seals of headers: 64 hex digits that detect alteration and, with a shared secret, forgery."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from draftworks.errors import ConfigError, StoreError

MIN_SECRET_BYTES = 16


@dataclass(frozen=True)
class AuthPolicy:
    """Whose files are accepted.

    With a secret, only what was sealed with the same secret (HMAC-SHA256); without, a seal is a plain SHA-256, which
    detects damage but no forgery. The secret is never written or printed.
    """

    secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.secret is not None and len(self.secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"the shared secret of a feature store has {len(self.secret)} bytes, expected at least "
                f"{MIN_SECRET_BYTES}: a shorter one can be guessed from a seal. Make one with: openssl rand -hex 32"
            )

    @property
    def kind(self) -> str:
        return "sha256" if self.secret is None else "hmac-sha256"

    def seal(self, content: bytes) -> str:
        if self.secret is None:
            return hashlib.sha256(content).hexdigest()
        return hmac.new(self.secret, content, hashlib.sha256).hexdigest()

    def require(self, kind: str, seal: str, content: bytes, where: str) -> None:
        """Raise StoreError unless `content` has this policy's seal.

        Args:
            kind: the seal that `content` claims to have; it decides the wording of the error only.
            where: what was read, for the error.
        """
        if hmac.compare_digest(self.seal(content).encode(), seal.encode()):
            return
        if kind == self.kind:
            reason = "the seal does not match: it is altered"
            reason += "" if self.secret is None else ", or was sealed with another secret"
        elif self.secret is None:
            reason = "it is sealed with a shared secret, and none was given: open the store with `AuthPolicy(secret)`"
        else:
            reason = "it is not sealed with the shared secret that was given: expected hmac-sha256, found " + repr(kind)
        raise StoreError(f"{where} is refused: {reason}")
