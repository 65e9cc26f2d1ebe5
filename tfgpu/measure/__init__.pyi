# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu.measure.profiling.session import profile as profile
