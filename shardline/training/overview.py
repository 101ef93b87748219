"""What a user checks before the first step: a table that describes the run, and notes on what is easily overlooked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardline.adapters.lora import trained_shapes
from shardline.comm.store import ranks_from_environment
from shardline.config.schema import Config
from shardline.config.write import toml_value
from shardline.data.files import find_files
from shardline.data.loader import Loader
from shardline.data.order import global_batch
from shardline.data.record_samples import RecordSamples
from shardline.data.token_store import is_store
from shardline.errors import UserError
from shardline.models.flavors import model_label
from shardline.models.fused_weights import active_words, is_low_rank, logical_shapes, parameter_count
from shardline.optim.lr_schedule import lr_factor
from shardline.optim.optimizer import scaled_lr
from shardline.parallel.context.context import attention_words
from shardline.run.device import available_memory, device_name, resident_memory
from shardline.run.stop import why_not_saved
from shardline.training.memory_need import MemoryNeed, memory_need, save_bytes
from shardline.words import TableRows, counted, listed, roughly

if TYPE_CHECKING:
    from shardline.training.setup import Setup

# Peak learning rates by which models of about this size were pre-trained with AdamW and batches of 0.5 to 16 million
# tokens: the Pythia suite (arXiv 2304.01373; 70M to 12B), Llama 2 (2307.09288; 7B to 70B) and Llama 3 (2407.21783; 8B
# to 405B). (largest number of parameters, rates)
PRE_TRAINING: tuple[tuple[float, str], ...] = (
    (100e6, "1e-3"),
    (250e6, "6e-4"),
    (1.2e9, "3e-4"),
    (4e9, "1.6e-4 to 3e-4"),
    (20e9, "1.2e-4 to 3e-4"),
    (100e9, "1.5e-4"),
    (math.inf, "8e-5"),
)
FINE_TUNING = "1e-5 to 2e-5"  # of all weights: Llama 2's chat models (2307.09288), Alpaca
LORA = "1e-4 to 2e-4"  # QLoRA (2305.14314)


# ---- the table -------------------------------------------------------------------------------------------------------


def overview(run: Setup) -> TableRows:
    """Return the label and value of each row. The model is built, but its parameters may be on the meta device."""
    config, layout, precision = run.config, run.layout, run.precision
    kernel = attention_words(config, run.arch, run.device, precision.compute, otherwise=run.kernel)
    need = _need(run)
    size = f"{parameter_count(run.arch):,} parameters{active_words(run.arch)}"
    rows = [("model", f"{model_label(config.model)}, {size}")]
    if run.model.frozen or run.model.adaptation is not None:
        rows.append(("trained", _trained(run)))
    rows.append(("device", _device(run)))
    if layout.world_size > 1:
        rows.append(("layout", f"{layout.world_size} ranks: {layout}"))
    if run.mesh.apart:
        rows.append(("workers", _workers(config, layout.dp_replicate)))
    types = [str(kind).removeprefix("torch.") for kind in (precision.compute, precision.storage)]
    stored = "" if types[0] == types[1] else f", weights in {types[1]}"
    rows += [
        ("precision", f"{types[0]}{stored}; attention by {kernel}"),
        ("data", _data(config, "training", run.loader, run.total_steps)),
        ("tokenizer", f"{run.tokenizer.name}, {run.tokenizer.vocab_size:,} ids"),
        ("batch", _batch(config, layout.data_ranks)),
        ("schedule", _schedule(config, run.total_steps, run.loader.global_batch_size)),
    ]
    if run.validation is not None:
        every = counted(config.validation.every(run.total_steps), "step") + ", and after the first and the last"
        samples = counted(run.validation.samples_in(config.validation.steps), "sample")
        rows.append(("validation", f"every {every}: {samples} of {_source(config, 'validation', run.validation)}"))
    rows += [
        ("memory", _memory(run, need)),
        ("run folder", str(run.folder.path)),
        ("checkpoints", _checkpoints(run)),
    ]
    changes = [f"{key} from {_shown(before)} to {_shown(now)}" for key, before, now in run.changed]
    return [*rows, ("changed", listed(changes, 8))] if changes else rows


def _shown(value: Any) -> str:
    return "unset" if value is None else toml_value(value)


def _trained(run: Setup) -> str:
    """How much of the model is trained, if something is frozen."""
    own = parameter_count(run.arch)
    if run.model.adaptation is None:
        count = own - sum(math.prod(logical_shapes(run.arch)[name]) for name in run.model.frozen)
        whole = own
    else:
        shapes = trained_shapes(run.model).items()
        count = sum(math.prod(shape) for _, shape in shapes)
        whole = own + sum(math.prod(shape) for name, shape in shapes if is_low_rank(name))
    return f"{count:,} of {whole:,} parameters ({100 * count / whole:.3g} %)"


def _workers(config: Config, workers: int) -> str:
    """`2, each clips by its own gradient norm; averaged every 100 steps (diloco), in 2 fragments ...`."""
    section = config.fault_tolerance
    if config.parallelism.data_parallel_mode == "async":
        most = counted(section.async_staleness, "step")
        outer = f"outer rate {section.outer_lr:g}, momentum {section.outer_momentum:g}"
        of = f" of {section.async_steps} local steps ({outer})" if section.async_steps > 1 else ""
        what = "waited for" if section.async_late == "wait" else f"dropped after {section.async_late_seconds:g} s"
        return f"{workers}, asynchronous; contributions{of} at most {most} late, late workers {what}"
    plain = section.semi_sync_method == "local_sgd"
    outer = "local SGD" if plain else f"DiLoCo, outer rate {section.outer_lr:g}, momentum {section.outer_momentum:g}"
    parts = f" in {section.num_fragments} fragments" if section.num_fragments > 1 else ""
    late = section.fragment_sync_delay
    after = f", applied {counted(late, 'step')} later" if late else ""
    code = f", sent in {section.quantized_dtype}" if section.should_quantize else ""
    every = counted(section.sync_steps, "step")
    return f"{workers}, each clips by its own gradient norm; averaged every {every}{parts}{after}{code} ({outer})"


def _device(run: Setup) -> str:
    ranks, name = run.layout.world_size, device_name(run.device)
    if ranks == 1:
        return name
    machines = ranks // ranks_from_environment("LOCAL_WORLD_SIZE", ranks)
    where = f" on {machines} machines" if machines > 1 else ""
    return f"{ranks} x {name}{where}" if run.device.type == "cuda" else f"{name}, {ranks} processes{where}"


def _data(config: Config, section: str, loader: Loader, steps: int) -> str:
    """`text.jsonl: 1 file, 12,345 tokens; 200 steps make 3.2 epochs`."""
    samples = loader.samples
    if isinstance(samples, RecordSamples):
        count = samples.rows.report.records
        held = (f"{counted(count, 'record')}, " if count else "") + f"{samples.rows.tokens:,} tokens"
    else:
        files = _files(config, section)
        held = (f"{counted(files, 'file')}, " if files else "") + f"{samples.store.tokens:,} tokens"
    epochs = steps * loader.global_batch_size / loader.samples_per_epoch
    made = f"{epochs:.2g} epoch{'' if f'{epochs:.2g}' == '1' else 's'}"
    return f"{_source(config, section, loader)}: {held}; {counted(steps, 'step')} make {made}"


def _source(config: Config, section: str, loader: Loader) -> str:
    settings, samples = getattr(config, section), loader.samples
    if isinstance(samples, RecordSamples):
        return listed([name if name != "demo" else "generated records" for name in samples.names], 3)
    if settings.dataset_path is None and settings.dataset == "demo":
        return "demo (generated text)"
    return str(settings.dataset_path or settings.dataset)


def _files(config: Config, section: str) -> int | None:
    """The number of text files that were read; None for other kinds of data."""
    settings = getattr(config, section)
    if settings.dataset_path is None or is_store(settings.dataset_path):
        return None
    try:
        return len(find_files(settings.dataset_path, settings.dataset_split))
    except (UserError, OSError):  # a dataset of the Hub, a registered source
        return None


def _batch(config: Config, ranks: int) -> str:
    section = config.training
    whole, each = global_batch(section, ranks), section.rows_of_a_sample
    passes = whole // (section.local_batch_size * ranks)
    unit = "sequence" if each == 1 else "pair"
    of_ranks = f" x {ranks} data ranks" if ranks > 1 else ""
    made = f"{counted(section.local_batch_size, unit)} x {passes} micro-batch{'es' if passes > 1 else ''}{of_ranks}"
    tokens = f"{whole * each * section.seq_len:,} tokens a step"
    twice = "" if each == 1 else "2 x "
    return f"{twice}{section.seq_len:,} tokens x {made} = {counted(whole, unit)}, {tokens}"


def _schedule(config: Config, steps: int, batch: int) -> str:
    """`AdamW, 200 steps: warmup 20, peak 3e-03, cosine to 3e-04`."""
    section, peak = config.lr_scheduler, scaled_lr(config, batch)
    total = section.total_steps or steps
    words = [f"warmup {section.warmup(total)}", f"peak {peak:.3g}"]
    end = peak * lr_factor(total, config, total)
    if section.decay_type != "constant" and end < peak:
        words.append(f"{section.decay_type} to {end:.3g}{'' if total == steps else f' at step {total}'}")
    else:
        words.append("then constant")
    return f"{config.optimizer.name}, {counted(steps, 'step')}: {', '.join(words)}"


def _memory(run: Setup, need: MemoryNeed) -> str:
    """Expected against available memory; on a CPU both include what this process already uses."""
    held, free = _in_use(run), _free(run)
    of = "" if free is None else f" of {roughly(held + free)}"
    whose = " on the fullest rank; rank 0" if run.layout.pp > 1 else ""
    before = f", the process itself {roughly(held)}" if held else ""
    return f"about {roughly(held + need.peak)}{of}{whose}: {need.words(run.config.optimizer.name)}{before}"


def _need(run: Setup) -> MemoryNeed:
    planned = None if run.verdict is None else run.verdict.memory
    return memory_need(run.model, run.config, run.layout, run.precision, run.device.type, planned)


def _in_use(run: Setup) -> int:
    return resident_memory() if run.device.type == "cpu" else 0


def _free(run: Setup) -> int | None:
    return available_memory(run.device, ranks_from_environment("LOCAL_WORLD_SIZE", run.layout.world_size))


def _checkpoints(run: Setup) -> str:
    section, reason = run.config.checkpoint, why_not_saved(run.config)
    if reason is not None:
        return f"none, nothing will be saved: {reason}"
    every, kept = section.every(run.total_steps), section.keep_latest_k
    when = "at the end" if every >= run.total_steps else f"every {counted(every, 'step')} and at the end"
    if section.interval_type == "seconds":
        when = f"every {counted(section.interval, 'second')} and at the end"
    of_them = "all kept" if kept == 0 else f"the newest {kept} kept"
    size = roughly(save_bytes(run.model, run.config, run.precision))
    last = ", the last one weights only" if section.last_save_model_only or section.last_save_in_hf else ""
    return f"{when}, {of_them}, about {size} each{last}"


# ---- notes -----------------------------------------------------------------------------------------------------------


def overview_notes(run: Setup) -> Iterator[str]:
    """Lines about how several ranks change the batch, and about a learning rate that was not set."""
    config, ranks = run.config, run.layout.data_ranks
    alone, together = (global_batch(config.training, number) for number in (1, ranks))
    if together != alone and not run.folder.resume:
        local = config.training.local_batch_size
        remedy = f"; training.local_batch_size = {local // ranks} keeps it" if local % ranks == 0 else ""
        yield f"{ranks} data ranks make the batch {ranks} times that of one process: {together}, not {alone}{remedy}"
    if not config.is_set("optimizer.lr"):
        yield (
            f"no learning rate was given: optimizer.lr = {config.optimizer.lr:g} is the default; usual for"
            f" {usual_rate(config, parameter_count(run.arch))}"
        )


def usual_rate(config: Config, parameters: int) -> str:
    """The kind of run, and the learning rate that is usual for it."""
    if config.lora.enable:
        return f"LoRA: {LORA}"
    if config.checkpoint.initial_load_in_hf or config.checkpoint.initial_load_path is not None:
        return f"fine-tuning all weights: {FINE_TUNING}"
    return f"{parameters:,} parameters: {next(rate for most, rate in PRE_TRAINING if parameters <= most)}"


def overview_warnings(run: Setup) -> Iterator[str]:
    """Lines about what the user will most likely regret."""
    config, free, need = run.config, _free(run), _need(run).peak
    if free is not None and need > free:
        changes = () if run.verdict is None else run.verdict.changes
        remedy = "; ".join(
            f"{change.words}, {roughly(int(change.memory.total))} ({change.flags})" for change in changes
        )
        yield (
            f"about {roughly(need)} of memory are needed and {roughly(free)} are free; "
            + (
                f"what fits, the fastest first: {remedy}"
                if remedy
                else "more ranks or a shorter training.seq_len need less"
            )
        )
    generated = config.training.dataset == "demo" and config.training.dataset_path is None and not config.data.sources
    if not config.checkpoint.enable and not generated:
        yield "this run will not be saved: checkpoint.enable is false (--checkpoint.enable saves it)"
