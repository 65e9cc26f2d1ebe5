"""How Keras's attention, and blocks of KerasHub, are split over devices, by package and name of the class.

KerasHub is not imported: its classes are known by name. Each entry is `styles`, `arguments` and `results`, as
`parallel.register_plan` takes them.
"""

_CACHE = {"cache": -2}, {5: -2}
_SCORES = {4: -3}  # of shape (batch, heads, queries, keys)

_MULTI_HEAD = {
    "_gate_dense": "column",
    "_query_dense": "column",
    "_key_dense": "column",
    "_value_dense": "column",
    "_dropout_layer": -3,
    "_output_dense": "row",
}


def _attention(prefix: str, dropout: str, at: int | tuple[int, int], *, groups: bool = True, **more: str) -> tuple:
    """Grouped queries: the cache has an axis of key heads; dropout is on the output, or on the scores."""
    counts = {"num_query_heads": "heads", "num_key_value_heads": "key_value_heads"}
    styles = {
        f"{prefix}query_dense": "column",
        f"{prefix}key_dense": "key_value",
        f"{prefix}value_dense": "key_value",
        dropout: at,
        f"{prefix}output_dense": "row",
        **counts,
    }
    if groups:
        styles["num_key_value_groups"] = "groups"
    return styles | more, *_CACHE


_LLAMA = _attention("_", "_dropout_layer", -2)
_MIXTRAL = _attention("", "dropout_layer", -2)
_MISTRAL_COUNTS = {"_num_query_heads": "heads", "_num_key_value_heads": "key_value_heads"}
_MISTRAL = _attention("_", "_dropout_layer", -2, groups=False, **_MISTRAL_COUNTS, _num_key_value_groups="groups")
_QWEN_MOE = (_MIXTRAL[0] | {"_dropout_layer": -2, "_output_dense": "row"}, *_CACHE)
_GEMMA = _attention("", "dropout_layer", (-4, -3), groups=False, hidden_dim="heads")
_PAIR = {"_feedforward_intermediate_dense": "column", "_feedforward_output_dense": "row"}
_GATED = {"_feedforward_gate_dense": "column", **_PAIR}
_GEMMA_FFN = {"gating_ffw": "column", "gating_ffw_2": "column", "ffw_linear": "row"}
_EXPERTS = {"_expert_feedforward_gate_dense": 0, "_expert_feedforward_output_dense": 0, "call": 0}
_MIXTRAL_EXPERTS = {**_EXPERTS, "_expert_feedforward_intermediate_dense": 0}
_GPT_OSS_EXPERTS = dict.fromkeys(("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias", "call"), 0)

_KERAS_HUB = {
    "CachedMultiHeadAttention": (_MULTI_HEAD, _CACHE[0], _CACHE[1] | _SCORES),
    "TransformerDecoder": (_PAIR,),
    "TransformerEncoder": (_PAIR,),
    "LlamaAttention": _LLAMA,
    "LlamaTransformerDecoder": (_GATED,),
    "CachedMistralAttention": _MISTRAL,
    "MistralTransformerDecoder": (_GATED,),
    "QwenAttention": _LLAMA,
    "QwenTransformerDecoder": (_GATED,),
    "Qwen3Attention": _LLAMA,
    "Qwen3TransformerDecoder": (_GATED,),
    "CachedGemmaAttention": _GEMMA,
    "GemmaDecoderBlock": (_GEMMA_FFN,),
    "CachedGemma3Attention": _GEMMA,
    "Gemma3DecoderBlock": (_GEMMA_FFN,),
    "CachedMixtralAttention": _MIXTRAL,
    "MixtralMoeExperts": (_MIXTRAL_EXPERTS,),
    "QwenMoeAttention": _QWEN_MOE,
    "QwenMoeMLP": (_GATED,),
    "QwenMoeExperts": (_EXPERTS,),
    "Qwen3MoeAttention": _LLAMA,
    "Qwen3MoeMLP": (_GATED,),
    "Qwen3MoeExperts": (_EXPERTS,),
    "Qwen3_5MoeExperts": (_EXPERTS,),
    "GptOssExperts": (_GPT_OSS_EXPERTS,),
}

_GROUPED = {
    **_MULTI_HEAD,
    "_key_dense": "key_value",
    "_value_dense": "key_value",
    "num_query_heads": "heads",
    "num_key_value_heads": "key_value_heads",
    "num_repeats": "groups",
}

PLANS = {
    ("keras", "GroupedQueryAttention"): (_GROUPED, {}, _SCORES),
    ("keras", "MultiHeadAttention"): (_MULTI_HEAD, {}, _SCORES),
    ("keras_hub.src.models.vit.vit_layers", "MLP"): ({"dense_1": "column", "dense_2": "row"},),  # one of several MLPs
    **{("keras_hub", name): plan for name, plan in _KERAS_HUB.items()},
}
"""By package or module, and name, of a class."""
