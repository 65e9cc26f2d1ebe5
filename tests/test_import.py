"""The layering: which module may import which, what starts TensorFlow, where Keras's private names may appear."""

import ast
import contextlib
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tfgpu"

# The design's table: each part, and those it may import besides `errors`, `lazy` and `redact`; `cli` may import all.
FEATURES = {"attention", "repairs", "optim", "checkpoint", "consistency", "parallel", "parameter_server"}
ENGINE = {"compat", "core", *FEATURES}
ALLOWED = {
    "errors": set(),
    "atomic": set(),
    "lazy": set(),
    "named": set(),
    "redact": set(),
    "quiet": set(),
    "sensors": set(),
    "cluster": set(),
    "environment": set(),
    "packing": set(),
    "precision": {"environment"},
    "rendezvous": {"cluster"},
    "compat": set(),
    "core": {"compat"},
    "repairs": {"compat", "core"},
    "attention": {"compat", "core", "repairs"},
    "optim": {"compat", "core", "repairs"},
    "checkpoint": {"compat", "core", "repairs", "packing"},
    "consistency": {"compat", "core", "repairs"},
    "parallel": {"compat", "core", "repairs", "attention", "optim", "cluster", "environment", "rendezvous"},
    "parameter_server": {"compat", "core", "repairs", "parallel"},
    "layers": {"compat", "core"},
    "strategies": {"cluster", "environment", "rendezvous", "callbacks", *ENGINE},
    "losses": {"compat", "core"},
    "data": {"cluster", "compat", "core"},  # slots on datasets; how one worker makes its rows is registered in core
    "launch": {"cluster", "environment", "sensors", *ENGINE},
    "models": {"precision", *ENGINE},
    "training": {"data", "precision", "packing", *ENGINE},
    "callbacks": {"cluster", "environment", "training", "launch", "packing", "sensors", *ENGINE},
    "run": {"cluster", "quiet", "launch", "rendezvous", *ENGINE},
    "serving": {"models", *ENGINE},
}
ALLOWED["asynchronous"] = {"checkpoint", "optim", "parameter_server", "strategies"}
ALLOWED["interop"] = {"cluster", "environment", "data", *ENGINE}
ALLOWED["finetuning"] = {"data", *ENGINE}
ALLOWED["recipes"] = {*ALLOWED}
ALLOWED["measure"] = {*ALLOWED}
ALLOWED["tune"] = {*ALLOWED}
ALLOWED["doctor"] = {*ALLOWED}
FREE = {"__init__", "__main__", "cli"}
QUICK = (
    "tfgpu",
    "tfgpu.errors",
    "tfgpu.atomic",
    "tfgpu.cluster",
    "tfgpu.sensors",
    "tfgpu.sensors.table",
    "tfgpu.sensors.epochs",
    "tfgpu.sensors.prometheus",
    "tfgpu.rendezvous",
    "tfgpu.rendezvous.meeting",
    "tfgpu.launch",
    "tfgpu.launch.heartbeat",
    "tfgpu.cli",
    "tfgpu.launch.local",
    "tfgpu.launch.ssh",
    "tfgpu.launch.remote",
    "tfgpu.run",
    "tfgpu.parallel.mesh",
    "tfgpu.parallel.pipeline.schedule",
    "tfgpu.parallel.planning.planner",
    "tfgpu.launch.kubernetes",
    "tfgpu.launch.slurm.submission",
    "tfgpu.launch.slurm.batch_job",
    "tfgpu.launch.slurm.task",
    "tfgpu.recipes.recipe",
    "tfgpu.recipes.directory",
    "tfgpu.recipes.compare",
    "tfgpu.doctor",
    "tfgpu.doctor.bundle",
    "tfgpu.doctor.selftest",
    "tfgpu.recipes.agreement",
    "tfgpu.recipes.ready",
    "tfgpu.tune",
    "tfgpu.tune.space",
    "tfgpu.tune.batch_search",
)

FILES = sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """The parts of tfgpu that a file imports, anywhere in it and however it is written."""
    inside = ("tfgpu", *path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(inside[: len(inside) - node.level + 1]) if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("tfgpu.")}
    return found


def test_a_module_imports_only_from_the_rows_above():
    files = [path for path in FILES if part(path) not in FREE]
    assert {part(path) for path in files} <= ALLOWED.keys(), "a part has no row in the table of the house"
    always = {"errors", "atomic", "lazy", "named", "redact"}
    below = {path: imported(path) - ALLOWED[part(path)] - always - {part(path)} for path in files}
    wrong = [f"{module_of(path)} may not import {', '.join(sorted(names))}" for path, names in below.items() if names]
    assert not wrong, "\n".join(wrong)


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module but for those under TYPE_CHECKING or `__name__ == "__main__"`."""
    for node in body:
        yield node
        is_elsewhere = isinstance(node, ast.If) and re.search("TYPE_CHECKING|__name__", ast.unparse(node.test))
        for name in ("orelse",) if is_elsewhere else ("body", "handlers", "orelse", "finalbody"):
            yield from statements(getattr(node, name, []))


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """The modules of tfgpu that a file imports, in its functions too."""
    found = set()
    for node in statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:  # `tfgpu.errors.InputError` is of the module `tfgpu.errors`
            while name and name not in known:
                name = name.rpartition(".")[0]
            found.add(name)
    return found - {"", module_of(path)}


def circle(imports: dict[str, set[str]]) -> list[str]:
    """A circle among modules that import each other, or an empty list."""
    left = {name: set(others) for name, others in imports.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    walk = sorted(left)[:1]
    while walk and walk[-1] not in walk[:-1]:
        walk.append(min(left[walk[-1]] & left.keys()))
    return walk[walk.index(walk[-1]) :] if walk else []


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]


def test_no_modules_import_each_other_in_a_circle():
    known = {module_of(path) for path in FILES}
    assert not circle({module_of(path): imported_modules(path, known) for path in FILES})


def test_no_rooms_import_each_other_in_a_circle():
    """Function-level imports count too: a circle that they hide is still one."""
    found = {name: set() for name in {part(path) for path in FILES} - {"__init__", "__main__"}}
    for path in FILES:
        if part(path) in found:
            found[part(path)] |= imported(path) & found.keys() - {part(path)}
    assert not circle(found)


def rooms() -> list[str]:
    """The parts of tfgpu that the table of docs/explained/design.md names, in its first column."""
    page = (PACKAGE.parent / "docs" / "explained" / "design.md").read_text()
    text = page.partition("\n## The packages\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return re.findall(r"`(\w+)(?:\.py|/)?`", " ".join(cells))


def test_the_map_names_every_part_once():
    named, parts = rooms(), {part(path) for path in FILES} - {"__init__", "__main__"}
    assert len(named) == len(set(named)) and set(named) == parts


def private_names(path: Path) -> set[str]:
    """Keras's and TensorFlow's private modules and underscored attributes that a file uses."""
    found, roots = set(), ("keras", "tensorflow", "tf")
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            words = name.split(".")
            private = any(word.startswith("_") and not word.startswith("__") for word in words[1:])
            if words[0] in roots and (private or words[:2] in (["keras", "src"], ["tensorflow", "python"])):
                found.add(name)
    return found


def test_private_names_of_keras_stand_in_the_engine_alone():
    outside = [path for path in FILES if part(path) not in ENGINE]
    wrong = [f"{module_of(path)}: {name}" for path in outside for name in sorted(private_names(path))]
    assert outside
    assert not wrong, "\n".join(wrong)


def test_what_a_thread_knows_is_in_one_place():
    """Others use `step_context.Slot`, which goes along where code runs again or in another thread."""
    found = [module_of(path) for path in FILES if re.search(r"threading\.local|ContextVar", path.read_text())]
    assert found == ["tfgpu.core.step_context"]


@pytest.fixture(scope="module")
def slow_imports():
    """The slow packages that each of QUICK is the first to import, in one process that imports them in turn."""
    code = (
        "import importlib, json, sys\n"
        "found, before = {}, set()\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    slow = {'tensorflow', 'keras', 'matplotlib', 'sklearn', 'jinja2'} & set(sys.modules)\n"
        "    found[name], before = sorted(slow - before), slow\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *QUICK], capture_output=True, text=True, timeout=550, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", QUICK)
def test_importing_it_starts_no_tensorflow(module, slow_imports):
    assert slow_imports[module] == []


def test_every_public_name_is_there():
    import tfgpu

    assert {"strategy", "Trainer", "data", "models", "callbacks", "repair_keras"} <= set(tfgpu.__all__)
    for name in tfgpu.__all__:
        assert getattr(tfgpu, name) is not None
    assert set(tfgpu.__all__) <= set(dir(tfgpu))
    with pytest.raises(AttributeError, match="no attribute 'strateggy'"):
        tfgpu.strateggy  # noqa: B018


@pytest.mark.slow
def test_a_public_function_stays_where_its_module_has_the_same_name():
    code = (
        "import tfgpu.tune.study, tfgpu.data.mixture, tfgpu\n"
        "from tfgpu.tune import study\n"
        "assert callable(study) and callable(tfgpu.data.mixture) and tfgpu.tune.study is study\n"
        "import tfgpu.data.names\n"
        "assert tfgpu.data.names.parse_source('digits').kind == 'digits'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=550)


_DOTTED = re.compile(r"tfgpu(\.\w+)+")


def _missing(path: Path) -> Iterator[str]:
    """Names that a file takes of the package's modules, and that these do not have."""
    tree, modules = ast.parse(path.read_text(encoding="utf-8")), {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfgpu":
            for each in node.names:
                with contextlib.suppress(ModuleNotFoundError):  # a function or a class; else Python itself would fail
                    found = importlib.import_module(f"{node.module}.{each.name}")
                    modules[each.asname or each.name] = found
    rebound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in rebound:
            module = modules.get(node.value.id)
            if module is not None and not hasattr(module, node.attr):
                yield f"{path.relative_to(PACKAGE.parent)}:{node.lineno}: {module.__name__} has no {node.attr}"
        is_set = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr"  # of `monkeypatch`
        given = node.args[0] if is_set and node.args else None
        if isinstance(given, ast.Constant) and _DOTTED.fullmatch(str(given.value)):
            owner, _, name = given.value.rpartition(".")
            with contextlib.suppress(ImportError):  # a class's
                if not hasattr(importlib.import_module(owner), name):
                    yield f"{path.relative_to(PACKAGE.parent)}:{node.lineno}: {owner} has no {name}"


def test_what_a_file_takes_of_another_module_is_there():
    """A function that moved is missed at run time only, perhaps in a path that needs a library or a GPU."""
    pytest.importorskip("tensorflow")
    paths = [*PACKAGE.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]
    assert [found for path in sorted(paths) for found in _missing(path)] == []


def test_a_package_travels_by_its_name():
    """cloudpickle carries a script's functions to Ray's and Spark's workers, with the modules that they name."""
    code = (
        "import pickle, tfgpu, tfgpu.data\n"
        "assert pickle.loads(pickle.dumps((tfgpu, tfgpu.data))) == (tfgpu, tfgpu.data)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=550)
