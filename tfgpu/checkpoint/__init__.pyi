# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu.checkpoint.background_writer import Writer as Writer
from tfgpu.checkpoint.manifest import Position as Position
