# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu.tune.batch_search import BatchSizes as BatchSizes
from tfgpu.tune.batch_search import batch_size as batch_size
from tfgpu.tune.batches import BatchTry as BatchTry
from tfgpu.tune.range_test import RangeTest as RangeTest
from tfgpu.tune.range_test import learning_rate as learning_rate
from tfgpu.tune.results import StudyResult as StudyResult
from tfgpu.tune.results import TrialResult as TrialResult
from tfgpu.tune.space import default_space as default_space
from tfgpu.tune.space import parse_search as parse_search
from tfgpu.tune.study import study as study
