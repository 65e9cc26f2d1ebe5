"""What to write where calls run too few steps: it depends on what sets how many a call runs."""

from tfgpu.core.step_blocks import CALLBACKS
from tfgpu.measure.profiling.reading import Window

_KERAS_S = {
    "BackupAndRestore": 'save_freq="epoch"',
    "ModelCheckpoint": 'save_freq="epoch", or tfgpu.callbacks.Checkpoint in its place',
    "TensorBoard": 'update_freq="epoch" and profile_batch=0',
    "TerminateOnNaN": "tfgpu.callbacks.StopOnNaN in its place",
}
_XLA = "same result but for rounding: "


def callbacks(window: Window) -> tuple[str, ...]:
    """The classes of the callbacks that look at single batches, so that a call has one step.

    Example:
        >>> callbacks(Window(0, 1, 1, (), "tfgpu", "callbacks: Watch, TensorBoard"))
        ('Watch', 'TensorBoard')
    """
    return tuple(window.set_by.removeprefix(CALLBACKS).split(", ")) if window.set_by.startswith(CALLBACKS) else ()


def fewer_looks(names: tuple[str, ...]) -> str:
    """What lets calls have many steps although there are these callbacks."""
    known = [f"{name}: {_KERAS_S[name]}" for name in names if name in _KERAS_S]
    own = [name for name in names if name not in _KERAS_S]
    if own:
        known.append(
            f"{' and '.join(own)}: `every_batch = False` in the class or on the object, where blocks of steps are "
            "enough (on_train_batch_end is then called once a block, with the number of its last step); else its work "
            "in on_epoch_end"
        )
    return f"same weights: {'; '.join(known)}."


def launches(window: Window) -> str:
    """What helps where launching operations takes the time; empty where all of it is in force."""
    if window.marked_by != "tfgpu":
        return f"{_XLA}@tf.function(jit_compile=True) above the step makes few operations of many."
    if window.set_by == "pace":  # The steps of a call are as many as they may be.
        return "" if window.jit else f'{_XLA}model.compile(..., jit_compile="auto") makes few operations of many.'
    if window.set_by in ("", "steps_per_execution"):
        more = "" if window.jit else ', jit_compile="auto"'
        return f'same result: model.compile(..., steps_per_execution="auto"{more}).'
    return _more_steps(window)


def _more_steps(window: Window) -> str:
    """What lets a call have more steps, where something else than `compile` sets how many it has."""
    if window.set_by == "train_on_batch":
        return (
            "same result: model.fit(dataset) or tfgpu.Trainer(model).fit(dataset), which run many steps a call; "
            "train_on_batch runs one, whatever compile() says. In a loop of your own: a @tf.function around a loop "
            "over several batches, with the step in it."
        )
    if window.set_by == "test_on_batch":
        return (
            "same result: model.evaluate(dataset), which runs many steps a call; test_on_batch runs one, whatever "
            "compile() says."
        )
    if window.set_by == "steps_per_call":
        return "same result: tfgpu.Trainer(model) without steps_per_call: calls grow to a tenth or two of a second."
    if window.set_by == "run_eagerly":
        return "model.compile(..., run_eagerly=False): TensorFlow then runs the step whole, without Python."
    return fewer_looks(callbacks(window))


def python(window: Window) -> str:
    """What helps where Python's own lines take the time around the steps."""
    if window.marked_by == "tfgpu":
        if window.set_by == "pace":
            return (
                "calls have as many steps as they may: work of callbacks each 10 epochs, or longer epochs "
                "(dataset.repeat(10), a tenth of the epochs); checkpoints by tfgpu.callbacks.Checkpoint."
            )
        if window.set_by not in ("", "steps_per_execution"):
            return _more_steps(window)
        return (
            'model.compile(..., steps_per_execution="auto"): more steps a call; every_batch = False in callbacks that '
            "need no single batch; checkpoints by tfgpu.callbacks.Checkpoint."
        )
    if window.marked_by == "batches":
        return "put @tf.function above the step: TensorFlow then runs it whole, without Python."
    return (
        "several steps in one call: @tf.function around a loop `for x, y in dataset.take(64)` with the step in it; or "
        'model.fit with compile(..., steps_per_execution="auto"). Logs and checkpoints each 100 steps.'
    )
