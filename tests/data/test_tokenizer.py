import random

import numpy as np
import pytest

from onecurve.data import tokenizer as module
from onecurve.data.tokenizer import BpeTokenizer, ByteTokenizer, Replaced, text_pieces

TEXT = (
    "Der Fluß, 河流 и река.\r\n\tif x == 1:\n        return  'x'  \n\n\n "
    "naïve\u00a0 \u3000 end\0 \ufeff<|endoftext|> 👩‍👩‍👧 "
)


@pytest.fixture(scope="module")
def bpe():
    return BpeTokenizer.train([TEXT, "the return of the river " * 20], 300)


@pytest.fixture(params=["byte", "bpe"])
def either(request, bpe):
    return ByteTokenizer() if request.param == "byte" else bpe


def test_every_text_comes_back(either):
    assert either.decode(either.encode(TEXT)) == TEXT
    assert either.decode_bytes(either.encode(TEXT)) == TEXT.encode()
    assert either.encode("") == []
    everything = "".join(map(chr, [*range(0x300), *range(0xFE00, 0x10100)]))
    assert either.decode(either.encode(everything)) == everything


def test_no_text_encodes_to_the_end_of_document(either):
    for text in (TEXT, "<|endoftext|>", "</s>"):
        assert max(either.encode(text)) < either.end_of_document == either.vocab - 1
    assert either.decode([either.end_of_document, *either.encode("a"), either.end_of_document]) == "a"


def test_bytes_can_be_decoded_id_by_id(either):
    ids = either.encode(TEXT)
    assert b"".join(either.decode_bytes([i]) for i in ids) == TEXT.encode()


def test_ids_without_meaning_are_nothing(bpe):
    small = BpeTokenizer.train(["ab ab"], 1000)
    assert small.learned < 999
    assert small.decode(range(small.learned, 1000)) == ""


def test_text_from_a_terminal_that_is_not_utf8(either):
    ids = either.encode("a\udcffb")
    assert either.decode_bytes(ids) == (b"a\xffb" if either.kind == "byte" else "a\ufffdb".encode())


def test_a_stored_bpe_is_the_same(bpe, tmp_path):
    (tmp_path / "t.json").write_text(bpe.to_json(), "utf-8")
    again = BpeTokenizer.load(tmp_path / "t.json", 300)
    assert again.encode(TEXT) == bpe.encode(TEXT)
    assert again.to_json() == bpe.to_json()
    assert BpeTokenizer.train([TEXT, "the return of the river " * 20], 300).to_json() == bpe.to_json()


@pytest.mark.parametrize("seed", range(5))
def test_pieces_change_no_token(bpe, monkeypatch, seed):
    """Cut between words, a text has the ids that it has in one go."""
    monkeypatch.setattr(module, "PIECE", 80)  # each has a place to cut at
    draw = random.Random(seed)
    words = ["a", "ab", "'s", "12", "\n", " ", "  ", "\t", "\r\n", "\u00a0", "\u3000", "河流", "!?", "return", "\x1c"]
    text = "".join(draw.choice(words) for _ in range(400))
    pieces = list(text_pieces([text.encode()], Replaced()))
    assert "".join(pieces) == text
    assert len(pieces) > 5 and max(map(len, pieces)) <= 80
    assert [i for piece in pieces for i in bpe.encode(piece)] == bpe.encode(text)
    ids = np.concatenate(list(bpe.encode_document([text.encode()], Replaced())))
    assert ids.tolist() == [*bpe.encode(text), bpe.end_of_document]


def test_pieces_do_not_depend_on_the_blocks(monkeypatch):
    monkeypatch.setattr(module, "PIECE", 40)
    data = TEXT.encode() * 4 + b"\xff\xfe broken \xe2\x82 and \xef\xbf\xbd genuine" + b"x" * 100 + b"\xe2"
    results = []
    for size in (1, 2, 3, 7, 1000):
        replaced = Replaced()
        pieces = list(text_pieces((data[i : i + size] for i in range(0, len(data), size)), replaced))
        results.append((pieces, replaced.count))
        assert "".join(pieces) == data.decode("utf-8", "replace")
    assert all(result == results[0] for result in results)
    assert results[0][1] == 4  # ff, fe, the cut e2 82, the cut e2 at the end; not the genuine one


def test_a_text_without_white_space_is_still_cut(bpe):
    data = b"x" * (3 * module.PIECE + 5)
    assert [len(piece) for piece in text_pieces([data], Replaced())] == [module.PIECE] * 3 + [5]
    ids = np.concatenate(list(bpe.encode_document([data], Replaced())))
    assert bpe.decode_bytes(ids.tolist()) == data


def test_a_byte_document(bpe):
    replaced = Replaced()
    ids = np.concatenate(list(ByteTokenizer().encode_document([b"\xef\xbb\xbfa\r\n\0", b"\xff"], replaced)))
    assert ids.tolist() == [0xEF, 0xBB, 0xBF, 97, 13, 10, 0, 255, 256]
    assert replaced.count == 0
