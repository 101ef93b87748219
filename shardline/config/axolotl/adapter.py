"""Axolotl's keys of LoRA and QLoRA."""

from __future__ import annotations

import re
from typing import Any

from shardline.config.axolotl.reader import Read, Reader, choice, number, switch, table, text, texts, whole

OF_ADAPTERS = (
    *("lora_r", "lora_alpha", "lora_rank_pattern", "lora_alpha_pattern", "lora_dropout"),
    *("lora_target_modules", "lora_target_linear", "lora_target_parameters"),
    "lora_modules_to_save",
    *("lora_model_dir", "peft_use_dora", "peft_use_rslora", "peft_layers_to_transform", "peft_init_lora_weights"),
    *("loraplus_lr_ratio", "bnb_config_kwargs", "peft"),
)
WRAPPER = "_checkpoint_wrapped_module."  # in names of recomputed layers, as configs for FSDP have them
OUTSIDE_BLOCKS = ("embed_tokens", "lm_head")  # targets that lora_target_linear does not take
QUANTIZATION: dict[str, tuple[Any, ...]] = {  # values of bnb_config_kwargs that mean what is done here
    "bnb_4bit_quant_type": ("nf4",),
    "bnb_4bit_compute_dtype": ("bfloat16", "torch.bfloat16", "auto"),
    "bnb_4bit_quant_storage": ("bfloat16", "torch.bfloat16", "uint8"),
    "load_in_4bit": (True,),
    "llm_int8_has_fp16_weight": (False,),
}


def adapter(reader: Reader) -> None:
    """The section [lora], where an adapter is asked for."""
    kind = reader.get("adapter", text)
    four, eight = reader.on("load_in_4bit"), reader.on("load_in_8bit")
    if kind in (None, ""):
        for name in ("load_in_4bit", "load_in_8bit"):
            if reader.on(name):
                reader.problem(name, "a quantized base needs an adapter; set adapter: qlora or lora")
        for name in OF_ADAPTERS:
            if reader.has(name):
                reader.idle(name, "adapter is empty: every weight is trained")
        return
    if kind not in ("lora", "qlora"):
        reader.problem("adapter", f"expected 'lora', 'qlora' or nothing, got {kind!r}")
        return
    if kind == "qlora" and not four:
        reader.problem("adapter", "qlora needs load_in_4bit: true; adapter: lora has a base in full precision")
    if four and eight:
        reader.problem("load_in_8bit", "conflicts with load_in_4bit; set only one of them")
    reader.set("lora.enable", True, "adapter")
    if four or eight:
        name = "load_in_4bit" if four else "load_in_8bit"
        reader.set("lora.base_dtype", "nf4" if four else "int8", name)
    for name, native, read in (
        ("lora_r", "rank", whole),
        ("lora_alpha", "alpha", number),
        ("lora_rank_pattern", "rank_pattern", _each(whole)),
        ("lora_alpha_pattern", "alpha_pattern", _each(number)),
        ("lora_dropout", "dropout", number),
        ("lora_modules_to_save", "modules_to_save", texts),
        ("lora_model_dir", "adapter_path", text),
        ("peft_use_dora", "use_dora", switch),
        ("peft_use_rslora", "use_rslora", switch),
        ("peft_layers_to_transform", "layers", _numbers),
        ("loraplus_lr_ratio", "lr_ratio", number),
    ):
        if reader.has(name):
            reader.set(f"lora.{native}", reader.get(name, read), name)
        elif name in ("lora_r", "lora_alpha"):
            reader.problem("adapter", f"{kind} needs {name}")
    _targets(reader)
    _quantization(reader)
    _peft(reader, coded=four or eight)
    reader.get("peft_init_lora_weights", choice(True, "default"))


def _numbers(value: Any) -> list[int]:
    return [whole(item) for item in value] if isinstance(value, list) else [whole(value)]


def _each(read: Read) -> Read:
    """A table whose values are all read in one way."""

    def read_table(value: Any) -> dict[str, Any]:
        return {name: read(inner) for name, inner in table(value).items()}

    return read_table


def _targets(reader: Reader) -> None:
    """Names, or a regex; `lora_target_linear` is every linear layer of the blocks; parameters are those of experts."""
    experts = [one.replace(WRAPPER, "") for one in reader.get("lora_target_parameters", texts, [])]
    name = "lora_target_modules"
    given: Any = reader.get(name)
    if given is not None and not isinstance(given, str):
        given = reader.get(name, texts, [])
    if reader.on("lora_target_linear"):
        others = [one for one in texts(given or []) if one in OUTSIDE_BLOCKS]
        if given and not others:
            reader.idle(name, "lora_target_linear takes every linear layer of the blocks")
        given, name = ["all-linear", *others], "lora_target_linear"
    if given in ("all-linear", ["all-linear"]):
        given = ["all-linear"] if experts else []
    if isinstance(given, str) and experts:
        given = f"(?:{given})|(?:.*[.])?(?:{'|'.join(map(re.escape, experts))})"
    elif experts:
        given, name = [*(given or []), *experts], name if given else "lora_target_parameters"
    if given is not None:
        reader.set("lora.target_modules", given, name)
    if reader.has("loraplus_lr_ratio") and "embed_tokens" in (given or []):
        reader.note("loraplus_lr_ratio", "the adapter of embed_tokens learns at the rates of the others here, at"
                    " loraplus_lr_embedding (1e-6) in Axolotl")  # fmt: skip


def _quantization(reader: Reader) -> None:
    for option, value in reader.get("bnb_config_kwargs", table, {}).items():
        if option == "bnb_4bit_use_double_quant":
            reader.set("lora.double_quantization", bool(value), "bnb_config_kwargs")
        elif option not in QUANTIZATION or value not in QUANTIZATION[option]:
            reader.problem("bnb_config_kwargs", f"{option} = {value!r}: a base in 4 bits is NF4, computed in bfloat16")


def _peft(reader: Reader, coded: bool) -> None:
    """`peft` as a table: 4 or 8 bits by another library, which here mean the same as load_in_4bit."""
    given = reader.below("peft", reader.get("peft", table, {}))
    kind = given.get("weight_dtype", choice("nf4", "int8"))
    for name in given.values:
        if name in ("backend", "group_size"):
            given.idle(name, "Shardline quantizes the frozen weights itself")
        elif name != "weight_dtype":
            given.problem(name, "is refused: only weight_dtype is known; A is random, B is zero")
    if kind is not None and coded:
        given.problem("weight_dtype", "conflicts with load_in_4bit or load_in_8bit; set only one of them")
    elif kind is not None:
        given.set("lora.base_dtype", kind, "weight_dtype")


HANDLERS = (adapter,)
