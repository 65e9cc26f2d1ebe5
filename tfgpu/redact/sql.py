"""Passwords in statements of SQL."""

from tfgpu.redact.commands import WORD

_TEXT = rf"(?:'(?:[^'\n]|'')*+'?|\\++[\"'](?:(?!\\++[\"'])[^\n])*+(?:\\++[\"'])?|{WORD}(?<![;)]))"
# In capitals, or behind what makes a user: "the layer identified by 'dense'" is a sentence.
_IDENTIFIED = (
    r"(?P<identified>\b(?:IDENTIFIED|(?i:(?:create|alter)\s++(?:or\s++replace\s++)?+(?:if\s++not\s++exists\s++)?+"
    r"(?:user|role)\s++[^\n;]{1,200}?\bidentified))(?i:\s++(?:(?:with|via)\s++[\w\"'`]++\s++)?+(?:by|as|using)\s++"
    r"(?:(?:values|password|random\s++password)\b\s*+\(?\s*+)?+))(?!(?i:external|global|none|random)\b)"
    rf"{_TEXT}(?:(?i:\s++replace\s++){_TEXT})?"
)
_SET = r"(?P<set>\b(?i:set\s++password(?:\s++for\s++[^\s=]++)?+\s*+=\s*+))(?!(?i:(?:old_)?password\())"
_FUNCTION = r"(?P<function>(?<![.\w])(?i:(?:old_)?password)\(\s*+(?=\\*+[\"']))"
PASSWORDS = f"{_IDENTIFIED}|(?:{_SET}|{_FUNCTION}){_TEXT}"
