"""Axolotl's keys of the optimizer and of its learning rate.

A schedule is a row of native keys under [lr_scheduler]; what `lr_scheduler_kwargs` may change of it is in `OPTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from shardline.config.axolotl.reader import Reader, choice, number, switch, table, text, whole
from shardline.config.axolotl.training import steps_of
from shardline.registry import nearest

SCHEDULERS: dict[str, dict[str, Any]] = {
    "cosine": {"decay_type": "cosine"},
    "cosine_with_restarts": {"decay_type": "cosine"},
    "cosine_with_min_lr": {"decay_type": "cosine"},
    "cosine_warmup_with_min_lr": {"decay_type": "cosine", "include_ends": True},
    "linear": {"decay_type": "linear"},
    "polynomial": {"decay_type": "polynomial"},
    "inverse_sqrt": {"decay_type": "inverse_sqrt"},
    "warmup_stable_decay": {"decay_type": "cosine"},
    "one_cycle": {"decay_type": "cosine", "warmup_type": "cosine", "include_ends": True},
    "rex": {"decay_type": "rex"},
    "constant": {"decay_type": "constant"},
    "constant_with_warmup": {"decay_type": "constant"},
}
_BY_LOSS = "the learning rate depends on the step alone, so that a resumed run continues it"
REFUSED_SCHEDULERS = {"reduce_lr_on_plateau": _BY_LOSS, "greedy": _BY_LOSS}
POLYNOMIAL_END = 1e-7  # transformers' lr_end
ONE_CYCLE = {"div_factor": 25.0, "final_div_factor": 1e4, "base_momentum": 0.85, "max_momentum": 0.95}  # torch's
SHAPES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}  # of transformers' warmup and decay


def _only(*values: Any) -> Callable[[Any], Any]:
    """Accept an option only with a value that it has anyway."""

    def read(value: Any) -> None:
        if value not in values:
            raise ValueError(f"{' or '.join(map(repr, values))}")

    return read


# Schedule -> option -> how it is read. What is read goes to `_set_options`.
_PLAIN = {"last_epoch": _only(-1)}
_COSINE = {**_PLAIN, "num_cycles": _only(0.5)}
OPTIONS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "cosine": _COSINE,
    "cosine_with_restarts": {**_PLAIN, "num_cycles": whole},
    "cosine_with_min_lr": {**_COSINE, "min_lr": number, "min_lr_rate": number},
    "cosine_warmup_with_min_lr": {**_COSINE, "min_lr": number, "min_lr_rate": number, "warmup_lr_rate": number},
    "polynomial": {**_PLAIN, "lr_end": number, "power": number},
    "inverse_sqrt": {**_PLAIN, "timescale": whole},
    "warmup_stable_decay": {
        **_COSINE,
        "num_decay_steps": whole,
        "min_lr_ratio": number,
        "warmup_type": choice(*SHAPES),
        "decay_type": choice(*SHAPES),
    },
    "one_cycle": {
        **_PLAIN,
        "pct_start": number,
        "anneal_strategy": choice("cos", "linear"),
        "cycle_momentum": switch,
        "three_phase": _only(False),
        **dict.fromkeys(ONE_CYCLE, number),
    },
}


def schedule(reader: Reader) -> None:
    """The shape of the learning rate."""
    name = reader.get("lr_scheduler", text, "cosine")
    if name in REFUSED_SCHEDULERS:
        reader.problem("lr_scheduler", f"{name!r} is refused: {REFUSED_SCHEDULERS[name]}")
        return
    if name not in SCHEDULERS:
        close = nearest(name, SCHEDULERS)
        reader.problem("lr_scheduler", f"expected one of {', '.join(SCHEDULERS)}, got {name!r}{close}")
        return
    for native, value in SCHEDULERS[name].items():
        reader.set(f"lr_scheduler.{native}", value, "lr_scheduler")
    if reader.get("warmup_ratio", number):
        reader.together("warmup_ratio", "warmup_steps")
    if name == "constant":
        reader.set("lr_scheduler.warmup_steps", 0, "lr_scheduler")
        for key in ("warmup_steps", "warmup_ratio"):
            if reader.has(key):
                reader.idle(key, "lr_scheduler: constant has no warmup; constant_with_warmup has")
    else:
        _warmup(reader)
    _set_options(reader, name, _options(reader, name))
    _cosine_options(reader, name)


def _warmup(reader: Reader) -> None:
    given = reader.get("warmup_steps", number)
    if given is not None and 0 < given < 1:
        reader.note("warmup_steps", f"{given:g} is a fraction of the run, as warmup_ratio is")
        reader.set("lr_scheduler.warmup_ratio", given, "warmup_steps")
    elif given is not None:
        reader.set("lr_scheduler.warmup_steps", reader.get("warmup_steps", whole, 0), "warmup_steps")
    elif reader.has("warmup_ratio"):
        reader.set("lr_scheduler.warmup_ratio", reader.get("warmup_ratio", number), "warmup_ratio")
    elif (steps := steps_of(reader)) is not None:
        reader.set("lr_scheduler.warmup_steps", min(int(0.03 * steps), 100), "warmup_ratio")
    else:
        reader.set("lr_scheduler.warmup_ratio", 0.03, "warmup_ratio")


def _options(reader: Reader, name: str) -> dict[str, Any]:
    """What `lr_scheduler_kwargs` says, as the schedule reads it."""
    known, found = OPTIONS.get(name, _PLAIN), dict[str, Any]()
    for option, value in reader.get("lr_scheduler_kwargs", table, {}).items():
        if option not in known:
            words = f"{name} has {', '.join(known)}{nearest(option, known)}"
            reader.problem("lr_scheduler_kwargs", f"{option}: there is no such option; {words}")
            continue
        try:
            found[option] = known[option](value)
        except ValueError as error:
            reader.problem("lr_scheduler_kwargs", f"{option}: expected {error}, got {value!r}")
    return {option: value for option, value in found.items() if value is not None}


def _set_options(reader: Reader, name: str, given: dict[str, Any]) -> None:
    def put(native: str, value: Any) -> None:
        source = "lr_scheduler_kwargs" if reader.has("lr_scheduler_kwargs") else "lr_scheduler"
        reader.set(f"lr_scheduler.{native}", value, source)

    if name == "polynomial":
        given = {"lr_end": POLYNOMIAL_END, **given}
    if name == "one_cycle":
        _one_cycle(reader, put, given)
    rate = reader.get("learning_rate", number) or 1.0
    for option, native, read in (
        ("num_cycles", "cycles", int),
        ("power", "decay_power", float),
        ("timescale", "timescale", int),
        ("num_decay_steps", "decay_steps", int),
        ("min_lr", "min_lr_factor", lambda value: value / rate),
        ("lr_end", "min_lr_factor", lambda value: value / rate),
        ("min_lr_rate", "min_lr_factor", float),
        ("min_lr_ratio", "min_lr_factor", float),
        ("min_lr_ratio", "warmup_start_factor", float),
        ("warmup_lr_rate", "warmup_start_factor", float),
        ("warmup_type", "warmup_type", SHAPES.get),
        ("decay_type", "decay_type", SHAPES.get),
    ):
        if option in given:
            put(native, read(given[option]))
    if name.endswith("with_min_lr") and not {"min_lr", "min_lr_rate"} & given.keys():
        reader.problem("lr_scheduler", f"{name} needs lr_scheduler_kwargs: {{min_lr_rate: ...}}")
    if name == "warmup_stable_decay" and "num_decay_steps" not in given:
        reader.problem("lr_scheduler", f"{name} needs lr_scheduler_kwargs: {{num_decay_steps: ...}}")
    if name == "cosine_warmup_with_min_lr" and "warmup_lr_rate" not in given:
        if not (steps := reader.out.values.get("lr_scheduler.warmup_steps")):
            reader.problem("lr_scheduler", f"{name} needs warmup_steps, or warmup_lr_rate in lr_scheduler_kwargs")
        else:
            put("warmup_start_factor", 1 / steps)


def _one_cycle(reader: Reader, put: Callable[[str, Any], None], given: dict[str, Any]) -> None:
    """Set the defaults of torch's OneCycleLR, momentum included, which Axolotl does not change."""
    numbers = {**ONE_CYCLE, **given}
    put("warmup_start_factor", 1 / numbers["div_factor"])
    put("min_lr_factor", 1 / (numbers["div_factor"] * numbers["final_div_factor"]))
    if given.get("anneal_strategy") == "linear":
        put("warmup_type", "linear")
        put("decay_type", "linear")
    if "pct_start" in given:
        put("warmup_ratio", given["pct_start"])
        reader.out.values.pop("lr_scheduler.warmup_steps", None)
        for key in ("warmup_steps", "warmup_ratio"):
            if reader.has(key):
                reader.idle(key, "lr_scheduler_kwargs has pct_start")
    if not given.get("cycle_momentum", True):
        return
    put("momentum_range", [numbers["base_momentum"], numbers["max_momentum"]])
    if _optimizer_name(reader) == "adafactor":
        words = "one_cycle changes the momentum, which adafactor does not have"
        reader.problem("lr_scheduler", f"{words}; set lr_scheduler_kwargs: {{cycle_momentum: false}}")


def _cosine_options(reader: Reader, name: str) -> None:
    """Keys that Axolotl reads only with its own schedules; a ratio of 0 is off, as in Axolotl."""
    lowest, constant = reader.get("cosine_min_lr_ratio", number), reader.get("cosine_constant_lr_ratio", number)
    quadratic = reader.on("lr_quadratic_warmup") and name == "cosine"
    of_cosine = f"lr_scheduler is {name}"
    if lowest is not None and name in ("cosine", "rex") and not quadratic:
        reader.set("lr_scheduler.min_lr_factor", lowest, "cosine_min_lr_ratio")
    elif lowest is not None:
        reader.idle("cosine_min_lr_ratio", "lr_quadratic_warmup takes its place" if quadratic else of_cosine)
    if constant and lowest and name == "cosine" and not quadratic:
        reader.set("lr_scheduler.decay_end_ratio", constant, "cosine_constant_lr_ratio")
    elif constant is not None:
        off = "lr_quadratic_warmup takes its place" if quadratic else of_cosine
        off = "cosine_min_lr_ratio is not set" if name == "cosine" and not quadratic else off
        reader.idle("cosine_constant_lr_ratio", "it is 0" if not constant else off)
    if quadratic:
        reader.set("lr_scheduler.warmup_type", "quadratic", "lr_quadratic_warmup")
    elif reader.on("lr_quadratic_warmup"):
        reader.idle("lr_quadratic_warmup", of_cosine)


# ---- the optimizer ---------------------------------------------------------------------------------------------------


class NativeOptimizer(NamedTuple):
    """A native optimizer in place of one of Axolotl's names, and what differs."""

    name: str
    state_dtype: str = "parameter"
    note: str = ""


_PAGED = "its state is not paged; training.enable_cpu_offload keeps it in host memory"
_WIDER = "moments take 8 bits, the smallest size there is"
_OPTIMIZERS: dict[NativeOptimizer, str] = {
    NativeOptimizer("AdamW"): "adamw_torch adamw_torch_fused adamw_hf adamw_torch_xla adamw_torch_npu_fused"
    " adamw_apex_fused optimi_adamw flash_adamw",
    NativeOptimizer("AdamW", "int8"): "adamw_bnb_8bit adamw_8bit adamw_torch_8bit ao_adamw_8bit",
    NativeOptimizer("AdamW", "int8", _WIDER): "adamw_torch_4bit ao_adamw_4bit ao_adamw_fp8",
    NativeOptimizer("AdamW", "int8", _PAGED): "paged_adamw_8bit",
    NativeOptimizer("AdamW", "parameter", _PAGED): "paged_adamw paged_adamw_32bit",
    NativeOptimizer("Adam"): "flash_adam",
    NativeOptimizer("Adafactor"): "adafactor",
    NativeOptimizer("SGD"): "sgd flash_sgd",
    NativeOptimizer("Lion"): "lion lion_32bit lion_pytorch flash_lion",
    NativeOptimizer("Lion", "parameter", _PAGED): "paged_lion_32bit",
    NativeOptimizer("Lion", "parameter", "its moment has the type of the weights"): "lion_8bit paged_lion_8bit",
    NativeOptimizer("Muon"): "muon",
}
OPTIMIZERS = {name: choice for choice, names in _OPTIMIZERS.items() for name in names.split()}
_PROJECTED = "gradients are not projected; adafactor or adamw_torch_8bit need as little memory"
_TWO_SETS = "it trains other weights than it evaluates; use adamw_torch with a schedule"
_EARLY = "optimizer.early_step_in_backward frees gradients in the same way, with AdamW"
_ROUNDED = "sums of bfloat16 weights are not compensated; use adamw_torch with weights in float32"
_OWN = "it is not built; experimental.custom_import can register it"
_REFUSED: dict[str, str] = {
    _PROJECTED: "galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise galore_adamw_8bit_layerwise"
    " galore_adafactor_layerwise q_galore_adamw8bit apollo_adamw apollo_adamw_layerwise dion sinkgd",
    _TWO_SETS: "schedule_free_radam schedule_free_adamw schedule_free_sgd",
    _EARLY: "lomo adalomo",
    _ROUNDED: "adamw_anyprecision",
    _OWN: "adagrad rmsprop rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit ademamix ademamix_8bit paged_ademamix_32bit"
    " paged_ademamix_8bit grokadamw stable_adamw adopt_adamw came_pytorch flash_sgdw",
}
REFUSED_OPTIMIZERS = {name: reason for reason, names in _REFUSED.items() for name in names.split()}
# Options of transformers' Adafactor, which its Trainer does not pass on
OF_ADAFACTOR = ("scale_parameter", "relative_step", "warmup_init", "clip_threshold", "decay_rate", "beta1")


UNREAD = {"Adafactor": ("beta1", "beta2", "eps"), "SGD": ("beta2", "eps"), "Lion": ("eps",)}  # of Adam's numbers


def _optimizer_name(reader: Reader) -> str:
    return str(reader.get("optimizer", text, "adamw_torch_fused")).removeprefix("OptimizerNames.").lower()


def optimizer(reader: Reader) -> None:
    """The native optimizer of the same update."""
    name = _optimizer_name(reader)
    if name in REFUSED_OPTIMIZERS:
        reader.problem("optimizer", f"{name!r} is refused: {REFUSED_OPTIMIZERS[name]}")
        return
    if name not in OPTIMIZERS:
        close = nearest(name, (*OPTIMIZERS, *REFUSED_OPTIMIZERS))
        reader.problem("optimizer", f"there is no {name!r}{close} ({', '.join(OPTIMIZERS)})")
        return
    chosen = OPTIMIZERS[name]
    reader.set("optimizer.name", chosen.name, "optimizer")
    if chosen.state_dtype != "parameter":
        reader.set("optimizer.state_dtype", chosen.state_dtype, "optimizer")
    if chosen.name == "SGD":
        reader.set("optimizer.beta1", 0.0, "optimizer")
    if chosen.name == "Muon":
        reader.set("optimizer.muon_adjust_lr", "match_rms_adamw", "optimizer")
    if chosen.note:
        reader.note("optimizer", f"{name}: {chosen.note}")
    for native in UNREAD.get(chosen.name, ()):
        if not reader.has({"eps": "adam_epsilon"}.get(native, f"adam_{native}")):
            reader.out.values.pop(f"optimizer.{native}", None)
    for option, value in _optimizer_options(reader):
        _set_optimizer_option(reader, chosen.name, option, value)
    if reader.out.values.get("optimizer.weight_decay"):
        reader.set("optimizer.decay_norms", False, "weight_decay")


def _set_optimizer_option(reader: Reader, name: str, option: str, value: Any) -> None:
    if name == "Adafactor" and option in OF_ADAFACTOR:
        reader.idle(f"optim_args.{option}", "transformers' Trainer does not pass it on; optimizer.adafactor_* are here")
    elif option == "betas" and isinstance(value, list | tuple) and len(value) == 2:
        reader.set("optimizer.beta1", float(value[0]), "optim_args")
        reader.set("optimizer.beta2", float(value[1]), "optim_args")
    elif option in ("eps", "weight_decay"):
        reader.set(f"optimizer.{option}", float(value), "optim_args")
    elif option == "momentum" and name == "SGD":
        reader.set("optimizer.beta1", float(value), "optim_args")
    elif option in ("fused", "foreach"):
        reader.idle(f"optim_args.{option}", "the kernel is optimizer.implementation")
    else:
        reader.problem("optim_args", f"{option}: only betas, eps, weight_decay and momentum (of sgd) are known")


def _optimizer_options(reader: Reader) -> list[tuple[str, Any]]:
    given = reader.get("optim_args")
    if isinstance(given, str):
        pairs = [part.partition("=") for part in given.replace(" ", "").split(",") if part]
        return [(name, value) for name, _, value in pairs]
    return list(reader.get("optim_args", table, {}).items())


HANDLERS = (schedule, optimizer)
