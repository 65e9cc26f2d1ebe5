"""The names of attributes that Keras and TensorFlow give objects: all others are the user's, or a setting."""

import functools

import keras

_LAYER_NAMES = frozenset("_build_shapes_dict _inbound_nodes _outbound_nodes _called _call_has_context_arg".split())
_MODEL_NAMES = frozenset(
    "_compile_config _compile_loss _compile_metrics _compiled_trainable_state _compute_loss_has_training_arg "
    "_distribute_strategy _distribute_reduction_method _supports_reduce_retracing _eval_epoch_iterator _initial_epoch "
    "_inputs _inputs_struct _outputs _outputs_struct _nodes _nodes_by_depth _operations _operations_by_depth "
    "_jit_compile _run_eagerly _loss_tracker _functional _layers compiled history loss optimizer output_names "
    "predict_function test_function train_function stop_evaluating stop_predicting stop_training steps_per_execution "
    "unrolled_steps_per_execution".split()
)
OF_TRACKING = frozenset(
    "_self_setattr_tracking _self_unconditional_checkpoint_dependencies _self_unconditional_dependency_names "
    "_self_unconditional_deferred_dependencies _self_update_uid _self_name_based_restores "
    "_self_saveable_object_factories".split()
)
"""Those in which TensorFlow notes what an object holds, for its checkpoints.

By their whole names: `_self_attention`, which begins like them, is a user's.
"""


@functools.cache
def of_layer(is_model: bool) -> frozenset[str]:
    """Those that Keras gives every layer, or every model."""
    return frozenset(vars(keras.layers.Layer())) | _LAYER_NAMES | (_MODEL_NAMES if is_model else frozenset())


@functools.cache
def of_metric() -> frozenset[str]:
    """Those that Keras gives every metric, and to the one that holds those of `compile`."""
    of_compile = {"built", "_flat_metrics", "_flat_weighted_metrics", "_resolved_output_names"}
    return frozenset(vars(keras.metrics.Metric(name="metric"))) | of_compile


@functools.cache
def of_operation() -> frozenset[str]:
    """Those that Keras gives every operation of a functional model."""
    return frozenset(vars(keras.Operation(name="operation"))) | _LAYER_NAMES
