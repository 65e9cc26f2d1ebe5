"""The cleaner: applies all rules to a text or to facts, and counts what it removed."""

import getpass
import json
import os
import re
import shlex
import socket
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tfgpu.redact import assignments
from tfgpu.redact.forms import REMOVED, RULES, Rule
from tfgpu.redact.names import is_secret

_SHORTEST_VALUE = 4
"""Shorter values of secret variables are not searched for: they occur everywhere."""
_SHORTEST_NAME = 3
_COLOR = re.compile(r"\x1b\[[\d;]*+m")
_EMAIL = re.compile(r"(?<![A-Za-z0-9._%+\-])[A-Za-z0-9._%+\-]++@[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)+")


class Cleaner:
    """Removes secrets and counts them.

    Args:
        environ: environment variables; the values of those with secret names are removed wherever they occur.
        user: the user's name; `None` asks the system.
        home: the home directory; `None` asks the system.
        host: this machine's name; `None` asks the system.

    Example:
        >>> cleaner = Cleaner({"WANDB_API_KEY": "0123456789abcdef"}, user="ada", home="/home/ada", host="box")
        >>> cleaner.clean("key 0123456789abcdef in /home/ada/train.py; pip install https://me:pw@host/x; ada@box:~$")
        'key <removed> in ~/train.py; pip install https://<removed>@host/x; <user>@<host>:~$'
        >>> cleaner.clean("epochs: 3, tokens=512, api_key=abc")
        'epochs: 3, tokens=512, api_key=<removed>'
    """

    def __init__(
        self, environ: Mapping[str, str], *, user: str | None = None, home: str | None = None, host: str | None = None
    ):
        self.removed: Counter[str] = Counter()
        secret = [value for name, value in environ.items() if is_secret(name) and not _is_folder(name, value)]
        written = {form for value in secret if len(value) >= _SHORTEST_VALUE for form in _written(value)}
        values = map(re.escape, sorted(written, key=len, reverse=True))
        self._values = [Rule("value of a secret variable", re.compile(value)) for value in values]
        self._personal = [Rule("e-mail address", _EMAIL)]
        home = re.escape((home or os.path.expanduser("~")).rstrip("/"))
        if len(home) > 1:
            self._personal.append(Rule("home directory", re.compile(rf"{home}(?![\w\-])"), "~"))
        user, host = user or _user(), socket.gethostname() if host is None else host
        for name, kind in {user: "user", host: "host", host.partition(".")[0]: "host"}.items():
            if len(name) >= _SHORTEST_NAME and name not in ("root", "localhost"):
                form = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
                self._personal.append(Rule(f"name of the {kind}", form, f"<{kind}>"))

    def hide(self, text: str) -> str:
        """The text without secrets and terminal colors.

        Example:
            >>> Cleaner({}).hide("train.py --data /home/ada/x --api-key abc --host ada@box.example.org")
            'train.py --data /home/ada/x --api-key <removed> --host ada@box.example.org'
        """
        text = _COLOR.sub("", self._applied(self._values, text))
        return "".join(self._without_assigned(self._applied(RULES, text)))

    def clean(self, text: str) -> str:
        """The text without secrets, e-mail addresses, the user's name, the home directory and this machine's name."""
        return self._applied(self._personal, self.hide(text))

    def facts(self, value: Any, name: str = "") -> Any:
        """Facts, as JSON or YAML has them, with every text cleaned and the values of secret names removed.

        Example:
            >>> Cleaner({}).facts({"epochs": 3, "api_key": 12345, "url": "https://me:pw@host"})
            {'epochs': 3, 'api_key': '<removed>', 'url': 'https://<removed>@host'}
        """
        if isinstance(value, Mapping):
            return {self.clean(str(key)): self.facts(each, str(key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.facts(each, name) for each in value]
        if value is None or isinstance(value, bool):
            return value
        if is_secret(name):
            self.removed["value of a secret name"] += 1
            return REMOVED
        return value if isinstance(value, int | float) else self.clean(str(value))

    def _applied(self, rules: Iterable[Rule], text: str) -> str:
        for rule in rules:
            text, count = rule.form.subn(rule.instead, text)
            self.removed[rule.kind] += count
        return text

    def _without_assigned(self, text: str) -> Iterator[str]:
        done = 0
        for first, last in assignments.secrets(text):
            self.removed["value of a secret name"] += 1
            yield text[done:first] + REMOVED
            done = last
        yield text[done:]


def _written(value: str) -> set[str]:
    """The value as it is, and as JSON, Python, a URL and a shell write it."""
    code = {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
    urls = {urllib.parse.quote(value), urllib.parse.quote(value, ""), urllib.parse.quote_plus(value)}
    return {value, shlex.quote(value), *code, *urls}


def _is_folder(name: str, value: str) -> bool:
    """Whether this is the shell's own variable for a directory; elsewhere `pwd` means password."""
    return name in ("PWD", "OLDPWD") and value.startswith("/")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
