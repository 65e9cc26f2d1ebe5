"""`wrap` names missing targets, detects changed ones, and lists active patches."""

import ast
import types
from pathlib import Path

import pytest
import tensorflow as tf

from tfgpu.compat import patch, targets
from tfgpu.errors import MachineError


@pytest.fixture
def listed(monkeypatch):
    """A target that stands in the tables, and the list of patches for this test alone."""
    holder = types.ModuleType("holder")
    exec("def _double(x):\n    return 2 * x", vars(holder))
    holder._double = lambda x: 2 * x
    monkeypatch.setitem(targets.OWNERS, "holder", ("nowhere",))
    monkeypatch.setattr(targets, "TARGETS", (*targets.TARGETS, "holder._double"))
    monkeypatch.setattr(targets, "owner", lambda name: holder)
    monkeypatch.setattr(patch, "_installed", [])
    monkeypatch.setattr(patch, "_told", set())
    return holder


def know(monkeypatch, mark):
    monkeypatch.setitem(targets.FINGERPRINTS, "holder._double", {mark: ["Keras 3.15.1"]})


def add_one():
    @patch.wrap("holder.double")
    def double(stock, x):
        return stock(x) + 1


def test_a_wrapped_function_gets_the_stock_one(listed, monkeypatch):
    know(monkeypatch, targets.fingerprint(listed._double))
    add_one()
    assert listed._double(4) == 9
    (found,) = patch.installed()
    assert found == patch.Patch("holder._double", __name__, "tried")


def test_a_changed_target_is_reported_and_wrapped(listed, monkeypatch, caplog):
    know(monkeypatch, "another source")
    with patch.applying(lambda: True):
        add_one()
    assert listed._double(4) == 9
    assert [found.source for found in patch.installed()] == ["changed"]
    assert "holder._double has changed" in caplog.text and "Keras 3.13 to 3.16" in caplog.text


def test_a_fault_that_is_gone_is_not_repaired(listed, monkeypatch):
    know(monkeypatch, "another source")
    with patch.applying(lambda: False):
        add_one()
    assert listed._double(4) == 8 and patch.installed() == ()


@pytest.mark.parametrize("is_needed", [True, False])
def test_what_else_a_repair_did_is_undone_if_it_is_not_needed(listed, monkeypatch, is_needed):
    know(monkeypatch, "another source")
    undone = []
    with patch.applying(lambda: is_needed):
        add_one()
        patch.if_not_needed(lambda: undone.append(1))
    patch.if_not_needed(lambda: undone.append(2))  # of no repair
    assert undone == ([] if is_needed else [1])


def test_the_probe_is_not_run_if_nothing_changed(listed, monkeypatch):
    know(monkeypatch, targets.fingerprint(listed._double))
    with patch.applying(lambda: pytest.fail("asked")):
        add_one()
    assert listed._double(4) == 9


def test_an_error_within_a_repair_leaves_no_record(listed, monkeypatch):
    know(monkeypatch, targets.fingerprint(listed._double))
    with pytest.raises(RuntimeError), patch.applying(lambda: True):
        add_one()
        raise RuntimeError
    assert patch.installed() == ()


def test_a_target_that_is_gone_names_versions_and_a_cure():
    with pytest.raises(MachineError) as caught:
        patch.wrap("keras.Model.gone")
    text = str(caught.value)
    assert "has no `keras.Model.gone`" in text and "Keras 3.13 to 3.16" in text
    assert 'pip install "keras==3.15.1"' in text and "TFGPU_REPAIR=0" in text
    with pytest.raises(MachineError, match=r'TensorFlow 2\.\d+\.\S+ has no `tf.data.gone`.*"tensorflow==2'):
        patch.wrap("tf.data.gone")


def test_a_replaced_value_that_is_gone_names_versions_unless_it_is_new(listed):
    with pytest.raises(MachineError, match="has no `holder.gone`"):
        patch.replace("holder.gone", print, by=__name__)
    patch.replace("holder.gone", print, by=__name__, is_new=True)
    assert listed.gone is print


def test_a_private_target_that_is_gone_names_its_own_library():
    strategy = tf.distribute.Strategy
    with pytest.raises(MachineError, match=r'TensorFlow 2\.\d+\.\S+ has no `Strategy.gone`.*"tensorflow==2'):
        patch.wrap(strategy, "gone")


def test_an_unlisted_name_is_an_internal_error():
    with pytest.raises(ValueError, match="neither in TARGETS"):
        patch.wrap("somewhere.else")


def test_every_target_is_there_or_of_another_version():
    missing = [name for name in targets.TARGETS if not hasattr(*targets.locate(name))]
    assert set(missing) <= {"backend_ops.remat", "core.remat"}


def test_the_installed_version_has_its_fingerprints():
    for name in targets.TARGETS:
        owner, attribute = targets.locate(name)
        mark = targets.fingerprint(getattr(owner, attribute, None))
        assert mark is None or mark in targets.FINGERPRINTS[name], f"{name}: run tfgpu.compat.record_fingerprints"


def test_only_replaced_values_have_no_fingerprints():
    assert [name for name, known in targets.FINGERPRINTS.items() if not known] == ["aug_mix.py_random"]


def test_a_replaced_function_is_checked(listed, monkeypatch):
    know(monkeypatch, "another source")
    patch.replace("holder.double", print, by=__name__)
    know(monkeypatch, targets.fingerprint(print) or "none")
    patch.replace("holder.double", abs, by=__name__)
    assert [found.source for found in patch.installed()] == ["changed", "tried"]


def test_a_target_of_unknown_source_gives_no_warning(listed, monkeypatch, caplog):
    monkeypatch.setitem(targets.FINGERPRINTS, "holder._double", {})
    add_one()
    assert [found.source for found in patch.installed()] == ["unlisted"] and not caplog.text


def test_comments_and_spaces_do_not_change_a_fingerprint(tmp_path):
    def load(text):
        path = tmp_path / f"m{abs(hash(text))}.py"
        path.write_text(text)
        space = {}
        exec(compile(text, str(path), "exec"), space)
        return targets.fingerprint(space["f"])

    plain = load("def f(x):\n    return x + 1\n")
    assert load("def f(x):\n    # adds\n    return  x + 1  # one\n") == plain
    assert load("def f(x):\n    return x + 2\n") != plain


def test_every_listed_target_is_wrapped_by_a_module():
    # core/gradients.py for each class of optimizers, coupled_losses.py for each module of Keras that has the losses
    found = {"BaseOptimizer.apply", "LossScaleOptimizer.apply"}
    found |= {f"keras.losses.{name}" for name in ("dice", "tversky", "circle")}
    assert {*targets.TARGETS} - {target for target, _ in patch.declared()} == found


def test_a_listed_target_that_is_wrapped_by_its_class_is_checked(listed, monkeypatch):
    know(monkeypatch, "another source")
    patch.wrap(listed, "_double")(lambda stock, x: stock(x))
    patch.wrap(types.SimpleNamespace(__name__="holder", _double=lambda x: x), "_double")(lambda stock, x: stock(x))
    assert [found.source for found in patch.installed()] == ["changed", "unlisted"]


def test_a_block_is_wrapped_and_listed_for_its_length(listed, monkeypatch, caplog):
    know(monkeypatch, "another source")
    stock = listed._double
    for _ in range(2):
        with pytest.raises(KeyError), patch.wrapped("holder.double", lambda stock, x: stock(x) + 1):
            assert listed._double(4) == 9
            assert patch.installed() == (patch.Patch("holder._double", __name__, "changed"),)
            raise KeyError
        assert listed._double is stock and patch.installed() == ()
    assert caplog.text.count("holder._double has changed") == 1


def test_a_block_wraps_getters_and_inherited_functions(listed):
    class Base:
        @property
        def size(self):
            return 2

        def double(self, x):
            return 2 * x

    class Below(Base):
        pass

    with (
        patch.wrapped(Base, lambda stock, self: stock(self) + 1, "size"),
        patch.wrapped(Below, lambda stock, self, x: stock(self, x) + self.size, "double"),
    ):
        assert (Below().size, Below().double(4), Base().double(4)) == (3, 11, 8)
    assert (Below().size, Below().double(4), vars(Below).get("double")) == (2, 8, None)


def test_what_is_wrapped_within_a_block_stays(listed, monkeypatch):
    know(monkeypatch, targets.fingerprint(listed._double))
    with patch.wrapped("holder.double", lambda stock, x: stock(x) + 10):
        add_one()
    assert listed._double(4) == 19
    assert len(patch.installed()) == 2


def test_a_method_of_one_object_is_listed_once_for_its_class(listed):
    class Layer:
        def call(self):
            return "stock"

    layers = Layer(), Layer(), Layer()
    for at, layer in enumerate(layers[:2]):
        patch.override(layer, "call", lambda at=at: at, by="tfgpu.example")
    assert [each.call() for each in layers] == [0, 1, "stock"]
    assert patch.installed() == (patch.Patch("Layer.call", "tfgpu.example", "unlisted"),)


METHODS = {"call", "quantize", "add", "pop", "save_own_variables"}


def test_methods_of_objects_in_parallel_are_declared():
    declared = patch.declared()
    assert METHODS <= {target[2:] for target, by in declared if by.startswith("tfgpu.parallel")}
    assert ("*.compute_loss", "tfgpu.parallel.device_placement") in declared
    assert ("*._run_through_graph", "tfgpu.compat.layers") in declared


PACKAGE = Path(patch.__file__).parents[1]
LIBRARIES = ("keras", "tensorflow", "tfgpu.compat")


def of_library(value: ast.expr, names: set[str]) -> bool:
    """Whether an expression is a class or a module of a library: an attribute's path, or found by `targets`."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in ("targets.owner", "targets.locate")
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name) and value.id in names


def assigned_to_libraries(text: str) -> list[str]:
    """The statements that put an attribute on a class or a module of a library."""
    nodes, names = [*ast.walk(ast.parse(text))], set()
    for node in nodes:
        module = getattr(node, "module", None) or ""
        for each in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if (module or each.name).startswith(LIBRARIES):
                names.add(each.asname or each.name.partition(".")[0])
    for node in nodes:  # other names for them
        if isinstance(node, ast.Assign):
            sides = node.targets[0], node.value
            is_split = all(isinstance(side, ast.Tuple) for side in sides)
            pairs = zip(*(side.elts for side in sides), strict=False) if is_split else [sides]
            names |= {to.id for to, what in pairs if isinstance(to, ast.Name) and of_library(what, names)}
    found = []
    for node in nodes:
        changed = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            if of_library(node.args[0], names):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            where = [each.value for each in changed if isinstance(each, ast.Attribute)]
            found += [ast.unparse(node) for each in where if of_library(each, names)]
    return found


def test_nothing_else_changes_a_library():
    changes = {path: assigned_to_libraries(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {str(path.relative_to(PACKAGE)): found for path, found in changes.items() if found} == {}


ATTRIBUTES = {  # variables and numbers, no methods
    "parallel/expert/shards.py": 1,
    "parallel/tensor/local_shards.py": 2,
    "parallel/tensor/variable_splits.py": 2,
}


def test_objects_get_methods_by_override_alone():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        calls = [each for each in nodes if isinstance(each, ast.Call) and each.args]
        calls = [each for each in calls if ast.unparse(each.func) == "object.__setattr__"]
        if count := len([each for each in calls if ast.unparse(each.args[0]) != "self"]):  # of a frozen dataclass
            found[str(path.relative_to(PACKAGE))] = count
    assert {path: count for path, count in found.items() if not path.startswith("compat/")} == ATTRIBUTES


@pytest.mark.parametrize(
    "line",
    [
        "tf.Variable.assign = None",
        "owner, here = lib.StrategyBase, 1; owner.size = property(None)",
        "setattr(lib.Strategy, name, None)",
        "owner = targets.owner('Layer'); owner.call = None",
        "import keras; del keras.Layer.call",
    ],
)
def test_a_change_of_a_library_is_found(line):
    text = "import tensorflow as tf\nfrom tensorflow.python.distribute import distribute_lib as lib\n" + line
    assert len(assigned_to_libraries(text)) == 1
    assert assigned_to_libraries("import tensorflow as tf\nmodel = tf.Module()\nmodel.size = 1\n") == []
