"""Our tokenizers as transformers' fast one: the same ids for every text, and back.

tokenizer.json          the tokenizers library's own format: a byte-level BPE. For bytes it has no merges, and the
                        characters that stand for the 256 bytes are ids 0 … 255
tokenizer_config.json   what transformers adds: the special token, and that no text may spell it

The end of a document is a word of the vocabulary that no merge leads to, so text can't reach it. It is not listed in
tokenizer.json as a special token, because then a text that spells it would become it; transformers makes it special as
it loads, and `split_special_tokens` keeps such a text apart from it. Being a word with an id of its own it also stays
the last id where fewer merges were found than the vocabulary has room for.
"""

import json
from typing import Any

from onecurve.data.tokenizer import BpeTokenizer, Tokenizer

# GPT-2's own name for it. No merge can have made this word: letters and punctuation are never in one word.
END_OF_DOCUMENT = "<|endoftext|>"


def tokenizer_files(tokenizer: Tokenizer, context: int) -> dict[str, dict[str, Any]]:
    """The content of each file, by name; `context` is the most tokens that the model takes."""
    inner = tokenizer if isinstance(tokenizer, BpeTokenizer) else BpeTokenizer.without_merges()
    described = json.loads(inner.to_json())
    described["model"]["vocab"][END_OF_DOCUMENT] = tokenizer.end_of_document
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_DOCUMENT,
        "eos_token": END_OF_DOCUMENT,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    return {"tokenizer.json": described, "tokenizer_config.json": config}
