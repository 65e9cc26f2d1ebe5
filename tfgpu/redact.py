"""Takes secrets out of texts that others will read: tokens, keys, passwords, credentials in URLs, the user's name.

It removes too much rather than too little: what follows a name such as `api_key`, what has the form of a known token,
what commands such as `curl -u` take as a password, the values of this process's own secret variables wherever they
stand, and long strings that look random. Texts within texts (JSON in JSON) are looked through too; `redact_places.py`
finds the values that stand apart from their names.
"""

import getpass
import json
import os
import re
import shlex
import socket
import urllib.parse
from collections import Counter
from collections.abc import Callable, Mapping

from tfgpu import redact_places

REMOVED = "<removed>"
_SHORTEST_KNOWN = 4
"""Characters from which the value of a secret variable is looked for in all texts; a shorter one stands everywhere."""
_SHORTEST_NAME = 3
# Whole words of a name; `key` counts as its last word, so that `api_key` is one and `key_dim` is not.
_WORDS = re.compile(
    r"(^|_)(pwd|pw|psw|pass|auth|authorization|cookies?|signature|sig|sas|token|bearer|jwt|otp|pin|creds?|credentials?|netrc)(_|$)"
    r"|(^|_)key(_data)?$"
    r"|(^|_)(api|access|secret|private|ssh|signing|encryption|service|auth)_keys$"
)
_INSIDE = re.compile(r"passw|passphrase|passcode|passkey|userpass|sshpass|pgpass|storepass|keypass|pswd"
    r"|secret|apikey|accesskey|privatekey|credential"
    r"|token(?!s|i[zs])"
)
# Names of secrets' names, and tokens of texts.
_NONE = re.compile(
    r"(secret|token|key|auth)_(name|refs?|key_ref|sock|socket)$|pull_secrets$|github_ref|_token_(ids?|type_ids)$"
    r"|^(\w+_)?(bos|eos|pad|unk|unknown|mask|sep|cls|oov|start|end|special|decoder_start)_tokens?(_ids?)?$"
    r"|(^|_)token_(accuracy|count|dim|embeddings?|errors?|index|indices|length|loss|mask|rate|type_ids?|types?)(_|$)"
)
# These also name what is no secret, or any key of a mapping: their values are one if they look like it.
_WEAK = re.compile(
    r"^keys?$|(^|_)(signature|sig)$|^(\w+_)?(checkpoint|group|instance|cache|sort|partition|index|prng|rng)_key$"
)
_WEAKER = re.compile(r"passw|passphrase|secret")
_SMALL = re.compile(r"[-+]?(\d{1,3}|\d+\.\d+)(e[-+]?\d+)?(?![\w.])")
_CODE = re.compile(r"[\[({]|[A-Za-z_][\w.]*[(\[{]|lambda\b")
_STAND_IN = re.compile(r"[|>][-+\d]*$|<[a-z ]+>(?!\w)|\*{3}")
_VERSION = re.compile(r"v?\d+(\.\w+)*([+!-][\w.]+)?[\s;,]*$|\d[\w.+!]*$")
_COUNTS = re.compile(r"(num|n|max|min|count)_")
_URL_SAFE = r"[A-Za-z0-9_\-]"
# Between the words of a command, written as a line or as a list; what comes before an option of it; one word.
_GAP = r"(?:[^\S\n]+|[\"']?,[^\S\n]*[\"'])"
_UP_TO = rf"\b(?:{_GAP}[^\n]{{0,300}}?)?{_GAP}"
_WORD = r"(?:\"[^\"\n]+\"?|'[^'\n]+'?|[^\s\"'\\]+)"
# Words that follow "password" in sentences and messages, and are none.
_NO_PASSWORDS = (
    r"for|is|was|are|of|or|and|to|in|on|at|from|with|by|as|not|no|none|must|may|can|cannot|has|have|had|does|did|will|if|that"
    r"|when|while|until|before|after|then|than|so|but|although|though|unless|which|who|it|we|you|this|these|via|using|uses?"
    r"|should|would|could|per|input|entry|store|stored|hidden|empty|unknown|set|given|length|strength|here|there|again|required|requires|prompts?|prompted|protected|protection|authentication|auth|login|files?|fields?|manager|hash"
    r"|hashes|policy|based|less|incorrect|invalid|wrong|expired|missing|accepted|rejected|changed|change|changes|reset|too"
)
# Each begins where a word does and gives back nothing of it: a log of one long word must not take hours.
_FORMS = {
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY.*?(-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|\Z)"
    r"|(?<=PuTTY-User-Key-File-)\d:.*?(Private-MAC:[^\n]*|\Z)",
    "credentials in a URL": r"(?<=://)(?=[^\s/@])[^\s/@:\"'<>]*+(?::[^\s/\"'<>]*)?@(?=[^\s/])",
    "webhook": r"(?<=hooks\.slack\.com/)(?:services|workflows|triggers)/[^\s\"'\\<>]+"
    r"|(?<=/api/webhooks/)\d+/[^\s\"'\\<>]+|(?<=\.webhook\.office\.com/)[^\s\"'\\<>]+|(?<=api\.telegram\.org/)bot[^\s/]+",
    "authorization": r"(?i)\b(?:bearer|basic|digest|token)\s+(?!(?-i:[A-Za-z]?[a-z]*+)(?![A-Za-z0-9+/_~=]))"
    r"[A-Za-z0-9+/._~=\-]{8,}",
    "token": r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|pk-|rk_|xox[abeprs]-|npm_|pypi-|dapi|ya29\.|nvapi-|r8_|AIza)"
    r"[A-Za-z0-9_.\-]{10,}"
    r"|\b(?:wandb_v\d_|xapp-|gld?t-|GOCSPX-|do[opr]_v1_|[spr]k_(?:live|test)_|SG\.|shp(?:at|ca|pa|ss)_|lin_api_|tskey-"
    r"|AGE-SECRET-KEY-|gsk_|pplx-|hv[sbr]\.|gl(?:rt|cbt|ptt|ft|imt|agent|oas|soat)-|sq0[a-z]{3}-|dp\.[psc]t\.|fo1_|vercel_|NRAK-"
    r"|sntry[su]_|ATATT|PMAK-|tfp_|pul-|dckr_(?:pat|oat)_)[A-Za-z0-9_.+/=\-]{10,}",
    "AWS key": r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}\b",
    "JSON web token": rf"(?<!{_URL_SAFE})(?={_URL_SAFE}++\.{_URL_SAFE}){_URL_SAFE}*?\beyJ{_URL_SAFE}{{8,}}"
    rf"\.{_URL_SAFE}+(?:\.{_URL_SAFE}*)?",
    # A user's and a group's number (`docker run -u 1000:1000`) are no password.
    "password of a command": r"(?<=[\s\"'])(?P<user>(?:-[uU]|--(?:proxy-)?user)"
    r"(?:=|(?<=-[uU])|[^\S\n]+|[\"']?,\s*)[\"']?)(?!\d+:\d+(?!\S)|\$|\))[^\s:\"'/]+:(?!//)[^\s\"']+"
    rf"|(?P<sshpass>\bsshpass{_UP_TO}-p{_GAP}?){_WORD}"
    rf"|(?P<mysql>\b(?:mysql|mariadb)\w*{_UP_TO}-p)(?=[^\s,]){_WORD}"
    rf"|(?P<login>\b(?:docker|podman|nerdctl|az|oc){_GAP}login{_UP_TO}-p{_GAP}?){_WORD}"
    rf"|(?P<mongo>\b(?:mongo\w*|snowsql){_UP_TO}-p{_GAP}?){_WORD}|(?P<literal>--from-literal[= ][\"']?[\w.\-]+=){_WORD}"
    rf"|(?P<cookie>(?<![\w\-])(?:-b|--cookie){_GAP}[\"']?[\w.\-]+=){_WORD}"
    rf"|(?P<redis>\bredis-cli{_UP_TO}-a{_GAP}?){_WORD}|(?P<ldap>\bldap\w+{_UP_TO}-w{_GAP}?){_WORD}"
    rf"|(?P<openssl>-pass(?:in|out)?{_GAP}pass:){_WORD}"
    rf"|(?P<echo>\b(?:echo|printf)(?:{_GAP}-\w+)*+{_GAP})(?=[^\n|]{{1,300}}\|[^\n|]{{0,300}}(?:--password-stdin|--with-token|sudo{_GAP}-S))[^\n|]+(?=\|)"
    rf"|(?P<wandb>\bwandb{_GAP}login{_GAP})(?!-){_WORD}",
    "password in a sentence": r"(?i)(?P<phrase>\b(?:password|passwd|passphrase|passcode)s?[\"']?[^\S\n]+"
    rf"(?:(?:is|was|are|of|set[^\S\n]+to)[^\S\n]+)?)(?!(?:{_NO_PASSWORDS})\b|[\w.\-]{{1,60}}+=)(?![-:=!<(\[|]){_WORD}",
    # The lines of `.pgpass`: machine, port, database, user, password.
    "password of PostgreSQL": r"(?P<pgpass>(?m:^)(?:[\w.\-]++|\*):(?:\d{2,5}|\*):(?:[\w.\-]++|\*):(?:[\w.\-]++|\*):)"
    r"(?![\d.]*$)[^\s:]{4,}(?m:$)",
    "secret in a sentence": r"(?i)(?P<said>\b(?:api[ _-]?key|token|secret"
    r"|(?:password|passphrase)[^\S\n]+for[^\S\n]+[^\s:]{1,80})"
    rf"(?:[^\S\n]+(?:is|was|=)[^\S\n]+|:[^\S\n]+))(?!(?:{_NO_PASSWORDS})\b)(?=[^\s]{{0,200}}\d)[^\s<>()]{{8,}}",
}
_EMAIL = r"(?<![A-Za-z0-9._%+\-])[A-Za-z0-9._%+\-]++@[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)+"
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\\n])*\"?|'(?:\\.|[^'\\\n])*'?")
# Within a text that is itself quoted, `\"` and `\\\"` stand for a mark; the same one ends it.
_MARK = r"\\*+[\"']"
_MARKED = r"(?P<mark>\\++[\"'])(?:(?!(?<!\\)(?P=mark))[^\n])*+(?P=mark)?"
_LITERAL = re.compile(r"\"(?:[^\"\\\n]++|\\[^\n])*+(?P<end>\"?)")
_DEEPEST = 5
"""How many texts within texts are unquoted; deeper ones are looked through as they stand."""
_COLOUR = re.compile(r"\x1b\[[\d;]*+m")
_PREFIX = r"(?:[bBrRuUfF]{1,2}(?=[\"']))?"
# A mark in single quotes, as a shell takes it: 'it'"'"'s'.
_SHELL = r"'[^'\n]*+'(?:(?:\"'\"|\\')'[^'\n]*+')++"
# A name and what joins it to its value: in code, JSON, YAML, an environment, a query, a command line.
_NAMED = re.compile(
    r"(?<![\w.\-])(?P<name>[\w.\-]++)"
    rf"(?:(?P<equals>(?:{_MARK})?\]?[ \t]*+(?::=|=>|[=!]=|=)[ \t]*+{_PREFIX}(?:\\\n[ \t]*+)?)"
    rf"|(?P<colon>(?:{_MARK})?\s*+:[ \t]*+{_PREFIX})"
    rf"|(?P<list>{_MARK}\s*+,\s*+(?={_MARK})|(?:{_MARK})?[ \t]*+\n[ \t]*+-[ \t]++)|(?P<space>[ \t]++(?:\\\n[ \t]*+)?))"
)
_VALUES = {
    "equals": re.compile(rf"{_SHELL}|{_QUOTED.pattern}|{_MARKED}|(?:[^\s&\"']|&(?![\w.\-%]{{1,60}}+=))++"),
    "colon": re.compile(rf"'(?:[^'\n]|'')*+'(?=\s|\Z)|{_QUOTED.pattern}|{_MARKED}|(?:[^\s\"'/]|(?<=[ \t])/)[^\n]*"),
    "list": re.compile(rf"{_QUOTED.pattern}|{_MARKED}|[^\s\"'\-][^\n]*"),
    "space": re.compile(rf"{_SHELL}|{_QUOTED.pattern}|{_MARKED}|[^\s\"'\-][^\s\"']*"),
}
_LINE = re.compile(r"[^\n]*")
_BRACKET = re.compile(rf"[(\[{{)\]}}]|{_QUOTED.pattern}")
_LONGEST_KEY = 600
_ALONE = re.compile(rf"(?:(?P<number>{_SMALL.pattern})|<[a-z ]+>)(?=[\s,;)\]}}]|\Z)")
_LONGEST_BRACKET, _DEEPEST_BRACKET = 2000, 8
_SHORTEST_KEY = 8
"""Characters from which a value with a digit is taken for a key, behind a name that may mean something else."""
_FLAG = re.compile(r"-|.*--")
_FLAG_ALONE = re.compile(r"[\"']--?[\w.\-]+[\"']")
_QUOTES = "\"'"
_NO_SECRETS = ("true", "false", "null", "none", "")
# The second form is that of AWS's secret keys, whose 40 characters may have a `/` among them.
_RANDOM = re.compile(
    r"(?<![\w+\-])(?!_Z)[A-Za-z0-9+_\-]{36,}={0,2}(?![\w+\-])|(?<![\w+/.\-])[A-Za-z0-9+][A-Za-z0-9+/]{39}(?![\w+/.=\-])"
)
# Keys of 32 to 64 hexadecimal digits, unless what stands before calls them a sum or a commit.
_HEX = re.compile(r"(?<![\w+\-])(?:[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64})(?![\w+\-])")
_SUM = re.compile(
    r"(?i)(?:(?<![A-Za-z])(?:commits?|git|detached at|index|sha-?\d*"
    r"|(?:sha\d*|md5|b2)sums?|md5|digest|hash|checksum|sum|revision|rev|tree|parent|merge|blob|head|build"
    r"|fingerprint|etag|object|tag|ref|image|layer|container)\b[\"']?|[@#]|[0-9a-f]{7}\.\.\.?)[ \t]*[:=]?[ \t]*[\"'(]?$"
)
_SUM_AFTER = re.compile(r"[ \t]+(?:refs/|HEAD\b|\((?:HEAD|tag:|origin))|\.\.")
# Words and numbers of a name such as `MultiHeadAttention_2_1_QueryDense`; of random characters each is one or two long.
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_PART_LENGTH = 3.2
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
        self._known = sorted({form for value in found for form in _written(value)}, key=len, reverse=True)
        user, host = user or _user(), socket.gethostname() if host is None else host
        self._places = [(home or os.path.expanduser("~")).rstrip("/")]
        self._names = {user: "<user>", host: "<host>", host.partition(".")[0]: "<host>"}

    def clean(self, text: str) -> str:
        """The text without secrets, and without the names of the user, the user's folder and this machine."""
        text = self._replaced("e-mail address", _EMAIL, REMOVED, self.hide(text))
        text = _HEX.sub(self._hex, _RANDOM.sub(self._random, text))
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
        text = _COLOUR.sub("", text)  # In them a name begins with a number: `36mpwd`.
        if depth:
            text = _LITERAL.sub(lambda literal: self._within(literal, depth - 1), text)
        for kind, form in _FORMS.items():
            text = self._replaced(kind, form, f"{REMOVED}@" if kind == "credentials in a URL" else REMOVED, text)
        return self._without_values(self._without_places(text))

    def _without_places(self, text: str) -> str:
        """Removes the secrets that `redact_places` finds."""
        named = [*redact_places.apart(text), *redact_places.below(text, is_secret)]
        places = [
            (first, last)
            for name, first, last in named
            if (is_secret(name) or redact_places.holds(name)) and _is_value(name, text[first:last])
        ]
        kept, done = [], 0
        for first, last in sorted([*places, *redact_places.before_the_end(text)]):
            if first >= done:
                self.removed["value of a secret name"] += 1
                kept += [text[done:first], _kept_around(text[first:last], "")]
                done = last
        return "".join([*kept, text[done:]])

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
            if (named["space"] or named["list"]) and (not _FLAG.match(named["name"]) or named["name"].endswith(".")):
                continue
            if named["colon"] == ":" and text[named.start() - 1 : named.start()] == "/":  # `-v /run/token:/token`
                continue
            if not is_secret(named["name"]):
                at = named.end()
                quoted = _QUOTED.match(text, at, ends[-1])
                if quoted and not _FLAG_ALONE.fullmatch(quoted[0]):
                    ends.append(quoted.end())
                continue
            value = _value(text, named, ends[-1])
            if not value:
                continue
            first, at = named.end(), named.end() + len(value)
            if _is_value(named["name"], value, named["equals"] or ""):
                self.removed["value of a secret name"] += 1
                kept += [text[done:first], _kept_around(value, text[named.end("name")])]
                done = at
            elif value[0] not in _QUOTES:
                at = first + 1
        return "".join([*kept, text[done:]])

    def _hex(self, match: re.Match) -> str:
        if _SUM_AFTER.match(match.string, match.end()):
            return match[0]
        digits = match[0].isdecimal() or match[0].isalpha()
        if digits or _SUM.search(match.string, max(0, match.start() - 24), match.start()):
            return match[0]
        self.removed["long random string"] += 1
        return REMOVED

    def _random(self, match: re.Match) -> str:
        """Long strings of mixed letters and digits, which no word of a language is."""
        tests: tuple[Callable[[str], bool], ...] = (str.isupper, str.islower, str.isdecimal)
        parts = _PART.findall(match[0])
        if re.search(r"[_\-]", match[0]) and sum(map(len, parts)) >= _PART_LENGTH * len(parts):
            return match[0]
        if _UUID.fullmatch(match[0]) or not all(any(test(character) for character in match[0]) for test in tests):
            return match[0]
        self.removed["long random string"] += 1
        return REMOVED


def _written(value: str) -> set[str]:
    """The value as itself, as JSON and Python write it between quotes, and as an address has it."""
    quoted = {json.dumps(value)[1:-1], repr(value)[1:-1], urllib.parse.quote(value, ""), urllib.parse.quote_plus(value)}
    return {value, *quoted, urllib.parse.quote(value), shlex.quote(value)}


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
    words = _words(name)
    if _NONE.search(words):
        return False
    return not _COUNTS.match(words) and bool(_WORDS.search(words) or _INSIDE.search(words.replace("_", "")))


def _words(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower().strip("_")


def _is_value(name: str, value: str, joined: str = "") -> bool:
    """Whether what stands behind a secret name is a secret, and not `true`, a version or a piece of a program."""
    bare = value.strip("\"',}];`.) ")
    if bare.strip("\\") == REMOVED or bare.lower() in _NO_SECRETS or _STAND_IN.match(bare):
        return False
    words = _words(name)
    if not _WEAKER.search(words) and _SMALL.fullmatch(bare):
        return False
    if joined.strip() == "==" and _VERSION.match(value):
        return False
    if not _WEAK.search(words):
        return True
    is_code = value[0] not in "\"'\\" and _CODE.match(bare)
    return not is_code and bare[:1] != "/" and len(bare) >= _SHORTEST_KEY and any(map(str.isdecimal, bare))


def _value(text: str, named: re.Match, end: int) -> str:
    """What stands behind a name: a word, a quoted text, a line, or what is within brackets."""
    first, kind = named.end(), str(named.lastgroup)
    words = _words(named["name"])
    alone = _ALONE.match(text, first, end)
    if alone and not (alone["number"] and _WEAKER.search(words)):
        return alone[0]
    if _WEAK.search(words):  # Pieces of programs stay, and what is in them is looked at: each only once or so.
        end = min(end, first + _LONGEST_KEY)
    if text[first : first + 1] in ("(", "[", "{"):
        depth = 0
        for mark in _BRACKET.finditer(text, first, min(end, first + _LONGEST_BRACKET)):
            depth += (mark[0] in "([{") - (mark[0] in ")]}")
            if not depth:
                return text[first : mark.end()]
            if depth > _DEEPEST_BRACKET:
                break
    if kind == "colon" and text[named.end("name") : named.end("name") + 1] in ("'", '"'):
        number = re.compile(r"[-\w.+]++(?=\s*+[,}\]])").match(text, first, end)
        if number:
            return number[0]
    if named["equals"] == " = " and _WEAKER.search(named["name"].lower()) and text[first : first + 1] not in _QUOTES:
        return text[first : _LINE.match(text, first, end).end()]  # of a settings file, which quotes no blanks
    found = _VALUES[kind].match(text, first, end)
    return found[0] if found else ""


def _kept_around(value: str, before: str) -> str:
    """What stands for a secret: in the same quotes, so that JSON stays JSON.

    Args:
        before: the character after the name, which in JSON is a quote.
    """
    if value[0] == "\\" and (mark := re.match(_MARK, value)):
        return f"{mark[0]}{REMOVED}{mark[0] if value.removeprefix(mark[0]).endswith(mark[0]) else ''}"
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
