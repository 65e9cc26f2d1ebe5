# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu.sensors.gpus import Gpu as Gpu
from tfgpu.sensors.gpus import Gpus as Gpus
from tfgpu.sensors.host import Host as Host
from tfgpu.sensors.host import HostSensor as HostSensor
from tfgpu.sensors.sampling import Sample as Sample
from tfgpu.sensors.sampling import Sensors as Sensors
