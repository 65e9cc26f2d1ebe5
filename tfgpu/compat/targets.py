"""Every function of Keras and TensorFlow that tfgpu wraps, and where each supported version keeps it.

`OWNERS` maps a short name to the paths of a class or module, newest first; the first existing one is used.
`fingerprints.json` lists the functions, public ones by their dotted path. Callers name a private function without its
underscore: `wrap("Trainer.symbolic_build")`.
"""

import hashlib
import importlib
import inspect
import json
import re
from functools import cache
from pathlib import Path

OWNERS: dict[str, tuple[str, ...]] = {
    # Keras
    "ArrayDataAdapter": ("keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter",),
    "BackupAndRestore": ("keras.src.callbacks.backup_and_restore:BackupAndRestore",),
    "BaseOptimizer": ("keras.src.optimizers.base_optimizer:BaseOptimizer",),
    "BatchNormalization": ("keras.src.layers.normalization.batch_normalization:BatchNormalization",),
    "CSVLogger": ("keras.src.callbacks.csv_logger:CSVLogger",),
    "CallbackList": ("keras.src.callbacks.callback_list:CallbackList",),
    "Equalization": ("keras.src.layers:Equalization",),
    "IoUBase": ("keras.src.metrics.iou_metrics:_IoUBase",),
    "KerasFunction": ("keras.src.ops.function:Function",),
    "GeneratorDataAdapter": ("keras.src.trainers.data_adapters.generator_data_adapter:GeneratorDataAdapter",),
    "GroupedQueryAttention": ("keras.src.layers.attention.grouped_query_attention:GroupedQueryAttention",),
    "HashedCrossing": ("keras.src.layers.preprocessing.hashed_crossing:HashedCrossing",),
    "Layer": ("keras.src.layers.layer:Layer",),
    "LossFunctionWrapper": ("keras.src.losses.losses:LossFunctionWrapper",),
    "Loss": ("keras.src.losses.loss:Loss",),
    "LossScaleOptimizer": ("keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer",),
    "Mean": ("keras.src.metrics.reduction_metrics:Mean",),
    "MeanMetricWrapper": ("keras.src.metrics.reduction_metrics:MeanMetricWrapper",),
    "MelSpectrogram": ("keras.src.layers.preprocessing.mel_spectrogram:MelSpectrogram",),
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
    # The first of each is from Keras 3.16 on.
    "Trainer": ("keras.src.trainers.trainer:BaseTrainer", "keras.src.trainers.trainer:Trainer"),
    "Variable": ("keras.src.backend.tensorflow.ops.core:Variable", "keras.src.backend.tensorflow.core:Variable"),
    "KerasVariable": ("keras.src.backend.common.variables:Variable",),
    "accuracy_metrics": ("keras.src.metrics.accuracy_metrics",),
    "aug_mix": ("keras.src.layers.preprocessing.image_preprocessing.aug_mix",),
    "backend_ops": ("keras.src.backend.tensorflow.ops",),  # from Keras 3.16
    "core": ("keras.src.backend.tensorflow.ops.core", "keras.src.backend.tensorflow.core"),
    "distribution_lib": ("keras.src.distribution.distribution_lib",),
    "hdf5_format": ("keras.src.legacy.saving.legacy_h5_format",),
    "image": ("keras.src.backend.tensorflow.ops.image", "keras.src.backend.tensorflow.image"),
    "keras": ("keras",),
    "keras.config": ("keras.config",),
    "keras.distribution": ("keras.distribution",),
    "loss_module": ("keras.src.losses.loss",),
    "losses": ("keras.src.losses.losses",),
    "math": ("keras.src.backend.tensorflow.ops.math", "keras.src.backend.tensorflow.math"),
    "nn": ("keras.src.backend.tensorflow.ops.nn", "keras.src.backend.tensorflow.nn"),
    "numpy": ("keras.src.backend.tensorflow.ops.numpy", "keras.src.backend.tensorflow.numpy"),
    "random": ("keras.src.backend.tensorflow.random",),
    "saving_lib": ("keras.src.saving.saving_lib",),
    "seed_generator": ("keras.src.random.seed_generator",),
    "summary_utils": ("keras.src.utils.summary_utils",),
    # TensorFlow
    "AutomaticControlDependencies": ("tensorflow.python.framework.auto_control_deps:AutomaticControlDependencies",),
    "CollectiveAllReduceExtended": (
        "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended",
    ),
    "Context": ("tensorflow.python.eager.context:Context",),
    "DistributedDataset": ("tensorflow.python.distribute.input_lib:DistributedDataset",),
    "DistributedDatasetsFromFunction": ("tensorflow.python.distribute.input_lib:DistributedDatasetsFromFunction",),
    "EagerTensorBase": ("tensorflow.python.framework.ops:_EagerTensorBase",),
    "Function": ("tensorflow.python.eager.polymorphic_function.polymorphic_function:Function",),
    "MirroredExtended": ("tensorflow.python.distribute.mirrored_strategy:MirroredExtended",),
    "MirroredReplicaThread": ("tensorflow.python.distribute.mirrored_run:_MirroredReplicaThread",),
    "StrategyBase": ("tensorflow.python.distribute.distribute_lib:StrategyBase",),
    "array_ops": ("tensorflow.python.ops.array_ops",),
    "collective_ops": ("tensorflow.python.ops.collective_ops",),
    "cond_module": ("tensorflow.python.ops.cond",),
    "custom_gradient": ("tensorflow.python.ops.custom_gradient",),
    "ctc_ops": ("tensorflow.python.ops.ctc_ops",),
    "gen_array_ops": ("tensorflow.python.ops.gen_array_ops",),
    "gen_ctc_ops": ("tensorflow.python.ops.gen_ctc_ops",),
    "gen_math_ops": ("tensorflow.python.ops.gen_math_ops",),
    "gen_nn_ops": ("tensorflow.python.ops.gen_nn_ops",),
    "gen_sparse_ops": ("tensorflow.python.ops.gen_sparse_ops",),
    "mirrored_strategy": ("tensorflow.python.distribute.mirrored_strategy",),
    "random_seed": ("tensorflow.python.framework.random_seed",),
    "segment_id_ops": ("tensorflow.python.ops.ragged.segment_id_ops",),
}

FINGERPRINTS: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("fingerprints.json").read_text(encoding="utf-8")
)
"""Target -> fingerprint -> the versions that have it; empty if the target has no source of its own."""

TARGETS: tuple[str, ...] = tuple(FINGERPRINTS)


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
    """A short hash of a function's source without comments and white space; None for what is no function, or has none.

    Example:
        >>> fingerprint(len) is None
        True
    """
    function = getattr(function, "fget", function)  # a property's getter
    if not callable(function):
        return None
    function = inspect.unwrap(function)
    try:
        lines = inspect.getsource(function).splitlines()
    except (OSError, TypeError):
        return None
    text = re.sub(r"\s+", "", "".join(re.sub(r"(^|\s)#.*$", "", line) for line in lines))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
