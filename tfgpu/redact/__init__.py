"""Removes secrets from text that others will read: reports, logs in a bundle, settings that a tracker gets.

Removes what is assigned to a secret name (`names.py`, `assignments.py`), tokens of known forms and credentials in URLs
(`forms.py`), and the values of this process's secret environment variables. What stays is listed in
docs/explained/security.md.
"""

from tfgpu.redact.cleaner import Cleaner
from tfgpu.redact.forms import REMOVED
from tfgpu.redact.names import is_secret
from tfgpu.redact.terminal import printable

__all__ = ["REMOVED", "Cleaner", "is_secret", "printable"]
