"""The profiler: records some steps with TensorFlow's profiler, and says what limits them and what to change."""
