"""What commands take as a password: `curl -u`, `sshpass -p`, `mysql -p` and the like."""

# Between the words of a command, written as a line or as a list; what comes before an option of it; one word.
_GAP = r"(?:[^\S\n]+|[\"']?,[^\S\n]*[\"'])"
_UP_TO = rf"\b(?:{_GAP}[^\n]{{0,300}}?)?{_GAP}"
WORD = r"(?:\"[^\"\n]+\"?|'[^'\n]+'?|[^\s\"'\\]+)"
# What a named group has taken stays. A user's and a group's number (`docker run -u 1000:1000`) are no password.
_USER = (
    r"(?<=[\s\"'])(?P<user>(?:-[uU]|--(?:proxy-)?user)(?:=|(?<=-[uU])|[^\S\n]+|[\"']?,\s*)[\"']?)"
    r"(?!\d+:\d+(?!\S)|\$|\))[^\s:\"'/]+:(?!//)[^\s\"']+"
)
_PIPED = (
    rf"(?P<echo>\b(?:echo|printf)(?:{_GAP}-\w+)*+{_GAP})"
    rf"(?=[^\n|]{{1,300}}\|[^\n|]{{0,300}}(?:--password-stdin|--with-token|sudo{_GAP}-S))[^\n|]+(?=\|)"
)
_OPTIONS = (
    rf"(?P<sshpass>\bsshpass{_UP_TO}-p{_GAP}?)",
    rf"(?P<mysql>\b(?:mysql|mariadb)\w*{_UP_TO}-p)(?=[^\s,])",
    rf"(?P<login>\b(?:docker|podman|nerdctl|az|oc){_GAP}login{_UP_TO}-p{_GAP}?)",
    rf"(?P<mongo>\b(?:mongo\w*|snowsql){_UP_TO}-p{_GAP}?)",
    r"(?P<literal>--from-literal[= ][\"']?[\w.\-]+=)",
    rf"(?P<cookie>(?<![\w\-])(?:-b|--cookie){_GAP}[\"']?[\w.\-]+=)",
    rf"(?P<redis>\bredis-cli{_UP_TO}-a{_GAP}?)",
    rf"(?P<ldap>\bldap\w+{_UP_TO}-w{_GAP}?)",
    rf"(?P<openssl>-pass(?:in|out)?{_GAP}pass:)",
    rf"(?P<wandb>\bwandb{_GAP}login{_GAP})(?!-)",
)
PASSWORDS = "|".join([_USER, _PIPED, *(f"{option}{WORD}" for option in _OPTIONS)])
