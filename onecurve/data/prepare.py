"""`onecurve prepare`: files in, a folder of token files out.

    collect    the files, from paths and folders                                  → paths
    examine    each read once: its size and the sha256 of its content             → documents
    split      a document is held out where its hash says so, whatever its name   → train, val
    train      only for BPE: the tokenizer, on the training part
    write      each read again, in the order of the hashes, block by block        → train.bin, val.bin, manifest.json

Documents are in the order of their hashes, so that the corpus does not depend on the order or the names of files.
Memory is bounded whatever the size of a file. The folder appears whole at the end or not at all.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onecurve.data.bpe_training import train_bpe
from onecurve.data.folder import new_folder
from onecurve.data.sources import Document, collect, examine, reread
from onecurve.data.text import MANIFEST, CorpusManifest, Part, TokenWriter, iterate
from onecurve.data.tokenizer import (
    BYTE_VOCAB,
    TOKENIZER_FILE,
    BpeTokenizer,
    ByteTokenizer,
    Replaced,
    Tokenizer,
    text_pieces,
)
from onecurve.errors import InputError
from onecurve.paths import show

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all

BPE_TRAINING_BYTES = 128 << 20  # of the corpus, from its beginning (an order by hash, so a fair sample of documents)
VOCAB_LIMIT = 1 << 24


@dataclass(frozen=True)
class Prepared:
    """What was written: the folder, its manifest, and what the user should know, a line each."""

    folder: Path
    manifest: CorpusManifest
    notes: list[str]


def prepare(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    glob: str | Sequence[str] = "*.txt",
    exclude: str | Sequence[str] = (),
    tokenizer: str = "byte",
    vocab: int | None = None,
    val_fraction: float = 0.05,
    progress: Progress | None = None,
) -> Prepared:
    """Makes the corpus folder `out` of files, and of what `glob` matches (and `exclude` doesn't) in folders.

    `tokenizer` "byte" has a vocabulary of 257; "bpe" trains one of `vocab` ids. About `val_fraction` of the documents
    are held out, at least one where there are two. Raises InputError, and then leaves nothing behind.
    """
    _check_arguments(tokenizer, vocab, val_fraction)
    out = Path(out).expanduser()
    tell = progress or (lambda what, done, total: None)
    with new_folder(out) as folder:  # before the long reading, so that a place that can't be used is found at once
        globs, excludes = _as_list(glob), _as_list(exclude)
        files = collect([Path(path).expanduser() for path in paths], globs, excludes)
        documents, empty = _examine_all(files, tell)
        train, val = split_documents(documents, val_fraction)
        notes = [f"{empty} empty {'file was' if empty == 1 else 'files were'} left out"] if empty else []
        if val_fraction > 0 and not val:
            notes.append("there is no held-out part: it takes two documents with different content")

        made: dict[str, object] = {"by": "onecurve prepare", "glob": globs, "exclude": excludes}
        made |= {"val_fraction": val_fraction, "files": len(files), "empty_files": empty}
        using: Tokenizer = ByteTokenizer()
        tokenizer_sha256 = ""
        if tokenizer == "bpe":
            assert vocab is not None
            using, tokenizer_sha256 = _train_bpe(folder, train, vocab, tell, notes, made)
        replaced = Replaced()
        parts = _write_parts(folder, {"train": train, "val": val}, using, replaced, tell)
        if replaced.count:
            made["replaced"] = replaced.count
            notes.append(f"{replaced.count} byte sequences that are not valid UTF-8 were replaced by U+FFFD")
        manifest = CorpusManifest(using.vocab, tokenizer, tokenizer_sha256, parts, made)
        _write_file(folder / MANIFEST, manifest.to_json())
    return Prepared(out, manifest, notes)


def write_corpus(
    out: str | os.PathLike[str], *, train: Iterable[np.ndarray], val: Iterable[np.ndarray] = (), vocab: int
) -> CorpusManifest:
    """A corpus folder of token ids that were made elsewhere, given as arrays of any length (one a document)."""
    with new_folder(Path(out)) as folder:
        parts = {}
        for split, arrays in (("train", train), ("val", val)):
            with TokenWriter(folder / f"{split}.bin", vocab) as writer:
                for ids in arrays:
                    for block in iterate(np.asarray(ids)):
                        writer.write(block)
                    writer.documents += 1
                parts[split] = writer.finish()
        manifest = CorpusManifest(vocab, "ids", "", parts, {"by": "onecurve.data.prepare.write_corpus"})
        _write_file(folder / MANIFEST, manifest.to_json())
    return manifest


def split_documents(documents: Sequence[Document], val_fraction: float) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, each in the order of their content's hashes.

    The hash alone decides, so a document stays in its part when others are added, and copies of it go along. Where
    that leaves a part empty, the document nearest to it moves over, if there are two different ones.
    """
    ordered = sorted(documents, key=lambda document: document.digest)
    if not ordered or val_fraction == 0 or ordered[0].digest == ordered[-1].digest:
        return ordered, []
    limit = int(val_fraction * 2**64)
    held_out = {d.digest for d in ordered if int(d.digest[:16], 16) < limit} or {ordered[0].digest}
    if ordered[-1].digest in held_out:
        held_out.remove(ordered[-1].digest)
    return [d for d in ordered if d.digest not in held_out], [d for d in ordered if d.digest in held_out]


def _check_arguments(tokenizer: str, vocab: int | None, val_fraction: float) -> None:
    if tokenizer not in ("byte", "bpe"):
        raise InputError(f"--tokenizer {show(tokenizer)}: there is no such tokenizer; allowed are byte and bpe")
    if tokenizer == "byte" and vocab not in (None, BYTE_VOCAB):
        raise InputError(
            f"--vocab {vocab}: the byte tokenizer has {BYTE_VOCAB} ids; leave --vocab out or add --tokenizer bpe"
        )
    if tokenizer == "bpe" and vocab is None:
        raise InputError("--tokenizer bpe needs --vocab, for example --vocab 4096")
    if tokenizer == "bpe" and not BYTE_VOCAB <= (vocab or 0) <= VOCAB_LIMIT:
        raise InputError(f"--vocab {vocab}: a byte-level BPE takes {BYTE_VOCAB} … {VOCAB_LIMIT} ids")
    if not 0 <= val_fraction < 1:
        raise InputError(f"--val-fraction {val_fraction}: allowed is 0 (nothing held out) up to, not including, 1")


def _examine_all(files: list[Path], tell: Progress) -> tuple[list[Document], int]:
    """The files that aren't empty, and how many are."""
    meter = _Meter("reading", sum(_size(file) for file in files), tell)
    documents = [examine(file, meter.add) for file in files]
    whole = [document for document in documents if document.size]
    if not whole:
        what = f"{show(files[0])} is" if len(files) == 1 else f"all {len(files)} files are"
        raise InputError(f"{what} empty: there is no text to prepare; name files with text")
    return whole, len(files) - len(whole)


def _train_bpe(
    folder: Path, train: list[Document], vocab: int, tell: Progress, notes: list[str], made: dict[str, object]
) -> tuple[BpeTokenizer, str]:
    """Trains the tokenizer and stores it; returns it and the sha256 of its file."""
    total = sum(document.size for document in train)
    meter = _Meter("training the tokenizer", min(total, BPE_TRAINING_BYTES), tell)
    tokenizer = train_bpe(_training_texts(train, meter), vocab)
    made["tokenizer_trained_on_bytes"] = meter.done
    if meter.done < total:
        notes.append(f"the tokenizer was trained on {meter.done} of {total} bytes")
    if tokenizer.learned < vocab - 1:
        notes.append(
            f"the text has merges for {tokenizer.learned + 1} ids only; "
            f"the vocabulary stays {vocab}, the others are unused"
        )
    content = tokenizer.to_json()
    _write_file(folder / TOKENIZER_FILE, content)
    return tokenizer, hashlib.sha256(content.encode()).hexdigest()


def _training_texts(documents: list[Document], meter: "_Meter") -> Iterator[str]:
    for document in documents:
        yield from text_pieces(_until_full(reread(document), meter), Replaced())
        if meter.done >= BPE_TRAINING_BYTES:
            return


def _until_full(blocks: Iterable[bytes], meter: "_Meter") -> Iterator[bytes]:
    for block in blocks:
        meter.add(len(block))
        yield block
        if meter.done >= BPE_TRAINING_BYTES:
            return


def _write_parts(
    folder: Path, documents: dict[str, list[Document]], tokenizer: Tokenizer, replaced: Replaced, tell: Progress
) -> dict[str, Part]:
    meter = _Meter("writing", sum(document.size for part in documents.values() for document in part), tell)
    parts = {}
    for split, part in documents.items():
        with TokenWriter(folder / f"{split}.bin", tokenizer.vocab) as writer:
            for document in part:
                for ids in tokenizer.encode_document(meter.through(reread(document)), replaced):
                    writer.write(ids)
                writer.documents += 1
                writer.text_bytes += document.size
            parts[split] = writer.finish()
    return parts


class _Meter:
    """Adds bytes up for the progress callback."""

    def __init__(self, what: str, total: int, tell: Progress) -> None:
        self.what, self.total, self.tell, self.done = what, total, tell, 0

    def add(self, count: int) -> None:
        self.done += count
        self.tell(self.what, self.done, max(self.total, self.done))

    def through(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self.add(len(block))
            yield block


def _write_file(file: Path, content: str) -> None:
    with file.open("w", encoding="utf-8", newline="") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())


def _size(file: Path) -> int:
    """For the progress only: a file that can't be asked is refused by name when it is read."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _as_list(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)
