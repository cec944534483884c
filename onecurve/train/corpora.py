"""The corpora that a config names, opened for it. Torch is not needed to see whether they can serve."""

from onecurve.config import Config
from onecurve.data.corpus import Corpus
from onecurve.data.text import open_corpus


def training_corpus(config: Config, *, full_check: bool = False) -> Corpus:
    """What is trained on; `full_check` reads all of it once. Raises InputError for a corpus that can't serve."""
    m, t = config.model, config.train
    needed = t.leaves * t.accumulate * t.micro_batch
    return open_corpus(
        config.data.source, vocab=m.vocab, context=m.context, seed=t.seed, step_windows=needed, full_check=full_check
    )


def held_out_corpus(config: Config, *, full_check: bool = False) -> Corpus | None:
    """What is evaluated on, None where nothing is. Raises InputError."""
    if not config.observe.eval_every:
        return None
    m, t = config.model, config.train
    return open_corpus(
        config.data.source, vocab=m.vocab, context=m.context, seed=t.seed, split="val", full_check=full_check
    )


def check_corpora(config: Config) -> None:
    """Raises InputError where training would refuse the corpora for what they say of themselves: their ids stay unread.
    The built-in one always serves."""
    if config.data.source != "cycle":
        training_corpus(config)
        held_out_corpus(config)
