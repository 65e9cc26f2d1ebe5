"""Secrets that are recognized by their form alone. Every pattern takes linear time."""

import re
from typing import NamedTuple

REMOVED = "<removed>"
# A user name alone, or a user and a password; the password may hold `/` and `@`, but digits before a `/` are a port.
_CREDENTIALS = r"(?<=://)(?:[^\s/@:\"'<>]++@|[^\s/@:\"'<>\[]*+:(?!\d{1,5}/)[^\s@\"'<>]{0,256}+@(?:[^\s@/\"'<>]{0,256}+@)*+)(?=[^\s/])"
_PREFIXED = (
    r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|pk-|[spr]k_(?:live|test)_|xox[abeprs]-|xapp-|npm_|pypi-|dapi|ya29\.|AIza"
    r"|GOCSPX-|nvapi-|r8_|gsk_|wandb_v\d_|dckr_(?:pat|oat)_|AGE-SECRET-KEY-)[A-Za-z0-9_.+/=\-]{10,}"
)
# 40 characters of base64; the digits of a commit's hash have no capitals.
_AWS_SECRET = (
    r"(?<![\w/+=.\-])(?=[a-z\d/+]*+[A-Z])(?=[A-Z\d/+]*+[a-z])(?=[A-Za-z/+]*+\d)[A-Za-z0-9/+]{40}(?![\w/+=.\-])"
)
# Options that hold a password in these programs: elsewhere `-p` is a port or a folder. All are followed by the value.
_NEAR = r"(?![\w\-])[^\n|;&]{0,200}?(?<![\w\-])"  # further words of the same command
_NEXT = r"(?:\\*[\"'],[\s\"'\\]*|[\s=]+)"  # to the next word, or to the next text of a list
_BEFORE = "|".join(
    (
        rf"(?:mysql|mariadb|7z)[\w\-]*+{_NEAR}-p(?=[^\s\"'\\])",  # these need it attached
        rf"(?:mysql|mariadb)[\w\-]*+{_NEAR}-p(?=['\"]\S)",
        rf"(?:sshpass|mongo\w*+|login){_NEAR}-p{_NEXT}?",
        rf"(?:redis-cli|https?(?= )){_NEAR}-a{_NEXT}?",
        rf"ldap\w++{_NEAR}-w{_NEXT}",
        rf"(?:zip|unzip|sqlcmd|bcp|ssh-keygen|mosquitto_\w++){_NEAR}-[PN]{_NEXT}?",
        rf"htpasswd{_NEAR}-\w*b\w*+{_NEXT}\S++{_NEXT}\S++{_NEXT}",
        r"(?:echo|printf)[ \t]++(?:-\w++[ \t]++)?(?=[^\n|]{1,200}\|[^\n|]{0,100}(?:sudo -S|stdin|passwd))",
        rf"-p[ \t]++(?=[\"'])|-pass(?:in|out)?{_NEXT}pass:|--from-literal{_NEXT}[\w.\-]++=",
        # user:password, user%password
        rf"(?:-[A-Za-z]{{0,6}}[uU]{_NEXT}?|--(?:user|proxy-user|auth){_NEXT})"
        r"\\*[\"']?(?!\d++:\d)[^\s:%/\"'\\]++[:%](?!//)",
    )
)
_WORD = r"(?:(?P<quote>\\*+[\"'])(?:(?!(?P=quote))[^\n])*+(?:(?P=quote))?+|[^\s\"'|;&]++)"
_URL_SAFE = r"[A-Za-z0-9_\-]"


class Rule(NamedTuple):
    """What is replaced, as a report names it."""

    kind: str
    form: re.Pattern
    instead: str = REMOVED


_INSTEAD = {"credentials in a URL": f"{REMOVED}@", "password on a command line": rf"\g<kept>{REMOVED}"}
RULES = [
    Rule(kind, re.compile(form, re.DOTALL), _INSTEAD.get(kind, REMOVED))
    for kind, form in {
        "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY.*?(-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|\Z)",
        "credentials in a URL": _CREDENTIALS,
        "webhook": r"(?<=hooks\.slack\.com/)[^\s\"'\\<>]+|(?<=/api/webhooks/)\d+/[^\s\"'\\<>]+",
        "token": _PREFIXED,
        "AWS key": rf"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{{12,}}\b|{_AWS_SECRET}",
        "JSON web token": rf"(?<![\w\-])eyJ{_URL_SAFE}{{8,}}+\.{_URL_SAFE}++(?:\.{_URL_SAFE}*+)?",
        "authorization": r"(?i)(?<=\bbearer )(?=[^\s]{0,200}\d)[A-Za-z0-9+/._~=\-]{8,}",
        "password on a command line": rf"(?P<kept>(?<![\w\-])(?:{_BEFORE})){_WORD}",
        "key of Weights & Biases": r"(?<=wandb login )(?:--relogin )?[A-Za-z0-9_\-]{20,}",
    }.items()
]
