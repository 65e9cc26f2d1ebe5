"""The seam: the one place for private names of Keras and TensorFlow."""
