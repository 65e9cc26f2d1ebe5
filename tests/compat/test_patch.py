"""`wrap` names missing targets, detects changed ones, and lists active patches."""

import types

import pytest

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
