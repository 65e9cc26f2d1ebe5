"""Takes secrets out of texts that others will read: tokens, keys, passwords, credentials in URLs, the user's name.

It removes too much rather than too little: what follows a name such as `api_key` (`names.py`, `values.py`), what stands
apart from one (`places.py`, `tables.py`), what has the form of a known token or is a password in an address, in SQL or
to commands such as `curl -u` (`forms.py`, `addresses.py`, `sql.py`, `commands.py`), long strings that look random
(`randoms.py`), and the values of this process's own secret variables wherever they stand. Texts within texts (JSON in
JSON) are looked through too (`cleaner.py`).
"""

from tfgpu.redact.cleaner import Cleaner
from tfgpu.redact.names import is_secret
from tfgpu.redact.terminal import printable
from tfgpu.redact.values import REMOVED

__all__ = ["REMOVED", "Cleaner", "is_secret", "printable"]
