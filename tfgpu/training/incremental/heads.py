"""What a classifier puts out."""

import keras


def gives_probabilities(model: keras.Model) -> bool:
    """Whether a model ends in a softmax; else its outputs are taken for logits.

    Example:
        >>> gives_probabilities(keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax")]))
        True
    """
    layers = getattr(model, "layers", [])
    last = layers[-1] if layers else None
    if isinstance(last, keras.Model):
        return gives_probabilities(last)
    return isinstance(last, keras.layers.Softmax) or getattr(last, "activation", None) is keras.activations.softmax
