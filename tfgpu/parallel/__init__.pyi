# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu.parallel.hybrid import apply as apply
from tfgpu.parallel.memory import memory_by_device as memory_by_device
from tfgpu.parallel.mesh import Mesh as Mesh
from tfgpu.parallel.pictures import picture as picture
from tfgpu.parallel.pipeline import pipeline as pipeline
from tfgpu.parallel.placement import place as place
from tfgpu.parallel.planning.layouts import Layout as Layout
from tfgpu.parallel.planning.planner import plan as plan
from tfgpu.parallel.planning.planner import predict as predict
from tfgpu.parallel.planning.workload import Transformer as Transformer
from tfgpu.parallel.processes import connect as connect
from tfgpu.parallel.recomputation import recompute as recompute
from tfgpu.parallel.sharded_optimizer import shard as shard
from tfgpu.parallel.tensor import tensor as tensor
