"""How tfgpu patches Keras and TensorFlow: it wraps single functions, each for a known source.

`wrap` (`wrapped` for a block, `override` for one object) is the only way in which tfgpu replaces a library's function.
Each target in `targets.py` has fingerprints (hashes of its source) for the tested versions, in `fingerprints.json`. A
missing target raises an error; one whose source has changed is reported once, and, if it belongs to a repair, the
repair's probe decides whether the repair is still needed. `installed()` lists all active patches, and `declared()` what
the source may wrap; `tfgpu doctor --json` lists both.
"""

import ast
import functools
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tfgpu.compat import targets, versions
from tfgpu.errors import MachineError

versions.check()

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patch:
    """One wrapped function.

    Attributes:
        target: its name, such as `Trainer.compile`.
        by: the module of tfgpu that wraps it.
        source: `tried` (its source is one of those in `fingerprints.json`), `changed` (it is not) or `unlisted` (no
            source is known: the target belongs to a class of the user's, or is no function).
    """

    target: str
    by: str
    source: str


@dataclass
class _Pending:
    """What a repair wraps while it is being applied: all of it, or nothing."""

    patches: list[tuple[object, str, object, Patch]] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)


WAYS = ("wrap", "wrapped", "override", "replace")
"""The functions of this module that patch."""

_ABSENT = object()
_installed: list[Patch] = []
_told: set[Patch] = set()  # the changed ones that the log names: those of a block may come again
_pending: list[_Pending] = []  # not empty while a repair is applied


def wrap(target: object, name: str | None = None, *, listed: str = "") -> Callable[[Callable], Callable]:
    """Decorator: replaces the target by the decorated function, which gets the stock one as its first argument.

    Args:
        target: a name of `targets.TARGETS` without the underscore of a private function, a public dotted path below
            `keras` or `tf`, or, with `name`, an object.
        name: the attribute of the object `target`, a user's class or one made at run time.
        listed: what `declared` shows for an object whose `name` is no constant there, with `*` for what varies;
            several are separated by spaces.

    Raises:
        MachineError: this version of Keras or TensorFlow has no such function.

    Example:
        @wrap("Loss.__call__")
        def call(stock, self, y_true, y_pred, sample_weight=None): ...
    """
    shown, owner, attribute = _find(target, name)

    def put(fix: Callable) -> Callable:
        stock = getattr(owner, attribute)
        patch = Patch(shown, fix.__module__, _source(shown, stock, owner))
        _put(owner, attribute, _around(stock, fix), patch)
        return fix

    return put


@contextmanager
def wrapped(target: object, fix: Callable, name: str | None = None, *, instead: str | None = None) -> Iterator[None]:
    """Wraps a function, or a property's getter, for the length of a block; `installed` lists it meanwhile.

    Args:
        target: as for `wrap`.
        fix: gets the stock function as its first argument.
        name: as for `wrap`.
        instead: what the user may do where the target is missing; by default, to disable the repairs.

    Raises:
        MachineError: as `wrap`.
    """
    shown, owner, attribute = _find(target, name, instead)
    stock, before = getattr(owner, attribute), vars(owner).get(attribute, _ABSENT)
    value = property(_around(stock.fget, fix)) if isinstance(stock, property) else _around(stock, fix)
    patch = Patch(shown, fix.__module__, _source(shown, stock, owner))
    setattr(owner, attribute, value)
    _record(patch)
    try:
        yield
    finally:
        if vars(owner).get(attribute) is value:  # otherwise something has wrapped it since
            _take_back(owner, attribute, before)
            _installed.remove(patch)


def _find(target: object, name: str | None, instead: str | None = None) -> tuple[str, object, str]:
    """A target's name as `installed` shows it, the object that has it, and the attribute's name."""
    if name is None:
        shown, (owner, attribute) = targets.full_name(str(target)), targets.locate(str(target))
    else:
        shown, owner, attribute = f"{getattr(target, '__name__', target)}.{name}", target, name
    if owner is None or not hasattr(owner, attribute):
        raise MachineError(_missing(shown, owner, instead))
    return shown, owner, attribute


def _around(stock: Callable, fix: Callable) -> Callable:
    @functools.wraps(stock)
    def around(*args, **kwargs):
        return fix(stock, *args, **kwargs)

    return around


def override(owner: object, name: str, method: Callable, *, by: str, listed: str = "") -> None:
    """Gives one object, such as a layer, a method of its own in place of its class's; Keras does not track it.

    `installed` lists it once, as a method of the object's class, however many objects have it.

    Args:
        owner: the object.
        name: of the method.
        method: takes the arguments without `self`.
        by: the calling module, for `installed`.
        listed: as for `wrap`, where `name` is no constant.
    """
    object.__setattr__(owner, name, method)
    patch = Patch(f"{type(owner).__name__}.{name}", by, "unlisted")
    if patch not in _installed:
        _installed.append(patch)


def replace(target: str, value: object, *, by: str, is_new: bool = False) -> None:
    """Replaces an object that a module of Keras or TensorFlow uses.

    Args:
        target: as for `wrap`.
        value: the replacement.
        by: the calling module, for `installed`.
        is_new: it is an attribute of a class that only the class's instances have.

    Raises:
        MachineError: as `wrap`.
    """
    owner, attribute = targets.locate(target)
    shown = targets.full_name(target)
    if owner is None or not (is_new or hasattr(owner, attribute)):
        raise MachineError(_missing(shown, owner))
    stock = getattr(owner, attribute, None)
    _put(owner, attribute, value, Patch(shown, by, _source(shown, stock, owner)))


def _put(owner: object, attribute: str, value: object, patch: Patch) -> None:
    stock = vars(owner).get(attribute, _ABSENT)
    setattr(owner, attribute, value)
    if _pending:
        _pending[-1].patches.append((owner, attribute, stock, patch))
    else:
        _record(patch)


def _take_back(owner: object, attribute: str, stock: object) -> None:
    if stock is _ABSENT:  # inherited, or new
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, stock)


@contextmanager
def applying(is_needed: Callable[[], bool]) -> Iterator[None]:
    """Groups the wraps in this block: if one of their targets has changed, `is_needed` decides about all.

    Args:
        is_needed: whether this version has the fault that the block repairs; called only if a target has changed.
    """
    held = _Pending()
    _pending.append(held)
    try:
        yield
    finally:
        _pending.remove(held)
    if any(patch.source == "changed" for *_, patch in held.patches) and not is_needed():
        for owner, attribute, stock, _ in reversed(held.patches):
            _take_back(owner, attribute, stock)
        for undo in held.undo:
            undo()
        return
    for *_, patch in held.patches:
        _record(patch)


def if_not_needed(undo: Callable[[], None]) -> None:
    """Has `undo` called if the repair that is being applied turns out not to be needed; else does nothing."""
    if _pending:
        _pending[-1].undo.append(undo)


def installed() -> tuple[Patch, ...]:
    """All wrapped functions, in the order in which they were wrapped.

    Example:
        >>> all(isinstance(patch, Patch) for patch in installed())
        True
    """
    return tuple(_installed)


def declared() -> list[tuple[str, str]]:
    """Every target that a module of tfgpu wraps, with that module, including those that a feature wraps on use.

    Read from the source. A formatted name, such as `f"CSVLogger.{name}"`, stands for those targets that it makes of
    words in its module. Where a module wraps a method of classes that it finds at run time, `*` stands for the class:
    `*.update_state`.
    """
    package, found = Path(__file__).parent.parent, []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "from tfgpu.compat.patch import" not in text:
            continue
        module = ".".join(("tfgpu", *path.relative_to(package).with_suffix("").parts)).removesuffix(".__init__")
        tree = ast.parse(text)
        words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in WAYS and node.args:
                found += [(target, module) for target in _targets_in(node, words)]
    return found


def _targets_in(call: ast.Call, words: set[object]) -> list[str]:
    """The targets that a call of `wrap` names; `words` are the constants of its module."""
    target, *names = call.args
    if isinstance(target, ast.Constant):
        return [targets.full_name(target.value)]
    if not isinstance(target, ast.JoinedStr):  # an object
        listed = [name for each in call.keywords if each.arg == "listed" for name in each.value.value.split()]
        return listed or [f"*.{name.value}" for name in names if isinstance(name, ast.Constant)]
    parts = (re.escape(part.value) if isinstance(part, ast.Constant) else "(.+)" for part in target.values)
    pattern = re.compile("".join(parts))
    named = {target: pattern.fullmatch(re.sub(r"\._(?!_)", ".", target)) for target in targets.TARGETS}
    return [target for target, found in named.items() if found and words.issuperset(found.groups())]


def _record(patch: Patch) -> None:
    _installed.append(patch)
    if patch.source == "changed" and patch not in _told:
        _told.add(patch)
        _log.warning(
            "%s has changed since tfgpu was tested (with %s); %s wraps it. Run `tfgpu doctor` to see whether it fits.",
            patch.target,
            versions.tried(),
            patch.by,
        )


def _source(target: str, stock: Callable, owner: object) -> str:
    known = targets.FINGERPRINTS.get(target)
    if not known or targets.locate(target)[0] is not owner:  # a user's class of that name
        return "unlisted"
    found = targets.fingerprint(stock)
    return "tried" if found is None or found in known else "changed"


def _missing(target: str, owner: object, instead: str | None = None) -> str:
    module = getattr(owner, "__module__", getattr(owner, "__name__", "")) or ""
    library = "tensorflow" if module.startswith("tensorflow") or target.startswith("tf.") else "keras"
    return (
        f"{versions.here(library)} has no `{target}`, which tfgpu wraps. tfgpu was tested with {versions.tried()}. "
        f"Run `{Path(sys.executable).name} -m pip install {versions.pin(library)}`, or "
        f"{instead or 'set TFGPU_REPAIR=0 to leave Keras as it is'}."
    )
