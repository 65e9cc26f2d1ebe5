"""Advice to run more steps per call, depending on what limits their number."""

from tfgpu.core.step_blocks import CALLBACKS
from tfgpu.measure.profiling.reading import Window

_KERAS_S = {
    "BackupAndRestore": 'save_freq="epoch"',
    "ModelCheckpoint": 'save_freq="epoch", or tfgpu.callbacks.Checkpoint in its place',
    "TensorBoard": 'update_freq="epoch" and profile_batch=0',
    "TerminateOnNaN": "tfgpu.callbacks.StopOnNaN in its place",
}
_XLA = "same result except for rounding: "
_MORE_STEPS = {
    "train_on_batch": "same result: model.fit(dataset), which runs many steps per call; train_on_batch always runs "
    "one. In your own loop: a @tf.function around a loop over several batches, with the step in it.",
    "test_on_batch": "same result: model.evaluate(dataset), which runs many steps per call; test_on_batch always runs "
    "one.",
    "steps_per_call": "same result: tfgpu.Trainer(model) without steps_per_call: calls grow to 0.1 to 0.2 s.",
    "run_eagerly": "model.compile(..., run_eagerly=False): TensorFlow then runs the whole step without Python.",
}
"""By what sets the number of steps per call: how to run more."""


def callbacks(window: Window) -> tuple[str, ...]:
    """The classes of the callbacks that need each batch, so that a call runs one step.

    Example:
        >>> callbacks(Window(0, 1, 1, (), "tfgpu", "callbacks: Watch, TensorBoard"))
        ('Watch', 'TensorBoard')
    """
    return tuple(window.set_by.removeprefix(CALLBACKS).split(", ")) if window.set_by.startswith(CALLBACKS) else ()


def fewer_looks(names: tuple[str, ...]) -> str:
    """How to run many steps per call with these callbacks."""
    known = [f"{name}: {_KERAS_S[name]}" for name in names if name in _KERAS_S]
    own = [name for name in names if name not in _KERAS_S]
    if own:
        known.append(
            f"{' and '.join(own)}: `every_batch = False` in the class or on the object, if blocks of steps are enough "
            "(on_train_batch_end is then called once per block, with the number of its last step); otherwise do its "
            "work in on_epoch_end"
        )
    return f"same weights: {'; '.join(known)}."


def launches(window: Window) -> str:
    """Advice if launching operations takes the time; empty if nothing is left to try."""
    if window.marked_by != "tfgpu":
        return f"{_XLA}@tf.function(jit_compile=True) on the step fuses operations."
    if window.set_by == "pace":  # Calls already run as many steps as possible.
        return "" if window.jit else f"{_XLA}model.compile(..., jit_compile=True) fuses operations."
    if window.set_by in ("", "steps_per_execution"):
        more = "" if window.jit else ", jit_compile=True"
        return f'same result: model.compile(..., steps_per_execution="auto"{more}).'
    return _more_steps(window)


def _more_steps(window: Window) -> str:
    """How to run more steps per call, if something other than `compile` sets their number."""
    return _MORE_STEPS.get(window.set_by) or fewer_looks(callbacks(window))


def python(window: Window) -> str:
    """Advice if Python code around the steps takes the time."""
    if window.marked_by == "tfgpu":
        if window.set_by == "pace":
            return (
                "calls already run as many steps as possible: let callbacks work every 10 epochs, or lengthen epochs "
                "(dataset.repeat(10), a tenth of the epochs); save checkpoints with tfgpu.callbacks.Checkpoint."
            )
        if window.set_by not in ("", "steps_per_execution"):
            return _more_steps(window)
        return (
            'model.compile(..., steps_per_execution="auto"): more steps per call; every_batch = False in callbacks '
            "that do not need each batch; checkpoints with tfgpu.callbacks.Checkpoint."
        )
    if window.marked_by == "batches":
        return "decorate the step with @tf.function: TensorFlow then runs all of it without Python."
    return (
        "several steps per call: @tf.function around a loop `for x, y in dataset.take(64)` with the step in it; or "
        'model.fit with compile(..., steps_per_execution="auto"). Log and save every 100 steps.'
    )
