"""What code can change in Python is put back."""

import collections
import dataclasses
import functools
import random
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpu.core.state.python_state import Kept

NAMED, CACHE = None, {}


@functools.cache
def cached(name):
    return [name]


class Slotted:
    __slots__ = ("full", "empty")

    def __init__(self):
        self.full = 1


class Holder:
    shared = 0

    def __init__(self):
        self.numbers, self.named, self.of_python = [1], collections.OrderedDict(a=1, b=2), types.SimpleNamespace(x=1)
        self.queue, self.slotted, self.draws = collections.deque([1], maxlen=3), Slotted(), np.random.default_rng(0)
        self.python, self.old = random.Random(0), np.random.RandomState(0)

    @functools.cached_property
    def late(self):
        return object()


def test_attributes_and_containers():
    holder = Holder()
    numbers, kept = holder.numbers, Kept([holder])
    first = [holder.draws.random(), holder.python.random(), holder.old.random()]
    kept.put_back()
    holder.numbers.append(2)
    holder.named["c"] = 3
    holder.named.move_to_end("a")
    holder.of_python.x = holder.slotted.full = holder.slotted.empty = 5
    holder.queue.append(2)
    holder.new, Holder.shared, holder.numbers = holder.late, 1, []
    assert [holder.draws.random(), holder.python.random(), holder.old.random()] == first
    assert kept.changes() == "draws full named numbers old python queue shared x".split()
    assert kept.draws(kept.changes()) == ["draws", "old", "python"]
    kept.put_back()
    assert not kept.changes()
    assert holder.numbers is numbers == [1] and list(holder.named.items()) == [("a", 1), ("b", 2)]
    assert (holder.of_python.x, holder.slotted.full, list(holder.queue), Holder.shared) == (1, 1, [1], 0)
    assert not {"new", "late"} & set(vars(holder)) and not hasattr(holder.slotted, "empty")
    assert [holder.draws.random(), holder.python.random(), holder.old.random()] == first


def test_global_generators_and_arrays_in_their_place():
    holder = Holder()
    holder.table = np.zeros(3)
    kept = Kept([holder])
    first, holder.table[0] = (random.random(), np.random.random()), 5.0
    assert kept.changes() == ["np.random", "random", "table"]
    kept.put_back()
    assert holder.table[0] == 0 and (random.random(), np.random.random()) == first


def test_each_may_have_its_own():
    holder = Holder()
    holder.last = None
    places = Kept([holder]).places(["shared", "last", "draws", "numbers"])
    before = [place.value() for place in places]
    first, holder.shared, holder.last = holder.draws.random(), 3, tf.constant(1.0)
    holder.numbers.append(2)
    mine = [place.value() for place in places]
    for place, value in zip(places, before, strict=True):
        place.give(value)
    assert (holder.shared, holder.last, holder.numbers, holder.draws.random()) == (0, None, [1], first)
    for place, value in zip(places, mine, strict=True):
        place.give(value)
    assert (holder.shared, float(holder.last), holder.numbers) == (3, 1.0, [1, 2])
    holder.last = holder.late  # made once, for all
    for place, value in zip(places, before, strict=True):
        place.give(value)
    assert holder.last is holder.late


def test_what_functions_reach():
    inner = None

    def change(seen=[], *, more={}):  # noqa: B006
        global NAMED
        nonlocal inner
        NAMED, inner = 1, 2
        CACHE["a"] = cached("a")
        seen.append(1)
        more["a"] = 1
        change.count = 1

    kept = Kept([functools.partial(tf.function(change))])
    change()
    kept.put_back()
    assert NAMED is None and inner is None and not CACHE and not cached.cache_info().currsize
    assert change.__defaults__ == ([],) and change.__kwdefaults__ == {"more": {}} and not vars(change)


@pytest.mark.parametrize("base", [keras.layers.Layer, tf.Module])
def test_trackers_forget(base):
    class Own(base):
        def __init__(self):
            super().__init__()
            self.found = {}

    own, count = Own(), lambda: len(own.variables)
    kept = Kept([own])
    own.found["late"] = own.late = keras.layers.Dense(2) if base is keras.layers.Layer else tf.Variable(0.0)
    if base is keras.layers.Layer:
        own.late.build((None, 3))
    assert count()
    kept.put_back()
    assert not count() and not own.found and not hasattr(own, "late")
    own.late = keras.layers.Dense(2) if base is keras.layers.Layer else tf.Variable(0.0)
    if base is keras.layers.Layer:
        own.late.build((None, 3))
    assert count() == (2 if base is keras.layers.Layer else 1)


def test_variables_are_told():
    variable = tf.Variable(1.0)
    assert Kept([lambda: variable]).variables == [variable]


@dataclasses.dataclass(slots=True)
class Noise:
    """A generator and a count in slots."""

    rng: np.random.Generator
    calls: int = 0


OLD, PYTHON = np.random.RandomState(2), random.Random(3)
IN_A_DICT = {"noise": {"held": (np.random.default_rng(1),)}}


def drawn_everywhere(holder, rng_in_a_cell):
    def step(x, by_default=[OLD], *, more={"a": PYTHON}):  # noqa: B006
        holder.noise.calls += 1
        holder.state["inner"]["calls"] += 1
        sources = [holder.noise.rng, *holder.queue, *IN_A_DICT["noise"]["held"], rng_in_a_cell, more["a"]]
        return [float(each.random()) for each in sources] + [float(by_default[0].uniform())]

    return step


def test_generators_and_counts_within_containers_slots_and_defaults():
    holder = types.SimpleNamespace(
        noise=Noise(np.random.default_rng(4)),
        queue=collections.deque([[0], np.random.default_rng(5)][1:]),
        state={"inner": {"calls": 0}},
        never=random.SystemRandom(),
    )
    step = functools.partial(drawn_everywhere(holder, random.Random(6)), 1.0)
    kept = Kept([step])
    first = step()
    names = "IN_A_DICT['noise']['held'][0] by_default[0] calls more['a'] queue[0] rng rng_in_a_cell state['inner']"
    assert kept.changes() == names.split()
    assert kept.counts(kept.changes()) == ["calls", "state['inner']"]
    assert kept.draws(kept.changes()) == [each for each in names.split() if each not in ("calls", "state['inner']")]
    places = kept.places(kept.changes())
    mine = [place.value() for place in places]
    kept.put_back()
    assert not kept.changes() and holder.noise.calls == holder.state["inner"]["calls"] == 0
    assert step() == first
    second = step()
    for place, value in zip(places, mine, strict=True):
        place.give(value)
    assert holder.noise.calls == holder.state["inner"]["calls"] == 1 and step() == second


class OwnSGD(keras.optimizers.SGD):
    def __init__(self):
        super().__init__()
        self.seen = ["a"]


class OwnModule(tf.Module):
    def __init__(self):
        super().__init__()
        self.seen = ["a"]


@pytest.mark.parametrize("kind", [OwnModule, OwnSGD])
def test_lists_that_tensorflow_wraps(kind):
    owner = kind()
    kept = Kept([owner])
    assert kept.changes() == []
    owner.seen.append("b")
    assert kept.changes() == ["seen"]
    kept.put_back()
    assert owner.seen == ["a"] and kept.changes() == []
    owner.seen.append("c")
    assert owner.seen == ["a", "c"]


def test_tuples_that_tensorflow_wraps():
    owner = OwnModule()
    owner.weights = tf.Variable(0.0), [1]
    kept = Kept([owner])
    owner.weights[1].append(2)
    assert any(owner.weights[0] is each for each in kept.variables)
    kept.put_back()
    assert owner.weights[1] == [1]


def test_what_keras_locks_is_no_change():
    model, optimizer = keras.Sequential([keras.layers.Dense(1)]), keras.optimizers.Adam()
    kept = Kept([model, optimizer])
    model.build((None, 2))
    optimizer.build(model.trainable_variables)
    assert kept.changes() == []


def test_arrays_that_are_too_large_to_be_put_back_are_locked():
    large = np.zeros(6 << 20, "float32")
    holder = types.SimpleNamespace(part=large[: 5 << 20], large=large, rest=large[1 << 20 :], small=np.zeros(3))
    kept = Kept([holder])
    with kept.without_iterators():
        holder.small[0] = 1.0
        with kept.locked_arrays():
            pass
        with pytest.raises(ValueError, match="read-only"):
            holder.large[0] = 1.0
    assert holder.part.flags.writeable and holder.rest.flags.writeable
    holder.large[0] = 2.0
    kept.put_back()
    assert holder.small[0] == 0.0 and holder.large[0] == 2.0
