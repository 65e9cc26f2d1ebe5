# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu.sensors.limits import Limit as Limit
from tfgpu.sensors.limits import limit as limit
from tfgpu.sensors.machine import Sampler as Sampler
from tfgpu.sensors.sample import Gpu as Gpu
from tfgpu.sensors.sample import Sample as Sample
