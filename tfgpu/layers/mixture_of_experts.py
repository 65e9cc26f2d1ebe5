"""`layers.MixtureOfExperts`: a feed-forward layer of which each token uses a few experts."""

from collections.abc import Callable

import keras
import tensorflow as tf
from keras import ops

from tfgpu.core import batch_rows, step_context
from tfgpu.errors import InputError, whole_number
from tfgpu.layers.routing import Router


class _ForEach:
    """An initializer whose draw for each expert is that of one network: its fans do not grow with the experts."""

    def __init__(self, initializer, count: int):
        self._each = [_clone(initializer, at) for at in range(count)]

    def __call__(self, shape, dtype=None):
        return ops.stack([each(shape[1:], dtype=dtype) for each in self._each])


def _clone(initializer, at: int):
    """The initializer with a seed for this expert; one without a seed, such as zeros, itself."""
    config = initializer.get_config() if isinstance(initializer, keras.Initializer) else {}
    seed = config.get("seed", 0)
    if "seed" not in config or not (seed is None or isinstance(seed, int)):
        return initializer
    return type(initializer).from_config({**config, "seed": None if seed is None else seed + at})


@keras.saving.register_keras_serializable(package="tfgpu")
class FeedForwardExperts(keras.layers.Layer):
    """`num_experts` feed-forward networks, each of which gets its own tokens: `MixtureOfExperts` holds one.

    Args:
        num_experts: how many.
        intermediate_dim: the width between the two kernels of an expert.
        gated: the activation's result is multiplied by that of a third kernel ("SwiGLU", where the activation is silu).
        activation: a name or a function.
        use_bias: whether each kernel has a bias.
        kernel_initializer, bias_initializer: each expert draws for itself.
        **kwargs: those of every Keras layer.

    Example:
        >>> FeedForwardExperts(4, 16)(keras.ops.ones((4, 5, 8))).shape  # 5 tokens of width 8 for each of 4 experts
        TensorShape([4, 5, 8])

    Source of the gate: Shazeer, 2020, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202
    """

    def __init__(
        self,
        num_experts: int,
        intermediate_dim: int,
        *,
        gated: bool = False,
        activation: str | Callable = "gelu",
        use_bias: bool = True,
        kernel_initializer: str | keras.initializers.Initializer = "glorot_uniform",
        bias_initializer: str | keras.initializers.Initializer = "zeros",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_experts, self.intermediate_dim = num_experts, intermediate_dim
        self.gated, self.use_bias = gated, use_bias
        self.activation = keras.activations.get(activation)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)

    def build(self, input_shape):
        width, hidden = input_shape[-1], self.intermediate_dim
        self.up_kernel, self.up_bias = self._add("up", width, hidden)
        if self.gated:
            self.gate_kernel, self.gate_bias = self._add("gate", width, hidden)
        self.down_kernel, self.down_bias = self._add("down", hidden, width)

    def _add(self, name: str, inputs: int, outputs: int) -> tuple:
        count = self.num_experts
        kernel = self.add_weight(
            shape=(count, inputs, outputs), initializer=_ForEach(self.kernel_initializer, count), name=f"{name}_kernel"
        )
        bias = None
        if self.use_bias:
            initializer = _ForEach(self.bias_initializer, count)
            bias = self.add_weight(shape=(count, outputs), initializer=initializer, name=f"{name}_bias")
        return kernel, bias

    def call(self, inputs):
        """[experts, tokens of each, width] of the same shape."""
        hidden = _linear(inputs, self.up_kernel, self.up_bias)
        if self.gated:
            hidden = hidden * self.activation(_linear(inputs, self.gate_kernel, self.gate_bias))
        else:
            hidden = self.activation(hidden)
        return _linear(hidden, self.down_kernel, self.down_bias)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return super().get_config() | {
            **{name: getattr(self, name) for name in ("num_experts", "intermediate_dim", "gated", "use_bias")},
            "activation": keras.activations.serialize(self.activation),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
        }


def _linear(inputs, kernel, bias):
    found = ops.matmul(inputs, kernel)
    return found if bias is None else found + ops.expand_dims(bias, 1)


@keras.saving.register_keras_serializable(package="tfgpu")
class MixtureOfExperts(keras.layers.Layer):
    """A feed-forward layer of `num_experts` networks, of which each token uses the `top_k` that a router chooses.

    The router is one kernel, and is computed in float32 under every dtype policy. In training the layer adds a loss
    that is least where all experts are used equally. Under replicas that loss, the capacity and which tokens find no
    place are those of the whole batch, as on one device. `parallel.Mesh(expert=n)` gives each of n devices 1/n of the
    experts. To load a file that holds this layer, import it first.

    Args:
        num_experts: how many experts there are.
        intermediate_dim: the width between the kernels of an expert.
        top_k: how many experts a token uses.
        capacity_factor: None lets every token go to its experts. A number lets an expert take at most that many times
            its equal share of the batch's choices, rounded up. Choices are served in the order of the batch's rows, all
            first ones before all second ones; a token adds nothing for a choice that finds no place.
        gated: each expert multiplies the activation's result by that of a third kernel.
        activation: of the experts, a name or a function.
        use_bias: whether the experts' kernels have biases.
        normalize: whether the weights of a token's experts are divided by their sum; None: if `top_k` is above 1.
            Without, they are the router's probabilities.
        balance_loss: the factor of the balance loss; 0 adds none.
        z_loss: the factor of the router's z-loss, which keeps logits small; 0 adds none.
        kernel_initializer, bias_initializer: of the experts; each draws for itself.
        router_initializer: of the router's kernel.
        **kwargs: those of every Keras layer.

    Call arguments:
        inputs: [batch, ..., width].
        mask: bool [batch, ...] (Keras passes one on): a token with False uses no expert, counts for nothing and gets
            zeros.
        training: whether losses are added.

    Returns of a call: a tensor like `inputs`.

    Raises:
        InputError: `num_experts`, `intermediate_dim` or `top_k` is not a number above 0, `top_k` is above
            `num_experts`, or a factor is negative.

    Example:
        >>> layer = MixtureOfExperts(4, 16, top_k=2, capacity_factor=1.25)
        >>> layer(keras.ops.ones((2, 3, 8)), training=True).shape, len(layer.losses)
        (TensorShape([2, 3, 8]), 1)

    Sources: Lepikhin et al., 2020, "GShard", https://arxiv.org/abs/2006.16668; Fedus et al., 2021, "Switch
    Transformers", https://arxiv.org/abs/2101.03961 (its balance loss, with the mean over a token's choices); Zoph et
    al., 2022, "ST-MoE", https://arxiv.org/abs/2202.08906 (the z-loss).
    """

    def __init__(
        self,
        num_experts: int,
        intermediate_dim: int,
        *,
        top_k: int = 2,
        capacity_factor: float | None = None,
        gated: bool = False,
        activation: str | Callable = "gelu",
        use_bias: bool = True,
        normalize: bool | None = None,
        balance_loss: float = 0.01,
        z_loss: float = 0.0,
        kernel_initializer: str | keras.initializers.Initializer = "glorot_uniform",
        bias_initializer: str | keras.initializers.Initializer = "zeros",
        router_initializer: str | keras.initializers.Initializer = "glorot_uniform",
        **kwargs,
    ):
        super().__init__(**kwargs)
        for name, value in {"num_experts": num_experts, "intermediate_dim": intermediate_dim, "top_k": top_k}.items():
            whole_number(name, value)
        if top_k > num_experts:
            raise InputError(f"`top_k` must be at most `num_experts`. Received: {top_k} of {num_experts} experts.")
        for name, value in {"balance_loss": balance_loss, "z_loss": z_loss}.items():
            if value < 0:
                raise InputError(f"`{name}` must be 0 or more. Received: {value!r}.")
        if capacity_factor is not None and capacity_factor <= 0:
            raise InputError(f"`capacity_factor` must be above 0, or None for no limit. Received: {capacity_factor!r}.")
        self.num_experts, self.intermediate_dim, self.top_k = num_experts, intermediate_dim, top_k
        self.capacity_factor, self.normalize = capacity_factor, normalize
        self.balance_loss, self.z_loss = balance_loss, z_loss
        self.router_initializer = keras.initializers.get(router_initializer)
        self.supports_masking = True
        style = {"gated": gated, "activation": activation, "use_bias": use_bias, "dtype": self.dtype_policy}
        style |= {"kernel_initializer": kernel_initializer, "bias_initializer": bias_initializer}
        self.experts = FeedForwardExperts(num_experts, intermediate_dim, **style, name="experts")
        is_normalized = top_k > 1 if normalize is None else normalize
        self._routing = Router(num_experts, top_k, capacity_factor, is_normalized)

    @property
    def sees_whole_batch(self) -> bool:
        """Whether it counts over the batch, and not each token by itself."""
        return bool(self.capacity_factor is not None or self.balance_loss or self.z_loss)

    def build(self, input_shape):
        settings = {"initializer": self.router_initializer, "dtype": "float32", "autocast": False, "name": "router"}
        self.router = self.add_weight(shape=(input_shape[-1], self.num_experts), **settings)
        self.experts.build((self.num_experts, None, input_shape[-1]))

    def call(self, inputs, mask=None, training=None):
        inputs = tf.convert_to_tensor(inputs)
        tokens = tf.reshape(inputs, [-1, inputs.shape[-1]])
        logits = ops.matmul(ops.cast(tokens, "float32"), self.router)
        has_losses = bool(training and (self.balance_loss or self.z_loss))
        has_losses = has_losses and not step_context.current().is_trying  # a layer around is tried by rows
        is_token = self._is_token(inputs, mask)
        routes = self._routing.route(tf.convert_to_tensor(logits), is_token, has_losses=has_losses)
        outputs = routes.from_experts(self.experts(routes.to_experts(tokens)))
        if has_losses and self.balance_loss:
            self.add_loss(self.balance_loss * routes.balance_loss())
        if has_losses and self.z_loss:
            self.add_loss(self.z_loss * routes.z_loss())
        return tf.reshape(outputs, tf.shape(inputs))

    def _is_token(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor | None:
        """Which tokens count: not those of a row that stands in on a replica without rows."""
        found = None if mask is None else tf.reshape(tf.cast(mask, tf.bool), [-1])
        if batch_rows.local_rows() is None or step_context.surely_has_rows():
            return found
        count = tf.size(inputs) // tf.shape(inputs)[-1]
        has_rows = tf.fill([count], step_context.has_rows())
        return has_rows if found is None else found & has_rows

    def compute_output_shape(self, input_shape):
        return input_shape

    def compute_output_spec(self, inputs, mask=None, training=None):
        return keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)

    def get_config(self):
        experts = self.experts.get_config()
        own = ("num_experts", "intermediate_dim", "top_k", "capacity_factor", "normalize", "balance_loss", "z_loss")
        names = ("gated", "activation", "use_bias", "kernel_initializer", "bias_initializer")
        return super().get_config() | {
            **{name: getattr(self, name) for name in own},
            "router_initializer": keras.initializers.serialize(self.router_initializer),
            **{name: experts[name] for name in names},
        }
