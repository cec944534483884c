"""What `onecurve prepare` made, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onecurve.report.console import printable, table

if TYPE_CHECKING:
    from onecurve.data.prepare import Prepared


def prepared_lines(made: Prepared) -> list[str]:
    """The folder, its vocabulary and its parts."""
    manifest = made.manifest
    rows = [(name, f"{p.documents:,}", f"{p.tokens:,}", f"{p.text_bytes:,}") for name, p in manifest.parts.items()]
    return [
        f"corpus       {printable(str(made.folder))}",
        f"vocabulary   {manifest.vocab:,} ids, tokenizer {manifest.tokenizer}",
        f"fingerprint  {manifest.fingerprint}",
        "",
        *table(["part", "documents", "tokens", "bytes of text"], rows),
    ]
