"""Classes of optimizers with what a feature adds to them."""

import functools

import keras


@functools.cache
def extended(kind: type, mixin: type, *, prefix: str, saved_as: str) -> type:
    """A subclass of an optimizer's class, the same for the same arguments.

    Args:
        kind: the class of the optimizer, which the attribute `kind` gives.
        mixin: what is added; its methods come first.
        prefix: the class's name is this and that of `kind`.
        saved_as: the name in saved files, in the package `tfgpu`.
    """
    made = type(f"{prefix}{kind.__name__}", (mixin, kind), {"kind": kind, "__module__": mixin.__module__})
    return keras.saving.register_keras_serializable("tfgpu", saved_as)(made)
