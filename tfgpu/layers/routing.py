"""Which tokens go to which experts, and the way there and back.

Every count is one of the whole batch: under replicas they are summed, so that the balance of the experts, and which
tokens find no place, are one device's.

Sources: Lepikhin et al., 2020, "GShard", https://arxiv.org/abs/2006.16668 (capacity; first choices before second ones);
Fedus et al., 2021, "Switch Transformers", https://arxiv.org/abs/2101.03961 (the balance loss); Zoph et al., 2022,
"ST-MoE", https://arxiv.org/abs/2202.08906 (the router's z-loss).
"""

from dataclasses import dataclass

import tensorflow as tf

from tfgpu.compat import tensorflow as private
from tfgpu.core import batch_rows, replication, step_context
from tfgpu.core.row_mixing import row_sums


@dataclass(frozen=True)
class Router:
    """How tokens choose experts.

    Attributes:
        num_experts: how many there are.
        top_k: how many a token chooses.
        capacity_factor: an expert takes that many times its equal share of the batch's choices; None takes all.
        normalize: the weights of a token's choices are divided by their sum.
    """

    num_experts: int
    top_k: int
    capacity_factor: float | None
    normalize: bool

    def route(self, logits: tf.Tensor, is_token: tf.Tensor | None, *, has_losses: bool) -> "Routes":
        """Chooses experts.

        Args:
            logits: float32 [tokens, experts].
            is_token: bool [tokens], False for tokens that go nowhere and count for nothing; None: all count.
            has_losses: whether the routes are asked for losses, which takes sums over the batch.
        """
        has_places = self.capacity_factor is not None and not step_context.current().is_trying
        choices = self._choices(logits, is_token)
        one_hot = tf.one_hot(choices.experts, self.num_experts, dtype=tf.float32)
        if is_token is not None:
            one_hot *= tf.cast(is_token, tf.float32)[:, None, None]
        counts = None
        if has_places or has_losses:
            counts = _Counts.of(tf.reduce_sum(one_hot, 0), choices, are_placed=has_places)
        by_choice = tf.transpose(one_hot, [1, 0, 2])  # all first choices, then all second ones
        if has_places:
            places = tf.cumsum(by_choice, axis=1, exclusive=True) + counts.before[:, None]
            share = self.capacity_factor * self.top_k / self.num_experts
            most = tf.math.ceil(tf.cast(counts.tokens, tf.float64) * share - 1e-6)  # less than rounding adds
            is_kept = places < tf.cast(tf.maximum(most, 1.0), tf.float32)
            by_choice = tf.where(is_kept, by_choice, tf.zeros_like(by_choice))
        flat = tf.reshape(by_choice, [-1, self.num_experts])
        places = tf.reduce_sum(tf.cumsum(flat, exclusive=True) * flat, -1)
        shape = tf.shape(by_choice)[:2]
        places = tf.transpose(tf.reshape(tf.cast(places, tf.int64), shape))
        is_kept = tf.transpose(tf.reduce_sum(by_choice, -1)) > 0
        weights = tf.reduce_sum(one_hot * choices.probabilities[:, None], -1)
        if self.normalize:
            weights = tf.math.divide_no_nan(weights, tf.reduce_sum(weights, -1, keepdims=True))
        most = tf.reduce_max(tf.reduce_sum(by_choice, [0, 1]))  # tokens of an expert
        size = tf.shape(logits, tf.int64)[0] if _is_compiled() else tf.cast(tf.maximum(most, 1.0), tf.int64)
        return Routes(choices.experts, weights, places, is_kept, size, self.num_experts, counts)

    def _choices(self, logits: tf.Tensor, is_token: tf.Tensor | None) -> "_Choices":
        probabilities = tf.nn.softmax(logits)
        # In int32: TensorFlow has no kernel for GPUs that gives int64 ones.
        experts = tf.cast(tf.math.top_k(tf.stop_gradient(probabilities), self.top_k).indices, tf.int64)
        squares = tf.square(tf.reduce_logsumexp(logits, -1))
        if is_token is None:
            return _Choices(experts, probabilities, squares, tf.cast(tf.shape(logits)[0], tf.float32), None)
        counted = tf.cast(is_token, tf.float32)
        return _Choices(experts, probabilities, squares, tf.reduce_sum(counted), counted)


@dataclass(frozen=True)
class _Choices:
    """What the router says of each token; `counted` is 1 for those that count, None if all do."""

    experts: tf.Tensor
    probabilities: tf.Tensor
    squares: tf.Tensor
    tokens: tf.Tensor
    counted: tf.Tensor | None

    def sums(self) -> list[tf.Tensor]:
        """Over the tokens: their number, the probabilities by expert, and the squares."""
        probabilities, squares = self.probabilities, self.squares
        if self.counted is not None:
            probabilities, squares = probabilities * self.counted[:, None], squares * self.counted
        return [self.tokens[None], tf.reduce_sum(probabilities, 0), tf.reduce_sum(squares)[None]]


@dataclass(frozen=True)
class _Counts:
    """Sums over the whole batch.

    Attributes:
        chosen: [experts], by how many tokens each is chosen.
        before: [choices, experts], how many have a place before this replica's tokens of this choice; None where no
            places are counted.
        tokens: how many there are.
        probabilities: [experts], summed over the tokens.
        squares: of the logarithms of the router's sums, over the tokens.
    """

    chosen: tf.Tensor
    before: tf.Tensor | None
    tokens: tf.Tensor
    probabilities: tf.Tensor
    squares: tf.Tensor

    @classmethod
    def of(cls, own: tf.Tensor, choices: _Choices, *, are_placed: bool) -> "_Counts":
        """One sum over replicas, of a few numbers for each expert.

        Args:
            own: [choices, experts], this replica's choices.
            choices: what the router says.
            are_placed: whether places are counted.
        """
        count, at, is_alone = 1, 0, _is_alone()
        if not is_alone:
            context = replication.replica_context()
            count = context.num_replicas_in_sync
            at = replication.shard_index(context.strategy, replication.replica_number(context))
        table = tf.stop_gradient(own)
        if are_placed:
            table = tf.one_hot(at, count, dtype=tf.float32)[:, None, None] * table
        sums = [tf.reshape(table, [-1]), *choices.sums()]
        sizes, total = [tf.size(each) for each in sums], tf.concat(sums, 0)
        if not is_alone:
            (total,) = row_sums.over_replicas([tf.where(step_context.has_rows(), total, tf.zeros_like(total))])
        table, tokens, probabilities, squares = tf.split(total, sizes)
        table = tf.reshape(table, [-1, *own.shape])
        by_choice, before = tf.reduce_sum(table, 0), None
        if are_placed:
            before = tf.reduce_sum(table[:at], 0) + tf.cumsum(by_choice, exclusive=True)
        return cls(tf.reduce_sum(by_choice, 0), before, tokens[0], probabilities, squares[0])


@dataclass(frozen=True)
class Routes:
    """Where each token goes.

    Attributes:
        experts: int64 [tokens, choices].
        weights: float32 [tokens, choices].
        places: int64 [tokens, choices], among the tokens of the expert.
        is_kept: bool [tokens, choices]; the others find no place.
        size: int64, places of each expert.
        num_experts: how many experts there are.
        counts: sums over the whole batch, if there are losses or a capacity.
    """

    experts: tf.Tensor
    weights: tf.Tensor
    places: tf.Tensor
    is_kept: tf.Tensor
    size: tf.Tensor
    num_experts: int
    counts: _Counts | None

    def balance_loss(self) -> tf.Tensor:
        """1 where all experts are equally likely and chosen equally often, up to their number where one is alone."""
        counts, tokens = self.counts, tf.maximum(self.counts.tokens, 1.0)
        chosen = tf.stop_gradient(counts.chosen) / (tokens * self.experts.shape[1])
        return self.num_experts * tf.reduce_sum(chosen * counts.probabilities / tokens)

    def z_loss(self) -> tf.Tensor:
        """The mean square of the logarithm of the router's sum."""
        return self.counts.squares / tf.maximum(self.counts.tokens, 1.0)

    def to_experts(self, tokens: tf.Tensor) -> tf.Tensor:
        """[experts, places, width]: the tokens of each expert, from [tokens, width]; zeros where a place is free."""
        places, choice_of, choices = self._places(), self._choice_of_each_place(), self.experts.shape[1]

        @tf.custom_gradient
        def send(given):
            def gradient(upstream):
                return tf.add_n([tf.gather(_with_zeros(upstream), places[:, at]) for at in range(choices)])

            return tf.gather(_with_zeros(given), choice_of // choices), gradient

        return tf.reshape(send(tokens), [self.num_experts, self.size, tokens.shape[-1]])

    def from_experts(self, results: tf.Tensor) -> tf.Tensor:
        """[tokens, width]: the weighted sums of what a token's experts made of it."""
        width, choices = results.shape[-1], self.experts.shape[1]
        places, choice_of = self._places(), self._choice_of_each_place()

        @tf.custom_gradient
        def bring(given):
            def gradient(upstream):
                return tf.gather(_with_zeros(tf.reshape(upstream, [-1, width])), choice_of)

            return tf.gather(_with_zeros(given), places), gradient

        found = tf.ensure_shape(bring(tf.reshape(results, [-1, width])), [None, choices, width])
        return tf.reduce_sum(found * tf.cast(self.weights, found.dtype)[..., None], 1)

    def _places(self) -> tf.Tensor:
        """[tokens, choices]: the index among the places of all experts; one past the last for a dropped choice."""
        return tf.where(self.is_kept, self.experts * self.size + self.places, self.num_experts * self.size)

    def _choice_of_each_place(self) -> tf.Tensor:
        """For each of all experts' places the choice, in a row of all; the one after the last where it is free."""
        places = tf.reshape(self._places(), [-1])
        count = tf.size(places, tf.int64)
        free = tf.fill([self.num_experts * self.size + 1], count)
        return tf.tensor_scatter_nd_update(free, places[:, None], tf.range(count))[:-1]


def _with_zeros(rows: tf.Tensor) -> tf.Tensor:
    return tf.pad(rows, [[0, 1], [0, 0]])


def _is_compiled() -> bool:
    """Whether XLA compiles this step, for which shapes must not depend on values."""
    facts = step_context.step()
    if facts is not None and facts.jit:
        return True
    return not tf.executing_eagerly() and private.is_compiled_by_xla(tf.compat.v1.get_default_graph())


def _is_alone() -> bool:
    """Whether the batch is what this replica sees."""
    if step_context.current().is_trying or step_context.has_local_forward():  # tried on a few rows: each token is alone
        return True
    context = replication.replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return True
    return step_context.step() is None and not batch_rows.can_communicate()
