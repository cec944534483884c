import random
import sys
import unicodedata

import pytest

from onecurve.report.terminal import TerminalText


def shown(data: bytes, cut: int = 1) -> str:
    text = TerminalText()
    return "".join(text.feed(data[i : i + cut]) for i in range(0, len(data), cut)) + text.end()


def test_characters_come_through_whole_however_they_are_cut() -> None:
    words = "größe 日本語 🙂\tnaïve\n"
    for cut in range(1, 9):
        assert shown(words.encode(), cut) == words


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x1b[2J\x07\x08\x7f\r\0", r"\x1b[2J\x07\x08\x7f\r\x00"),
        ("\x9b2J\x85".encode(), r"\x9b2J\x85"),  # C1 controls as characters
        (b"\x9b2J", r"\x9b2J"),  # and as lone bytes
        ("a\u202eb\u2066c\u200fd".encode(), r"a\u202eb\u2066c\u200fd"),  # direction
        ("\u2028\u2029\ufeff\U000e0001".encode(), r"\u2028\u2029\ufeff\U000e0001"),
        (b"caf\xc3", r"caf\xc3"),  # cut at the end
        (b"\xf0\x9f\x99a\xff\xc0\xaf\xed\xa0\x80", r"\xf0\x9f\x99a\xff\xc0\xaf\xed\xa0\x80"),
    ],
)
def test_what_a_terminal_would_act_on_is_shown(data: bytes, expected: str) -> None:
    for cut in (1, 2, len(data)):
        assert shown(data, cut) == expected


def test_no_category_of_control_gets_through() -> None:
    every = "".join(chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000)
    passed = set(shown(every.encode(), 1 << 20))
    assert {unicodedata.category(c) for c in passed} & {"Cf", "Cs", "Zl", "Zp"} == set()
    assert {c for c in passed if unicodedata.category(c) == "Cc"} == {"\n", "\t"}
    noise = random.Random(0).randbytes(1 << 14)
    assert {c for c in shown(noise) if not c.isprintable()} <= {"\n", "\t"}
