# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu.strategies.averaging import averaging as averaging
from tfgpu.strategies.description import describe as describe
from tfgpu.strategies.factory import strategy as strategy
from tfgpu.strategies.mirrored import mirrored as mirrored
from tfgpu.strategies.multi_worker import multi_worker as multi_worker
from tfgpu.strategies.one_device import one_device as one_device
from tfgpu.strategies.parameter_server import parameter_server as parameter_server
from tfgpu.strategies.parameter_server import serve as serve
