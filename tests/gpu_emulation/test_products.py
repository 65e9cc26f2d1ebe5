"""With TF32, GPUs round the inputs of products. So replicas run the products of one device, and no others."""

from collections import Counter

import gpu_way
import keras
import pytest
import tracer
from traced_models import MODELS
from traced_rows import REPLICAS, Row, run, strategy_of

PRODUCTS = ("MatMul", "Conv", "Einsum", "Dot")
ROWS = [Row(model) for model in MODELS]
ROWS += [Row(model, rows="rest") for model in ("cnn", "embeddings", "own_loss")]
ROWS += [Row("cnn", option=option) for option in ("accumulation", "zero-1", "zero-2", "zero-3")]
ROWS += [Row("cnn", path="loop"), Row("language", path="evaluate")]


def products(row: Row) -> Counter:
    """How many products of each kind a step has, on all its GPUs."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    replicas = REPLICAS[row.strategy]
    with gpu_way.gpu_way(replicas):
        strategy = strategy_of(row, replicas)
        with tracer.recording() as calls:
            run(row, strategy, replicas)
        nodes, _ = tracer.placed(calls.largest.function, calls.largest.devices)
    step = [node for node in nodes if node.loops] if row.path in ("fit", "evaluate") else nodes
    return Counter(node.type for node in step if any(kind in node.type for kind in PRODUCTS))


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_replicas_run_the_products_of_one_device_and_no_others(row):
    alone = products(Row(row.model, "one", row.path, row.precision, row.rows))
    assert alone
    if row.option == "zero-3":  # the forward pass runs again, as docs/guides/sharding.md says
        alone += products(Row(row.model, "one", "predict", row.precision))
    assert products(row) == Counter({kind: REPLICAS[row.strategy] * count for kind, count in alone.items()})
