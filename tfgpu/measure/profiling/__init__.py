"""The profiler: a window of a training is recorded by TensorFlow, read, and judged; each finding names its knob."""
