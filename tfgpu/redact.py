"""Takes secrets out of texts that others will read: tokens, keys, passwords, credentials in URLs, the user's name.

It removes too much rather than too little: what follows a name such as `api_key`, what has the form of a known token,
the values of this process's own secret variables wherever they stand, and long strings that look random.
"""

import getpass
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping

REMOVED = "<removed>"
_SHORTEST_KNOWN = 4
"""Characters from which the value of a secret variable is looked for in all texts; a shorter one stands everywhere."""
_SHORTEST_NAME = 3
# Whole words of a name; `key` counts as its last word, so that `api_key` is one and `key_dim` is not.
_WORDS = re.compile(
    r"(^|_)(pwd|pass|auth|authorization|cookies?|signature|sig|sas|token|bearer|jwt|otp|pin|credentials?|netrc|key$)(_|$)"
    r"|(^|_)(api|access|secret|private|ssh|signing|encryption|service|auth)_keys$"
)
_INSIDE = re.compile(r"passw|passphrase|sshpass|pgpass|secret|apikey|accesskey|privatekey|credential|token(?!s|i[zs])")
_COUNTS = re.compile(r"(num|n|max|min|count)_")
_URL_SAFE = r"[A-Za-z0-9_\-]"
# Each begins where a word does and gives back nothing of it: a log of one long word must not take hours.
_FORMS = {
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    "credentials in a URL": r"(?<=://)(?=[^\s/@])[^\s/@:\"'<>]*+(?::[^\s/\"'<>]*)?@(?=[^\s/])",
    "authorization": r"(?i)\b(?:bearer|basic|digest|token)\s+[A-Za-z0-9+/._~=\-]{8,}",
    "token": r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|pk-|rk_|xox[abeprs]-|npm_|pypi-|dapi|ya29\.|nvapi-|r8_|AIza)"
    r"[A-Za-z0-9_.\-]{10,}",
    "AWS key": r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}\b",
    "JSON web token": rf"(?<!{_URL_SAFE})(?={_URL_SAFE}++\.{_URL_SAFE}){_URL_SAFE}*?\beyJ{_URL_SAFE}{{8,}}"
    rf"\.{_URL_SAFE}+(?:\.{_URL_SAFE}*)?",
}
_EMAIL = r"(?<![A-Za-z0-9._%+\-])[A-Za-z0-9._%+\-]++@[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)+"
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\\n])*\"?|'(?:\\.|[^'\\\n])*'?")
# A name and what joins it to its value: in code, JSON, YAML, an environment, a query, a command line.
_NAMED = re.compile(
    r"(?<![\w.\-])(?P<name>[\w.\-]++)"
    r"(?:(?P<equals>[\"']?[ \t]*+(?::=|=>|=)[ \t]*+)|(?P<colon>[\"']?\s*+:[ \t]*+)|(?P<space>[ \t]++))"
)
_VALUES = {
    "equals": re.compile(rf"{_QUOTED.pattern}|[^\s&\"']+"),
    "colon": re.compile(rf"{_QUOTED.pattern}|[^\s\"'/][^\n]*"),
    "space": re.compile(rf"{_QUOTED.pattern}|[^\s\"'\-][^\s\"']*"),
}
_FLAG = re.compile(r"-|.*--")
_QUOTES = "\"'"
_NO_SECRETS = ("true", "false", "null", "none", "")
_RANDOM = re.compile(r"(?<![\w+\-])(?!_Z)[A-Za-z0-9+_\-]{36,}={0,2}(?![\w+\-])")

_UUID = re.compile(r"([A-Za-z]+-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Cleaner:
    """Removes secrets from texts, and counts what it has removed.

    Args:
        environ: the variables whose secret values are looked for everywhere.
        user: the user's name; `None` asks the system.
        home: the user's folder; `None` asks the system.
        host: this machine's name; `None` asks the system.

    Example:
        >>> cleaner = Cleaner({"WANDB_API_KEY": "0123456789abcdef"}, user="ada", home="/home/ada", host="box")
        >>> cleaner.clean("key 0123456789abcdef in /home/ada/train.py; pip install https://me:pw@host/x; ada@box:~$")
        'key <removed> in ~/train.py; pip install https://<removed>@host/x; <user>@<host>:~$'
        >>> cleaner.clean("epochs: 3, tokens=512, api_key=abc")
        'epochs: 3, tokens=512, api_key=<removed>'
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        user: str | None = None,
        home: str | None = None,
        host: str | None = None,
    ):
        self.removed: Counter[str] = Counter()
        found = [value for name, value in environ.items() if is_secret(name) and len(value) >= _SHORTEST_KNOWN]
        self._known = sorted(set(found), key=len, reverse=True)
        user, host = user or _user(), socket.gethostname() if host is None else host
        self._places = [(home or os.path.expanduser("~")).rstrip("/")]
        self._names = {user: "<user>", host: "<host>", host.partition(".")[0]: "<host>"}

    def clean(self, text: str) -> str:
        """The text without secrets, and without the names of the user, the user's folder and this machine."""
        text = self._replaced("e-mail address", _EMAIL, REMOVED, self.hide(text))
        text = _RANDOM.sub(self._random, text)
        for folder in self._places:
            if len(folder) > 1:
                text = self._replaced("home folder", rf"{re.escape(folder)}(?![\w\-])", "~", text)
        for name, shown in self._names.items():
            if len(name) >= _SHORTEST_NAME and name not in ("root", "localhost"):
                text = self._replaced(f"name of the {shown[1:-1]}", rf"(?<!\w){re.escape(name)}(?!\w)", shown, text)
        return text

    def hide(self, text: str) -> str:
        """The text without secrets alone, for those who may know the user, the paths and the machines.

        Example:
            >>> Cleaner({}).hide("train.py --data /home/ada/x --api-key abc --host ada@box.example.org")
            'train.py --data /home/ada/x --api-key <removed> --host ada@box.example.org'
        """
        for value in self._known:
            text = self._replaced("value of a secret variable", re.escape(value), REMOVED, text)
        for kind, form in _FORMS.items():
            text = self._replaced(kind, form, self._instead(kind), text)
        return self._without_values(text)

    def _replaced(self, kind: str, form: str, instead: str, text: str) -> str:
        text, count = re.subn(form, lambda _: instead, text, flags=re.DOTALL)
        self.removed[kind] += count
        return text

    def _instead(self, kind: str) -> str:
        return f"{REMOVED}@" if kind == "credentials in a URL" else REMOVED

    def _without_values(self, text: str) -> str:
        """Removes what stands behind secret names; a value that is none may itself hold some: `args: --token abc`."""
        kept, done, at = [], 0, 0
        ends = [len(text)]  # Of the quoted values that `at` is within.
        while ends:
            named = _NAMED.search(text, at, ends[-1])
            if named is None:
                at = ends.pop()
                continue
            at = named.end("name")
            if named["space"] and not _FLAG.match(named["name"]):
                continue
            if not is_secret(named["name"]):
                at = named.end()
                if quoted := _QUOTED.match(text, at, ends[-1]):
                    ends.append(quoted.end())
                continue
            value = _VALUES[str(named.lastgroup)].match(text, named.end(), ends[-1])
            if value is None:
                continue
            at = value.end()
            hidden = value[0].strip("\"',}") != REMOVED and value[0].strip(" ,}]").lower() not in _NO_SECRETS
            if hidden:
                self.removed["value of a secret name"] += 1
                kept += [text[done : value.start()], _kept_around(value[0], text[named.end("name")])]
                done = at
        return "".join([*kept, text[done:]])

    def _random(self, match: re.Match) -> str:
        """Long strings of mixed letters and digits, which no word of a language is."""
        tests: tuple[Callable[[str], bool], ...] = (str.isupper, str.islower, str.isdecimal)
        if _UUID.fullmatch(match[0]) or not all(any(test(character) for character in match[0]) for test in tests):
            return match[0]
        self.removed["long random string"] += 1
        return REMOVED


def printable(text: str) -> str:
    """The text with a replacement for each character that would steer a terminal or turn the writing round.

    Example:
        >>> printable("red \x1b[31mname")
        'red \ufffd[31mname'
    """
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def is_secret(name: str) -> bool:
    """Whether what a name stands for is to be kept from others.

    Example:
        >>> [is_secret(name) for name in ("HF_TOKEN", "apiKey", "--password", "key_dim", "max_tokens", "tokenizer")]
        [True, True, True, False, False, False]
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower().strip("_")
    return not _COUNTS.match(words) and bool(_WORDS.search(words) or _INSIDE.search(words.replace("_", "")))


def _kept_around(value: str, before: str) -> str:
    """What stands for a secret: in the same quotes, so that JSON stays JSON.

    Args:
        before: the character after the name, which in JSON is a quote.
    """
    if value[0] in _QUOTES:
        return f"{value[0]}{REMOVED}{value[0] if value[1:].endswith(value[0]) else ''}"
    if before in _QUOTES:  # a number, which becomes a text
        return f"{before}{REMOVED}{before}{value[len(value.rstrip(' ,}]')) :]}"
    return REMOVED


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
