"""In which order operations run: each after what it takes, and after what it waits for."""

from collections.abc import Iterator, Sequence

from flat_graph import Expansion, Node


def in_order(nodes: Sequence[Node]) -> tuple[list[Node], bool]:
    """Some nodes in the order in which they run, and whether it is the only one that the graph allows.

    Nodes of two branches of a condition, of which only one runs, need no order.
    """
    before = _among(nodes)
    found = sorted(nodes, key=lambda node: before[node].bit_count())
    numbers = {node: number for number, node in enumerate(nodes)}
    pairs = zip(found, found[1:], strict=False)
    is_only = all(before[b] >> numbers[a] & 1 or _exclude_each_other(a, b) for a, b in pairs)
    return found, is_only


def _exclude_each_other(a: Node, b: Node) -> bool:
    """Whether two nodes are in different branches of a condition."""
    differ = next((pair for pair in zip(a.conditions, b.conditions, strict=False) if pair[0] != pair[1]), None)
    return differ is not None and len({each.rpartition("/")[0] for each in differ}) == 1


def _among(nodes: Sequence[Node]) -> dict[Node, int]:
    """For each node: the others that run before it, as bits by their numbers."""
    bits, found = {node: 1 << number for number, node in enumerate(nodes)}, {}
    for root in nodes:
        path = [(root, _before(root))]
        found.setdefault(root, 0)
        while path:
            node, left = path[-1]
            following = next((each for each in left if each not in found), None)
            if following is not None:
                found[following] = 0
                path.append((following, _before(following)))
                continue
            path.pop()
            found[node] = 0
            for each in _before(node):
                found[node] |= found[each] | bits.get(each, 0)
    return {node: found[node] for node in nodes}


def _before(each: Node | Expansion) -> Iterator[Node | Expansion]:
    """What runs before a node in the same pass of a loop; the nodes of an expansion."""
    if isinstance(each, Expansion):
        yield from each.nodes
        return
    yield from (source for source, _ in each.inputs if source.type != "NextIteration")
    yield from each.waits
