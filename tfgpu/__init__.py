"""Change the hardware, not the result: Keras training on one GPU, eight, or many machines.

    import keras, tfgpu

    with tfgpu.strategy().scope():
        model = tfgpu.models.cnn((8, 8, 1), 10)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    data = tfgpu.data.load("digits", global_batch=32, validation=0.1, test=0.2, augment="auto")
    model.fit(data.train, validation_data=data.validation, epochs=10)

Names load on first use, so `import tfgpu` starts no TensorFlow.
"""

from tfgpu.lazy import on_first_use

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)
