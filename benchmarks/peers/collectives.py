"""How many collectives a worker runs per step, read from the graphs that TensorFlow ran."""

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import tensorflow as tf
from tensorflow.python.eager import context

_COLLECTIVE = re.compile(r"Collective(Reduce|Gather|Bcast|AllToAll|ReduceScatter)")


def count(run: Callable[[], object]) -> dict[str, int]:
    """Runs something with TensorFlow's graph collection on, and counts the collectives in its largest graph.

    Args:
        run: calls a compiled loop for the first time: TensorFlow shows a graph when it is made ready.

    Returns:
        "a_step", those within a while loop, and "a_call", those around it. A function without a loop has all
        of its collectives under "a_call".
    """
    step, call = max(map(_in_graph, graphs(run)), key=sum, default=(0, 0))
    return {"a_step": step, "a_call": call}


def graphs(run: Callable[[], object]) -> list[tf.compat.v1.GraphDef]:
    """Runs something with TensorFlow's graph collection on; returns the graphs, as traced, of what ran first then."""
    with tempfile.TemporaryDirectory() as folder:
        writer = tf.summary.create_file_writer(folder)
        tf.summary.trace_on(graph=True)
        run()
        with writer.as_default():
            tf.summary.trace_export("graphs", step=0)
        writer.close()
        context.context().disable_graph_collection()  # else each later graph stays in memory, whatever TensorFlow says
        return [graph for path in Path(folder).glob("*tfevents*") for graph in _collected(path)]


def _collected(path: Path) -> Iterator[tf.compat.v1.GraphDef]:
    for record in tf.data.TFRecordDataset(str(path)):
        for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
            metadata = tf.compat.v1.RunMetadata.FromString(value.tensor.string_val[0])
            yield from (function.pre_optimization_graph for function in metadata.function_graphs)


def _in_graph(graph) -> tuple[int, int]:
    """Counts the collectives within while loops, and the others, through all functions that are called."""
    functions = {function.signature.name: function.node_def for function in graph.library.function}

    def walk(nodes) -> tuple[int, int]:
        inside = around = 0
        for node in nodes:
            around += bool(_COLLECTIVE.match(node.op))
            for name, value in node.attr.items():
                if value.func.name in functions and name != "cond":
                    deeper = walk(functions[value.func.name])
                    is_loop = node.op in ("While", "StatelessWhile")
                    inside += sum(deeper) if is_loop else deeper[0]
                    around += 0 if is_loop else deeper[1]
        return inside, around

    return walk(graph.node)
