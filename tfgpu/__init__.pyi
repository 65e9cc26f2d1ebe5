# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu import asynchronous as asynchronous
from tfgpu import callbacks as callbacks
from tfgpu import checkpoint as checkpoint
from tfgpu import cluster as cluster
from tfgpu import data as data
from tfgpu import doctor as doctor
from tfgpu import environment as environment
from tfgpu import errors as errors
from tfgpu import interop as interop
from tfgpu import launch as launch
from tfgpu import layers as layers
from tfgpu import losses as losses
from tfgpu import measure as measure
from tfgpu import models as models
from tfgpu import parallel as parallel
from tfgpu import precision as precision
from tfgpu import recipes as recipes
from tfgpu import rendezvous as rendezvous
from tfgpu import repairs as repairs
from tfgpu import sensors as sensors
from tfgpu import serving as serving
from tfgpu import strategies as strategies
from tfgpu import training as training
from tfgpu import tune as tune
from tfgpu.cluster import Cluster as Cluster
from tfgpu.core.row_mixing.choices import by_rows as by_rows
from tfgpu.core.row_mixing.choices import gather as gather
from tfgpu.core.row_mixing.choices import on_all_rows as on_all_rows
from tfgpu.errors import InputError as InputError
from tfgpu.errors import MachineError as MachineError
from tfgpu.repairs import repair_keras as repair_keras
from tfgpu.strategies import strategy as strategy
from tfgpu.training import Trainer as Trainer

__version__: str
