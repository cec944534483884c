"""All ranks decide alike: every rank brings a message or an error, and all leave with the messages or the same error.

An error on one rank must not leave the others waiting in a collective that it will never join. So local work is
wrapped by `attempt`, which returns the error instead of raising it, and the next `agree` shares it.
"""

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from onecurve.checkpoint import errors
from onecurve.checkpoint.errors import CheckpointError, SaveFailed

T = TypeVar("T")
Message = tuple[dict[str, Any], bytes]


class RankGroup(Protocol):
    """The part of a mesh that checkpoints use."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def all_gather_bytes(self, payload: bytes) -> list[bytes]: ...


class Alone:
    """A mesh of one: for tools that read checkpoints in a single process."""

    rank = 0
    world = 1

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return [payload]


def pack(header: dict[str, Any], blob: bytes = b"") -> bytes:
    """`header` as JSON and `blob` in one message: 4 bytes of length, little-endian, the JSON, the blob."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(4, "little") + text + blob


def unpack(payload: bytes) -> Message:
    size = 4 + int.from_bytes(payload[:4], "little")
    return json.loads(payload[4:size]), payload[size:]


def attempt(
    work: Callable[[], T], to_error: Callable[[BaseException], CheckpointError]
) -> tuple[T | None, CheckpointError | None]:
    """Run `work`; its result and None, or None and its exception as `to_error` names it (never raises an Exception)."""
    try:
        return work(), None
    except Exception as cause:
        error = to_error(cause)
        if error is not cause:
            error.__cause__ = cause
        return None, error


def agree(
    mesh: RankGroup, header: dict[str, Any] | None = None, blob: bytes = b"", error: CheckpointError | None = None
) -> list[Message]:
    """Collective. Every rank's (header, blob) in rank order; or, if any rank brought an error, the error of the lowest
    such rank, raised on all of them with the same type and text."""
    told = None if error is None else {"kind": type(error).__name__, "text": str(error)}
    messages = [unpack(p) for p in mesh.all_gather_bytes(pack({"error": told, "body": header or {}}, blob))]
    for rank, (message, _) in enumerate(messages):
        if message["error"] is not None:
            if rank == mesh.rank and error is not None:
                raise error
            raise _rebuilt(message["error"]["kind"], message["error"]["text"])
    return [(message["body"], data) for message, data in messages]


def _rebuilt(kind: str, text: str) -> CheckpointError:
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, CheckpointError):
        return found(text)
    return SaveFailed(f"{kind}: {text}")
