"""What commands take as a password: `curl -u`, `sshpass -p`, `mysql -p` and the like."""

# Between the words of a command, written as a line or as a list; what comes before an option of it, up to the next
# command or beyond; one word.
_GAP = r"(?:[^\S\n]+|[\"']?,[^\S\n]*[\"'])"
_UP_TO = rf"\b(?:{_GAP}[^\n]{{0,300}}?)?{_GAP}"
_BEFORE = rf"\b(?:{_GAP}[^\n;|&]{{0,300}}?)?{_GAP}"
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
    # `wget model.zip -P data` and `unzip -p model.zip` have none.
    rf"(?P<zip>(?<![\w.\-])(?:un)?zip{_BEFORE}-[A-Za-z]{{0,8}}P{_GAP}?)",
    rf"(?P<archive>(?<![\w.\-])(?:7z[arz]?|(?:un)?rar)(?:\.exe)?{_BEFORE}-h?p)(?=[^\s,\"']|[\"'][^\s,\]])",
    rf"(?P<wifi>\bwpa_passphrase{_GAP}(?!(?:to|is|and|or|for|from|in|with)\b){WORD}{_GAP})",
    rf"(?P<nmcli>\b(?:wifi-sec|802-11-wireless-security)\.(?:psk|wep-key\d|leap-password){_GAP})",
    rf"(?P<wandb>\bwandb{_GAP}login{_GAP})(?!-)",
)
PASSWORDS = "|".join([_USER, _PIPED, *(f"{option}{WORD}" for option in _OPTIONS)])
