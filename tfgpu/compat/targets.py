"""Every function of Keras and TensorFlow that tfgpu wraps, and where each supported version keeps it.

`OWNERS` maps a short name to the paths of a class or module, newest first; the first existing one is used. `TARGETS`
lists the functions. Callers name a private function without its underscore: `wrap("Trainer.symbolic_build")`.
"""

import hashlib
import importlib
import inspect
import re
from functools import cache

OWNERS: dict[str, tuple[str, ...]] = {
    # Keras
    "ArrayDataAdapter": ("keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter",),
    "BackupAndRestore": ("keras.src.callbacks.backup_and_restore:BackupAndRestore",),
    "BaseOptimizer": ("keras.src.optimizers.base_optimizer:BaseOptimizer",),
    "BatchNormalization": ("keras.src.layers.normalization.batch_normalization:BatchNormalization",),
    "CSVLogger": ("keras.src.callbacks.csv_logger:CSVLogger",),
    "CallbackList": ("keras.src.callbacks.callback_list:CallbackList",),
    "Equalization": ("keras.src.layers:Equalization",),
    "KerasFunction": ("keras.src.ops.function:Function",),
    "GeneratorDataAdapter": ("keras.src.trainers.data_adapters.generator_data_adapter:GeneratorDataAdapter",),
    "GroupedQueryAttention": ("keras.src.layers.attention.grouped_query_attention:GroupedQueryAttention",),
    "Layer": ("keras.src.layers.layer:Layer",),
    "LossFunctionWrapper": ("keras.src.losses.losses:LossFunctionWrapper",),
    "Loss": ("keras.src.losses.loss:Loss",),
    "LossScaleOptimizer": ("keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer",),
    "Mean": ("keras.src.metrics.reduction_metrics:Mean",),
    "MeanMetricWrapper": ("keras.src.metrics.reduction_metrics:MeanMetricWrapper",),
    "ModelCheckpoint": ("keras.src.callbacks.model_checkpoint:ModelCheckpoint",),
    "MultiHeadAttention": ("keras.src.layers.attention.multi_head_attention:MultiHeadAttention",),
    "PyDatasetAdapter": ("keras.src.trainers.data_adapters.py_dataset_adapter:PyDatasetAdapter",),
    "SeedGenerator": ("keras.src.random.seed_generator:SeedGenerator",),
    "Sum": ("keras.src.metrics.reduction_metrics:Sum",),
    "SwapEMAWeights": ("keras.src.callbacks.swap_ema_weights:SwapEMAWeights",),
    "TFEpochIterator": ("keras.src.backend.tensorflow.trainer:TFEpochIterator",),
    "TFOptimizer": ("keras.src.backend.tensorflow.optimizer:TFOptimizer",),
    "TensorBoard": ("keras.src.callbacks.tensorboard:TensorBoard",),
    "TensorFlowTrainer": (
        "keras.src.backend.tensorflow.trainer:TensorFlowTrainer",
        "keras.src.backend.tensorflow.trainer:Trainer",  # from Keras 3.16
    ),
    "Trainer": (
        "keras.src.trainers.trainer:BaseTrainer",  # from Keras 3.16
        "keras.src.trainers.trainer:Trainer",
    ),
    "Variable": (
        "keras.src.backend.tensorflow.ops.core:Variable",  # from Keras 3.16
        "keras.src.backend.tensorflow.core:Variable",
    ),
    "KerasVariable": ("keras.src.backend.common.variables:Variable",),
    "accuracy_metrics": ("keras.src.metrics.accuracy_metrics",),
    "aug_mix": ("keras.src.layers.preprocessing.image_preprocessing.aug_mix",),
    "backend_ops": ("keras.src.backend.tensorflow.ops",),  # from Keras 3.16
    "core": ("keras.src.backend.tensorflow.ops.core", "keras.src.backend.tensorflow.core"),
    "distribution_lib": ("keras.src.distribution.distribution_lib",),
    "hdf5_format": ("keras.src.legacy.saving.legacy_h5_format",),
    "keras": ("keras",),
    "keras.config": ("keras.config",),
    "keras.distribution": ("keras.distribution",),
    "loss_module": ("keras.src.losses.loss",),
    "losses": ("keras.src.losses.losses",),
    "nn": ("keras.src.backend.tensorflow.ops.nn", "keras.src.backend.tensorflow.nn"),
    "numpy": ("keras.src.backend.tensorflow.ops.numpy", "keras.src.backend.tensorflow.numpy"),
    "random": ("keras.src.backend.tensorflow.random",),
    "saving_lib": ("keras.src.saving.saving_lib",),
    "seed_generator": ("keras.src.random.seed_generator",),
    "summary_utils": ("keras.src.utils.summary_utils",),
    # TensorFlow
    "AutomaticControlDependencies": ("tensorflow.python.framework.auto_control_deps:AutomaticControlDependencies",),
    "DistributedDataset": ("tensorflow.python.distribute.input_lib:DistributedDataset",),
    "DistributedDatasetsFromFunction": ("tensorflow.python.distribute.input_lib:DistributedDatasetsFromFunction",),
    "Function": ("tensorflow.python.eager.polymorphic_function.polymorphic_function:Function",),
    "MirroredExtended": ("tensorflow.python.distribute.mirrored_strategy:MirroredExtended",),
    "MirroredReplicaThread": ("tensorflow.python.distribute.mirrored_run:_MirroredReplicaThread",),
    "collective_ops": ("tensorflow.python.ops.collective_ops",),
    "custom_gradient": ("tensorflow.python.ops.custom_gradient",),
    "mirrored_strategy": ("tensorflow.python.distribute.mirrored_strategy",),
    "random_seed": ("tensorflow.python.framework.random_seed",),
}

TARGETS: tuple[str, ...] = (
    "ArrayDataAdapter.get_tf_dataset",
    "AutomaticControlDependencies.__exit__",
    "BackupAndRestore._save_model",
    "BackupAndRestore.on_epoch_begin",
    "BackupAndRestore.on_epoch_end",
    "BackupAndRestore.on_train_batch_end",
    "BackupAndRestore.on_train_begin",
    "BackupAndRestore.on_train_end",
    "BaseOptimizer.__init__",
    "BaseOptimizer._backend_apply_gradients",
    "BaseOptimizer._clip_gradients",
    "BaseOptimizer._use_weight_decay",
    "BaseOptimizer.add_variable_from_reference",
    "BaseOptimizer.apply",
    "BaseOptimizer.build",
    "BaseOptimizer.exclude_from_weight_decay",
    "BaseOptimizer.load_own_variables",
    "BaseOptimizer.save_own_variables",
    "BaseOptimizer.scale_loss",
    "BatchNormalization._moments",
    "CSVLogger.on_epoch_end",
    "CSVLogger.on_train_begin",
    "CSVLogger.on_train_end",
    "CallbackList.on_epoch_end",
    "CallbackList.on_test_batch_begin",
    "CallbackList.on_test_batch_end",
    "CallbackList.on_train_batch_begin",
    "CallbackList.on_train_batch_end",
    "CallbackList.on_train_begin",
    "DistributedDataset.__iter__",
    "DistributedDatasetsFromFunction.__iter__",
    "Equalization._custom_histogram_fixed_width",
    "Function.__call__",
    "KerasFunction._run_through_graph",
    "KerasVariable.__float__",
    "KerasVariable.__init__",
    "KerasVariable.__int__",
    "Loss.__call__",
    "LossFunctionWrapper.call",
    "GeneratorDataAdapter.get_tf_dataset",
    "GroupedQueryAttention._compute_attention",
    "GroupedQueryAttention._compute_attention_mask",
    "LossScaleOptimizer._tf_apply",
    "LossScaleOptimizer.apply",
    "LossScaleOptimizer.check_finite",
    "LossScaleOptimizer.scale_loss",
    "Mean.update_state",
    "MeanMetricWrapper.update_state",
    "MultiHeadAttention._compute_attention",
    "MultiHeadAttention._compute_attention_mask",
    "MirroredExtended._initialize_single_worker",
    "MirroredReplicaThread.__init__",
    "ModelCheckpoint._get_file_path",
    "PyDatasetAdapter.get_tf_dataset",
    "PyDatasetAdapter.on_epoch_begin",
    "PyDatasetAdapter.on_epoch_end",
    "SeedGenerator.next",
    "Sum.update_state",
    "SwapEMAWeights._tf_finalize_ema_values",
    "SwapEMAWeights._tf_swap_variables",
    "TFEpochIterator.__init__",
    "TFEpochIterator._enumerate_iterator",
    "TFEpochIterator._get_iterator",
    "TFOptimizer._backend_maybe_overwrite_model_variables",
    "TFOptimizer._apply_weight_decay",
    "TFOptimizer._backend_increment_gradient_accumulators",
    "TFOptimizer._backend_reset_gradient_accumulators",
    "TFOptimizer._backend_update_step",
    "TFOptimizer._overwrite_model_variables_with_average_value",
    "TFOptimizer.add_variable_from_reference",
    "TFOptimizer.apply_gradients",
    "TensorBoard.on_train_end",
    "TensorBoard.set_model",
    "TensorFlowTrainer._make_function",
    "TensorFlowTrainer._maybe_symbolic_build",
    "TensorFlowTrainer.evaluate",
    "TensorFlowTrainer.fit",
    "TensorFlowTrainer.make_predict_function",
    "TensorFlowTrainer.predict",
    "TensorFlowTrainer.predict_on_batch",
    "TensorFlowTrainer.test_on_batch",
    "TensorFlowTrainer.train_on_batch",
    "TensorFlowTrainer.train_step",
    "Trainer._get_metrics_result_or_logs",
    "Trainer._resolve_auto_jit_compile",
    "Trainer.compile",
    "Trainer.get_metrics_result",
    "Variable._deferred_initialize",
    "Variable._direct_assign",
    "Variable._initialize",
    "Variable._initialize_with_initializer",
    "Variable._restore_from_tensors",
    "Variable._serialize_to_tensors",
    "Variable.assign_add",
    "Variable.assign_sub",
    "accuracy_metrics.sparse_top_k_categorical_accuracy",
    "accuracy_metrics.top_k_categorical_accuracy",
    "aug_mix.py_random",
    "backend_ops.remat",
    "collective_ops.broadcast_recv",
    "collective_ops.broadcast_send",
    "core.remat",
    "custom_gradient._graph_mode_decorator",
    "distribution_lib.set_distribution",
    "hdf5_format.save_model_to_hdf5",
    "hdf5_format.save_weights_to_hdf5_group",
    "keras.config.disable_flash_attention",
    "keras.config.enable_flash_attention",
    "keras.distribution.set_distribution",
    "loss_module.apply_mask",
    "loss_module.reduce_values",
    "loss_module.reduce_weighted_values",
    "loss_module.scale_loss_for_distribution",
    "loss_module.unscale_loss_for_distribution",
    "losses.build_pos_neg_masks",
    "mirrored_strategy._is_device_list_single_worker",
    "nn._compute_moments_sync",
    "nn.adaptive_max_pool",
    "nn.average_pool",
    "nn.conv",
    "nn.conv_transpose",
    "nn.depthwise_conv",
    "nn.dot_product_attention",
    "nn.max_pool",
    "nn.sparse_categorical_crossentropy",
    "numpy.argmax",
    "numpy.equal",
    "numpy.greater",
    "numpy.greater_equal",
    "numpy.less",
    "numpy.less_equal",
    "numpy.not_equal",
    "numpy.signbit",
    "numpy.take",
    "random.beta",
    "random.binomial",
    "random.categorical",
    "random.dropout",
    "random.gamma",
    "random.normal",
    "random.randint",
    "random.shuffle",
    "random.truncated_normal",
    "random.uniform",
    "random_seed.get_seed",
    "saving_lib.save_model",
    "saving_lib.save_weights_only",
    "seed_generator.global_seed_generator",
    "summary_utils.count_params",
)


@cache
def owner(name: str) -> object | None:
    """The class or module of `OWNERS` with this name, or None if this version has none.

    Example:
        >>> owner("Trainer").__module__
        'keras.src.trainers.trainer'
    """
    for path in OWNERS[name]:
        module, _, attributes = path.partition(":")
        try:
            found: object = importlib.import_module(module)
        except ImportError:
            continue
        for attribute in filter(None, attributes.split(".")):
            found = getattr(found, attribute, None)
        if found is not None:
            return found
    return None


def full_name(target: str) -> str:
    """`target` as `TARGETS` lists it, with the underscore of a private function; other names are returned unchanged.

    Example:
        >>> full_name("TFEpochIterator.enumerate_iterator"), full_name("keras.Model.export")
        ('TFEpochIterator._enumerate_iterator', 'keras.Model.export')
    """
    place, _, name = target.rpartition(".")
    return next((each for each in (target, f"{place}._{name}") if each in TARGETS), target)


def locate(target: str) -> tuple[object | None, str]:
    """The object that has the target as an attribute, and the attribute's name.

    Args:
        target: a name of `TARGETS`, or a public dotted path below `keras` or `tf`, such as `tf.GradientTape.gradient`.
    """
    place, _, name = full_name(target).rpartition(".")
    if place in OWNERS:
        return owner(place), name
    root, *rest = place.split(".")
    if root not in ("keras", "tf"):
        raise ValueError(f"`{target}` is neither in TARGETS nor a public path of keras or tf.")
    found: object | None = importlib.import_module({"tf": "tensorflow"}.get(root, root))
    for attribute in rest:
        found = getattr(found, attribute, None)
    return found, name


def fingerprint(function: object) -> str | None:
    """A short hash of a function's source without comments and white space; None if it has no source.

    Example:
        >>> fingerprint(len) is None
        True
    """
    function = inspect.unwrap(function) if callable(function) else function
    try:
        lines = inspect.getsource(function).splitlines()
    except (OSError, TypeError):
        return None
    text = re.sub(r"\s+", "", "".join(re.sub(r"(^|\s)#.*$", "", line) for line in lines))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
