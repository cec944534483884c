"""Text to token ids and back: bytes as they are, or a byte-level BPE trained on the corpus.

Both keep every byte of valid UTF-8 (line ends, a byte-order mark, NULs). The last id of the vocabulary ends a document;
no text, whatever it says, encodes to it.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from onecurve.errors import InputError
from onecurve.paths import show

if TYPE_CHECKING:
    import tokenizers

PIECE = 1 << 16  # characters encoded at a time
TOGETHER = 8  # pieces handed to the tokenizers library in one call
TOKENIZER_FILE = "tokenizer.json"
BYTE_VOCAB = 257

# The end of the longest start of a text that ends before white space which follows something else. The pattern that
# cuts text into words (GPT-2's) never has a word across such a place, so cutting there changes no token.
_BEFORE_SPACE = re.compile(r".*\S(?=[ \t\n\r])", re.DOTALL)
_GENUINE_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


class Tokenizer(Protocol):
    """`vocab` ids, the last of which, `end_of_document`, ends each document."""

    kind: str
    vocab: int

    @property
    def end_of_document(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without an end of document."""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that `ids` stand for; any cut of `ids` gives the same bytes in the same order."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text that `ids` stand for; what is not valid UTF-8 becomes U+FFFD."""

    def encode_document(self, blocks: Iterable[bytes], replaced: "Replaced") -> Iterator[np.ndarray]:
        """The ids of a document given in blocks of bytes (of any sizes), in bounded pieces, its end included."""


class Replaced:
    """Counts what was not valid UTF-8 and became U+FFFD."""

    count = 0


class ByteTokenizer:
    """Ids 0 … 255 are the bytes; 256 ends a document."""

    kind = "byte"
    vocab = BYTE_VOCAB
    end_of_document = BYTE_VOCAB - 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return bytes(i for i in ids if i < 256)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def encode_document(self, blocks: Iterable[bytes], replaced: Replaced) -> Iterator[np.ndarray]:
        for block in blocks:
            yield np.frombuffer(block, np.uint8)
        yield np.array([self.end_of_document])


class BpeTokenizer:
    """A byte-level BPE (Radford et al. 2019, section 2.2) of the tokenizers library, with `vocab` - 1 ids at most."""

    kind = "bpe"

    def __init__(self, inner: "tokenizers.Tokenizer", vocab: int) -> None:
        self._inner, self.vocab = inner, vocab
        self._byte_of = {character: byte for byte, character in _byte_characters().items()}

    @property
    def end_of_document(self) -> int:
        return self.vocab - 1

    @property
    def learned(self) -> int:
        """How many ids have a meaning: 256 bytes and the merges found, the end of document not counted."""
        return self._inner.get_vocab_size()

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int) -> "BpeTokenizer":
        """Learns from `texts` (each a piece that ends between words); the same texts give the same tokenizer."""
        from tokenizers import pre_tokenizers, trainers

        inner = _byte_level({})
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocab - 1, initial_alphabet=alphabet, show_progress=False)
        inner.train_from_iterator(texts, trainer)
        return cls(inner, vocab)

    @classmethod
    def without_merges(cls) -> "BpeTokenizer":
        """Each byte a token: for text, the ids of ByteTokenizer."""
        return cls(_byte_level({character: byte for byte, character in _byte_characters().items()}), BYTE_VOCAB)

    @classmethod
    def load(cls, file: Path, vocab: int) -> "BpeTokenizer":
        try:
            return cls.parse(file.read_text("utf-8"), vocab)
        except Exception as error:  # the library raises bare Exception on a file that it can't parse
            raise InputError(f"{show(file)}: no tokenizer can be read from it ({error}); prepare again") from error

    @classmethod
    def parse(cls, content: str, vocab: int) -> "BpeTokenizer":
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(content), vocab)

    def to_json(self) -> str:
        return self._inner.to_str(pretty=False)

    def encode(self, text: str) -> list[int]:
        whole = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return self._inner.encode(whole, add_special_tokens=False).ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        words = (self._inner.id_to_token(i) or "" for i in ids if i < self.learned)
        return bytes(self._byte_of[character] for word in words for character in word)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def encode_document(self, blocks: Iterable[bytes], replaced: Replaced) -> Iterator[np.ndarray]:
        batch: list[str] = []
        for piece in text_pieces(blocks, replaced):
            batch.append(piece)
            if len(batch) == TOGETHER:
                yield self._encode_all(batch)
                batch = []
        yield np.append(self._encode_all(batch), self.end_of_document)

    def _encode_all(self, pieces: Sequence[str]) -> np.ndarray:
        encodings = self._inner.encode_batch(list(pieces), add_special_tokens=False)
        return np.concatenate([np.zeros(0, np.int64), *(np.array(e.ids, np.int64) for e in encodings)])


def _byte_level(ids: dict[str, int]) -> "tokenizers.Tokenizer":
    """Of the tokenizers library: bytes as printable characters, cut into words (GPT-2's pattern); no merges yet."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE(ids, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def text_pieces(blocks: Iterable[bytes], replaced: Replaced) -> Iterator[str]:
    """A document's text in pieces of at most PIECE characters, cut between words wherever there is a place to.

    The pieces depend on the content alone, not on how it came in blocks.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pending, tail = "", b""
    for block in blocks:
        text = decoder.decode(block)
        # U+FFFD that the document itself holds is not ours; an occurrence across two blocks counts in the second.
        replaced.count += text.count("\N{REPLACEMENT CHARACTER}") - (tail + block).count(_GENUINE_REPLACEMENT)
        tail = (tail + block)[-2:]
        pending += text
        at = 0
        while len(pending) - at >= PIECE:
            match = _BEFORE_SPACE.match(pending, at, at + PIECE)
            end = match.end() if match else at + PIECE
            yield pending[at:end]
            at = end
        pending = pending[at:]
    rest = decoder.decode(b"", final=True)
    replaced.count += len(rest)
    if pending + rest:
        yield pending + rest


def _byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level BPE's words (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
