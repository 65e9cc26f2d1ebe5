# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu.data.augmentation.stages import parse_stages as parse_stages
from tfgpu.data.batches import Data as Data
from tfgpu.data.batches import Info as Info
from tfgpu.data.batches import load as load
from tfgpu.data.feed import Feed as Feed
from tfgpu.data.manifest import check_shards as check_shards
from tfgpu.data.mixture import Mixture as Mixture
from tfgpu.data.mixture import mixture as mixture
from tfgpu.data.names import parse_source as parse_source
from tfgpu.data.storage.remote_files import Remote as Remote
from tfgpu.data.text.sequences import Sequences as Sequences
from tfgpu.data.text.sequences import bucket as bucket
from tfgpu.data.text.sequences import pack as pack
from tfgpu.data.text.sequences import segment_mask as segment_mask
from tfgpu.data.text.tokens import tokenized as tokenized
from tfgpu.data.writer import write_shards as write_shards
