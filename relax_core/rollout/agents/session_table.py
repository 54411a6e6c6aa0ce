"""Holds the sessions of an endpoint by their keys, which open nothing else and end with their session."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from hashlib import blake2b
from hmac import compare_digest

from relax_core.rollout.agents.agent_session import AgentSession
from relax_core.rollout.agents.turn_request import RequestRefused

KEY_BYTES = 32
KNOWN_ENDED = 1 << 16  # ended keys that are told from unknown ones
RETRY_S = 5


class SessionTable:
    """Holds at most ``most`` open sessions. It keeps no key, only the digests of keys."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._open: dict[bytes, AgentSession] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, session: AgentSession) -> str:
        """Returns the key of a new session. Raises `RequestRefused` 429 if there are too many."""
        if len(self._open) >= self._most:
            raise RequestRefused(
                429, f"{self._most} sessions are open (endpoint.max_sessions); ask again", retry_after_s=RETRY_S
            )
        key = f"rlx-{secrets.token_urlsafe(KEY_BYTES)}"
        self._open[_digest(key)] = session
        return key

    def find(self, key: str) -> AgentSession:
        """Returns the session of a key. Raises `RequestRefused` 401 for an unknown key, 410 for an ended one."""
        digest = _digest(key)
        found = next((session for known, session in self._open.items() if compare_digest(known, digest)), None)
        if found is not None and not found.over:
            return found
        if found is not None or digest in self._ended:
            raise RequestRefused(410, "the episode of this key has ended; a new attempt has a new key", code="ended")
        raise RequestRefused(
            401,
            "no session has this key. An agent's key is in its environment (OPENAI_API_KEY, ANTHROPIC_API_KEY); send "
            "it as a bearer token, as x-api-key, or in the base URL as /s/KEY/v1",
            code="invalid_api_key",
        )

    def close(self, key: str) -> None:
        """Ends a key."""
        digest = _digest(key)
        if self._open.pop(digest, None) is not None:
            self._ended[digest] = None
            if len(self._ended) > KNOWN_ENDED:
                self._ended.popitem(last=False)


def _digest(key: str) -> bytes:
    return blake2b(key.encode(errors="surrogatepass"), digest_size=32).digest()
