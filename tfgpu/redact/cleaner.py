"""The cleaner: what is removed in which order, counted, and what is put in its place."""

import getpass
import json
import os
import re
import shlex
import socket
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Mapping

from tfgpu.redact import forms, places, randoms, tables, terminal, values
from tfgpu.redact.names import is_secret
from tfgpu.redact.values import REMOVED

_SHORTEST_KNOWN = 4
"""Characters from which the value of a secret variable is looked for in all texts; a shorter one stands everywhere."""
_SHORTEST_NAME = 3
_LITERAL = re.compile(r"\"(?:[^\"\\\n]++|\\[^\n])*+(?P<end>\"?)")
_DEEPEST = 5
"""How many texts within texts are unquoted; deeper ones are looked through as they stand."""


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
        secret = (value for name, value in environ.items() if is_secret(name) and not _is_folder(name, value))
        found = [value for value in secret if len(value) >= _SHORTEST_KNOWN]
        self._known = sorted({form for value in found for form in _written(value)}, key=len, reverse=True)
        user, host = user or _user(), socket.gethostname() if host is None else host
        self._places = [(home or os.path.expanduser("~")).rstrip("/")]
        self._names = {user: "<user>", host: "<host>", host.partition(".")[0]: "<host>"}

    def clean(self, text: str) -> str:
        """The text without secrets, and without the names of the user, the user's folder and this machine."""
        text = self._replaced("e-mail address", forms.EMAIL, REMOVED, self.hide(text))
        for find in (randoms.mixed, randoms.hexadecimal):
            text = self._cut("long random string", text, ((*span, "") for span in find(text)))
        for folder in self._places:
            if len(folder) > 1:
                text = self._replaced("home folder", rf"{re.escape(folder)}(?![\w\-])", "~", text)
        for name, shown in self._names.items():
            if len(name) >= _SHORTEST_NAME and name not in ("root", "localhost"):
                text = self._replaced(f"name of the {shown[1:-1]}", rf"(?<!\w){re.escape(name)}(?!\w)", shown, text)
        return text

    def hide(self, text: str) -> str:
        """The text without secrets (and a terminal's colours) alone, for those who may know user, paths and machines.

        Example:
            >>> Cleaner({}).hide("train.py --data /home/ada/x --api-key abc --host ada@box.example.org")
            'train.py --data /home/ada/x --api-key <removed> --host ada@box.example.org'
        """
        return self._hidden(text, _DEEPEST)

    def _hidden(self, text: str, depth: int) -> str:
        for value in self._known:
            text = self._replaced("value of a secret variable", re.escape(value), REMOVED, text)
        text = terminal.without_colours(text)  # In them a name begins with a number: `36mpwd`.
        if depth:
            text = _LITERAL.sub(lambda literal: self._within(literal, depth - 1), text)
        text = self._replaced("private key", forms.PRIVATE_KEY, REMOVED, text)
        # Before the other forms, which may take what stands between cells.
        text = self._cut("cell of a secret column", text, ((*span, "") for span in sorted(tables.secrets(text))))
        for kind, form in forms.FORMS.items():
            text = self._replaced(kind, form, f"{REMOVED}@" if kind == "credentials in a URL" else REMOVED, text)
        text = self._cut("value of a secret name", text, ((*span, "") for span in sorted(places.secrets(text))))
        return self._cut("value of a secret name", text, values.behind_names(text))

    def _within(self, literal: re.Match, depth: int) -> str:
        """The quoted text, with what is secret in what it stands for removed: JSON in JSON, lines of a log as `\\n`."""
        if "\\" not in literal[0]:
            return literal[0]
        try:
            inner = json.loads(literal[0] if literal["end"] else f'{literal[0]}"')
        except ValueError:
            return literal[0]
        cleaned = self._hidden(inner, depth)
        return literal[0] if cleaned == inner else f'{json.dumps(cleaned)[:-1]}{literal["end"]}'

    def _replaced(self, kind: str, form: str, instead: str, text: str) -> str:
        """Puts `instead` for what has the form; what a named group of it has taken stays in front."""

        def put(match: re.Match) -> str:
            return f"{match[match.lastgroup] if match.lastgroup else ''}{instead}"

        text, count = re.subn(form, put, text, flags=re.DOTALL)
        self.removed[kind] += count
        return text

    def _cut(self, kind: str, text: str, secrets: Iterable[values.Secret]) -> str:
        """Removes each of the secrets, which are in order; of one that begins within another, nothing is left."""
        kept, done = [], 0
        for first, last, before in secrets:
            if first >= done:
                self.removed[kind] += 1
                kept += [text[done:first], values.kept_around(text[first:last], before)]
                done = last
        return "".join([*kept, text[done:]])


def _written(value: str) -> set[str]:
    """The value as itself, as JSON and Python write it between quotes, and as an address has it."""
    quoted = {json.dumps(value)[1:-1], repr(value)[1:-1], urllib.parse.quote(value, ""), urllib.parse.quote_plus(value)}
    return {value, *quoted, urllib.parse.quote(value), shlex.quote(value)}


def _is_folder(name: str, value: str) -> bool:
    """Whether a variable is the shell's own, of where it is and was; `pwd` is a password elsewhere."""
    return name in ("PWD", "OLDPWD") and value.startswith("/")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
