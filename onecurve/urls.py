"""URLs as they may be shown and stored."""

import re

# Up to the last "@" before the path. A "/" ends the host, but a password that was not escaped may hold one: where what
# follows the first ":" is no port, it is taken for a password.
_USER = re.compile(r"(?<=://)(?:[^/?#@:]*:(?!\d+(?:[/?#]|$))[^?#]*@|[^/?#]*@)")
_SECRET_VALUE = re.compile(
    r"([?&;#][^=&;#]*(?:key|secret|token|password|passwd|signature|credential|\bsig)[^=&;#]*=)[^&;#]*", re.IGNORECASE
)


def without_secrets(url: str) -> str:
    """The URL without its user part (`user:password@`) and without the values of key, secret or token parameters."""
    return _SECRET_VALUE.sub(r"\1", _USER.sub("", url))
