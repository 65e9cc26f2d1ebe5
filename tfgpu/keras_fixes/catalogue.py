"""Every repair, in the order in which it is applied. `tfgpu doctor` lists them with what their probes found."""

from tfgpu.keras_fixes import collectives, distribution, gradients, layers, losses, probes, random, seeds, trainer
from tfgpu.keras_fixes.seam import Fix

_KERAS = "https://github.com/keras-team/keras/issues/"
_TENSORFLOW = "https://github.com/tensorflow/tensorflow/issues/"

FIXES = (
    Fix(
        "collective-keys",
        "a second MirroredStrategy in one process reuses the first one's collective keys",
        _TENSORFLOW + "62790",
        probes.second_strategy_reuses_keys,
        collectives.give_each_strategy_its_own_keys,
    ),
    Fix(
        "local-losses",
        "an uneven batch is averaged as if every replica had equally many rows",
        _TENSORFLOW + "36224",
        probes.uneven_batch_differs,
        losses.keep_losses_local,
    ),
    Fix(
        "global-divisors",
        "masks and weighted means are divided by each replica's own count",
        "",
        probes.weighted_mean_differs,
        losses.make_divisors_global,
    ),
    Fix(
        "scalar-metrics",
        "the mean of a batch's scalar counts once a replica",
        "",
        probes.uneven_batch_differs,
        losses.weigh_scalar_metrics,
    ),
    Fix(
        "variables-once",
        "a model built inside the first step makes its variables inside one replica",
        "",
        probes.lazy_model_fails,
        layers.make_variables_once,
    ),
    Fix(
        "global-batch-norm",
        "BatchNormalization takes its statistics from one replica's rows",
        "",
        probes.batch_norm_differs,
        layers.normalise_by_global_batch,
    ),
    Fix(
        "gradients-meet-first",
        "gradients are clipped, checked and accumulated on each replica before they are summed",
        _KERAS + "20582",
        probes.clipping_differs,
        gradients.meet_before_applying,
    ),
    Fix(
        "local-updates",
        "accumulation and moving averages call merge_call inside a condition and crash",
        _KERAS + "20582",
        probes.accumulation_fails,
        gradients.apply_on_every_replica,
    ),
    Fix(
        "many-steps-a-call",
        "steps_per_execution above 1 crashes under replicas",
        _KERAS + "20861",
        probes.many_steps_fail,
        trainer.run_many_steps_in_one_call,
    ),
    Fix(
        "build-from-spec",
        "fit draws a batch and averages it over replicas to build the model",
        _KERAS + "20585",
        probes.uneven_first_batch_fails,
        trainer.build_from_spec,
    ),
    Fix(
        "predict-on-batch",
        "predict_on_batch predicts the whole batch on every replica",
        "",
        probes.predict_on_batch_repeats,
        trainer.split_batches_to_predict,
    ),
    Fix(
        "draws-by-example",
        "every replica draws the same dropout masks and noise",
        "",
        probes.dropout_masks_repeat,
        random.draw_by_example,
    ),
    Fix(
        "shared-seeds",
        "every replica makes a global seed generator of its own",
        "",
        probes.global_seeds_differ,
        seeds.share_seed_state,
    ),
    Fix(
        "no-distribution",
        "keras.distribution does nothing on TensorFlow, and says nothing",
        "",
        probes.distribution_is_silent,
        distribution.warn_of_no_distribution,
    ),
)
