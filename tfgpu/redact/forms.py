"""The forms that secrets have, whatever is around them."""

from tfgpu.redact import addresses, commands, sql
from tfgpu.redact.commands import WORD

_URL_SAFE = r"[A-Za-z0-9_\-]"
# Words that follow "password" in sentences and messages, and are none.
_NO_PASSWORDS = (
    r"for|is|was|are|of|or|and|to|in|on|at|from|with|by|as|not|no|none|must|may|can|cannot|has|have|had|does|did|will"
    r"|if|that|when|while|until|before|after|then|than|so|but|although|though|unless|which|who|it|we|you|this|these|via"
    r"|using|uses?|should|would|could|per|input|entry|store|stored|hidden|empty|unknown|set|given|length|strength|here"
    r"|there|again|required|requires|prompts?|prompted|protected|protection|authentication|auth|login|files?|fields?"
    r"|manager|hash|hashes|policy|based|less|incorrect|invalid|wrong|expired|missing|accepted|rejected|changed|change"
    r"|changes|reset|too"
)
PRIVATE_KEY = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY.*?(-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|\Z)"
    r"|(?<=PuTTY-User-Key-File-)\d:.*?(Private-MAC:[^\n]*|\Z)"
)
# Each begins where a word does and gives back nothing of it: a log of one long word must not take hours.
FORMS = {
    "credentials in a URL": addresses.CREDENTIALS,
    "webhook": r"(?<=hooks\.slack\.com/)(?:services|workflows|triggers)/[^\s\"'\\<>]+"
    r"|(?<=/api/webhooks/)\d+/[^\s\"'\\<>]+|(?<=\.webhook\.office\.com/)[^\s\"'\\<>]+"
    r"|(?<=api\.telegram\.org/)bot[^\s/]+",
    "authorization": r"(?i)\b(?:bearer|basic|digest|token)\s+(?!(?-i:[A-Za-z]?[a-z]*+)(?![A-Za-z0-9+/_~=]))"
    r"[A-Za-z0-9+/._~=\-]{8,}",
    "token": r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|pk-|rk_|xox[abeprs]-|npm_|pypi-|dapi|ya29\.|nvapi-|r8_|AIza)"
    r"[A-Za-z0-9_.\-]{10,}"
    r"|\b(?:wandb_v\d_|xapp-|gld?t-|GOCSPX-|do[opr]_v1_|[spr]k_(?:live|test)_|SG\.|shp(?:at|ca|pa|ss)_|lin_api_|tskey-"
    r"|AGE-SECRET-KEY-|gsk_|pplx-|hv[sbr]\.|gl(?:rt|cbt|ptt|ft|imt|agent|oas|soat)-|sq0[a-z]{3}-|dp\.[psc]t\.|fo1_"
    r"|vercel_|NRAK-|sntry[su]_|ATATT|PMAK-|tfp_|pul-|dckr_(?:pat|oat)_)[A-Za-z0-9_.+/=\-]{10,}",
    "AWS key": r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}\b",
    "JSON web token": rf"(?<!{_URL_SAFE})(?={_URL_SAFE}++\.{_URL_SAFE}){_URL_SAFE}*?\beyJ{_URL_SAFE}{{8,}}"
    rf"\.{_URL_SAFE}+(?:\.{_URL_SAFE}*)?",
    "password of a command": commands.PASSWORDS,
    "password in SQL": sql.PASSWORDS,
    "password in a sentence": r"(?i)(?P<phrase>\b(?:password|passwd|passphrase|passcode)s?[\"']?[^\S\n]+"
    rf"(?:(?:is|was|are|of|set[^\S\n]+to)[^\S\n]+)?)(?!(?:{_NO_PASSWORDS})\b|[\w.\-]{{1,60}}+=)(?![-:=!<(\[|])"
    rf"(?:[EeNn](?='))?{WORD}",
    # The lines of `.pgpass`: machine, port, database, user, password.
    "password of PostgreSQL": r"(?P<pgpass>(?m:^)(?:[\w.\-]++|\*):(?:\d{2,5}|\*):(?:[\w.\-]++|\*):(?:[\w.\-]++|\*):)"
    r"(?![\d.]*$)[^\s:]{4,}(?m:$)",
    "secret in a sentence": r"(?i)(?P<said>\b(?:api[ _-]?key|token|secret"
    r"|(?:password|passphrase)[^\S\n]+for[^\S\n]+[^\s:]{1,80})"
    rf"(?:[^\S\n]+(?:is|was|=)[^\S\n]+|:[^\S\n]+))(?!(?:{_NO_PASSWORDS})\b)(?=[^\s]{{0,200}}\d)[^\s<>()]{{8,}}",
}
EMAIL = r"(?<![A-Za-z0-9._%+\-])[A-Za-z0-9._%+\-]++@[A-Za-z0-9\-]+(?:\.[A-Za-z0-9\-]+)+"
