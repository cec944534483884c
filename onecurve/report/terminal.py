"""Text of unknown origin, such as a model's, made safe to print as it comes."""

import codecs

from onecurve.report.console import printable


class TerminalText:
    """Bytes in pieces to characters that no terminal acts on.

    A character that is cut by the end of a piece waits for the next one. Line feeds and tabs stay; what is not valid
    UTF-8 becomes `\\xff`; every other control (C0, C1, direction marks, line separators …) becomes a visible escape.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def feed(self, data: bytes) -> str:
        return printable(self._decoder.decode(data), keep="\n\t")

    def end(self) -> str:
        """What still waited."""
        return printable(self._decoder.decode(b"", final=True), keep="\n\t")
