"""Recipe settings for a pretrained language model (`model: causal_lm`). Imports no TensorFlow."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from tfgpu.errors import InputError

CAUSAL_LM = "causal_lm"
_OTHERS = (
    *("augment", "image_size", "classes", "label_smoothing", "skip_corrupt", "cache", "cache_directory"),
    *("memory_bytes", "parallel_calls", "model_options", "initializer", "normalization", "dropout", "strategy", "task"),
)
"""Settings of recipes whose model is built from scratch."""


def setting(default: Any, panel: str, *, flag: str | None = None, **bounds: Any) -> Any:
    """A field of the schema, with its panel in `--help`, and its flag if that differs from its name."""
    return Field(default, json_schema_extra={"panel": panel} | ({"flag": flag} if flag else {}), **bounds)


class Pretrained(BaseModel, use_attribute_docstrings=True):
    """The settings; `Recipe` has all others."""

    preset: str | None = setting(None, "Pretrained", min_length=1)
    """A folder with a pretrained language model: a KerasHub preset, or a Hugging Face model that KerasHub
    converts."""
    lora: int | None = setting(None, "Pretrained", ge=1)
    """Freeze the model and train LoRA matrices of this rank. Default: train all weights."""
    layout: Literal["auto", "one", "mirrored", "zero1", "zero2", "zero3", "pipeline", "tensor"] = setting(
        "auto", "Pretrained"
    )
    """Layout of the model on the devices; `auto`: mirrored, or `one` on a single device."""
    microbatches: int | None = setting(None, "Pretrained", ge=1)
    """Micro-batches per batch in a pipeline. Default: 4 per stage."""
    packing: bool = setting(True, "Pretrained")
    """Pack several sequences into one row if the model can keep them apart; else pad each."""
    loss_chunk: int | None = setting(None, "Pretrained", ge=1)
    """Tokens whose logits are computed at a time. Default: all; if all logits of a device take over 192 MiB, as
    many as take 64 MiB."""
    template: str = setting("auto", "Pretrained", min_length=1)
    """The chat template: plain, chatml, gemma, llama3 or a Jinja file; `auto`: the preset's own, else one whose
    tokens are in the vocabulary, else plain."""
    samples: int = setting(3, "Pretrained", ge=0)
    """Number of test prompts to complete in the report."""
    sample_tokens: int = setting(32, "Pretrained", ge=1)
    """Maximum number of tokens in each completion."""


def foreign(what: Any) -> tuple[str, ...]:
    """The settings that do not apply to a recipe."""
    return _OTHERS if what.model == CAUSAL_LM else tuple(Pretrained.model_fields)


def check(what: Any, defaults: Mapping[str, Any]) -> None:
    """Rejects settings that do not apply.

    Args:
        what: a recipe.
        defaults: of all its settings.

    Raises:
        ValueError: names the setting and the fix.
    """
    is_pretrained = what.model == CAUSAL_LM
    if is_pretrained and what.preset is None:
        raise ValueError("`model: causal_lm` needs `preset`, the folder with the model. Add --preset DIR")
    given = next((name for name in foreign(what) if getattr(what, name) != defaults[name]), None)
    if given is None:
        return
    if is_pretrained:
        raise ValueError(
            f"`{given}` does not apply to a pretrained model. Received: {getattr(what, given)!r}. Remove it"
        )
    raise ValueError(f"`{given}` needs a pretrained model. Received: {getattr(what, given)!r}. Add --model causal_lm")


def check_paths(what: Any) -> None:
    """Raises `InputError` if the data is not a file or the preset not a folder; contents are checked later."""
    if not Path(what.data).is_file():
        raise InputError(f"There is no file {what.data!r}. Give --data a .jsonl file or a plain text.")
    if not Path(what.preset).expanduser().is_dir():
        raise InputError(
            f"There is no preset folder {what.preset!r}. Give --preset the folder of a KerasHub or Hugging Face model."
        )
