"""The parts of a run that the config alone decides."""

from onecurve.config import Config
from onecurve.data.evaluation import EvaluationSet
from onecurve.data.loader import Loader
from onecurve.model import GPT
from onecurve.optim import Schedule
from onecurve.train.corpora import held_out_corpus, training_corpus

EVALUATION_TOKENS = 1 << 17  # of the held-out part, at most so many, spread evenly over it


def new_model(config: Config) -> GPT:
    """The untrained model of a curve."""
    m = config.model
    return GPT(
        layers=m.layers, width=m.width, heads=m.heads, vocab=m.vocab, context=m.context,
        tied=m.tied, dropout=m.dropout, seed=config.train.seed,
    )  # fmt: skip


def new_loader(config: Config, *, full_check: bool = False) -> Loader:
    """The training batches of a curve; `full_check` reads the whole corpus once. Raises InputError for a corpus that
    can't serve it."""
    m, t = config.model, config.train
    corpus = training_corpus(config, full_check=full_check)
    return Loader(
        corpus, context=m.context, micro_batch=t.micro_batch, leaves=t.leaves, accumulate=t.accumulate, seed=t.seed
    )


def new_held_out(config: Config, *, full_check: bool = False) -> EvaluationSet | None:
    """The held-out part, or None where nothing is evaluated; `full_check` reads all of it once. Raises InputError."""
    corpus = held_out_corpus(config, full_check=full_check)
    if corpus is None:
        return None
    share = min(1.0, EVALUATION_TOKENS / max(len(corpus.tokens), 1))
    return EvaluationSet(corpus, context=config.model.context, micro_batch=config.train.micro_batch, share=share)


def new_schedule(config: Config) -> Schedule:
    rates = config.optimizer
    return Schedule(rates.lr, config.train.steps, rates.warmup_steps, rates.decay, rates.min_lr)
