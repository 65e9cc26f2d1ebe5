"""What a user would write: a script takes the case and the place where it runs, and returns nested numbers.

Scripts know one thing about the place: `at.reference` is true in the run that all others are compared with.
"""

from dataclasses import replace
from pathlib import Path

import keras
import tensorflow as tf
from keras import optimizers as O
from material import numbers


def train(case, at):
    """Fit for two epochs, evaluate, predict: the default script."""
    model = at.build(case)
    history = at.fit(model, case)
    return {"history": history.history, **outcome(case, at, model)}


def outcome(case, at, model):
    """What most scripts end with: final weights and iterations, evaluate, predict in order."""
    result = {"weights": model.get_weights(), "iterations": model.optimizer.iterations.numpy()}
    if case.judged:
        result |= {"evaluate": at.evaluate(model, case), "predict": at.predict(model, case)}
    return result


def on_batches(case, at):
    """train_on_batch, test_on_batch, predict_on_batch over the rows by hand."""
    model, (x, y, *w) = at.build(case), case.data(case.rows)
    options = {"sample_weight": w[0]} if w else {}
    logs = []
    for _ in range(2):
        for i in range(0, case.rows, case.batch):
            cut = slice(i, i + case.batch)
            more = {k: v[cut] for k, v in options.items()}
            logs.append(model.train_on_batch(x[cut], y[cut], return_dict=True, **more, **case.fit))
    tested = model.test_on_batch(x[: case.batch], y[: case.batch], return_dict=True)
    return {
        "logs": logs,
        "tested": tested,
        "predict": model.predict_on_batch(x[:7]),
        "weights": model.get_weights(),
    }


def inside_scope(case, at):
    """The whole script under `with strategy.scope():`."""
    with at.strategy.scope():
        return train(case, at)


def prepared(case, at):
    """Everything is built before the first step."""
    model = at.build(case)
    with at.strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return {"history": at.fit(model, case).history, **outcome(case, at, model)}


def two_fits(case, at):
    """fit called twice, compiled again between with another rate; the metrics and functions are recreated."""
    model = at.build(case)
    first = at.fit(model, case, epochs=1).history
    with at.strategy.scope():
        model.compile(optimizer=O.SGD(0.05), loss=case.loss(), metrics=case.metrics())
    return {"first": first, "history": at.fit(model, case, epochs=1).history, **outcome(case, at, model)}


def distributed(case, at):
    """The user distributes the dataset."""
    model, data = at.build(case), at.feed(case)["x"]
    if not at.reference:
        data = at.strategy.experimental_distribute_dataset(data)
    history = at.fit(model, case, x=data, steps_per_epoch=case.rows // case.batch, epochs=1)
    return {"history": history.history, **outcome(case, at, model)}


class Interrupt(keras.callbacks.Callback):
    """Ends the first run in the middle, as a lost machine does."""

    def __init__(self, at_batch):
        super().__init__()
        self.left = at_batch

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise InterruptedError


def interrupted(at_batch, **options):
    """BackupAndRestore: interrupted and started again, it must end where the uninterrupted run ends."""

    def script(case, at):
        folder = str(at.directory / "backup")
        if not at.reference:
            try:
                backup = keras.callbacks.BackupAndRestore(folder, **options)
                at.fit(at.build(case), case, callbacks=[backup, Interrupt(at_batch)])
            except InterruptedError:
                pass
        model = at.build(case)
        history = at.fit(
            model,
            case,
            callbacks=[] if at.reference else [keras.callbacks.BackupAndRestore(folder, **options)],
        ).history
        return {"last": {name: values[-1] for name, values in history.items()}, **outcome(case, at, model)}

    return script


def saved(save, load, *, to_other=False, from_other=False, by_all=False, always=False):
    """One epoch, save, load (perhaps onto another number of replicas), another epoch: as if never stopped.

    `by_all`: every worker saves to the one path. `always`: one device loads too, where a file does not hold all.
    """

    def script(case, at):
        begins = at.other() if from_other and not at.reference else at
        model = begins.build(case)
        begins.fit(model, case, epochs=1)
        if always or not at.reference:
            path = at.shared / "saved"
            if by_all:
                save(model, path)
            at.on_chief((lambda: None) if by_all else (lambda: save(model, path)))
            at = at.other() if to_other else at
            with at.strategy.scope():
                model = load(case, at, path)
        at.fit(model, case, epochs=2, initial_epoch=1)
        names = ("dynamic_scale", "step_counter")
        scale = {n: getattr(model.optimizer, n).numpy() for n in names if hasattr(model.optimizer, n)}
        return {"scale": scale, **outcome(case, at, model)}

    return script


def _load_keras(case, at, path):
    return keras.models.load_model(f"{path}.keras")


def _load_weights(case, at, path):
    model = at.build(case)
    model.optimizer.build(model.trainable_variables)  # on one device too, an optimizer that is not built loads nothing
    model.load_weights(f"{path}.weights.h5")
    return model


def _load_checkpoint(case, at, path):
    model = at.build(case)
    model.optimizer.build(model.trainable_variables)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(str(path)).assert_existing_objects_matched()
    return model


def _save_checkpoint(model, path):
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(path))


AS_KERAS = (lambda model, path: model.save(f"{path}.keras"), _load_keras)
AS_WEIGHTS = (lambda model, path: model.save_weights(f"{path}.weights.h5"), _load_weights)
AS_CHECKPOINT = (_save_checkpoint, _load_checkpoint)


def exported(case, at):
    """export(), read back with TensorFlow alone."""
    model = at.build(case)
    at.fit(model, case)
    path, x = at.shared / "exported", case.data(case.rows)[0]
    model.export(path, verbose=False)
    at.on_chief(lambda: None)  # the chief has written it
    loaded = tf.saved_model.load(str(path))
    return {"served": loaded.serve(x).numpy(), "predict": at.predict(model, case)}


def chief_writes(case, at):
    """Callbacks and saves on every worker: files and folders appear on the chief alone."""
    model, folder, k = at.build(case), at.directory, keras.callbacks
    history = at.fit(
        model,
        case,
        callbacks=[
            k.ModelCheckpoint(str(folder / "full" / "{epoch}.keras")),
            k.ModelCheckpoint(str(folder / "weights" / "{epoch}.weights.h5"), save_weights_only=True, save_freq=5),
            k.BackupAndRestore(str(folder / "backup"), save_freq=2),
            k.CSVLogger(str(folder / "log.csv")),
            k.TensorBoard(str(folder / "board"), histogram_freq=1),
        ],
    ).history
    model.save(folder / "last.keras")
    model.save(folder / "last.h5")
    model.save_weights(folder / "last.weights.h5")
    model.export(folder / "exported", verbose=False)
    expected = {f"full/{e}.keras" for e in (1, 2)} | {f"weights/{e}.weights.h5" for e in (1, 2)}
    expected |= {"log.csv", "last.keras", "last.h5", "last.weights.h5", "exported/saved_model.pb"}
    found = {str(p.relative_to(folder)) for p in Path(folder).rglob("*")}
    boards = {name for name in found if "events.out" in name}
    return {
        "unexpected": len({n for n in found if Path(n).name.startswith(".")} if at.rank == 0 else found),
        "missing": len(expected - found) + (not boards) if at.rank == 0 else 0,
        "history": history,
        "weights": model.get_weights(),
    }


def best(case, at):
    """ModelCheckpoint keeps the best weights and saves within the epoch; they are read back."""
    model = at.build(case)
    path, within = at.directory / "best.weights.h5", at.directory / "{epoch}-{batch}.weights.h5"
    monitor = keras.callbacks.ModelCheckpoint(str(path), save_best_only=True, save_weights_only=True, monitor="loss")
    often = keras.callbacks.ModelCheckpoint(str(within), save_weights_only=True, save_freq=3)
    history = at.fit(model, case, callbacks=[monitor, often])
    at.on_chief(lambda: None)  # the chief has written its files, which all read
    model.load_weights(at.shared / "0" / "1-3.weights.h5")
    within = model.get_weights()
    model.load_weights(at.shared / "0" / "best.weights.h5")
    return {"within": within, "history": history.history, "weights": model.get_weights()}


def scale(case, at):
    """Loss scaling: trained on rows that overflow, judged on rows that do not."""
    model = at.build(case)
    at.fit(model, case)
    optimizer, clean = model.optimizer, replace(case, data=numbers)
    return {
        "scale": optimizer.dynamic_scale.numpy(),
        "inner": optimizer.inner_optimizer.iterations.numpy(),
        **outcome(clean, at, model),
    }


class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 2


class Cools(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.2 / (1 + batch)


class Warms(keras.callbacks.Callback):
    """Reads the rate and the count of updates, as many callbacks do, and sets the rate by both."""

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        optimizer.learning_rate = float(optimizer.learning_rate) * 0.8 + int(optimizer.iterations) * 0.01


class Reads(keras.callbacks.Callback):
    """Records the logs of every batch, and what they say at the epoch's end."""

    def on_train_begin(self, logs=None):
        self.model.read = []

    def on_train_batch_end(self, batch, logs=None):
        self.model.read.append({k: float(v) for k, v in logs.items()})

    on_test_batch_end = on_train_batch_end


def reading(case, at):
    model = at.build(case)
    history = at.fit(model, case, callbacks=[Reads()], validation_data=at.feed(case)["x"])
    return {"batches": model.read, "history": history.history}
