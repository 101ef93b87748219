"""Axolotl's keys of model, batch, length, precision and memory: those that are read together."""

from __future__ import annotations

from typing import Any

from shardline.config.axolotl.reader import Reader, choice, number, table, text, texts, whole
from shardline.config.names import FLOAT8_LINEAR

# Fields of a Hugging Face config.json -> fields of model.overrides
MODEL_FIELDS = {
    "tie_word_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
    "sliding_window": "sliding_window",
    "max_position_embeddings": "max_seq_len",
    "num_hidden_layers": "n_layers",
    "rope_scaling": "rope_scaling",
}
_TOKENS, _TYPES = "special_tokens sets special tokens", "bf16, fp16 and float32 set types"
IDLE_FIELDS = {
    "output_router_logits": "--model.overrides.moe.aux_loss_coeff adds the loss that balances experts",
    "use_cache": "training has no cache",
    "pad_token_id": _TOKENS,
    "bos_token_id": _TOKENS,
    "eos_token_id": _TOKENS,
    "attention_dropout": "attention has no dropout",
    "torch_dtype": _TYPES,
    "dtype": _TYPES,
}
DPO_NUMBERS = {"dpo_beta": "dpo.beta", "rl_beta": "dpo.beta", "dpo_label_smoothing": "dpo.label_smoothing"}
DPO_LOSSES = ("sigmoid", "hinge", "ipo", "robust")


def model(reader: Reader) -> None:
    """The folder or name of the base model, whose architecture, tokenizer and weights are used."""
    reader.set("model.name", "auto", "base_model")
    reader.set("model.hf_assets_path", reader.get("base_model", text), "base_model")
    reader.set("checkpoint.enable", True, "base_model")
    reader.set("checkpoint.initial_load_in_hf", not reader.on("reinit_weights"), "base_model")
    for name in ("model_type", "type_of_model"):
        kind = reader.get(name, text, "AutoModelForCausalLM")
        if kind.endswith("ForConditionalGeneration"):
            reader.note(name, "this is a model with images: only its text model is trained")
        elif not kind.endswith(("ForCausalLM", "LMHeadModel")):
            reader.problem(name, f"expected a causal language model such as AutoModelForCausalLM, got {kind!r}")
    overrides = {}
    for name in ("model_config", "overrides_of_model_config"):
        for field, value in reader.get(name, table, {}).items():
            if field in IDLE_FIELDS:
                reader.idle(f"{name}.{field}", IDLE_FIELDS[field])
            elif field in MODEL_FIELDS:
                native = MODEL_FIELDS[field]
                overrides[native] = _rope_scaling(value) if native == "rope_scaling" else value
            else:
                known = ", ".join(MODEL_FIELDS)
                reader.problem(name, f"{field}: only {known} can be set here; --model.overrides sets other fields")
        if overrides and reader.has(name):
            reader.set("model.overrides", overrides, name)


def _rope_scaling(value: Any) -> Any:
    """The table of a config.json, in which the rule has one of two names."""
    if not isinstance(value, dict):
        return value
    rest = {name: inner for name, inner in value.items() if name != "rope_type"}
    return {**rest, "type": value.get("type", value.get("rope_type"))}


def batch(reader: Reader) -> None:
    """Accumulation as a number of forward passes, which does not depend on the number of ranks."""
    steps, size = reader.get("gradient_accumulation_steps", whole), reader.get("batch_size", whole)
    name = "gradient_accumulation_steps"
    if steps is None and size is not None:
        name, micro = "batch_size", reader.get("micro_batch_size", whole, 1)
        steps = size // micro
        if steps * micro != size:
            reader.problem(name, f"{size} is not a multiple of micro_batch_size = {micro}")
    elif size is not None:
        reader.idle("batch_size", "gradient_accumulation_steps is set")
    reader.set("training.gradient_accumulation_steps", 1 if steps is None else steps, name)


def steps_of(reader: Reader) -> int | None:
    """The length of the run in steps, if `max_steps` sets it."""
    steps = reader.get("max_steps", whole)
    return steps if steps is not None and steps > 0 else None


def epochs_of(reader: Reader) -> float:
    return float(reader.get("num_epochs", number, 1.0))


def length(reader: Reader) -> None:
    """Steps, which take precedence, or epochs."""
    steps = steps_of(reader)
    if steps is None:
        reader.set("training.epochs", epochs_of(reader), "num_epochs")
        return
    reader.set("training.steps", steps, "max_steps")
    if reader.has("num_epochs"):
        reader.note("num_epochs", "only sets how often saves_per_epoch and evals_per_epoch happen: max_steps is set")


def precision(reader: Reader) -> None:
    """Set the compute type; weights are stored in float32 unless `bfloat16: true` asks for less."""
    half = reader.get("bf16", choice("auto", "full", True, False))
    pure = reader.get("bfloat16", choice("auto", True, False), False) is True  # auto leaves it to the device
    if reader.on("fp16") and half in (None, "auto", False):
        reader.set("training.mixed_precision_param", "float16", "fp16")
    elif half in (True, "full"):
        reader.set("training.mixed_precision_param", "bfloat16", "bf16")
    elif reader.on("float32") or (half is False and not pure):
        reader.set("training.mixed_precision_param", "float32", "float32" if reader.on("float32") else "bf16")
    if half == "full" or pure:
        reader.set("training.dtype", "bfloat16", "bfloat16" if pure else "bf16")
    if reader.on("float16"):
        reader.problem(
            "float16", "weights are not stored in float16; use bfloat16: true, or fp16: true to compute in it"
        )
    if reader.get("tf32", choice("auto", True, False), "auto") in ("auto", True):
        reader.set("training.tf32", True, "tf32")
    if reader.on("fp8"):
        reader.set("model.converters", [FLOAT8_LINEAR], "fp8")
        if reader.on("fp8_enable_fsdp_float8_all_gather"):
            native = f"{FLOAT8_LINEAR}.enable_fsdp_float8_all_gather"
            reader.set(native, True, "fp8_enable_fsdp_float8_all_gather")
    elif reader.on("fp8_enable_fsdp_float8_all_gather"):
        reader.idle("fp8_enable_fsdp_float8_all_gather", "fp8 is not true")


def weights(reader: Reader) -> None:
    """Which weights are trained without an adapter, noise on the embeddings, and how stored weights are read."""
    patterns = reader.get("unfrozen_parameters", texts, [])
    if patterns and reader.get("adapter", text):
        reader.idle("unfrozen_parameters", "an adapter freezes every weight that it does not name")
    elif patterns:
        reader.set("training.unfrozen_parameters", patterns, "unfrozen_parameters")
    for name in ("noisy_embedding_alpha", "neftune_noise_alpha"):
        if (alpha := reader.get(name, number)) is not None:
            reader.set("training.neftune_alpha", alpha, name)
    kind, options = reader.get("model_quantization_config", text), reader.get("model_quantization_config_kwargs", table)
    if kind == "Mxfp4Config" and (options or {}).get("dequantize") is True:
        reason = "weights in MXFP4 are dequantized when they are read"
        reader.idle("model_quantization_config", reason)
        reader.idle("model_quantization_config_kwargs", reason)
    elif kind is not None:
        reader.problem(
            "model_quantization_config",
            f"{kind}: weights are trained in full precision, or in 4 bits with load_in_4bit; Mxfp4Config needs"
            " model_quantization_config_kwargs: {dequantize: true}",
        )
    elif options:
        reader.idle("model_quantization_config_kwargs", "model_quantization_config is not set")


def memory(reader: Reader) -> None:
    """What is recomputed or kept in host memory, what is compiled, and the kernel of attention."""
    recompute = reader.get("gradient_checkpointing", choice("offload", "offload_disk", "unsloth", True, False), False)
    offload = reader.get("activation_offloading", choice("legacy", "disk", "hidden_states", True, False), False)
    if offload or recompute in ("offload", "offload_disk"):
        name = "activation_offloading" if offload else "gradient_checkpointing"
        reader.set("activation_checkpoint.mode", "offload", name)
        if "disk" in str(offload or recompute):
            reader.note(name, "activations go to host memory, not to a disk")
        if recompute is True:
            reader.note("gradient_checkpointing", "nothing is recomputed: activation_offloading keeps activations")
    elif reader.get("selective_checkpointing"):
        reader.set("activation_checkpoint.mode", "selective", "selective_checkpointing")
        reader.set("activation_checkpoint.selective_ac_option", "op", "selective_checkpointing")
    elif recompute:
        reader.set("activation_checkpoint.mode", "full", "gradient_checkpointing")
    if reader.get("torch_compile", choice("auto", True, False), False):
        reader.set("compile.enable", True, "torch_compile")
    attention = reader.get("attn_implementation", text)
    if attention == "fp8":
        reader.problem("attn_implementation", "attention is exact: there is no 'fp8'; remove the key")
    elif attention is not None:
        reader.idle("attn_implementation", "Shardline chooses the attention kernel")


def profiler(reader: Reader) -> None:
    """Record a trace of some steps, again and again at the same distance."""
    if not (steps := reader.get("profiler_steps", whole)):
        return
    reader.set("profiling.enable_profiling", True, "profiler_steps")
    reader.set("profiling.profiler_active", steps, "profiler_steps")
    start = reader.get("profiler_steps_start", whole, 0)
    reader.set("profiling.profiler_warmup", 1, "profiler_steps")
    reader.set("profiling.profile_freq", max(start, 1) + steps, "profiler_steps_start")


def objective(reader: Reader) -> None:
    """Direct preference optimization; every other method that is not next-token training is refused."""
    kind = reader.get("rl", text)
    if kind is None:
        for name in (*DPO_NUMBERS, "dpo_loss_type", "trl"):
            if reader.has(name):
                reader.idle(name, "rl is not dpo")
        return
    if kind not in ("dpo", "ipo"):
        reader.problem("rl", f"{kind!r} is not built: expected dpo or ipo; remove the key to train next tokens")
        return
    reader.set("training.objective", "dpo", "rl")
    for name, native in DPO_NUMBERS.items():
        if kind == "ipo" and name == "dpo_label_smoothing" and reader.has(name):
            reader.idle(name, "rl: ipo has no label smoothing")
        elif reader.has(name):
            reader.set(native, reader.get(name, number), name)
    trl = reader.below("trl", reader.get("trl", table, {}))
    for name in trl.values:
        if name == "beta":
            trl.set("dpo.beta", trl.get(name, number), name)
        else:
            trl.idle(name, "it is for another method than dpo")
    losses = texts(reader.get("dpo_loss_type", default=["ipo"] if kind == "ipo" else ["sigmoid"]))
    if len(losses) != 1 or losses[0] not in DPO_LOSSES:
        reader.problem("dpo_loss_type", f"expected one of {', '.join(DPO_LOSSES)}, got {losses!r}")
    elif kind == "ipo" and losses != ["ipo"]:
        reader.problem("dpo_loss_type", f"conflicts with rl: ipo, got {losses!r}; set only one of them")
    else:
        reader.set("dpo.loss", losses[0], "dpo_loss_type" if reader.has("dpo_loss_type") else "rl")


def garbage(reader: Reader) -> None:
    """Steps between garbage collections; Axolotl's 0 is off, and -1 means once per epoch."""
    for name in ("gc_steps", "gc_collect_steps"):
        steps = reader.get(name, whole)
        if steps in (0, -1):
            reader.idle(name, "garbage is collected at fixed steps, training.gc_freq")
        elif steps is not None:
            reader.set("training.gc_freq", steps, name)


HANDLERS = (model, batch, length, precision, weights, memory, profiler, garbage, objective)
