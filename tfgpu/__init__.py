"""Change the hardware, not the result: Keras training on one GPU, eight, or many machines.

    import keras, tfgpu

    with tfgpu.strategy().scope():
        model = tfgpu.models.cnn((8, 8, 1), 10)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    data = tfgpu.data.pipeline("digits", global_batch=32, augment="auto")
    model.fit(data.train, validation_data=data.validation, epochs=10)

Names load on first use, so `import tfgpu` starts no TensorFlow.
"""

import importlib

_PLACES = {  # public name -> (module, name in it); None for the module itself
    "Cluster": ("tfgpu.cluster", "Cluster"),
    "InputError": ("tfgpu.errors", "InputError"),
    "MachineError": ("tfgpu.errors", "MachineError"),
    "Trainer": ("tfgpu.training", "Trainer"),
    "repair_keras": ("tfgpu.keras_fixes", "install"),
    "strategy": ("tfgpu.strategies", "strategy"),
    **{
        name: (f"tfgpu.{name}", None)
        for name in (
            "asynchronous",
            "callbacks",
            "cluster",
            "data",
            "doctor",
            "environment",
            "errors",
            "interop",
            "keras_fixes",
            "launch",
            "measure",
            "models",
            "parallel",
            "precision",
            "preflight",
            "recipes",
            "serving",
            "strategies",
            "training",
            "tune",
        )
    },
}

__all__ = sorted(_PLACES)


def __getattr__(name: str):
    if name == "__version__":
        from importlib.metadata import version

        return version("tfgpu")
    if name not in _PLACES:
        raise AttributeError(f"module 'tfgpu' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
