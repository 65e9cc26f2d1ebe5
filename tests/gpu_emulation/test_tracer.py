"""The tracer on functions whose placement is known from TensorFlow's sources and its table of kernels."""

import pytest
import tensorflow as tf
import tracer
from placer import HOST, parse

ROWS = 13
GPU, SECOND = "CPU:1", "CPU:2"  # stand for GPU:0 and GPU:1


def facts_of(function, *specs, **options):
    """The facts of a function of tensors with these shapes and dtypes, on the host, or where `devices` says."""
    compiled = tf.function(function, autograph=False)
    traced = compiled.get_concrete_function(*(tf.TensorSpec(shape, dtype) for shape, dtype in specs))
    return tracer.facts_of(traced, rows=ROWS, **options)


def moved(facts, direction):
    return [(copy.source, copy.target, copy.dtype, copy.bytes) for copy in facts.moved(direction)]


def before_results(facts):
    """The copies but for those to a result, which asks for no device and so gets the first GPU."""
    return [copy for copy in facts.copies if copy.target != "Identity"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("CPU:0", ("CPU", 0)),
        ("/job:worker/replica:0/task:1/device:CPU:2", ("GPU", 1)),
        ("/device:GPU:3", ("GPU", 3)),
        ("/gpu:*", ("GPU", None)),
        ("/job:worker", (None, None)),
        ("", (None, None)),
    ],
)
def test_cpu_0_is_the_host_and_the_others_are_gpus(name, place):
    assert parse(name) == place


def test_a_product_stays_on_its_gpu():
    def product(x):
        with tf.device(GPU):
            return tf.matmul(x, x, transpose_a=True)

    facts = facts_of(product, ([ROWS, 4], tf.float32), devices={0: GPU})
    assert not facts.copies and not facts.host_work and not facts.collectives


def test_int32_is_compared_on_the_host():
    # TensorFlow registers Less of int32 for GPUs with all its arguments in host memory.
    def compare(x):
        with tf.device(GPU):
            return tf.cast(tf.cast(x, tf.int32) < 5, tf.float32)

    facts = facts_of(compare, ([ROWS, 10], tf.float32), devices={0: GPU})
    assert moved(facts, "to host") == [("Cast", "Less", "int32", ROWS * 10 * 4)]
    assert moved(facts, "to device") == [("Less", "Cast", "bool", ROWS * 10)]
    assert all(copy.has_rows for copy in facts.copies)
    assert facts.host_work == {"Less int32/bool": 1} and not facts.host_only


def test_float32_is_compared_on_the_gpu():
    def compare(x):
        with tf.device(GPU):
            return tf.cast(x < 5, tf.float32)

    assert not facts_of(compare, ([ROWS, 10], tf.float32), devices={0: GPU}).copies


def test_an_operation_without_a_kernel_for_gpus_falls_back_to_the_host():
    def pool(x):
        with tf.device(GPU):
            return tf.nn.fractional_max_pool(x, [1, 2, 2, 1], seed=1)[0] + 1.0

    facts = facts_of(pool, ([ROWS, 8, 8, 1], tf.float32), devices={0: GPU})
    assert moved(facts, "to host") == [("_Arg", "FractionalMaxPool", "float32", ROWS * 64 * 4)]
    assert moved(facts, "to device") == [("FractionalMaxPool", "AddV2", "float32", ROWS * 16 * 4)]
    assert [name.split()[0] for name in facts.host_only] == ["FractionalMaxPool"]


def test_without_a_device_the_first_gpu_is_chosen():
    facts = facts_of(lambda x: x * 2.0, ([ROWS], tf.float32))
    assert moved(facts, "to device") == [("_Arg", "Mul", "float32", 4 * ROWS)]  # the argument is on the host


def test_a_shape_is_read_where_the_tensor_is_and_costs_no_copy():
    def rows(x):
        with tf.device(GPU):
            y = x + 1.0
        return tf.shape(y)[0] + 1

    facts = facts_of(rows, ([None, 4], tf.float32), devices={0: GPU})
    assert not facts.copies


def test_an_unknown_number_of_rows_counts_as_the_replicas():
    def compare(x):
        with tf.device(GPU):
            return tf.cast(x, tf.int32) < 5

    (copy,) = facts_of(compare, ([None, 4], tf.float32), devices={0: GPU}).moved("to host")
    assert copy.bytes == ROWS * 4 * 4 and copy.has_rows and copy.shape == (None, 4)


def test_a_tensor_without_rows_is_told_apart():
    def compare(x, w):
        with tf.device(GPU):
            return tf.cast(x, tf.int32) < 5, tf.cast(w, tf.int32) < 5

    facts = facts_of(compare, ([ROWS, 4], tf.float32), ([4, 4], tf.float32), devices={0: GPU, 1: GPU})
    assert facts.bytes_moved("to host", has_rows=True) == ROWS * 4 * 4
    assert facts.bytes_moved("to host", has_rows=False) == 4 * 4 * 4


def test_a_tensor_that_two_operations_ask_for_is_copied_once():
    def compare(x):
        with tf.device(GPU):
            y = tf.cast(x, tf.int32)
            return y < 5, y > 7

    assert len(facts_of(compare, ([ROWS], tf.float32), devices={0: GPU}).moved("to host")) == 1


def test_gpus_copy_from_one_another():
    def both(x):
        with tf.device(GPU):
            y = x * 2.0
        with tf.device(SECOND):
            return y + 1.0

    facts = facts_of(both, ([ROWS], tf.float32), devices={0: GPU})
    there, back = facts.moved("between devices")
    assert (str(there), there.bytes, there.device) == (f"Mul <> AddV2 float32[{ROWS}]", 4 * ROWS, "GPU:1")
    assert (str(back), back.device) == (f"AddV2 <> Identity float32[{ROWS}]", "GPU:0")  # a result asks for no device


def test_a_nested_function_runs_on_its_callers_device():
    @tf.function
    def inner(x):
        return x * 2.0

    def outer(x):
        with tf.device(SECOND):
            return inner(x)

    facts = facts_of(outer, ([ROWS], tf.float32), devices={0: SECOND})
    assert not before_results(facts)


def test_a_variable_is_read_and_changed_where_it_is():
    with tf.device(SECOND):
        variable = tf.Variable(tf.zeros([4]))

    def change(x):
        variable.assign_add(x)
        return variable.read_value()

    facts = facts_of(change, ([4], tf.float32), devices={0: SECOND})
    assert not before_results(facts)


def test_a_loops_body_is_a_step():
    def many(x):
        def body(step, total):
            with tf.device(GPU):
                compared = tf.cast(tf.cast(total, tf.int32) < 5, tf.float32)
                return step + 1, tf.tanh(tf.exp(total + compared) * 2.0 - 1.0)

        with tf.device(GPU):
            x = tf.cast(tf.cast(x, tf.int32) < 3, tf.float32)
        return tf.while_loop(lambda step, _: step < 3, body, (0, x))[1]

    facts = facts_of(many, ([ROWS], tf.float32), devices={0: GPU})
    assert [copy.bytes for copy in facts.moved("to host", has_rows=True)] == [4 * ROWS]
    assert [copy.bytes for copy in facts.per_call.moved("to host", has_rows=True)] == [4 * ROWS]
    assert facts.host_work["Less int32/bool"] == facts.per_call.host_work["Less int32/bool"] == 1


def test_gradients_within_a_condition_are_seen():
    def train(x):
        def gradient():
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(x * x)
            return tape.gradient(y, x)

        return tf.cond(x[0] > 0, gradient, lambda: x), gradient()

    facts = facts_of(train, ([ROWS], tf.float32))
    assert facts.gradients_in_conditions > 0 and facts.conditions == ["cond/else", "cond/then"]
    assert facts_of(lambda x: x + 1.0, ([ROWS], tf.float32)).gradients_in_conditions == 0


def test_a_conditions_input_is_switched_where_it_is():
    def either(x):
        with tf.device(SECOND):
            y = x * 2.0

            def add():
                return y + 1.0

            return tf.cond(tf.reduce_sum(y) > 0, add, lambda: y)

    facts = facts_of(either, ([ROWS], tf.float32), devices={0: SECOND})
    assert {copy.bytes for copy in before_results(facts)} <= {1}  # the predicate goes to the host


def test_an_optional_without_a_device_lies_on_the_host():
    # TensorFlow registers the kernels of optionals for CPUs with priority 2, for GPUs with 1.
    def hold(x):
        with tf.device(GPU):
            y = x * 2.0
        held = tf.experimental.Optional.from_value(y)
        with tf.device(GPU):
            return held.get_value() + 1.0

    facts = facts_of(hold, ([ROWS], tf.float32), devices={0: GPU})
    assert moved(facts, "to host") == [("Mul", "OptionalFromValue", "float32", 4 * ROWS)]
    assert [copy.bytes for copy in facts.moved("to device")] == [4 * ROWS]


def test_what_xla_compiles_is_one_operation_on_the_gpu():
    @tf.function(jit_compile=True)
    def compiled(x):
        return tf.cast(tf.cast(x, tf.int32) < 5, tf.float32)

    def outer(x):
        with tf.device(GPU):
            return compiled(x)

    facts = facts_of(outer, ([ROWS], tf.float32), devices={0: GPU})
    assert facts.xla_clusters == 1 and not facts.copies and not facts.host_work


def test_collectives_of_each_replica_in_their_order():
    strategy = tf.distribute.MirroredStrategy([GPU, SECOND])

    def reduce_both(x):
        def replica(x):
            context = tf.distribute.get_replica_context()
            total = context.all_reduce("sum", tf.cast(x, tf.float64))
            return context.all_reduce("sum", tf.reshape(tf.cast(total, tf.float32), [-1])[:5])

        return strategy.run(replica, args=(x,))

    facts = facts_of(reduce_both, ([ROWS, 4], tf.float32))
    assert sorted(facts.collectives) == ["GPU:0", "GPU:1"] and facts.has_one_order
    for each in facts.collectives.values():
        assert [(c.kind, c.dtype, c.bytes, c.replicas) for c in each] == [
            ("all-reduce", "float64", ROWS * 4 * 8, 2),
            ("all-reduce", "float32", 5 * 4, 2),
        ]


def test_another_order_on_another_device_is_seen():
    def call(first, second):
        for device, sizes in ((GPU, first), (SECOND, second)):
            for size in sizes:
                with tf.device(device):
                    tf.raw_ops.CollectiveReduceV2(
                        input=tf.zeros([size]),
                        group_size=2,
                        group_key=1,
                        instance_key=size,
                        ordering_token=[],
                        merge_op="Add",
                        final_op="Id",
                    )

    assert facts_of(lambda: call((2, 3), (2, 3))).has_one_order
    assert not facts_of(lambda: call((2, 3), (3, 2))).has_one_order


def test_what_python_calls_is_recorded_with_the_devices_of_its_arguments():
    with tf.device(SECOND):
        variable = tf.Variable(1.0)

    @tf.function
    def scaled(x):
        return x * variable

    with tracer.recording() as calls:
        scaled(tf.ones([ROWS]))
        scaled(tf.ones([ROWS]))
    (call,) = calls.all
    assert call.times == 2 and parse(call.devices[0]) == parse(HOST) and parse(call.devices[1]) == ("GPU", 1)
    assert calls.largest is call


def test_the_data_of_a_step_says_whether_its_rows_are_known():
    def of(remainder):
        data = iter(tf.data.Dataset.range(26).batch(ROWS, drop_remainder=remainder))
        return tracer.facts_of(tf.function(lambda: next(data)).get_concrete_function())

    assert of(True).batches == [f"int64[{ROWS}]"] and of(True).rows_are_constant
    assert of(False).batches == ["int64[?]"] and not of(False).rows_are_constant
