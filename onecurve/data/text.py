"""Prepared corpora: a folder of mapped token files under a manifest.

    manifest.json     vocabulary, integer type, per part: tokens, documents, bytes of text, sha256; how it was made
    train.bin val.bin the ids, little-endian, nothing else (a part without a document has no file)
    tokenizer.json    where the tokenizer was trained

The fingerprint is the sha256 of all that decides the ids and what they mean; how they were made is not in it. Opening
checks the manifest against it and the files' sizes; `full_check` reads the files once, for their hashes and ids.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onecurve.data.corpus import BLOCK, Corpus, check_windows
from onecurve.data.cycle import cycle_corpus, token_dtype
from onecurve.data.tokenizer import TOKENIZER_FILE, BpeTokenizer, ByteTokenizer, Tokenizer
from onecurve.errors import InputError
from onecurve.paths import FOLDER, need, read_bytes, show

KIND, SCHEMA = "onecurve corpus", 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT, TOKENIZER_LIMIT = 1 << 20, 1 << 30  # bytes; a larger one is not ours
SPLITS = ("train", "val")
CYCLE_WINDOWS, CYCLE_HELD_OUT = 4096, 256


@dataclass(frozen=True)
class Part:
    """One split: `sha256` is over its file (of no bytes where there is none)."""

    tokens: int
    documents: int
    text_bytes: int
    sha256: str


@dataclass(frozen=True)
class CorpusManifest:
    vocab: int
    tokenizer: str  # "byte", "bpe", or "ids" where the ids were not made from text here
    tokenizer_sha256: str  # "" where no file goes with it
    parts: dict[str, Part]
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        content = asdict(self) | {"schema": SCHEMA, "dtype": token_dtype(self.vocab).name}
        del content["made"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        head = {"kind": KIND, "schema": SCHEMA, "fingerprint": self.fingerprint}
        return json.dumps(head | asdict(self) | {"dtype": token_dtype(self.vocab).name}, indent=2) + "\n"


class TokenWriter:
    """Writes one part's file in pieces; raises InputError on an id that the vocabulary doesn't have."""

    def __init__(self, file: Path, vocab: int) -> None:
        self._path, self._vocab, self._dtype = file, vocab, token_dtype(vocab)
        self._file = file.open("wb")
        self._digest = hashlib.sha256()
        self.tokens = self.documents = self.text_bytes = 0

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def write(self, ids: np.ndarray) -> None:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab:
            worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise InputError(f"{self._path.name}: token id {worst} is outside the vocabulary of {self._vocab} ids")
        data = ids.astype(self._dtype).tobytes()
        self._digest.update(data)
        self._file.write(data)
        self.tokens += len(ids)

    def finish(self) -> Part:
        """To the disk; an empty file is not left behind."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if not self.tokens:
            self._path.unlink()
        return Part(self.tokens, self.documents, self.text_bytes, self._digest.hexdigest())


def open_corpus(
    source: str | os.PathLike[str],
    *,
    vocab: int,
    context: int,
    seed: int,
    split: str = "train",
    step_windows: int = 1,
    full_check: bool = True,
) -> Corpus:
    """The corpus that `data.source` names: "cycle", or a folder made by `onecurve prepare`, mapped, not read.

    `vocab` and `context` are the model's; `seed` makes the cycle; `step_windows` is how many windows one step draws
    (leaves x accumulate x micro_batch). `full_check` reads the part once (rank 0, or the parent of local ranks, is
    enough). Raises InputError, one line, on whatever would make training fail or train on something else.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; there are {' and '.join(SPLITS)}")
    if os.fspath(source) == "cycle":
        corpus = _cycle(vocab, context, seed, split, step_windows)
    else:
        try:
            folder = Path(source).expanduser()
        except RuntimeError:  # "~name/" without such a user
            raise InputError(f"corpus {show(source)}: there is no such home folder; write the path out") from None
        corpus = _open_folder(folder, vocab, split, full_check)
    if split == "train":
        check_windows(corpus, context, step_windows)
    elif len(corpus.tokens) < 2:
        raise InputError(
            f"{corpus.name}: its held-out part has {len(corpus.tokens)} tokens, too few to evaluate on; "
            "prepare at least two documents with --val-fraction above 0, or set observe.eval_every = 0"
        )
    return corpus


def read_manifest(folder: Path) -> CorpusManifest:
    """The manifest of a prepared corpus, checked against its own fingerprint. Raises InputError."""
    cure = 'data.source must be "cycle" or a folder made by `onecurve prepare`'
    need(folder, FOLDER, "corpus", cure)
    file = folder / MANIFEST
    if not os.path.lexists(file):
        raise InputError(f"{show(folder)}: it holds no corpus (no {MANIFEST} in it); {cure}")
    try:
        stored = json.loads(read_bytes(file, "corpus manifest", "make it readable or prepare again", MANIFEST_LIMIT))
    except (ValueError, RecursionError):
        stored = None
    if not isinstance(stored, dict) or stored.get("kind") != KIND:
        raise InputError(f"{show(file)}: it is no corpus manifest; {cure}")
    if stored.get("schema") != SCHEMA:
        raise InputError(
            f"{show(file)}: its schema is {show(str(stored.get('schema')))}, this version reads {SCHEMA}; "
            "prepare again, or update onecurve"
        )
    manifest = _parse(stored)
    if manifest is None or manifest.fingerprint != stored.get("fingerprint"):
        raise InputError(f"{show(file)}: it was changed after it was made (its fingerprint differs); prepare again")
    return manifest


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that a prepared corpus was made with. Raises InputError."""
    manifest = read_manifest(folder)
    if manifest.tokenizer == "byte":
        return ByteTokenizer()
    if manifest.tokenizer == "bpe":
        _tokenizer_bytes(folder, manifest)
        return BpeTokenizer.load(folder / TOKENIZER_FILE, manifest.vocab)
    raise InputError(
        f"{show(folder)}: its ids were not made from text here, so there is no tokenizer to read them with"
    )


def keep_description(folder: Path, to: Path) -> None:
    """Copies what says how to read a corpus' ids (manifest and tokenizer) into the folder `to`, where `load_tokenizer`
    finds it when the corpus itself is gone. Raises InputError where the tokenizer isn't the corpus' own."""
    manifest = read_manifest(folder)
    to.mkdir(exist_ok=True)
    if manifest.tokenizer == "bpe":
        (to / TOKENIZER_FILE).write_bytes(_tokenizer_bytes(folder, manifest))
    (to / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def _cycle(vocab: int, context: int, seed: int, split: str, step_windows: int) -> Corpus:
    if vocab < 2:
        raise InputError(f"model.vocab is {vocab}; the cycle corpus needs at least 2 tokens")
    train = max(CYCLE_WINDOWS, step_windows) * context + 1
    if split == "train":
        return Corpus(cycle_corpus(seed, train, vocab), vocab, "cycle", split)
    # What comes next: the same rule, at places that training never sees.
    return Corpus(cycle_corpus(seed, train + CYCLE_HELD_OUT * context + 1, vocab)[train:], vocab, "cycle", split)


def _open_folder(folder: Path, vocab: int, split: str, full_check: bool) -> Corpus:
    manifest = read_manifest(folder)
    if manifest.vocab != vocab:
        raise InputError(
            f"{show(folder)}: it was made with a vocabulary of {manifest.vocab}, model.vocab is {vocab}; "
            f"set model.vocab = {manifest.vocab} or prepare again"
        )
    part, file = manifest.parts[split], folder / f"{split}.bin"
    tokens = _map(file, part, token_dtype(vocab))
    if full_check:
        _check_content(file, tokens.dtype, part, vocab)
    name = show(folder)
    return Corpus(tokens, vocab, name, split, manifest.fingerprint, part.text_bytes, folder)


def _map(file: Path, part: Part, dtype: np.dtype) -> np.ndarray:
    if part.tokens == 0:
        return np.zeros(0, dtype)
    expected = part.tokens * dtype.itemsize
    try:
        size = file.stat().st_size
        if size == expected:
            return np.memmap(file, dtype, mode="r")
    except OSError as error:
        raise InputError(f"{show(file)}: can't be read ({error.strerror or error}); prepare again") from error
    raise InputError(f"{show(file)}: it has {size} bytes, its manifest says {expected}; prepare again")


def _check_content(file: Path, dtype: np.dtype, part: Part, vocab: int) -> None:
    if part.tokens == 0:
        return
    digest, largest = hashlib.sha256(), 0
    try:
        with file.open("rb") as handle:  # read, not mapped: the pages needn't stay
            while data := handle.read(BLOCK * dtype.itemsize):
                digest.update(data)
                largest = max(largest, int(np.frombuffer(data, dtype).max()))
    except OSError as error:
        raise InputError(f"{show(file)}: can't be read ({error.strerror or error}); prepare again") from error
    outside = f"it holds token id {largest}, beyond its vocabulary of {vocab}" if largest >= vocab else ""
    if digest.hexdigest() != part.sha256:
        changed = "its content is not what its manifest says (sha256 differs)"
        raise InputError(f"{show(file)}: {changed}{' and ' + outside if outside else ''}; prepare again")
    if outside:
        raise InputError(f"{show(file)}: {outside}; allowed are 0 … {vocab - 1}: prepare again")


def _parse(stored: dict[str, Any]) -> CorpusManifest | None:
    """The manifest in `stored`, or None where a field is missing or of the wrong type."""
    try:
        parts = {split: Part(**stored["parts"][split]) for split in SPLITS}
        counts = [stored["vocab"], *(n for p in parts.values() for n in (p.tokens, p.documents, p.text_bytes))]
        if not all(type(n) is int and n >= 0 for n in counts) or stored["vocab"] < 1:
            return None
        return CorpusManifest(stored["vocab"], stored["tokenizer"], stored["tokenizer_sha256"], parts, stored["made"])
    except (KeyError, TypeError):
        return None


def _tokenizer_bytes(folder: Path, manifest: CorpusManifest) -> bytes:
    file = folder / TOKENIZER_FILE
    content = read_bytes(file, "tokenizer", "prepare again", TOKENIZER_LIMIT)
    if hashlib.sha256(content).hexdigest() != manifest.tokenizer_sha256:
        raise InputError(f"{show(file)}: it is not the one that the corpus was made with; prepare again")
    return content


def iterate(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """`tokens` in blocks."""
    for start in range(0, len(tokens), BLOCK):
        yield tokens[start : start + BLOCK]
