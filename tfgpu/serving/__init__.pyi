# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu.serving.adapters import export_adapters as export_adapters
from tfgpu.serving.adapters import load_adapters as load_adapters
from tfgpu.serving.exporting import Exported as Exported
from tfgpu.serving.exporting import export as export
from tfgpu.serving.formats import FORMATS as FORMATS
from tfgpu.serving.formats import run as run
from tfgpu.serving.stock import stock_model as stock_model
