# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu.parallel.connection import connect as connect
from tfgpu.parallel.hybrid import apply as apply
from tfgpu.parallel.loading import load as load
from tfgpu.parallel.memory import memory_by_device as memory_by_device
from tfgpu.parallel.mesh import Mesh as Mesh
from tfgpu.parallel.pipeline.api import pipeline as pipeline
from tfgpu.parallel.pipeline.drawing import picture as picture
from tfgpu.parallel.placement import place as place
from tfgpu.parallel.planning.layouts import Layout as Layout
from tfgpu.parallel.planning.planner import plan as plan
from tfgpu.parallel.planning.planner import predict as predict
from tfgpu.parallel.planning.workload import Transformer as Transformer
from tfgpu.parallel.rematerialization.api import recompute as recompute
from tfgpu.parallel.tensor.api import tensor as tensor
from tfgpu.parallel.tensor.block_plans import plan_for as plan_for
from tfgpu.parallel.tensor.block_plans import register_plan as register_plan
from tfgpu.parallel.zero.sharded_optimizer import shard as shard
