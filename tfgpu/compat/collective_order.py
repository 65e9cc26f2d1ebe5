"""The order of a device's collectives: packs of gradients come before those that they do not need.

All collectives of a device run in one order, the same on all devices. TensorFlow takes that in which Python made them:
each takes the device's token, a resource, and what takes a resource waits for what took it before. But Python makes the
packs after the whole backward pass. So packs take a token of their own, and when a function has been traced, each gets
its place: after the last other collective that it needs, before the next.
"""

from bisect import bisect
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from tfgpu.compat import distribute, slots
from tfgpu.compat.patch import installed, wrap
from tfgpu.compat.tensorflow import add_control_inputs


@contextmanager
def packs(strategy: tf.distribute.Strategy, replica: int) -> Iterator[None]:
    """The collectives that a replica makes in the block are packs; outside a graph, the block changes nothing.

    Args:
        strategy: its replicas sum by `CollectiveAllReduce`.
        replica: this replica's number in its process.
    """
    launcher = distribute.collective_launcher(strategy, replica)
    if tf.executing_eagerly() or launcher._ordering_token is None or not _orders_functions():
        yield
        return
    with slots.replaced(launcher, _ordering_token=_token_of_packs(launcher, ())):
        yield


@contextmanager
def packs_in_group(own, launcher, group: tuple[str, ...]) -> Iterator[None]:
    """In the block, the collectives of a launcher are packs if those of the replica's own launcher are.

    Args:
        own: the launcher of the replica's own device.
        launcher: of another device of the replica.
        group: the devices of its collectives.
    """
    token = own._ordering_token
    if launcher is own or token is None or token is not slots.get(own, "token_of_packs"):
        yield
        return
    with slots.replaced(launcher, _ordering_token=_token_of_packs(launcher, group)):
        yield


def _token_of_packs(launcher, group: tuple[str, ...]) -> tf.Variable:
    kept = slots.of(launcher)
    if not hasattr(kept, "token_of_packs"):
        kept.token_of_packs = distribute.plain_variable(0.0, launcher._device, "token_of_packs")
        of_handle = slots.of(kept.token_of_packs.handle)
        of_handle.token_of_others, of_handle.group = launcher._ordering_token.handle, group
    return kept.token_of_packs


def order_each_function() -> None:
    """Puts the collectives of each function in order once it has been traced, in this process from now on."""

    @wrap("AutomaticControlDependencies.__exit__")
    def leave(stock, self, kind, error, trace):
        stock(self, kind, error, trace)
        if kind is None and (graph := getattr(self, "_graph", None)) is not None:
            put_in_order(graph)


def _orders_functions() -> bool:
    return any(patch.target == "AutomaticControlDependencies.__exit__" for patch in installed())


def put_in_order(graph: tf.Graph) -> None:
    """Gives the packs of a function's graph their places among its other collectives.

    What calls a function with collectives counts as a collective, as it does for TensorFlow.
    """
    for devices in _collectives(graph).values():
        _put_in_order(graph, devices)


def _put_in_order(graph: tf.Graph, devices: list[tuple[list[tf.Operation], list[tf.Operation]]]) -> None:
    """`put_in_order` for the devices of one group."""
    if len({(len(others), len(packs)) for others, packs in devices}) == 1:
        places = [_places(devices)] * len(devices)
    else:  # where devices have no equal part, as in a two-level sum: Python's order, which all of them have
        made = {operation: at for at, operation in enumerate(graph.get_operations())}
        at = [([made[each] for each in others], packs) for others, packs in devices]
        places = [[bisect(others, made[pack]) - 1 for pack in packs] for others, packs in at]
    for (others, packs), after in zip(devices, places, strict=True):
        for pack, place in zip(packs, after, strict=True):
            if place >= 0:
                add_control_inputs(pack, [others[place]])
            if place + 1 < len(others):
                add_control_inputs(others[place + 1], [pack])


def _collectives(graph: tf.Graph) -> dict[tuple, list[tuple[list[tf.Operation], list[tf.Operation]]]]:
    """By group of devices, for each device with packs: its other collectives, and the packs, as Python made them."""
    captures = getattr(graph, "captures", ())
    inside = {id(token): placeholder for token, placeholder in captures}
    tokens = [(token, packs) for token, packs in captures if slots.get(token, "token_of_others") is not None]
    pairs = [(slots.of(token).group, inside.get(id(slots.of(token).token_of_others)), packs) for token, packs in tokens]
    if not any(others is not None for _, others, _ in pairs):
        return {}
    made, found = {operation: at for at, operation in enumerate(graph.get_operations())}, {}
    for group, of_others, of_packs in pairs:
        others = set() if of_others is None else set(of_others.consumers())
        packs = set(of_packs.consumers()) - others
        found.setdefault(group, []).append((sorted(others, key=made.get), sorted(packs, key=made.get)))
    return found


def _places(devices: list[tuple[list[tf.Operation], list[tf.Operation]]]) -> list[int]:
    """After which of the other collectives each pack comes on all devices; -1: before all.

    It is the last one that the pack or an earlier pack needs on any device. No cycle arises: what needs a pack was made
    after the pack, and so after the collectives that the pack needs. What it needs counts the order of the groups that
    have theirs, so that none arises between groups either.
    """
    number_of = {each: number for others, _ in devices for number, each in enumerate(others)}
    places, seen, last = [], set(), -1
    for same in zip(*(packs for _, packs in devices), strict=True):
        left = list(same)
        while left:
            operation = left.pop()
            for before in (*(tensor.op for tensor in operation.inputs), *operation.control_inputs):
                if before in number_of:
                    last = max(last, number_of[before])
                elif before not in seen:
                    seen.add(before)
                    left.append(before)
        places.append(last)
    return places
