# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu.interop.dlpack import from_dlpack as from_dlpack
from tfgpu.interop.dlpack import to_dlpack as to_dlpack
from tfgpu.interop.operations import CustomOp as CustomOp
from tfgpu.interop.operations import build_kernel as build_kernel
from tfgpu.interop.operations import custom_op as custom_op
from tfgpu.interop.pipelines import dali as dali
