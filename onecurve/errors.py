"""The errors of this library: one type per exit code, each a single clear line for the person who sees it."""


class OnecurveError(Exception):
    """Base of every error raised on purpose. `exit_code` is what the command ends with."""

    exit_code = 3
    rank: int | None = None  # the rank that raised it, where the launcher knows


class CheckFailed(OnecurveError):
    """A comparison or an invariant did not hold (exit 1)."""

    exit_code = 1


class InputError(OnecurveError):
    """Bad input: what, where, what is allowed, and the cure, in one line (exit 2)."""

    exit_code = 2


class UsageError(InputError):
    """The library was called in an order or a way that can't be right."""


class ConfigError(InputError):
    """A config key or value that is unknown, out of range, or not built yet."""


class CheckpointError(InputError):
    """A checkpoint that is missing, damaged, foreign, or newer than this version."""


class RunFailed(OnecurveError):
    """A rank failed; the message names the first rank's real error (exit 3)."""


class GaveUp(RunFailed):
    """A rank failed for a reason that another attempt would meet again: `--restarts` does not try (exit 3)."""


class PeerLost(OnecurveError):
    """Another rank is gone or silent. Secondary: the launcher blames it on that rank, never on the one that noticed."""


class Stopped(OnecurveError):
    """The run stopped early on request; its state is saved (exit 75)."""

    exit_code = 75
