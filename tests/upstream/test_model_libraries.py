"""Models of KerasHub, KerasRS and bayesflow, where they are installed: two replicas learn what one device learns."""

import importlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu

pytestmark = [pytest.mark.slow]
ROWS, BATCH, WORDS, LENGTH = 13, 4, 20, 6
DRAW = np.random.default_rng(0)
IDS = DRAW.integers(1, WORDS, (ROWS, LENGTH))
THERE = (np.arange(LENGTH) < 2 + np.arange(ROWS)[:, None] % 5).astype("int32")
TEXT = {"token_ids": IDS * THERE, "padding_mask": THERE}
PICTURES = DRAW.normal(size=(ROWS, 16, 16, 3)).astype("float32")
KINDS = DRAW.integers(0, 3, ROWS)
ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
LAST_NORM = ("ln_f.weight", "ln_f.bias")
HEADS = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 12}


def compiled(model, loss=ENTROPY, rate=0.1, **options):
    model.compile(keras.optimizers.SGD(rate), loss, jit_compile=False, **options)
    return model


def hub():
    return importlib.import_module("keras_hub").models


def next_words():
    return TEXT, np.roll(IDS, -1, 1), THERE.astype("float32")


def bert():
    backbone = hub().BertBackbone(WORDS, num_heads=2, max_sequence_length=LENGTH, **HEADS)
    positions = np.sort(np.argsort(DRAW.random((ROWS, LENGTH)), 1)[:, :2])
    given = TEXT | {"segment_ids": np.zeros_like(IDS), "mask_positions": positions}
    words, weights = (np.take_along_axis(each, positions, 1) for each in (IDS, THERE))
    model = compiled(hub().BertMaskedLM(backbone, preprocessor=None), weighted_metrics=["accuracy"])
    return model, (given, words, weights.astype("float32"))


def gpt2():
    backbone = hub().GPT2Backbone(WORDS, num_heads=2, max_sequence_length=LENGTH, **HEADS)
    return compiled(hub().GPT2CausalLM(backbone, preprocessor=None)), next_words()


def gemma():
    backbone = hub().GemmaBackbone(WORDS, num_query_heads=2, num_key_value_heads=1, head_dim=4, **HEADS)
    return compiled(hub().GemmaCausalLM(backbone, preprocessor=None)), next_words()


def llama():
    backbone = hub().LlamaBackbone(WORDS, num_query_heads=2, num_key_value_heads=1, **HEADS)
    return compiled(hub().LlamaCausalLM(backbone, preprocessor=None)), next_words()


def mixtral():
    heads = {"num_query_heads": 2, "num_key_value_heads": 1, "num_experts": 3}
    backbone = hub().MixtralBackbone(WORDS, router_aux_loss_coef=0.1, output_router_logits=True, **heads, **HEADS)
    return compiled(hub().MixtralCausalLM(backbone, preprocessor=None)), next_words()


def bart():
    backbone = hub().BartBackbone(WORDS, num_heads=2, max_sequence_length=LENGTH, **HEADS)
    given = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in TEXT.items()}
    return compiled(hub().BartSeq2SeqLM(backbone, preprocessor=None)), (given, *next_words()[1:])


def t5():
    backbone = hub().T5Backbone(WORDS, num_heads=2, dropout=0.0, **HEADS)
    given = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in TEXT.items()}
    inputs = backbone.input
    model = keras.Model(inputs, keras.layers.Dense(WORDS)(backbone(inputs)["decoder_sequence_output"]))
    return compiled(model), (given, *next_words()[1:])


def distil_bert():
    backbone = hub().DistilBertBackbone(WORDS, num_heads=2, max_sequence_length=LENGTH, **HEADS)
    model = hub().DistilBertTextClassifier(backbone, 3, hidden_dim=8, preprocessor=None)
    return compiled(model, metrics=["accuracy"]), (TEXT, KINDS)


def vit():
    backbone = hub().ViTBackbone((16, 16, 3), (8, 8), num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=12)
    return compiled(hub().ViTImageClassifier(backbone, 3, preprocessor=None), metrics=["accuracy"]), (PICTURES, KINDS)


def residual():
    stages = {"stackwise_num_filters": [64, 64], "stackwise_num_blocks": [1, 1], "stackwise_num_strides": [1, 2]}
    backbone = hub().ResNetBackbone([64], [3], block_type="basic_block", image_shape=(16, 16, 3), **stages)
    return compiled(hub().ResNetImageClassifier(backbone, 3, preprocessor=None), rate=0.02), (PICTURES, KINDS)


def whisper():
    sizes = {"num_mels": 4, "max_encoder_sequence_length": 8, "max_decoder_sequence_length": LENGTH}
    backbone = hub().WhisperBackbone(WORDS, num_heads=2, **sizes, **HEADS)
    sounds = DRAW.normal(size=(ROWS, 8, 4)).astype("float32")
    given = {"encoder_features": sounds, "decoder_token_ids": IDS, "decoder_padding_mask": THERE}
    inputs = backbone.input
    logits = backbone.token_embedding(backbone(inputs)["decoder_sequence_output"], reverse=True)
    return compiled(keras.Model(inputs, logits)), (given, *next_words()[1:])


def clip():
    """The logits are as wide as the batch: each picture is compared with each text."""
    vision = hub().CLIPVisionEncoder(8, 8, 1, 2, 12, image_shape=(16, 16, 3))
    text = hub().CLIPTextEncoder(WORDS, 8, 8, 1, 2, 12, max_sequence_length=LENGTH)
    backbone = hub().CLIPBackbone(vision, text, 8)

    class Contrastive(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            each = keras.ops.arange(keras.ops.shape(y_pred["vision_logits"])[0])
            return (ENTROPY(each, y_pred["vision_logits"]) + ENTROPY(each, y_pred["text_logits"])) / 2

    model = compiled(Contrastive(backbone.input, backbone.output), None)
    return model, ({"images": PICTURES, "token_ids": IDS}, KINDS)


def retinanet():
    """Its losses are divided by the positives of the batch."""
    layers = importlib.import_module("keras_hub").layers
    stages = {"stackwise_num_filters": [64] * 3, "stackwise_num_blocks": [1] * 3, "stackwise_num_strides": [1, 2, 2]}
    encoder = hub().ResNetBackbone([64], [3], block_type="basic_block", image_shape=(32, 32, 3), **stages)
    anchors = layers.AnchorGenerator("yxyx", 3, 4, num_scales=1, aspect_ratios=[1.0], anchor_size=4)
    model = hub().RetinaNetObjectDetector(
        hub().RetinaNetBackbone(encoder, 3, 4, False),
        3,
        "yxyx",
        anchors,
        preprocessor=None,
    )
    corner, sizes = DRAW.uniform(0, 14, (ROWS, 2, 2)), DRAW.uniform(4, 17, (ROWS, 2, 2))
    boxes = np.concatenate([corner, corner + sizes], -1).astype("float32")
    labels = np.where(np.arange(2) <= np.arange(ROWS)[:, None] % 2, DRAW.integers(0, 3, (ROWS, 2)), -1)
    model.compile(keras.optimizers.SGD(0.01), jit_compile=False)  # its losses are sums, whose weights it makes
    pictures = DRAW.normal(size=(ROWS, 32, 32, 3)).astype("float32")
    return model, (pictures, {"boxes": boxes, "labels": labels})


def recommenders():
    return importlib.import_module("keras_rs")


USERS = DRAW.integers(0, WORDS, (2, ROWS))
CLICKED = DRAW.integers(0, 2, (ROWS, 1)).astype("float32")
START = DRAW.bit_generator.state


def retrieval():
    """As in KerasRS's guide: the other rows' items are the negatives, the hardest of them count."""
    mine = recommenders().layers.HardNegativeMining(num_hard_negatives=2)
    remove = recommenders().layers.RemoveAccidentalHits()

    class Retrieval(keras.Model):
        def __init__(self):
            super().__init__()
            self.users, self.items = keras.layers.Embedding(WORDS, 4), keras.layers.Embedding(WORDS, 4)

        def call(self, given):
            return {"user": self.users(given["user"]), "item": self.items(given["item"])}

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            scores = keras.ops.matmul(y_pred["user"], keras.ops.transpose(y_pred["item"]))
            labels = keras.ops.eye(keras.ops.shape(scores)[0])
            scores = remove(scores, labels, x["item"])
            scores, labels = mine(scores, labels)
            return keras.ops.mean(keras.losses.categorical_crossentropy(labels, scores, from_logits=True))

    return compiled(Retrieval(), None, 1.0), ({"user": USERS[0], "item": USERS[1]}, KINDS)


def crossed():
    ids = [keras.Input((), dtype="int32") for _ in range(2)]
    x = first = keras.layers.Concatenate()([keras.layers.Embedding(WORDS, 4)(each) for each in ids])
    for _ in range(2):
        x = recommenders().layers.FeatureCross(projection_dim=2)(first, x)
    model = keras.Model(ids, keras.layers.Dense(1, "sigmoid")(x))
    return compiled(model, "binary_crossentropy", metrics=["AUC"]), (tuple(USERS), CLICKED)


def dotted():
    ids = [keras.Input((), dtype="int32") for _ in range(2)]
    products = recommenders().layers.DotInteraction()([keras.layers.Embedding(WORDS, 4)(each) for each in ids])
    model = keras.Model(ids, keras.layers.Dense(1, "sigmoid")(products))
    return compiled(model, "binary_crossentropy", metrics=["AUC"]), (tuple(USERS), CLICKED)


def ranked():
    """Rows are lists, and the loss compares the items of a list."""
    given = keras.Input((5, 3))
    model = keras.Model(given, keras.layers.Reshape((5,))(keras.layers.Dense(1)(given)))
    metrics = [recommenders().metrics.NDCG(k=3), recommenders().metrics.MeanReciprocalRank()]
    lists = DRAW.normal(size=(ROWS, 5, 3)).astype("float32"), DRAW.integers(0, 3, (ROWS, 5)).astype("float32")
    return compiled(model, recommenders().losses.PairwiseLogisticLoss(), metrics=metrics), lists


def posterior(summary=None, inference=None):
    bayesflow = importlib.import_module("bayesflow")
    networks = bayesflow.networks
    sets = DRAW.normal(size=(ROWS, 5, 2)).astype("float32")
    adapter = bayesflow.Adapter().rename("theta", "inference_variables").rename("x", "summary_variables")
    model = bayesflow.ContinuousApproximator(
        adapter=adapter,
        summary_network=summary(networks),
        inference_network=inference(networks),
        standardize=None,
    )
    model.compile(keras.optimizers.SGD(1e-4))  # rounding grows fast at larger steps
    return model, ({"inference_variables": sets.mean(1), "summary_variables": sets},)


SMALL = {"summary_dim": 3, "embed_dim": 8, "mlp_widths": (8,), "num_heads": 2, "num_seeds": 1, "depth": 1}


def coupling():
    """The summaries of a batch are drawn toward a normal distribution, which compares rows."""
    return posterior(
        lambda networks: networks.DeepSet(base_distribution="normal", dropout=0.1, **SMALL),
        lambda networks: networks.CouplingFlow(depth=2, subnet_kwargs={"widths": (8,), "dropout": 0.0}),
    )


def matching():
    return posterior(
        lambda networks: networks.DeepSet(**SMALL),
        lambda networks: networks.FlowMatching(subnet_kwargs={"widths": (8,), "dropout": 0.0}),
    )


class Batches(keras.utils.PyDataset):
    """What bayesflow takes: batches by their number."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, at):
        return {name: value[at * BATCH : (at + 1) * BATCH] for name, value in self.data.items()}


LIBRARIES = {
    "keras_hub": (bert, gpt2, gemma, llama, mixtral, bart, t5, distil_bert, vit, residual, whisper, clip, retinanet),
    "keras_rs": (retrieval, crossed, dotted, ranked),
    "bayesflow": (coupling, matching),
}


def learned(make, devices):
    """The weights and logs of two epochs, whose last batch has one row."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    DRAW.bit_generator.state = START
    strategy = tfgpu.strategy("mirrored", devices=devices) if devices else tf.distribute.get_strategy()
    with strategy.scope():
        model, data = make()
        if make in LIBRARIES["bayesflow"]:  # it builds the model when it fits
            given = {"dataset": Batches(*data), "shuffle": False}
        else:
            given = {"x": tf.data.Dataset.from_tensor_slices(data).batch(BATCH)}
        history = model.fit(**given, epochs=2, verbose=0).history
    return model.get_weights(), history


@pytest.mark.parametrize(
    ("library", "make"),
    [(library, make) for library, makes in LIBRARIES.items() for make in makes],
    ids=[make.__name__ for makes in LIBRARIES.values() for make in makes],
)
def test_a_library_s_model_learns_on_two_replicas_what_it_learns_on_one_device(library, make):
    pytest.importorskip(library)
    one, other = (learned(make, devices) for devices in (None, ["CPU:0", "CPU:1"]))
    assert any(np.isfinite(each).all() for each in one[0])
    for here, there in zip(one[0], other[0], strict=True):
        np.testing.assert_allclose(there, here, atol=1e-5, rtol=1e-5)
    assert one[1].keys() == other[1].keys()
    for name, values in one[1].items():
        np.testing.assert_allclose(other[1][name], values, atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("make", [gpt2, gemma], ids=["gpt2", "gemma"])
def test_a_loss_by_chunks_of_tokens_learns_what_all_logits_teach(make):
    pytest.importorskip("keras_hub")

    def by_chunks():
        model, data = make()
        return compiled(model, tfgpu.losses.ChunkedCrossentropy(5)), data

    expected, found = learned(make, None), learned(by_chunks, ["CPU:0", "CPU:1"])
    for here, there in zip(expected[0], found[0], strict=True):
        np.testing.assert_allclose(there, here, atol=1e-5, rtol=1e-5)


def test_a_task_that_has_compiled_itself_is_recomputed():
    pytest.importorskip("keras_hub")
    x, y, weights = next_words()
    found = []
    for change in (lambda model: model, lambda model: tfgpu.parallel.recompute(model, batch=x)):
        keras.utils.set_random_seed(1)
        backbone = hub().LlamaBackbone(WORDS, num_query_heads=2, num_key_value_heads=1, dropout=0.1, **HEADS)
        model = compiled(change(hub().LlamaCausalLM(backbone, preprocessor=None)))
        model.fit(x, y, BATCH, sample_weight=weights, shuffle=False, verbose=0)
        found.append(model.get_weights())
    with pytest.raises(tfgpu.InputError, match="before `compile`"):
        tfgpu.parallel.recompute(model, batch=x)
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_parts_of_a_sequence_learn_what_one_device_learns(make):
    pytest.importorskip("keras_hub")

    def along_sequence():
        model, data = make()
        model = tfgpu.parallel.apply(model, tfgpu.parallel.Mesh(sequence=2, devices=["CPU:0", "CPU:1"]))
        return compiled(model), data

    expected, found = learned(make, None), learned(along_sequence, ["CPU:0"])
    for here, there in zip(expected[0], found[0], strict=True):
        np.testing.assert_allclose(there, here, atol=1e-5, rtol=1e-5)


def test_weights_of_hugging_face_go_to_shards_as_kerashub_maps_them(tmp_path):
    """A folder of Hugging Face's GPT-2, two files and their index: what `from_preset` reads, and `load` with ZeRO 3."""
    pytest.importorskip("keras_hub")
    safetensors = importlib.import_module("safetensors.numpy")
    width, words, length = 8, 20, 6
    facts = {"vocab_size": words, "n_layer": 2, "n_head": 2, "n_embd": width, "resid_pdrop": 0.0, "n_positions": length}
    (tmp_path / "config.json").write_text(json.dumps(facts | {"model_type": "gpt2"}))
    shapes = {"wte.weight": (words, width), "wpe.weight": (length, width)} | dict.fromkeys(LAST_NORM, (width,))
    for at in range(2):
        inner = {"attn.c_attn": 3 * width, "attn.c_proj": width, "mlp.c_fc": 4 * width, "mlp.c_proj": width}
        for name, outputs in inner.items():
            inputs = 4 * width if name == "mlp.c_proj" else width
            shapes |= {f"h.{at}.{name}.weight": (inputs, outputs), f"h.{at}.{name}.bias": (outputs,)}
        shapes |= {f"h.{at}.ln_{one}.{kind}": (width,) for one in (1, 2) for kind in ("weight", "bias")}
    arrays = {name: DRAW.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    names, weight_map = sorted(arrays), {}
    for file, part in (("model-1.safetensors", names[:9]), ("model-2.safetensors", names[9:])):
        safetensors.save_file({name: arrays[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expected = hub().GPT2Backbone.from_preset(str(tmp_path))
    settings = HEADS | {"num_layers": 2, "intermediate_dim": 4 * width}
    with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        model = hub().GPT2Backbone(words, num_heads=2, max_sequence_length=length, **settings)
    tfgpu.parallel.load_weights(tfgpu.parallel.shard(model, 3), tmp_path)
    for mine, other, variable in zip(model.get_weights(), expected.get_weights(), expected.weights, strict=True):
        np.testing.assert_array_equal(mine, other, err_msg=variable.path)
