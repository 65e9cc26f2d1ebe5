"""The table of cases: what must be equal to one device, whatever the number of replicas and workers.

A case is data: how to build and compile a model, the rows, how they are fed, and its script
(default `scripts.train`).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import keras
import material as kit
import others_contrast
import others_density
import others_generative
import others_tables
import others_text
import others_training
import others_vision
import own_code
import own_steps
import scripts
from keras import layers as L
from keras import losses as S
from keras import optimizers as O

from tfgpu.training.optimizers import LARS


@dataclass(frozen=True)
class Case:
    """One row. The thunks run inside the strategy's scope; `compile` and `fit` are extra arguments."""

    name: str
    group: str = ""
    model: Callable = None
    data: Callable = None
    rows: int = 40
    batch: int = 8
    feed: str = "dataset"
    policy: str = "float32"
    optimizer: Callable = lambda: O.SGD(0.2)
    loss: Callable = lambda: S.SparseCategoricalCrossentropy(from_logits=True)
    metrics: Callable = lambda: ["accuracy"]
    compile: dict = field(default_factory=dict)
    fit: dict = field(default_factory=dict)
    callbacks: Callable = lambda at: []
    script: Callable = scripts.train
    judged: bool = True  # evaluate and predict too: half of a case's time goes into tracing them
    loop: bool = False  # the row also runs by hand-written strategy.run loops
    rounding: bool = False  # compared with what one device differs from itself under a re-ordered sum


def group(name, *cases, judged=True):
    return [replace(case, group=name, judged=judged and case.judged) for case in cases]


def ragged(*cases, rows=37):
    """Each case on even batches, and with a last batch of 5: 2 + 2 + 1 + 0 rows on four replicas."""
    return [c for case in cases for c in (case, replace(case, name=f"{case.name}-uneven", rows=rows))]


def batches():
    plain = Case("even", loop=True)
    arrays = replace(plain, name="arrays", feed="arrays", loop=False)
    return group(
        "batches",
        plain,
        *[replace(plain, name=f"last-of-{n}", rows=32 + n) for n in (1, 3, 5, 6)],
        replace(plain, name="batch-of-10", batch=10),
        replace(plain, name="batch-of-3", batch=3, rows=14),
        replace(plain, name="static-shapes", feed="static"),
        replace(plain, name="mapped-after-batch", feed="mapped", rows=37),
        replace(plain, name="files", feed="files", rows=37, loop=False),
        replace(plain, name="sparse-inputs", model=kit.sparse, data=kit.sparsely, rows=37, loop=False),
        replace(arrays, rows=37),
        replace(arrays, name="arrays-shuffled", fit={"shuffle": True}),
        replace(arrays, name="validation-split", rows=50, fit={"validation_split": 0.25}),
        replace(
            arrays,
            name="validation-arrays",
            fit={"validation_data": kit.numbers(13, 5), "validation_batch_size": 4},
        ),
        replace(plain, name="pydataset", feed="pydataset", rows=37, loop=False),
        replace(plain, name="generator", feed="generator", rows=37, loop=False, fit={"steps_per_epoch": 2}),
        Case("dict-inputs", model=kit.functional(kit.dict_inputs, kit.joined), data=kit.dictionary, rows=37),
        Case("nested-inputs", model=kit.functional(kit.nested_inputs, kit.joined), data=kit.nested, rows=37),
        Case("steps-per-epoch", feed="repeat", rows=37, fit={"steps_per_epoch": 3}),
        Case("distributed-dataset", script=scripts.distributed, feed="repeat"),
    )


# What a loss needs beside one-hot targets and shares from 0 to 1; losses that are not here get those.
LABELS = {"data": kit.numbers}
SUITED = {
    "SparseCategoricalCrossentropy": LABELS,
    "CategoricalGeneralizedCrossEntropy": LABELS,
    "Circle": {**LABELS, "model": kit.directions, "loss": lambda: S.Circle(gamma=4)},
    "CTC": {"data": kit.spelled, "model": kit.words(lambda: L.LSTM(4, return_sequences=True), mask=False)},
    "MeanAbsolutePercentageError": {"data": kit.above_zero, "rounding": True},  # gradients of 100 / y
}


def every_loss():
    """A row for each loss class that the installed Keras has: each must be right where replicas have unequal rows."""
    found = {c for c in vars(S).values() if isinstance(c, type) and issubclass(c, S.Loss) and c is not S.Loss}
    for cls in sorted(found, key=lambda c: c.__name__):
        same = {"data": kit.one_hot, "model": kit.shares(), "loss": cls, "metrics": lambda: None, "judged": False}
        yield Case(f"loss-{cls.__name__}", rows=37, **{**same, **SUITED.get(cls.__name__, {})})


def mixing_losses():
    """Losses that mix the rows of a batch, in more than their default form."""
    same = {"data": kit.one_hot, "model": kit.shares(), "metrics": lambda: None, "rows": 37, "judged": False}
    drawn = {**same, "data": kit.drawings, "model": kit.drawing()}
    faces = {**same, "data": kit.numbers, "model": kit.directions}
    own = kit.wired(train_step=kit.own_step)
    return [
        Case("dice-weights", loss=S.Dice, **{**same, "data": kit.one_hot_weighted}),
        Case("dice-by-class", loss=lambda: S.Dice(axis=0), **same),
        Case("dice-by-row", loss=lambda: S.Dice(axis=-1), **same),
        Case("dice-pictures-by-class", loss=lambda: S.Dice(axis=(0, 1, 2)), **drawn),
        Case("dice-pictures-by-row", loss=lambda: S.Dice(axis=(1, 2, 3)), **drawn),
        Case("dice-in-own-loss", loss=lambda: kit.entropy_and_dice, **drawn),
        Case("dice-by-name", loss=lambda: "dice", **same),
        Case("dice-reduction-sum", loss=lambda: S.Dice(reduction="sum"), **same),
        Case("dice-own-step", loss=S.Dice, **{**same, "model": own}),
        Case("tversky-by-class", loss=lambda: S.Tversky(alpha=0.2, beta=0.8, axis=(0,)), **same),
        Case("circle-even", loss=lambda: S.Circle(gamma=4), **{**faces, "rows": 40}),
        Case("circle-weights", loss=lambda: S.Circle(gamma=4), **{**faces, "data": kit.weighted}),
        Case("circle-own-step", loss=lambda: S.Circle(gamma=4), **{**faces, "model": kit.pointing()}),
    ]


def shapes_of_losses():
    """Several outputs, none, and weights in every form that Keras takes."""
    entropy = S.SparseCategoricalCrossentropy
    tagger = kit.words(lambda: L.LSTM(4, return_sequences=True))
    untagged = kit.words(lambda: L.LSTM(4, return_sequences=True), mask=False)
    both = {"kind": entropy(True), "size": "mse"}
    heads = {"model": kit.two_heads, "data": kit.two_targets, "metrics": lambda: None}
    listed = {"model": kit.listed_heads, "data": kit.listed_targets, "metrics": lambda: None}
    rows = {"rows": 37}
    return [
        Case(
            "outputs-nested",
            model=kit.nested_heads,
            data=kit.nested_targets,
            loss=lambda: "mse",
            metrics=lambda: None,
            **rows,
        ),
        Case("outputs-one-without-loss", loss=lambda: {"kind": entropy(True), "size": None}, **heads, **rows),
        Case(
            "outputs-listed",
            loss=lambda: [entropy(True), "mse"],
            compile={"loss_weights": [0.5, 0.3]},
            **listed,
            **rows,
        ),
        Case("outputs-listed-one-without-loss", loss=lambda: [entropy(True), None], **listed, **rows),
        Case("outputs-weights", loss=lambda: both, **{**heads, "data": kit.two_targets_weighted}, **rows),
        Case(
            "outputs-weighted-metrics",
            loss=lambda: both,
            compile={"weighted_metrics": {"kind": ["accuracy"], "size": ["mae"]}},
            **{**heads, "data": kit.two_targets_weighted},
            **rows,
        ),
        Case("outputs-coupled", loss=lambda: {"kind": entropy(True), "size": S.Dice(axis=0)}, **heads, **rows),
        Case(
            "outputs-reduction-None",
            loss=lambda: {"kind": entropy(True, reduction=None), "size": "mse"},
            **heads,
            compile={"loss_weights": {"kind": 0.1, "size": 0.02}},
            rows=40,
        ),
        Case("add-loss-only", model=kit.dense(kit.Adds), loss=lambda: None, metrics=lambda: None, **rows),
        Case(
            "add-loss-no-targets",
            model=kit.dense(kit.Adds),
            data=kit.no_targets,
            loss=lambda: None,
            metrics=lambda: None,
            **rows,
        ),
        Case("loss-float64", loss=lambda: entropy(True, dtype="float64"), **rows),
        Case(
            "loss-bfloat16", loss=lambda: entropy(True, dtype="bfloat16"), rounding=True, metrics=lambda: None, **rows
        ),
        Case("loss-weight-of-one", compile={"loss_weights": 0.25}, **rows),
        Case("weights-by-step", model=untagged, data=kit.tagged_weighted, **rows),
        Case(
            "weights-by-step-mean",
            model=untagged,
            data=kit.tagged_weighted,
            loss=lambda: entropy(True, reduction="mean_with_sample_weight"),
            **rows,
        ),
        Case("weights-zero-in-a-batch", data=kit.weightless_batch),
        Case(
            "weights-zero-in-a-batch-mean",
            data=kit.weightless_batch,
            loss=lambda: entropy(True, reduction="mean_with_sample_weight"),
        ),
        Case("weights-None", data=kit.weighted, loss=lambda: entropy(True, reduction=None), **rows),
        Case("mask-weights-zero", model=tagger, data=kit.tagged_half_weightless, **rows),
        Case(
            "mask-weights-zero-mean",
            model=tagger,
            data=kit.tagged_half_weightless,
            loss=lambda: entropy(True, reduction="mean_with_sample_weight"),
            **rows,
        ),
        Case("mask-whole-rows", model=tagger, data=kit.half_empty, **rows),
        Case("mask-None", model=tagger, data=kit.tagged, loss=lambda: entropy(True, reduction=None)),
        Case(
            "mask-weighted-metrics",
            model=tagger,
            data=kit.tagged_weighted,
            compile={"weighted_metrics": ["accuracy"]},
            **rows,
        ),
        Case("ignore-class", loss=lambda: entropy(True, ignore_class=1), **rows),
        Case(
            "sum-and-regularizer",
            model=kit.dense(kernel_regularizer="l2"),
            loss=lambda: entropy(True, reduction="sum"),
            optimizer=lambda: O.SGD(0.02),
            **rows,
        ),
    ]


def losses():
    entropy = S.SparseCategoricalCrossentropy
    reductions = ("sum", "mean", "sum_over_batch_size", "mean_with_sample_weight", None)
    values_loss = {"model": kit.dense(last=2), "data": kit.values, "metrics": lambda: ["mae"]}
    tagger = kit.words(lambda: L.LSTM(4, return_sequences=True))
    pooled = kit.words(lambda: L.GlobalAveragePooling1D())
    own = kit.wired(train_step=kit.own_step)
    return group(
        "losses",
        *ragged(
            *[
                Case(
                    f"reduction-{r}",
                    loss=lambda r=r: entropy(from_logits=True, reduction=r),
                    loop=r is not None,
                )
                for r in reductions
            ]
        ),
        *[
            Case(
                f"weights-{r}",
                data=kit.weighted,
                rows=37,
                loss=lambda r=r: entropy(from_logits=True, reduction=r),
            )
            for r in reductions[:4]
        ],
        Case("weights-even", data=kit.weighted, loop=True),
        Case("weights-zero-on-half", data=kit.half_weightless),
        Case("weighted-metrics", data=kit.weighted, rows=37, compile={"weighted_metrics": ["accuracy"]}),
        *ragged(Case("class-weights", fit={"class_weight": {0: 0.2, 1: 1.0, 2: 3.0}})),
        *ragged(
            Case("mask", model=tagger, data=kit.tagged),
            Case("mask-weights", model=tagger, data=kit.tagged_weighted),
        ),
        Case(
            "mask-reduction-weighted",
            model=tagger,
            data=kit.tagged_weighted,
            loss=lambda: entropy(True, reduction="mean_with_sample_weight"),
        ),
        Case("mask-reduction-sum", model=tagger, data=kit.tagged, loss=lambda: entropy(True, reduction="sum")),
        Case("mask-inside", model=pooled, data=kit.tokens),
        *ragged(
            Case("add-loss", model=kit.dense(kit.Adds)),
            Case("weight-regularizer", model=kit.dense(kernel_regularizer="l2", bias_regularizer="l1")),
            Case("activity-regularizer", model=kit.dense(activity_regularizer="l2")),
            Case(
                "two-outputs",
                model=kit.two_heads,
                data=kit.two_targets,
                loss=lambda: {"kind": entropy(True), "size": "mse"},
                metrics=lambda: {"kind": ["accuracy"], "size": ["mae"]},
                compile={"loss_weights": {"kind": 0.3, "size": 2.0}},
            ),
            Case("own-loss-function", loss=lambda: kit.smooth, **values_loss),
            Case("own-scalar-loss", loss=lambda: kit.scalar, **values_loss),
            Case("own-loss-class", loss=kit.OwnLoss, **values_loss),
            Case("own-train-step", model=own, metrics=lambda: None),
            Case("own-scalar-step", model=kit.wired(train_step=kit.scalar_step), metrics=lambda: None),
            Case("own-compute-loss", model=kit.wired(compute_loss=kit.own_loss), metrics=lambda: None),
            Case(
                "two-optimizers",
                model=kit.Gan,
                loss=lambda: "mse",
                data=lambda n: (kit.numbers(n)[0], kit.numbers(n)[1][:, None]),
                metrics=lambda: None,
            ),
        ),
        *every_loss(),
        *mixing_losses(),
        *shapes_of_losses(),
    )


def gradients():
    limits = {"clipnorm": 0.05, "global_clipnorm": 0.05, "clipvalue": 0.01}
    embedding = {"model": kit.words(lambda: L.GlobalAveragePooling1D(), mask=False), "data": kit.tokens}
    return group(
        "gradients",
        *[
            Case(
                f"{k}{'-uneven' * u}",
                rows=37 if u else 40,
                optimizer=lambda k=k, v=v: O.SGD(0.5, **{k: v}),
                loop=True,
            )
            for k, v in limits.items()
            for u in (0, 1)
        ],
        *[
            Case(
                f"accumulate-{n}",
                rows=37,
                optimizer=lambda n=n: O.Adam(0.02, gradient_accumulation_steps=n),
                loop=True,
            )
            for n in (2, 5)
        ],
        *[
            Case(
                f"accumulate-{k}",
                rows=37,
                optimizer=lambda k=k, v=v: O.SGD(0.5, gradient_accumulation_steps=2, **{k: v}),
            )
            for k, v in limits.items()
        ],
        *[
            Case(f"embedding-{name}", optimizer=make, loop=True, **embedding)
            for name, make in {
                "sgd": lambda: O.SGD(0.5),
                "adam": lambda: O.Adam(0.02),
                "clipnorm": lambda: O.SGD(0.5, clipnorm=0.02),
                "global-clipnorm": lambda: O.SGD(0.5, global_clipnorm=0.02),
                "clipvalue": lambda: O.SGD(0.5, clipvalue=0.002),
                "accumulate": lambda: O.SGD(0.5, gradient_accumulation_steps=2),
            }.items()
        ],
        Case("embedding-uneven", rows=37, **embedding),
        *[
            Case(f"embedding-{name}", rows=37, optimizer=lambda: O.Adam(0.02), model=make, data=kit.tokens, loop=True)
            for name, make in {
                "by-position": kit.words(own_code.Placed, L.GlobalAveragePooling1D, mask=False),
                "by-both": kit.sequential((7,), own_code.LooksUpBoth, L.Flatten, lambda: L.Dense(3), dtype="int32"),
            }.items()
        ],
        Case("none-gradients", model=kit.unused_layer, optimizer=lambda: O.Adam(0.02)),
        Case(
            "none-gradients-clipped",
            model=kit.unused_layer,
            optimizer=lambda: O.Adam(0.02, global_clipnorm=0.05),
        ),
        judged=False,
    )


def _made(cls, rate, **options):
    if cls is not getattr(O, "MultiOptimizer", None):
        return cls(rate, **options)
    first, second = O.SGD(rate, **options), O.Adam(rate, **options)
    return cls(lambda variable: first if "bias" in variable.path else second)


def optimizers():
    """Every optimizer that the installed Keras has, plain, and with weight decay and an overwriting EMA."""
    found = {
        c
        for c in vars(O).values()
        if isinstance(c, type) and issubclass(c, O.Optimizer) and c not in (O.Optimizer, O.LossScaleOptimizer)
    }
    rates = {"SGD": 0.2, "Adadelta": 1.0, "Ftrl": 0.2, "Adagrad": 0.1}
    rounding = {"Lion"}
    # Keras 3.15 builds it wrongly within the first step, on one device: its momentum starts at 0, not at
    # the weights.
    built_first = {"ScheduleFreeAdamW"}
    rows = []
    for cls in sorted(found, key=lambda c: c.__name__):
        rate, same = rates.get(cls.__name__, 0.02), {"rounding": cls.__name__ in rounding}
        lazy = cls.__name__ not in built_first
        same["script"] = scripts.train if lazy else scripts.prepared
        more = {"weight_decay": 0.01, "use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3}
        rows.append(Case(cls.__name__, rows=37, optimizer=lambda c=cls, r=rate: _made(c, r), loop=lazy, **same))
        rows.append(
            Case(
                f"{cls.__name__}-decay-ema",
                rows=37,
                optimizer=lambda c=cls, r=rate, m=more: _made(c, r, **m),
                **same,
            )
        )
    return group(
        "optimizers",
        *rows,
        Case("SGD-momentum-nesterov", optimizer=lambda: O.SGD(0.1, momentum=0.9, nesterov=True)),
        Case("Adam-amsgrad", optimizer=lambda: O.Adam(0.02, amsgrad=True)),
        Case("Adam-tiny-epsilon", optimizer=lambda: O.Adam(0.02, epsilon=1e-12), rounding=True),
        Case("Lion-clipnorm", optimizer=lambda: O.Lion(0.02, clipnorm=0.05), rounding=True),
        Case("ema-at-end", rows=37, optimizer=lambda: O.SGD(0.2, use_ema=True, ema_momentum=0.9)),
        Case(
            "ema-accumulate",
            rows=37,
            optimizer=lambda: O.Adam(0.02, use_ema=True, ema_overwrite_frequency=2, gradient_accumulation_steps=2),
        ),
        Case("schedule", optimizer=lambda: O.Adam(O.schedules.CosineDecay(0.05, 10))),
        Case("schedule-one-cycle", optimizer=lambda: O.Adam(own_code.OneCycle(0.05, 10, 3))),
        Case("LARS", rows=37, optimizer=lambda: LARS(2.0, trust=0.01, weight_decay=0.01), loop=True),
        Case(
            "LARS-ema-accumulate",
            rows=37,
            optimizer=lambda: LARS(
                2.0, trust=0.01, use_ema=True, ema_overwrite_frequency=2, gradient_accumulation_steps=2, clipnorm=0.1
            ),
        ),
        judged=False,
    )


def building():
    bare = [lambda: L.Dense(8, "tanh"), lambda: L.Dense(3)]

    def lazy(*stack):
        return lambda: keras.Sequential([make() for make in stack])

    return group(
        "building",
        Case("lazy-sequential", model=lazy(*bare), rows=37, optimizer=lambda: O.Adam(0.02), loop=True),
        Case("lazy-subclass", model=kit.wired(), rows=37, optimizer=lambda: O.Adam(0.02), loop=True),
        Case("lazy-batchnorm", model=lazy(bare[0], L.BatchNormalization, bare[1]), loop=True),
        Case("lazy-dropout", model=lazy(bare[0], lambda: L.Dropout(0.5), bare[1]), loop=True),
        Case(
            "lazy-metrics",
            model=lazy(*bare),
            metrics=lambda: [keras.metrics.SparseTopKCategoricalAccuracy(2), "accuracy"],
        ),
        Case("built-before", script=scripts.prepared, optimizer=lambda: O.Adam(0.02)),
        Case("fit-inside-scope", script=scripts.inside_scope, model=lazy(*bare)),
        Case("fit-twice", script=scripts.two_fits, rows=37),
    )


# What a layer on pictures is given where `factor=0.5` is not what it takes.
OPTIONS = {
    "CenterCrop": {"height": 6, "width": 6},
    "RandomColorJitter": {f"{name}_factor": 0.5 for name in ("brightness", "contrast", "saturation", "hue")},
    "RandomCrop": {"height": 6, "width": 6},
    "RandomPosterization": {"factor": 4},
    "RandomShear": {"x_factor": 0.3, "y_factor": 0.3},
    "RandomTranslation": {"height_factor": 0.3, "width_factor": 0.3},
    "RandomZoom": {"height_factor": 0.3},
    "Resizing": {"height": 6, "width": 6},
    "Solarization": {"addition_factor": 0.5, "threshold_factor": 0.5},
}


def every_layer_on_pictures():
    """A row for each layer of the installed Keras that changes pictures, at random or not."""
    for name, cls in sorted(vars(L).items()):
        if hasattr(cls, "get_random_transformation") and cls is not L.MaxNumBoundingBoxes:
            takes = inspect.signature(cls).parameters
            options = OPTIONS.get(name, {"factor": 0.5} if "factor" in takes else {})
            # RandomCrop crops in training alone: what comes after it must take pictures of either size.
            flat = L.GlobalAveragePooling2D if cls is L.RandomCrop else L.Flatten
            model = kit.colored(lambda c=cls, o=options: c(**o), flat)
            yield Case(f"picture-{name}", model=model, data=kit.colors, rows=13, judged=False)


def mixing_layers():
    """Layers that pair the pictures of a batch, or draw in a way of their own, in more than their default form."""
    same = {"data": kit.colors, "rows": 11, "judged": False}  # the last batch leaves a replica without rows
    mix, cut, augment, bend = lambda: L.MixUp(0.8), L.CutMix, L.AugMix, L.RandomElasticTransform
    both = {**same, "data": kit.colors_and_labels}
    # AugMix picks anew each time the step is traced, and Keras traces it twice where metrics are made in it.
    once = {**same, "metrics": lambda: None}
    return [
        Case("mixup-short", model=kit.colored(mix), **{**same, "judged": True}),
        Case("mixup-labels", model=kit.mixed(mix), **both),
        Case("mixup-eager", model=kit.colored(mix), compile={"run_eagerly": True}, **same),
        Case("mixup-half", model=kit.colored(mix), policy="mixed_bfloat16", rounding=True, **same),
        Case("mixup-within", model=kit.deep(mix), **same),
        Case("cutmix-short", model=kit.colored(cut), **same),
        Case("cutmix-labels", model=kit.mixed(cut), **both),
        Case("cutmix-static", model=kit.colored(cut), feed="static", **{**same, "rows": 16}),
        Case("augmix-twice", model=kit.colored(lambda: keras.Sequential([augment(), augment()])), **once),
        Case("augmix-eager", model=kit.colored(augment), compile={"run_eagerly": True}, **once),
        Case("augmix-steps", model=kit.colored(augment), compile={"steps_per_execution": 2}, **{**once, "rows": 29}),
        Case("elastic-static", model=kit.colored(bend), feed="static", **{**same, "rows": 16}),
    ]


def layers():
    def norm(**options):
        return lambda: L.BatchNormalization(**options)

    masked_norm = kit.words(lambda: L.BatchNormalization(), lambda: L.LSTM(4))
    random = {
        "dropout": lambda: L.Dropout(0.5),
        "dropout-seeded": lambda: L.Dropout(0.3, seed=9),
        "gaussian-noise": lambda: L.GaussianNoise(0.3),
        "gaussian-dropout": lambda: L.GaussianDropout(0.3),
        "keras-random": kit.Noise,
    }
    pictures = {
        "spatial-dropout": lambda: L.SpatialDropout2D(0.5),
        "flip": lambda: L.RandomFlip(),
        "contrast": lambda: L.RandomContrast(0.5),
        "rotation": lambda: L.RandomRotation(0.2),
        "translation": lambda: L.RandomTranslation(0.3, 0.3),
        "zoom": lambda: L.RandomZoom(0.3),
    }
    cells = {
        "SimpleRNN": lambda: L.SimpleRNN(4),
        "GRU": lambda: L.GRU(4),
        "LSTM": lambda: L.LSTM(4),
        "Bidirectional": lambda: L.Bidirectional(L.LSTM(3)),
        "LSTM-dropout": lambda: L.LSTM(4, dropout=0.3, recurrent_dropout=0.3),
    }
    stats = ["AUC", "Precision", "Recall", "BinaryAccuracy"]

    def frozen():
        model = kit.dense(lambda: L.BatchNormalization())()
        model.layers[0].trainable = model.layers[1].trainable = False
        return model

    def adapted():
        layer = L.Normalization()
        layer.adapt(kit.numbers(40)[0])
        return keras.Sequential([keras.Input((6,)), layer, L.Dense(3)])

    return group(
        "layers",
        *ragged(
            Case("batchnorm", model=kit.dense(norm()), loop=True),
            Case("batchnorm-synchronized", model=kit.dense(norm(synchronized=True)), loop=True),
        ),
        Case("batchnorm-conv", model=kit.conv(norm(momentum=0.8)), data=kit.images, rows=36),
        Case("batchnorm-mask", model=masked_norm, data=kit.tokens),
        Case("frozen", model=frozen),
        *[Case(n, model=kit.dense(m), rows=37, loop=n == "dropout") for n, m in random.items()],
        *[Case(n, model=kit.conv(m), data=kit.images) for n, m in pictures.items()],
        *every_layer_on_pictures(),
        *mixing_layers(),
        Case("attention-dropout", data=kit.sequences, model=lambda: kit.attention(0.3)),
        Case("attention", data=kit.sequences, model=lambda: kit.attention(0.0)),
        Case(
            "constraints",
            model=kit.dense(kernel_constraint=keras.constraints.MaxNorm(0.5), bias_constraint="non_neg"),
        ),
        *ragged(Case("own-state", model=kit.dense(kit.Counter))),
        Case("own-state-sums", model=kit.dense(kit.Sums), rows=37),
        Case("own-state-codebook", model=kit.dense(kit.Codebook), rows=37),
        Case("own-state-eager", model=kit.dense(kit.Counter), rows=21, compile={"run_eagerly": True}),
        Case("own-state-jit", model=kit.dense(kit.Counter), compile={"jit_compile": True}),
        Case("own-state-steps", model=kit.dense(kit.Counter), rows=37, compile={"steps_per_execution": 3}),
        Case("batchnorm-own-step", model=kit.normed(), rows=37, metrics=lambda: None),
        Case(
            "spectral-norm",
            model=kit.sequential((6,), lambda: L.SpectralNormalization(L.Dense(8)), lambda: L.Dense(3)),
        ),
        Case("layer-norm", model=kit.dense(L.LayerNormalization)),
        Case("normalization-adapted", model=adapted),
        # A replica with no rows: TensorFlow 2.21's oneDNN gradient of max pooling ends the process (SIGABRT).
        *ragged(Case("cnn", model=kit.conv(), data=kit.images, loop=True)),
        Case(
            "picture-outputs", model=kit.filtered, data=kit.pictures, rows=33, loss=lambda: "mse", metrics=lambda: None
        ),
        *[Case(n, model=kit.recurrent(m), data=kit.sequences, rows=37) for n, m in cells.items()],
        Case(
            "binary-metrics",
            model=kit.dense(lambda: L.Dense(2), last=2),
            data=kit.binary,
            rows=37,
            loss=lambda: S.BinaryCrossentropy(True),
            metrics=lambda: [getattr(keras.metrics, n)() for n in stats],
        ),
        Case(
            "other-metrics",
            model=kit.dense(last=2),
            data=kit.values,
            rows=37,
            loss=lambda: "mse",
            metrics=lambda: [
                keras.metrics.R2Score(),
                keras.metrics.RootMeanSquaredError(),
                keras.metrics.CosineSimilarity(),
            ],
        ),
        Case(
            "class-metrics",
            model=kit.dense(lambda: L.Softmax()),
            data=kit.one_hot,
            rows=37,
            loss=lambda: "mse",
            metrics=lambda: [keras.metrics.F1Score(), keras.metrics.OneHotMeanIoU(num_classes=3)],
        ),
    )


def _with_nan(rows):
    x, y = kit.numbers(rows)
    x[18] = float("nan")  # in the third batch of 8, on one replica
    return x, y


def execution():
    k = keras.callbacks
    return group(
        "execution",
        *[Case(f"steps-per-execution-{n}", rows=37, compile={"steps_per_execution": n}) for n in (2, 5, 7)],
        Case(
            "steps-per-execution-accumulate",
            compile={"steps_per_execution": 2},
            optimizer=lambda: O.SGD(0.5, gradient_accumulation_steps=2),
        ),
        Case(
            "steps-per-execution-validation",
            feed="arrays",
            rows=50,
            compile={"steps_per_execution": 2},
            fit={"validation_split": 0.3},
        ),
        *[
            Case(f"jit{n}", compile={"jit_compile": True, **c}, model=m, optimizer=o, rows=r)
            for n, c, m, o, r in (
                ("", {}, kit.dense(), lambda: O.SGD(0.2), 40),
                ("-uneven", {}, kit.dense(), lambda: O.SGD(0.2), 37),
                ("-clipnorm", {}, kit.dense(), lambda: O.Adam(0.02, global_clipnorm=0.05), 40),
                ("-steps", {"steps_per_execution": 2}, kit.dense(), lambda: O.SGD(0.2), 40),
                ("-batchnorm", {}, kit.dense(L.BatchNormalization), lambda: O.SGD(0.2), 40),
                ("-dropout", {}, kit.dense(lambda: L.Dropout(0.5)), lambda: O.SGD(0.2), 40),
            )
        ],
        Case("eager", rows=37, compile={"run_eagerly": True}),
        Case("eager-cnn", rows=17, compile={"run_eagerly": True}, model=kit.conv(), data=kit.images),
        Case(
            "jit-accumulate",
            rows=37,
            compile={"jit_compile": True},
            optimizer=lambda: O.SGD(0.5, gradient_accumulation_steps=2),
        ),
        Case(
            "eager-clip-accumulate",
            rows=21,
            compile={"run_eagerly": True},
            optimizer=lambda: O.SGD(0.5, clipnorm=0.05, gradient_accumulation_steps=2),
        ),
        Case("stop-in-epoch", callbacks=lambda at: [scripts.Stops()]),
        Case("rate-each-batch", callbacks=lambda at: [scripts.Cools()]),
        Case("rate-read-and-set", callbacks=lambda at: [scripts.Warms()], rows=37),
        Case("LearningRateScheduler", callbacks=lambda at: [k.LearningRateScheduler(lambda e, r: r * 0.5)]),
        Case(
            "ReduceLROnPlateau",
            callbacks=lambda at: [k.ReduceLROnPlateau("val_loss", min_delta=10.0, patience=1)],
            rows=50,
            feed="arrays",
            fit={"validation_split": 0.25, "epochs": 3},
        ),
        Case(
            "EarlyStopping",
            callbacks=lambda at: [k.EarlyStopping("val_loss", min_delta=10.0, restore_best_weights=True)],
            rows=50,
            feed="arrays",
            fit={"validation_split": 0.25, "epochs": 4},
        ),
        Case(
            "SwapEMAWeights",
            callbacks=lambda at: [k.SwapEMAWeights()],
            optimizer=lambda: O.SGD(0.2, use_ema=True, ema_momentum=0.9),
        ),
        Case("batch-logs", script=scripts.reading, rows=37),
        Case("validation-freq", fit={"validation_freq": 2, "validation_split": 0.25}, feed="arrays", rows=52),
        Case("on-batch", script=scripts.on_batches),
        Case("on-batch-uneven", script=scripts.on_batches, rows=37),
        Case("on-batch-weights", script=scripts.on_batches, data=kit.weighted, rows=21),
        Case("ModelCheckpoint", script=scripts.best),
        Case("BackupAndRestore", script=scripts.interrupted(7), optimizer=lambda: O.Adam(0.02)),
        *[
            Case(f"BackupAndRestore-within{name}", script=scripts.interrupted(stop, save_freq=often), **more)
            for name, stop, often, more in (
                ("", 8, 2, {"optimizer": lambda: O.Adam(0.02)}),
                ("-uneven", 8, 3, {"rows": 37, "optimizer": lambda: O.Adam(0.02)}),
                ("-arrays", 8, 2, {"feed": "arrays", "fit": {"validation_split": 0.2}, "rows": 50}),
                ("-shuffled", 8, 2, {"feed": "arrays", "fit": {"shuffle": True}}),
                ("-repeat", 5, 2, {"feed": "repeat", "fit": {"steps_per_epoch": 3}}),
                ("-dropout", 8, 2, {"model": kit.dense(lambda: L.Dropout(0.3))}),
                ("-at-end", 6, 5, {}),
                ("-steps", 5, 2, {"compile": {"steps_per_execution": 2}}),
                ("-accumulate", 8, 1, {"optimizer": lambda: O.SGD(0.5, gradient_accumulation_steps=3)}),
            )
        ],
        Case("TerminateOnNaN", callbacks=lambda at: [k.TerminateOnNaN()], data=_with_nan),
    )


def precision():
    rows = []
    changes = {
        "": {},
        "-clip": {"clipnorm": 0.05},
        "-global-clip": {"global_clipnorm": 0.05},
        "-accumulate": {"gradient_accumulation_steps": 2},
        "-clip-accumulate": {"clipnorm": 0.05, "gradient_accumulation_steps": 2},
    }
    for policy in ("mixed_float16", "mixed_bfloat16"):
        for n, more in changes.items():
            rows.append(
                Case(
                    f"{policy}{n}",
                    policy=policy,
                    rows=37,
                    rounding=True,
                    metrics=lambda: None,  # one row's flipped accuracy would hide all else
                    optimizer=lambda m=more: O.SGD(0.2, **m),
                    loop=n in ("", "-clip"),
                )
            )
        rows.append(
            Case(
                f"{policy}-batchnorm",
                policy=policy,
                rounding=True,
                metrics=lambda: None,
                model=kit.dense(L.BatchNormalization),
            )
        )

    def scaled(**more):
        return lambda: O.LossScaleOptimizer(O.SGD(0.2, **more), initial_scale=1024.0, dynamic_growth_steps=3)

    half = {"policy": "mixed_float16", "rounding": True, "script": scripts.scale, "metrics": lambda: None}
    return group(
        "precision",
        *rows,
        Case("scale-grows", optimizer=scaled(), **half),
        *[
            Case(f"overflow-{n}", data=kit.overflowing(*w), optimizer=scaled(), **half)
            for n, w in {"first": (0,), "second": (2,), "last": (7,), "all": range(8)}.items()
        ],
        Case("overflow-clip", data=kit.overflowing(5), optimizer=scaled(clipnorm=0.05), **half),
        Case(
            "overflow-accumulate",
            data=kit.overflowing(5),
            optimizer=scaled(gradient_accumulation_steps=2),
            **half,
        ),
        judged=False,
    )


def files():
    adam = {"optimizer": lambda: O.Adam(0.02), "model": kit.dense(L.BatchNormalization)}
    return group(
        "files",
        Case("save-keras", script=scripts.saved(*scripts.AS_KERAS), **adam),
        Case("save-keras-by-all", script=scripts.saved(*scripts.AS_KERAS, by_all=True), **adam),
        Case("save-weights", script=scripts.saved(*scripts.AS_WEIGHTS)),
        Case("save-weights-by-all", script=scripts.saved(*scripts.AS_WEIGHTS, by_all=True), **adam),
        Case("tf-checkpoint", script=scripts.saved(*scripts.AS_CHECKPOINT), **adam),
        # Neither file holds the state of random draws: on one device too they begin anew after a load.
        Case(
            "save-draws",
            script=scripts.saved(*scripts.AS_WEIGHTS, always=True),
            model=kit.dense(lambda: L.Dropout(0.3, seed=9)),
        ),
        Case(
            "save-ema",
            script=scripts.saved(*scripts.AS_KERAS),
            optimizer=lambda: O.Adam(0.02, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
        ),
        *[
            Case(
                f"save-loss-scale{name}",
                script=scripts.saved(*way, to_other=bool(name)),
                policy="mixed_float16",
                rounding=True,
                metrics=lambda: None,
                optimizer=lambda: O.LossScaleOptimizer(O.SGD(0.2), initial_scale=1024.0, dynamic_growth_steps=3),
            )
            for name, way in {"": scripts.AS_WEIGHTS, "-other-replicas": scripts.AS_KERAS}.items()
        ],
        Case("other-replicas-keras", script=scripts.saved(*scripts.AS_KERAS, to_other=True), **adam),
        Case("other-replicas-weights", script=scripts.saved(*scripts.AS_WEIGHTS, to_other=True), **adam),
        Case("other-replicas-checkpoint", script=scripts.saved(*scripts.AS_CHECKPOINT, to_other=True), **adam),
        *[
            Case(f"more-replicas-{name}", script=scripts.saved(*way, from_other=True), **adam)
            for name, way in {"keras": scripts.AS_KERAS, "checkpoint": scripts.AS_CHECKPOINT}.items()
        ],
        Case(
            "other-replicas-accumulate",
            script=scripts.saved(*scripts.AS_KERAS, to_other=True, by_all=True),
            optimizer=lambda: O.SGD(0.5, gradient_accumulation_steps=2),
        ),
        Case("export", script=scripts.exported),
        Case("only-chief-writes", script=scripts.chief_writes),
    )


def of_own():
    uneven = {"rows": 37}
    silent = {"metrics": lambda: None, "judged": False, **uneven}
    vector = {"model": kit.wired(train_step=own_code.vector_step), "optimizer": lambda: O.SGD(0.02), **silent}
    of_all = {"model": kit.shares(), "data": kit.one_hot, "loss": lambda: own_code.overlap}
    of_all["metrics"] = lambda: [own_code.recall, own_code.root]
    paired, accumulate = kit.wired(train_step=own_code.paired_step), {"gradient_accumulation_steps": 2}

    def scaled():
        return O.LossScaleOptimizer(O.SGD(0.02), initial_scale=64.0)

    def regularized():
        words = L.Embedding(20, 4, mask_zero=True)
        cell = L.LSTM(4, return_sequences=True, activity_regularizer="l2")
        return keras.Sequential([keras.Input((7,), dtype="int32"), words, cell, L.Dense(3)])

    return group(
        "your own code",
        Case("weight-dropout", model=kit.dense(own_code.DropConnect), **uneven),
        Case("table-dropout", model=kit.dense(own_code.Positions), rows=35),
        Case("call-is-a-function", model=kit.dense(own_code.Traced), **uneven),
        Case("step-is-a-function", model=kit.wired(train_step=own_code.traced_step), **silent),
        Case("vector-loss-own-step", **vector),
        Case("vector-loss-own-step-float16", policy="mixed_float16", rounding=True, **{**vector, "optimizer": scaled}),
        Case("vector-loss-of-one-row-a-replica", **{**vector, "rows": 36, "batch": 4}),
        Case("loss-of-shape-1", model=kit.wired(compute_loss=own_code.kept_loss), **uneven),
        Case("own-layout", model=paired, data=own_code.paired, **silent),
        Case("own-predict-step", model=own_code.pictures_to_predict, data=kit.images, rows=33),
        Case("layer-metrics", model=kit.dense(own_code.Totals), **uneven),
        *ragged(Case("kept-tensors", model=own_code.Keeps), rows=33),
        Case("kept-losses", model=kit.dense(L.BatchNormalization, activity_regularizer="l2"), **uneven),
        Case("kept-losses-masked", model=regularized, data=kit.tagged, rows=37),
        Case("vector-loss-unscaled", **{**vector, "model": kit.wired(train_step=own_code.unscaled_vector_step)}),
        Case("average-loss-own-step", model=kit.wired(train_step=own_code.average_step), **silent),
        Case("own-optimizer", optimizer=lambda: own_code.ByNorm(0.02), **uneven),
        Case("rows-that-stand-in", model=own_code.looked_up, data=own_code.known_words, rows=33),
        Case("rows-of-an-embedding-in-blocks", model=own_code.looked_up, data=own_code.known_words, rows=69, batch=4),
        Case("shuffled-rows", model=kit.dense(own_code.Shuffled), **uneven),
        *ragged(Case("loss-of-all-rows", **of_all)),
        Case("loss-of-all-rows-float16", policy="mixed_float16", rounding=True, **of_all),
        Case("loss-of-all-rows-accumulate", optimizer=lambda: O.SGD(0.2, **accumulate), rows=37, **of_all),
        Case("loss-of-all-rows-jit", compile={"jit_compile": True}, rows=37, **of_all),
        Case("loss-of-all-rows-weights", rows=37, **{**of_all, "data": kit.one_hot_weighted, "metrics": lambda: None}),
        Case("loss-that-sums", rows=37, **{**of_all, "loss": lambda: own_code.total, "optimizer": lambda: O.SGD(0.02)}),
        Case("loss-by-row-of-all-rows", rows=37, **{**of_all, "loss": lambda: own_code.apart}),
        Case("loss-class-of-all-rows", rows=37, **{**of_all, "loss": own_code.Correlation}),
        *ragged(Case("penalty-of-all-rows", model=kit.dense(own_code.Experts))),
        *ragged(Case("queue-and-count", model=kit.dense(own_code.Remembers))),
        Case("loss-that-reduces", rows=37, **{**of_all, "loss": own_code.Supervised}),
        Case("metric-that-is-no-sum", rows=37, **{**of_all, "metrics": lambda: [own_code.Largest()]}),
        Case("float8", model=own_code.float8, rows=37),
        Case("float8-accumulate", model=own_code.float8, optimizer=lambda: O.SGD(0.2, **accumulate), rows=32),
    )


def of_own_steps():
    silent = {"metrics": lambda: None, "judged": False, "rows": 37}

    def by(**methods):
        return {"model": kit.wired(**methods), **silent}

    return group(
        "custom steps that mix rows",
        Case("own-divisor", **by(compute_loss=own_steps.divided_loss)),
        Case("clipped-by-hand", **by(train_step=own_steps.clipped_step)),
        Case("clipped-by-hand-even", **{**by(train_step=own_steps.clipped_step), "rows": 32}),
        Case(
            "clipped-by-hand-accumulate",
            optimizer=lambda: O.SGD(0.2, gradient_accumulation_steps=2),
            **{**by(train_step=own_steps.clipped_step), "rows": 32},
        ),
        Case("pairs-of-rows", **by(train_step=own_steps.pairs_step)),
        Case("moved-inputs", **by(train_step=own_steps.moved_step)),
        Case("mixed-rows", **by(train_step=own_steps.mixed_step)),
        Case("pairs-of-rows-eager", compile={"run_eagerly": True}, **by(train_step=own_steps.pairs_step)),
    )


def of_others():
    """Small models of the kinds that libraries and recipes have, each written as people write it."""
    usual = {"rows": 37, "metrics": lambda: None, "judged": False}
    files = (
        others_contrast,
        others_density,
        others_generative,
        others_tables,
        others_text,
        others_training,
        others_vision,
    )
    rows = {name: row for file in files for name, row in file.ROWS.items()}
    return group("other people's code", *[Case(name, **{**usual, **row}) for name, row in rows.items()])


def table():
    """All cases, with the default model and data filled in."""
    groups = (
        batches,
        losses,
        gradients,
        optimizers,
        building,
        layers,
        execution,
        precision,
        files,
        of_own,
        of_own_steps,
        of_others,
    )
    cases = [replace(c, model=c.model or kit.dense(), data=c.data or kit.numbers) for make in groups for c in make()]
    assert len({c.name for c in cases}) == len(cases), "two cases have one name"
    return {case.name: case for case in cases}
