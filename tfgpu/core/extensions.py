"""What features add to the engine. Core names no feature: each registers itself when it is imported.

- `gradient_extensions`: how the gradients of an update are summed, and what surrounds the update
  (`gradients.GradientExtension`).
- `error_explanations`: `explain(error, model)` returns the error to raise in place of TensorFlow's, or None.
- `state_providers`: what a feature adds to the state of a training (`training_state.StateProvider`).
- `xla_obstacles`: `prevents(model)` says that XLA cannot compile the model's step as a whole.
- `xla_by_calls`: `compiles(model)` says that XLA can compile the calls of such a model's layers, one by one.
- `run_starts`: `start(run)` is called when `fit` or `evaluate` begins, and may add to the run's lists
  (`step_blocks.Run`).
- `run_observers`: `observe(strategy, function, args, kwargs)` is called before each `strategy.run` on rows.
- `compilations`: `around(model, arguments)` is a context around `Model.compile`, and may change its arguments.
- `method_calls`: `around(model, name, arguments)` is a context around `fit`, `evaluate` and `predict`.
- `after_callbacks`: `after(callbacks, name, at)` is called when all callbacks have had that hook: `on_train_begin`,
  `on_train_batch_end`, `on_test_batch_end` or `on_epoch_end`; `at` is the last step that ran, the epoch, or None.
- `trial_weights`: `stand_ins(model)` returns what stands in for weights of which each replica holds a piece when the
  model's step is tried (`row_mixing.trials.weights_in_pieces.TrialWeights`), or None.
- `verdict_listeners`: `listen(piece)` gets what was found of each piece of a step (`row_mixing.verdicts.Piece`).
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

from tfgpu.compat import patch

T = TypeVar("T")


class Registry(Generic[T]):
    """What has been registered at one extension point, in the order in which it is asked.

    Example:
        >>> greetings = Registry()
        >>> _ = greetings.register("hello", order=2), greetings.register("good morning", order=1)
        >>> list(greetings)
        ['good morning', 'hello']
    """

    def __init__(self):
        self._items: list[tuple[int, T]] = []

    def register(self, item: T, *, order: int = 0) -> T:
        """Adds an item, before those of a higher order; returns it. What a repair adds goes if it is not needed."""
        pair = (order, item)
        self._items.append(pair)
        self._items.sort(key=lambda pair: pair[0])
        patch.if_not_needed(lambda: self._items.remove(pair))
        return item

    def __iter__(self) -> Iterator[T]:
        return iter([item for _, item in self._items])


gradient_extensions: Registry = Registry()
error_explanations: Registry = Registry()
state_providers: Registry = Registry()
xla_obstacles: Registry = Registry()
xla_by_calls: Registry = Registry()
run_starts: Registry = Registry()
run_observers: Registry = Registry()
trial_weights: Registry = Registry()
verdict_listeners: Registry = Registry()
compilations: Registry = Registry()
method_calls: Registry = Registry()
after_callbacks: Registry = Registry()
