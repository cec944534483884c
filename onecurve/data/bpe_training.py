"""Training a BPE in a process of its own, which can be ended at any moment.

The library's call returns after minutes on a large text and holds back every signal until then, so whoever pressed
Ctrl-C would wait for it. Texts go to the process as frames (4 bytes of length, little-endian, then UTF-8; an empty one
is the end), the trained tokenizer comes back as JSON.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import IO

from onecurve.data.tokenizer import BpeTokenizer
from onecurve.errors import OnecurveError

_PROGRAM = "from onecurve.data.bpe_training import serve; serve()"


def train_bpe(texts: Iterable[str], vocab: int) -> BpeTokenizer:
    """`BpeTokenizer.train(texts, vocab)` elsewhere. Raises OnecurveError if that process ends without a result."""
    path = os.pathsep.join(entry or "." for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(vocab), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C on a terminal is ours to act on
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with suppress(BrokenPipeError), process.stdin:  # it ended early: its exit status says more
            for text in filter(None, texts):
                _write_frame(process.stdin, text.encode())
            _write_frame(process.stdin, b"")
        content = process.stdout.read().decode()
        status = process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if status != 0 or not content:
        raise OnecurveError(f"training the tokenizer failed: its process ended with status {status}, without a result")
    return BpeTokenizer.parse(content, vocab)


def serve() -> None:
    """The other side: arguments are the vocabulary and the process to serve; ends when that one does."""
    vocab, parent = int(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    content = BpeTokenizer.train(_read_frames(sys.stdin.buffer), vocab).to_json()
    sys.stdout.write(content)
    sys.stdout.flush()
    os._exit(0)


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _write_frame(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(4, "little") + data)


def _read_frames(stream: IO[bytes]) -> Iterator[str]:
    while size := int.from_bytes(_exactly(stream, 4), "little"):
        yield _exactly(stream, size).decode()


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        os._exit(1)  # the other side is gone
    return data
