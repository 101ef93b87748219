"""Compares Shardline with TorchTitan, `transformers` and `peft` here: tokens/s, memory, time to the first step.

    python benchmarks/compare.py                              # whole steps of Llama 3 on one GPU (case bf16)
    python benchmarks/compare.py --cases moe,float8-rowwise   # --list names all cases
    python benchmarks/compare.py --trainers shardline,torchtitan   # without the others
    python benchmarks/compare.py --cases lora                 # LoRA and QLoRA of Llama 3 8B, and peft
    python benchmarks/compare.py --cases cpu-demo,cpu-lora    # the cases that need no GPU
    python benchmarks/compare.py -- --training.max_norm=0.5   # flags after -- go to the runs of Shardline

Every run has its own process and prints one JSON line when it ends; a table with ratios comes last. Numbers are medians
after the first half of the steps, which is warm-up. A run that fails (memory, a missing package) has an error instead
of numbers, and the comparison continues.

Memory is the allocator's peak of reserved bytes (TorchTitan resets its count of allocated bytes at each logged step),
on a CPU the peak of resident memory. The time to the first step is from the start of the process to the end of step 1,
with the compiler's caches as they are; the case first-step measures it with an empty cache and with the filled one.

TorchTitan 0.2.2 and `accelerate` (for the Trainer of `transformers`) must be importable: installed or in PYTHONPATH.
All runs use bfloat16 with float32 weights (on a CPU float32), with AdamW and clipping; frozen weights are bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Model(NamedTuple):
    """A flavor cut to `layers`, with changes to our fields and their equivalents in TorchTitan."""

    label: str
    name: str
    flavor: str
    layers: int
    seq_len: int
    batch: int
    changes: dict[str, Any] = {}  # noqa: RUF012
    titan_table: str = ""
    titan_flavor: str = ""
    titan_changes: dict[str, Any] = {}  # noqa: RUF012

    def flags(self) -> list[str]:
        """Return our flags for it, which also define the architecture of the `transformers` model."""
        if self.name == "demo":
            return ["--preset=demo", "--checkpoint.enable=false"]
        changes = {"n_layers": self.layers, **self.changes}
        return [
            f"--model.name={self.name}",
            f"--model.flavor={self.flavor}",
            *(f"--model.overrides.{key}={json.dumps(value).strip(chr(34))}" for key, value in changes.items()),
            "--training.dataset=demo",
            f"--training.seq_len={self.seq_len}",
            f"--training.local_batch_size={self.batch}",
            "--metrics.log_freq=1",
        ]


class Run(NamedTuple):
    trainer: str  # shardline, torchtitan, trainer, loop, peft
    model: Model
    flags: tuple[str, ...] = ()  # of Shardline and TorchTitan, which use the same names
    variant: str = ""
    cache: str = "as it was"  # the compiler's; or cold, or warm (as the cold run left it)


CAUSAL = {"attn_mask_type": "causal", "attn_backend": "auto"}
TITAN_CAUSAL = {"attn_type": "sdpa", "attn_mask_type": "causal"}
# TorchTitan has neither this flavor nor tied weights.
SMALL = {"dim": 2048, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.4, "multiple_of": 1024}


def llama_8b(layers: int, seq_len: int = 8192, batch: int = 2) -> Model:
    label = f"Llama 3 8B cut to {layers} layers"
    return Model(label, "llama3", "8B", layers, seq_len, batch, {}, "llama3_args", "8B")


LLAMA_8B, LLAMA_LONG = llama_8b(8), llama_8b(4, seq_len=131_072, batch=1)
LLAMA_WHOLE = llama_8b(32, seq_len=2048, batch=4)._replace(label="Llama 3 8B")
LLAMA_1B = Model(
    *("Llama 3.2 1B, output not tied", "llama3", "1B", 16, 8192, 2, {"tie_word_embeddings": False}),
    *("llama3_args", "8B", SMALL),
)
LLAMA_SHORT = LLAMA_1B._replace(label="Llama 3.2 1B, 512 tokens a step", seq_len=512, batch=1)
DEEPSEEK = Model(
    *("DeepSeek 16B cut to 8 layers", "deepseek_v3", "16B", 8, 4096, 4, CAUSAL),
    *("deepseekv3_args", "16B", TITAN_CAUSAL),
)
QWEN3 = Model(
    *("Qwen3 30B-A3B cut to 6 layers", "qwen3", "30B-A3B", 6, 4096, 4, CAUSAL),
    *("qwen3_args", "30B-A3B", {"max_seq_len": 4096}),
)
DEMO = Model("the demo preset", "demo", "", 4, 128, 16)

COMPILED = ("--compile.enable",)
FULL = (*COMPILED, "--activation_checkpoint.mode=full")
SELECTIVE = (*COMPILED, "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op")
OURS_AND_TITAN = ("shardline", "torchtitan")
TRAINERS = (*OURS_AND_TITAN, "trainer", "loop", "peft")
OFFLOAD_SOME = ("--activation_checkpoint.mode=offload", "--activation_checkpoint.offload_every=3")
LORA_RANK = 16
LORA = ("--lora.enable", f"--lora.rank={LORA_RANK}", f"--lora.alpha={2 * LORA_RANK}")  # of all linear layers


def float8(recipe: str) -> tuple[str, ...]:
    key = "--quantize.linear.float8"
    return (*COMPILED, f"--model.converters={key[2:]}", f"{key}.recipe_name={recipe}", f"{key}.filter_fqns=output")


def each(trainers: tuple[str, ...], model: Model, flags: tuple[str, ...], variant: str = "") -> list[Run]:
    return [Run(trainer, model, flags, variant) for trainer in trainers]


VARIANTS = {
    "AdamW": (),
    "Muon": ("--optimizer.name=Muon",),
    "AdamW, int8 state": ("--optimizer.state_dtype=int8",),
    "activation offload": ("--activation_checkpoint.mode=offload",),
    "selective, op": SELECTIVE[1:],
    "full checkpointing": FULL[1:],
}
CASES: dict[str, list[Run]] = {
    "bf16": each((*OURS_AND_TITAN, "trainer", "loop"), LLAMA_8B, COMPILED),
    "bf16-1B": each((*OURS_AND_TITAN, "trainer"), LLAMA_1B, COMPILED),
    "float8-tensorwise": each(OURS_AND_TITAN, LLAMA_8B, float8("tensorwise"), "float8 tensorwise"),
    "float8-rowwise": each(OURS_AND_TITAN, LLAMA_8B, float8("rowwise"), "float8 rowwise"),
    "selective": each(OURS_AND_TITAN, LLAMA_8B, SELECTIVE, "selective, op"),
    "first-step": [
        Run(trainer, LLAMA_8B, COMPILED, cache, cache) for cache in ("cold", "warm") for trainer in OURS_AND_TITAN
    ],
    "long": each(OURS_AND_TITAN, LLAMA_LONG, FULL, "131,072 tokens, full checkpointing"),
    "eager-1B": each((*OURS_AND_TITAN, "trainer"), LLAMA_1B, (), "not compiled"),
    "moe": [run for model in (DEEPSEEK, QWEN3) for run in each(OURS_AND_TITAN, model, COMPILED)],
    "lora": [
        *each(("shardline", "peft"), LLAMA_WHOLE, (*COMPILED, *LORA), "LoRA"),
        *each(("shardline",), LLAMA_WHOLE, (*COMPILED, *LORA, *OFFLOAD_SOME), "LoRA, every 3rd layer offloaded"),
        *each(("shardline",), LLAMA_WHOLE, (*FULL, *LORA), "LoRA, full checkpointing"),
        *each(("peft",), LLAMA_WHOLE, (FULL[1], *LORA), "LoRA, full checkpointing, not compiled"),
        *each(("shardline",), LLAMA_WHOLE, (*COMPILED, *LORA, "--lora.base_dtype=nf4"), "QLoRA"),
    ],
    "lora-more": [
        *each(("shardline", "peft"), LLAMA_WHOLE, LORA, "LoRA, not compiled"),
        *each(("peft",), LLAMA_WHOLE, (*FULL, *LORA), "LoRA, full checkpointing"),
        *each(("shardline",), LLAMA_WHOLE, (*FULL, *LORA, "--lora.base_dtype=nf4"), "QLoRA, full checkpointing"),
    ],
    "launch-bound": [
        *each(("shardline",), LLAMA_SHORT, (*COMPILED, "--compile.cuda_graphs"), "CUDA graphs"),
        *each(OURS_AND_TITAN, LLAMA_SHORT, COMPILED),
    ],
    "modes": [Run("shardline", LLAMA_8B, (*COMPILED, *flags), name) for name, flags in VARIANTS.items()],
    "cpu-demo": each(("shardline", "trainer", "loop"), DEMO, ()),
    "cpu-lora": each(("shardline", "peft"), DEMO, LORA, "LoRA"),
}
FIRST_STEP_STEPS = 2  # for the case first-step


# ---- what runs inside the processes ----------------------------------------------------------------------------------

# Modules that Shardline and TorchTitan import (`experimental.custom_import`).
PEAK = """
import atexit, resource, torch
def peak():
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
atexit.register(lambda: print("PEAK", peak(), flush=True))
"""
STEPS = """
import time
from shardline.registry import register_hook
@register_hook("after_step")
def mark(trainer, row):
    if row["step"] == 1 and torch.cuda.is_available():
        torch.cuda.synchronize()
    print("STEP", time.time(), time.process_time(), row["loss"], flush=True)
"""
FLAVOR = """
import copy, dataclasses
from torchtitan.models.{name} import {titan_table} as flavors
flavors["cut"] = dataclasses.replace(copy.deepcopy(flavors["{titan_flavor}"]), n_layers={layers}, **{titan_changes})
"""


def write_assets(folder: Path) -> None:
    """Write a byte tokenizer and some text in the formats that TorchTitan reads."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    data = folder / "c4_test"
    data.mkdir()
    text = "".join(f"Line {n} of a text that is long enough to be cut into many sequences. " for n in range(4000))
    (data / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(20)))


def transformers_model(spec: dict[str, Any]) -> tuple[Any, Any]:
    """Return a LlamaForCausalLM with the architecture of our flags, and the config of the flags."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardline.config.load import load_config
    from shardline.models.flavors import resolve

    config = load_config(overrides=spec["flags"])
    arch = resolve(config.model)
    llama = LlamaConfig(
        hidden_size=arch.dim, num_hidden_layers=arch.n_layers, num_attention_heads=arch.n_heads,
        num_key_value_heads=arch.n_kv_heads, head_dim=arch.head_dim, intermediate_size=arch.ffn_dim,
        vocab_size=arch.vocab_size, rope_theta=arch.rope_theta, max_position_embeddings=config.training.seq_len,
        tie_word_embeddings=arch.tie_word_embeddings, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with here():
        return LlamaForCausalLM(llama), config


def finished_step(loss: float | None = None) -> None:
    """Print what `STEPS` prints."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print("STEP", time.time(), time.process_time(), loss, flush=True)


def run_trainer(spec: dict[str, Any]) -> None:
    """Run the Trainer of `transformers`: bfloat16 autocast on a GPU, fused AdamW, random tokens."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, config = transformers_model(spec)
    length, batch, steps = config.training.seq_len, config.training.local_batch_size, spec["steps"]

    class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return batch * steps

        def __getitem__(self, index: int) -> dict[str, Any]:
            tokens = torch.randint(256, (length,))
            return {"input_ids": tokens, "labels": tokens}

    class Marks(TrainerCallback):
        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            finished_step()

    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch, max_steps=steps, bf16=on_gpu, use_cpu=not on_gpu,
            torch_compile=spec["compiled"], optim="adamw_torch_fused", max_grad_norm=1.0, logging_steps=10,
            save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=on_gpu,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=Tokens(), callbacks=[Marks()]).train()


def run_loop(spec: dict[str, Any]) -> None:
    """Run the same model in a plain loop."""
    import torch

    model, config = transformers_model(spec)
    device = next(model.parameters()).device
    step_model = torch.compile(model) if spec["compiled"] else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(spec["steps"]):
        tokens = torch.randint(256, (config.training.local_batch_size, config.training.seq_len), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = step_model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        finished_step(loss.item())


def run_peft(spec: dict[str, Any]) -> None:
    """Run the same model, frozen in bfloat16 on a GPU, with `peft`'s LoRA on all linear layers, in a plain loop."""
    import torch
    from peft import LoraConfig, get_peft_model

    on_gpu = here().type == "cuda"
    torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)  # not float32 first, which would be the peak
    model, config = transformers_model(spec)
    torch.set_default_dtype(torch.float32)
    device = next(model.parameters()).device
    if spec["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model = get_peft_model(
        model, LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    ).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    step_model = torch.compile(model) if spec["compiled"] else model
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    for _ in range(spec["steps"]):
        tokens = torch.randint(256, (config.training.local_batch_size, config.training.seq_len), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = step_model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        finished_step(loss.item())


INSIDE = {"trainer": run_trainer, "loop": run_loop, "peft": run_peft}


# ---- processes -------------------------------------------------------------------------------------------------------


def command_of(run: Run, steps: int, folder: Path, extra: list[str]) -> list[str]:
    """Return the command line of a run; `folder` holds what it imports, reads and writes."""
    model = run.model
    if run.trainer == "shardline":
        return [
            *(sys.executable, "-m", "shardline", "train", *model.flags(), *run.flags),
            *(f"--training.steps={steps}", f"--job.dump_folder={folder}/run"),
            *("--experimental.custom_import=compare_marks", *extra),
        ]
    if run.trainer == "torchtitan":
        checkpointing = any(flag.startswith("--activation_checkpoint.mode") for flag in run.flags)
        return [
            *(sys.executable, "-m", "torchtitan.train", f"--job.dump_folder={folder}/run"),
            *(f"--model.name={model.name}", "--model.flavor=cut", f"--model.hf_assets_path={folder}"),
            *("--training.dataset=c4_test", f"--training.dataset_path={folder}/c4_test"),
            *(f"--training.seq_len={model.seq_len}", f"--training.local_batch_size={model.batch}"),
            *(f"--training.steps={steps}", "--metrics.log_freq=1", "--experimental.custom_import=compare_marks"),
            *([] if checkpointing else ["--activation_checkpoint.mode=none"]),
            *run.flags,
        ]
    spec = {
        "flags": model.flags(),
        "steps": steps,
        "compiled": COMPILED[0] in run.flags,
        "checkpointing": FULL[1] in run.flags,
    }
    return [sys.executable, __file__, "--inside", run.trainer, json.dumps(spec)]


def write_module(run: Run, folder: Path) -> None:
    """Write what Shardline and TorchTitan import."""
    if run.trainer in OURS_AND_TITAN:
        own = STEPS if run.trainer == "shardline" else FLAVOR.format(**run.model._asdict())
        (folder / "compare_marks.py").write_text(PEAK + own)


def environment_of(run: Run, folder: Path, cache: Path) -> dict[str, str]:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    if run.trainer == "torchtitan":
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **rendezvous}
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as in its start script
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a read-only installation has its caches here
    environment["PYTHONPYCACHEPREFIX"] = f"{cache}/python"
    if run.cache != "as it was":
        environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
    return environment


class Output(NamedTuple):
    code: int
    lines: list[tuple[float, str]]  # seconds since the start of the process
    began: float  # the clock of `time.time`


def execute(command: list[str], environment: dict[str, str], limit: float) -> Output:
    """Run a process for at most `limit` seconds and record when each line arrived; a killed one has a negative code."""
    began, lines = time.time(), []
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    timer = threading.Timer(limit, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.time() - began, re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip())))
        process.wait()
    finally:
        timer.cancel()
        process.kill()
    return Output(process.returncode, lines, began)


def measure(run: Run, steps: int, extra: list[str], limit: float, cache: Path) -> dict[str, Any]:
    """Return the numbers of a run, or its `error`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_module(run, folder)
        if run.trainer == "torchtitan":
            write_assets(folder)
        command = command_of(run, steps, folder, extra)
        output = execute(command, environment_of(run, folder, cache), limit)
    tokens = run.model.seq_len * run.model.batch
    read = titan_numbers if run.trainer == "torchtitan" else step_numbers
    found = read(output, tokens) if output.code == 0 else None
    return found or {"error": last_error(output, limit)}


# ---- what their output says ------------------------------------------------------------------------------------------


def settled(values: list[float]) -> float:
    """Return the median after the first half."""
    return statistics.median(values[len(values) // 2 :])


def step_numbers(output: Output, tokens: int) -> dict[str, Any] | None:
    """Parse lines `STEP wall-clock cpu-seconds loss` of Shardline and the `transformers` runs."""
    rows = [line.split()[1:] for _, line in output.lines if line.startswith("STEP ")]
    if not rows:
        return None
    wall, cpu = ([float(row[place]) for row in rows] for place in (0, 1))
    losses = [None if row[2] == "None" else float(row[2]) for row in rows]
    found: dict[str, Any] = {"first_step_seconds": round(wall[0] - output.began, 2)}
    if len(rows) > 1:
        seconds, cpu_seconds = (settled([b - a for a, b in itertools.pairwise(marks)]) for marks in (wall, cpu))
        found |= {"tokens_per_second": tokens / seconds, "cpu_seconds": cpu_seconds}
    return found | {"memory_gib": peak_of(output), "first_loss": losses[0], "last_loss": losses[-1]}


TITAN_STEP = re.compile(r"\bstep: +(\d+) .*?loss: +([\d.naif]+) .*?tps: ([\d,]+)")


def titan_numbers(output: Output, tokens: int) -> dict[str, Any] | None:
    """Parse TorchTitan's own lines `step:  1  loss: 12.2  grad_norm: 1.9  memory: 60.53GiB(43.31%)  tps: 1,234 ...`."""
    rows = [(seconds, found) for seconds, line in output.lines if (found := TITAN_STEP.search(line))]
    if not rows:
        return None
    losses = [float(found[2]) for _, found in rows]
    return {
        "first_step_seconds": round(rows[0][0], 2),
        "tokens_per_second": settled([float(found[3].replace(",", "")) for _, found in rows]),
        "memory_gib": peak_of(output),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def peak_of(output: Output) -> float | None:
    peaks = [float(line.split()[1]) for _, line in output.lines if line.startswith("PEAK ")]
    return peaks[-1] if peaks else None


def last_error(output: Output, limit: float) -> str:
    """Return the last line that names an error; otherwise the last line."""
    if output.code == -9:
        return f"killed: after {limit:.0f} s, or by a system short of memory"
    lines = [line for _, line in output.lines if line and not line.startswith(("PEAK ", "STEP "))]
    errors = [line for line in lines if re.search(r"(Error|Exception)\b|^error:", line)]
    return (errors or lines or [f"ended with code {output.code}"])[-1]


# ---- the table -------------------------------------------------------------------------------------------------------


def ratio(first: dict[str, Any], this: dict[str, Any], key: str) -> float | None:
    """Return the first run's number divided by this one's."""
    above, below = first.get(key), this.get(key)
    return above / below if above is not None and below else None


COLUMNS = {
    "tokens_per_second": "{:,.0f}",
    "memory_gib": "{:.1f}",
    "first_step_seconds": "{:.1f}",
    "cpu_seconds": "{:.3f}",  # per step; the number to trust on a busy CPU
}


def table(results: list[dict[str, Any]]) -> str:
    """Return one row per run; after each number comes its ratio to the first run with the same model and cache."""
    lines = ["| case | model | run | tokens/s | | GiB | | first step, s | | CPU time, s | |", "|---" * 11 + "|"]
    firsts: dict[tuple[str, ...], dict[str, Any]] = {}
    for result in results:
        first = firsts.setdefault((result["case"], result["model"], result["cache"]), result)
        run = ", ".join(filter(None, (result["trainer"], result["variant"])))
        cells = [cell for key, form in COLUMNS.items() for cell in _cells(first, result, key, form)]
        lines.append("| " + " | ".join([result["case"], result["model"], run, *cells]) + " |")
    return "\n".join(lines)


def _cells(first: dict[str, Any], result: dict[str, Any], key: str, form: str) -> tuple[str, str]:
    """Return a number and its ratio; `cannot` instead of the speed of a failed run."""
    if "error" in result:
        return "cannot" if key == "tokens_per_second" else "", ""
    found = ratio(first, result, key)
    number = "" if result.get(key) is None else form.format(result[key])
    return number, "" if found is None or first is result else f"{found:.2f} x"


def here() -> Any:
    """Return the device of the runs; nothing is allocated on it, because its memory is theirs."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def mfu(run: Run, rate: float) -> float | None:
    """Return the share of the GPU's bfloat16 peak; None if that is unknown."""
    from shardline.config.load import load_config
    from shardline.models.flavors import resolve
    from shardline.run.device import flops_per_token, peak_flops

    peak = peak_flops(here())
    arch = resolve(load_config(overrides=run.model.flags()).model)
    return rate * flops_per_token(arch, run.model.seq_len) / peak if peak else None


def about() -> dict[str, str]:
    """Return the machine and the relevant versions."""
    import torch

    from shardline.run.device import device_name

    versions = {"torch": torch.__version__, "python": platform.python_version()}
    for package in ("torchtitan", "torchao", "transformers", "accelerate", "peft", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"machine": device_name(here()), **versions}


def compare(
    names: list[str], steps: int, extra: list[str], limit: float, trainers: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield the results of the cases, each as soon as it is available."""
    for name in names:
        with tempfile.TemporaryDirectory() as caches:
            for run in CASES[name]:
                if run.trainer not in trainers:
                    continue
                count = steps if run.cache == "as it was" else FIRST_STEP_STEPS
                found = measure(run, count, extra, limit, Path(caches, run.trainer))
                shape = {"model": run.model.label, "seq_len": run.model.seq_len, "batch": run.model.batch}
                what = {"case": name, "trainer": run.trainer, "variant": run.variant, "cache": run.cache}
                if run.cache != "as it was":
                    found.pop("tokens_per_second", None)
                if "tokens_per_second" in found:
                    found["mfu"] = mfu(run, found["tokens_per_second"])
                yield {"benchmark": "compare", **what, **shape, "steps": count, **found}


def chosen_cases(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no case is named {unknown[0]!r}; there are {', '.join(CASES)}")
    return names


def chosen_trainers(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in TRAINERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no trainer is named {unknown[0]!r}; there are {', '.join(TRAINERS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=chosen_cases, help="comma list; bf16 on a GPU, cpu-demo elsewhere")
    parser.add_argument("--trainers", type=chosen_trainers, default=list(TRAINERS), help="comma list; all by default")
    parser.add_argument("--list", action="store_true", help="list the cases and their runs")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--limit", type=float, default=280, help="seconds that one run may take")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("extra", nargs="*", help="flags after -- go to the runs of Shardline")
    options = parser.parse_args()
    if options.list:
        for name, runs in CASES.items():
            for run in runs:
                print(f"{name:18} {run.trainer:11} {run.model.label}{', ' + run.variant if run.variant else ''}")
        return
    if options.inside:
        exec(PEAK, {})
        INSIDE[options.inside[0]](json.loads(options.inside[1]))
        return
    machine, results = about(), []
    names = options.cases or ["bf16" if here().type == "cuda" else "cpu-demo"]
    for result in compare(names, options.steps, options.extra, options.limit, options.trainers):
        print(json.dumps({**result, **machine}), flush=True)
        results.append(result)
    print(f"\n{table(results)}\n\nRatios are the first run's number divided by that of the row.")


if __name__ == "__main__":
    main()
