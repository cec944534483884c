"""`onecurve sample`: text from a run's newest whole checkpoint, in one process.

run folder   config.toml, the curve's id, what its token ids mean (corpus/, copied there when the run began)
checkpoint   the newest that verifies whole and is finite; fp32 masters, whatever layout saved them
prompt       to ids; without one the text begins as a document does
generate     id by id, to characters that a terminal can't act on, as they come
"""

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from onecurve.checkpoint import Place
from onecurve.data.text import open_corpus
from onecurve.errors import InputError
from onecurve.model.sampling import generate
from onecurve.report.terminal import TerminalText
from onecurve.trained import Say, Trained, open_trained


def sample(
    run: Path, *, prompt: str = "", tokens: int = 256, temperature: float = 1.0, top_k: int = 0, seed: int = 0, say: Say
) -> Iterator[str]:
    """The prompt and what the model makes of it, in pieces that are safe to print; a function of the checkpoint and the
    arguments. `say` is told, a line each, what the reader should know beside it.

    The text ends after `tokens` ids, or where the model ends the document. Without a tokenizer both prompt and output
    are ids. Raises InputError.
    """
    if not math.isfinite(temperature) or temperature < 0:
        raise InputError(f"--temperature {temperature}: it must be a finite number, 0 or more")
    trained = open_trained(Place(run, None, str(run)), say)
    model, tokenizer = trained.model, trained.tokenizer
    ids = prompt_ids(trained, prompt)
    say(f"step {trained.manifest.step} of {run}" + ("" if tokenizer else "; its corpus is no text: token ids"))
    if len(ids) > model.context:
        say(f"the prompt has {len(ids)} tokens, the model sees {model.context}: it reads the last {model.context}")
    following = generate(model, ids, temperature=temperature, top_k=top_k, seed=seed)
    if tokenizer is None:
        yield " ".join(map(str, ids))
        for token in islice(following, tokens):
            yield f" {token}"
        yield "\n"
        return
    text = TerminalText()
    yield text.feed(tokenizer.decode_bytes(ids))
    count, token = 0, -1
    while count < tokens and token != tokenizer.end_of_document:
        count, token = count + 1, next(following)
        yield text.feed(tokenizer.decode_bytes([token]))
    yield text.end() + "\n"
    if count < tokens:
        say(f"the model ended the document after {count} of {tokens} tokens")


def prompt_ids(trained: Trained, prompt: str) -> list[int]:
    """At least one id. Without a prompt: the end of a document, as before each one in training, or where there is no
    text the first id of the corpus. Raises InputError."""
    config, tokenizer = trained.config, trained.tokenizer
    if tokenizer is not None:
        return tokenizer.encode(prompt) if prompt else [tokenizer.end_of_document]
    vocab, given = config.model.vocab, prompt.replace(",", " ").split()
    if not given:
        cycle = open_corpus("cycle", vocab=vocab, context=config.model.context, seed=config.train.seed)
        return [int(cycle.tokens[0]) if config.data.source == "cycle" else 0]
    for word in given:
        if not (word.isascii() and word.isdigit() and int(word) < vocab):
            raise InputError(
                f"--prompt: {word!r} is no token id; this run's corpus is no text: write ids 0 … {vocab - 1}"
            )
    return [int(word) for word in given]
