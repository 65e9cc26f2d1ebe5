"""Tokenized text is padded for the global batch, so replicas see what one device sees."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.data import tokenized
from tfgpu.errors import InputError

TEXTS = [
    "the cat sat on the mat",
    "a dog barks",
    "birds sing in the morning and in the evening when it is quiet",
    "rain",
    "the dog sleeps on the mat all day long",
    "cats and dogs",
    "morning rain",
    "a bird sat on the dog",
    "it is quiet in the evening",
    "the cat sings",
    "dogs bark when birds sing in the rain",
]
LABELS = [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]


def made(**columns):
    """Sequences of 1 to 12 tokens that contain their own index."""
    return {"input_ids": [[at + 1] * (at % 12 + 1) for at in range(30)], **columns}


@pytest.mark.sample(2)
@pytest.mark.parametrize("lengths", [None, 8, [4, 6, 12], 1])
def test_each_sequence_comes_once_and_padding_is_as_short_as_it_may_be(lengths):
    allowed = {None: [16], 8: [8, 16], 1: range(1, 13)}.get(lengths if not isinstance(lengths, list) else 0, lengths)
    data = tokenized(made(labels=list(range(30))), global_batch=4, lengths=lengths, seed=1)
    for _ in range(2):
        seen = []
        for x, y in data.train:
            longest = max(label % 12 + 1 for label in y.numpy())
            assert x["input_ids"].shape[1] == min(length for length in allowed if length >= longest)
            for ids, mask, label in zip(x["input_ids"].numpy(), x["attention_mask"].numpy(), y.numpy(), strict=True):
                size = label % 12 + 1
                assert ids.tolist() == [label + 1] * size + [0] * (len(ids) - size)
                assert mask.tolist() == [1] * size + [0] * (len(ids) - size)
            seen.extend(y.numpy().tolist())
        assert sorted(seen) == list(range(30)) and seen != sorted(seen)
    data.seek(1)
    assert np.concatenate([y for _, y in data.train]).tolist() == seen


def test_labels_of_tokens_have_weights():
    texts = {"input_ids": [[5, 6, 7], [8]], "labels": [[-100, 2, 3], [4]]}
    x, y, weight = tokenized(texts, global_batch=2, lengths=[4], pad_id=9, shuffle=False).peek()
    assert x["input_ids"].numpy().tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert y.numpy().tolist() == [[0, 2, 3, 0], [4, 0, 0, 0]]
    assert weight.numpy().tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]


def test_the_next_token_is_a_label():
    x, y, weight = tokenized(made(), global_batch=30, labels="next", lengths=12, shuffle=False).peek()
    assert set(x) == {"input_ids", "attention_mask"}
    assert y[11].numpy().tolist() == [12] * 11 + [0] and weight[11].numpy().tolist() == [1.0] * 11 + [0.0]
    assert weight[0].numpy().sum() == 0


def test_non_numeric_columns_are_skipped(caplog):
    with caplog.at_level(logging.INFO):
        data = tokenized(made(text=["a"] * 30, score=[0.5] * 30, token_type_ids=made()["input_ids"]), global_batch=30)
    x = data.peek()  # no labels
    assert set(x) == {"input_ids", "attention_mask", "score", "token_type_ids"} and "not numeric: text" in caplog.text
    assert {x[name].dtype for name in ("input_ids", "token_type_ids")} == {tf.int32} and data.filled < 1


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ({"ids": [[1]]}, {}, "a column 'input_ids'"),
        ({"input_ids": []}, {}, "no sequences"),
        ({"input_ids": [[1], []]}, {}, r"sequence 1 \(the first is 0\) is empty"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, {}, r"shape \(1,\) in row 0, which has 2 tokens"),
        ({"input_ids": [[1, 2]], "labels": [1, 2]}, {}, "must have 1 rows"),
        ({"input_ids": [[1] * 9]}, {"lengths": [4, 8]}, "truncation=True"),
        ({"input_ids": [[1]]}, {"lengths": [8, 4]}, "increasing"),
        ({"input_ids": [[1]]}, {"lengths": 0}, "`lengths` must be"),
        ({"input_ids": [[1]]}, {"global_batch": 0}, "of at least 1"),
        ({"input_ids": [[1]], "labels": [1]}, {"labels": "label"}, "Did you mean 'labels'"),
        ([1, 2], {}, "dict of lists"),
    ],
)
def test_bad_input(columns, options, words):
    with pytest.raises(InputError, match=words):
        tokenized(columns, **{"global_batch": 2, **options})


def trained(train, strategy):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        ids, mask = (keras.Input([None], dtype="int32", name=name) for name in ("input_ids", "attention_mask"))
        h = keras.layers.Embedding(200, 8)(ids)
        h = h + keras.layers.MultiHeadAttention(2, 4)(h, h, attention_mask=keras.ops.expand_dims(mask, 1))
        # A mean over all places, padding too: it is the length of the batch that this test is after.
        out = keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(h))
        model = keras.Model({"input_ids": ids, "attention_mask": mask}, out)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss, metrics=["accuracy"])
    return model.fit(train, epochs=3, verbose=0).history["loss"]


@pytest.mark.slow
def test_two_replicas_train_as_one_device():
    """If each replica padded its own rows, the mean over all positions would differ."""
    tfgpu.repair_keras()
    losses = []
    for strategy in (tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])):
        data = tokenized(made(labels=[at % 2 for at in range(30)]), global_batch=7, lengths=1, seed=3)
        losses.append(trained(data.train, strategy))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def tokenizer():
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'tfgpu[hf]'")
    import tokenizers

    own = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    own.train_from_iterator(TEXTS, tokenizers.trainers.WordPieceTrainer(vocab_size=180, special_tokens=special))
    own.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, **names)


@pytest.mark.slow
def test_a_real_tokenizer_and_data_set_equal_one_device_and_what_transformers_pads():
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install 'tfgpu[hf]'")
    tfgpu.repair_keras()
    own = tokenizer()
    raw = datasets.Dataset.from_dict({"text": TEXTS, "label": LABELS})
    tokens = raw.map(lambda rows: own(rows["text"], truncation=True, max_length=16), batched=True)
    for dataset in (
        tokens,
        tokens.to_iterable_dataset(),
        tokens.with_format("numpy"),
        tokens.with_format("tensorflow"),
    ):
        data = tokenized(dataset, global_batch=4, lengths=8, pad_id=own.pad_token_id, shuffle=False)
        for at, (x, y) in enumerate(data.train):
            wanted = own(
                TEXTS[4 * at : 4 * at + 4],
                padding=True,
                pad_to_multiple_of=8,
                truncation=True,
                max_length=16,
                return_tensors="np",
            )
            for name in ("input_ids", "attention_mask"):
                assert x[name].numpy().tolist() == wanted[name].tolist(), name
            assert y.numpy().tolist() == LABELS[4 * at : 4 * at + 4]
    losses = []
    for strategy in (tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])):
        data = tokenized(tokens, global_batch=4, lengths=8, seed=1)
        losses.append(trained(data.train, strategy))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
