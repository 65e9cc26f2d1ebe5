"""One factory per strategy. Each returns a plain `tf.distribute.Strategy` and installs the Keras repairs.

`strategy` chooses among them by the cluster and the devices of this process.

Example:
    >>> import tfgpu
    >>> strategy = tfgpu.strategy()
    >>> with strategy.scope():
    ...     model = tfgpu.models.mlp(input_shape=(8,), classes=2)

Which option applies where:

| | one_device | mirrored | multi_worker | parameter_server | averaging |
|---|---|---|---|---|---|
| `devices` | one | any | the first GPUs, or the first logical CPU devices, of each worker | - | yes |
| `all_reduce="nccl"` | - | physical GPUs | physical GPUs | - | physical GPUs |
| `all_reduce="ring"`, `"hierarchical"` | - | - | yes | - | on several workers |
| `all_reduce="hierarchical_copy"` | - | an even number | - | - | in one process |
| `all_reduce="reduction_to_one_device"` | - | yes | - | - | in one process |
| `bytes_per_pack` | - | yes | yes | - | yes |
| `unproven` | yes | yes | yes | - | - |
| `check_replicas`, `on_difference` | - | yes | yes | - | - |
| `reduce_dtype`, `top_k` | - | yes | yes | - | - |
| `python_data` | - | - | yes | - | - |
| `max_staleness`, `partitioner`, `watch` | - | - | - | yes | - |
| `every`, `after`, `outer` | - | - | - | - | yes |

An option that does not apply raises `InputError`; none is ignored.
"""

from tfgpu.lazy import on_first_use

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)
