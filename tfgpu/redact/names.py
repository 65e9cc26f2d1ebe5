"""Which names are those of secrets."""

import re

# `token_ids`, `pad_token` and `max_tokens` are about text; `secret_name` and `auth_sock` only point to a secret.
_NONE = re.compile(
    r"(secret|token|key|auth)_(name|refs?|key_ref|sock|socket)$|pull_secrets$|^(num|n|max|min|count)_"
    r"|(bos|eos|pad|unk|unknown|mask|sep|cls|oov|start|end|special)_token"
    r"|token_(ids?|types?|type_ids?|accuracy|count|dim|embeddings?|errors?|index|indices|length|loss|mask|rate)(_|$)"
)
_WORD = re.compile(
    r"(^|_)(token|pwd|authorization|bearer|jwt|cookies?|creds?)(_|$)"
    r"|(^|_)(api|access|secret|private|ssh|signing|encryption|service|auth|account|license|deploy)_keys?$"
)
_INSIDE = re.compile(
    r"passw|passphrase|passcode|pswd|sshpass|pgpass|secret|apikey|accesskey|privatekey|credential|token$"
)
_WEAK = re.compile(r"(^|_)(key|pass|auth|pin|otp|psk|sas|sig|signature)$")


def is_secret(name: str) -> bool:
    """Whether a name stands for a secret.

    Example:
        >>> [is_secret(name) for name in ("HF_TOKEN", "apiKey", "--password", "key_dim", "max_tokens", "tokenizer")]
        [True, True, True, False, False, False]
    """
    return is_strong(name) or is_weak(name)


def is_strong(name: str) -> bool:
    """Whether whatever follows this name is a secret."""
    words = _words(name)
    return not _NONE.search(words) and bool(_WORD.search(words) or _INSIDE.search(words.replace("_", "")))


def is_weak(name: str) -> bool:
    """Whether a name is also used for other things, such as `key`: its value is a secret only if it looks like one."""
    words = _words(name)
    return bool(_WEAK.search(words)) and not _NONE.search(words)


def _words(name: str) -> str:
    """The words of a name: `apiKey` and `API-KEY` are `api_key`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower().strip("_")
