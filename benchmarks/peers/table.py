"""Which peers there are, on which topologies each makes sense, and what its process needs. Standard library only."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Topology:
    """What a training is spread over.

    Attributes:
        name: of the topology.
        processes: how many, on loopback.
        replicas: logical CPU devices of each process.
        strategy: what joins the replicas: "none", "mirrored" or "workers".
        share: a process gets one part in so many of the cores.
    """

    name: str
    processes: int = 1
    replicas: int = 1
    strategy: str = "none"
    share: int = 1


@dataclass(frozen=True)
class Peer:
    """One way to train.

    Attributes:
        name: in files and on the command line.
        label: in tables and plots.
        maker: "module:class" in benchmarks.peers.
        topologies: where it makes sense.
        options: of the class.
        environment: variables of its process.
        packages: what it imports; where one is missing the row says so.
        own_python: runs in the peers' environment, not in tfgpu's.
        is_floor: does less than the work on purpose, and is compared with nothing.
    """

    name: str
    label: str
    maker: str
    topologies: tuple[str, ...]
    options: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    packages: tuple[str, ...] = ("tensorflow", "keras")
    own_python: bool = False
    is_floor: bool = False


TOPOLOGIES = {
    topology.name: topology
    for topology in (
        Topology("one"),
        Topology("mirrored-1", strategy="mirrored"),
        Topology("mirrored-2", replicas=2, strategy="mirrored"),
        Topology("workers-1", strategy="workers", share=2),
        Topology("workers-2", processes=2, strategy="workers", share=2),
    )
}
_ALL = tuple(TOPOLOGIES)
_SEVERAL = ("mirrored-2", "workers-2")
_COMPARED = ("one", *_SEVERAL)
_STOCK = {"TFGPU_REPAIR": "0"}
_TORCH = {"packages": ("torch",), "own_python": True}
REFERENCE = "hand"
OURS = ("tfgpu-fit", "tfgpu-loop", "tfgpu-fit-xla")
PEERS = {
    peer.name: peer
    for peer in (
        Peer("hand", "hand-written TensorFlow", "by_hand:Hand", _ALL),
        Peer("tfgpu-fit", "tfgpu `fit`", "by_keras:Fit", _ALL, {"repaired": True}),
        Peer("tfgpu-loop", "tfgpu loop", "by_hand:Repaired", _ALL),
        Peer("hand-slices", "hand-written TensorFlow, slices", "by_hand:Hand", _SEVERAL, {"slices": True}),
        Peer("hand-xla", "hand-written TensorFlow, XLA", "by_hand:Hand", ("one",), {"xla": True}),
        Peer("tfgpu-fit-xla", "tfgpu `fit`, XLA", "by_keras:Fit", ("one",), {"repaired": True, "xla": True}),
        Peer("stock-fit", "stock Keras `fit`", "by_keras:Fit", _COMPARED, environment=_STOCK),
        Peer("stock-many", "stock Keras `fit`, many steps", "by_keras:Fit", _COMPARED, {"many": True}, _STOCK),
        Peer(
            "jax-fit",
            "Keras on JAX",
            "by_keras:ArrayFit",
            ("one",),
            {"many": True},
            {"KERAS_BACKEND": "jax"},
            packages=("jax", "keras"),
            own_python=True,
        ),
        Peer("torch-eager", "PyTorch eager", "by_torch:Eager", ("one", "workers-1"), **_TORCH),
        Peer("torch-compiled", "PyTorch compiled", "by_torch:Compiled", ("one",), **_TORCH),
        Peer("torch-ddp", "PyTorch DDP, gloo", "by_torch:Eager", ("workers-2",), **_TORCH),
        Peer("no-network", "half the batch, no network", "by_hand:Alone", ("workers-2",), is_floor=True),
    )
}
