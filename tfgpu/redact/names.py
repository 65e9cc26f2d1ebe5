"""Which names are those of secrets."""

import re
import urllib.parse

# Whole words of a name; `key` counts as its last word, so that `api_key` is one and `key_dim` is not.
_WORDS = re.compile(
    r"(^|_)(pwd|pw|psw|pass|auth|authorization|cookies?|signature|sig|sas|token|bearer|jwt|otp|pin|creds?|credentials?"
    r"|netrc|psk)(_|$)"
    r"|(^|_)key(_data)?$|(^|_)wep_key\d$"
    r"|(^|_)(api|access|secret|private|ssh|signing|encryption|service|auth)_keys$"
)
_INSIDE = re.compile(
    r"passw|passphrase|passcode|passkey|userpass|sshpass|pgpass|storepass|keypass|pswd"
    r"|secret|apikey|accesskey|privatekey|credential"
    r"|token(?!s|i[zs])"
)
# Names of secrets' names, and tokens of texts.
_NONE = re.compile(
    r"(secret|token|key|auth)_(name|refs?|key_ref|sock|socket)$|pull_secrets$|github_ref|_token_(ids?|type_ids)$"
    r"|(^|_)psk_(hint|identity)$|_(to|must|should)_pass$"
    r"|^(\w+_)?(bos|eos|pad|unk|unknown|mask|sep|cls|oov|start|end|special|decoder_start)_tokens?(_ids?)?$"
    r"|(^|_)token_(accuracy|count|dim|embeddings?|errors?|index|indices|length|loss|mask|rate|type_ids?|types?)(_|$)"
)
_COUNTS = re.compile(r"(num|n|max|min|count)_")
WEAK = re.compile(
    r"^keys?$|(^|_)(signature|sig)$|^(\w+_)?(checkpoint|group|instance|cache|sort|partition|index|prng|rng)_key$"
)
"""These also name what is no secret, or any key of a mapping: their values are one if they look like it."""
SPOKEN = re.compile(r"passw|passphrase|secret")
"""What people choose, who also choose small numbers and several words."""


def is_secret(name: str) -> bool:
    """Whether what a name stands for is to be kept from others.

    Example:
        >>> [is_secret(name) for name in ("HF_TOKEN", "apiKey", "--password", "key_dim", "max_tokens", "tokenizer")]
        [True, True, True, False, False, False]
    """
    found = words(name)
    if _NONE.search(found):
        return False
    return not _COUNTS.match(found) and bool(_WORDS.search(found) or _INSIDE.search(found.replace("_", "")))


def words(name: str) -> str:
    """The words of a name: `apiKey`, `API-KEY` and `api%5Fkey` are `api_key`."""
    if "%" in name:
        name = urllib.parse.unquote(re.sub(r"%(?:25)+", "%", name))
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower().strip("_")

