"""Every section and key of the config, with type, default and one line of meaning. Names are TorchTitan 0.2.2's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, Field, PrivateAttr
from pydantic.fields import FieldInfo

from shardline.config.types import (
    URL,
    AdafactorEps,
    AlphaPattern,
    Beta,
    DecayRate,
    Duration,
    EveryNth,
    ExitCode,
    Fraction,
    MomentumRange,
    Name,
    NCCLVariables,
    NonNegative,
    NonNegativeFloat,
    NonNegativeOrLatest,
    Port,
    Positive,
    PositiveFloat,
    PositiveOrAll,
    RankPattern,
    Section,
    Share,
    SourceTables,
    SpecialTokens,
    Text,
)
from shardline.errors import ConfigError


def key(default: Any, meaning: str) -> Any:
    """Return a section's key, with its default and one line for the documentation."""
    return Field(default=default, description=meaning)


def _steps_between(steps: int, ratio: float | None, total_steps: int) -> int:
    """Return an interval in steps; a fraction of the run is rounded up, so that at most 1 / ratio fit into it."""
    return steps if ratio is None else max(1, math.ceil(ratio * total_steps - 1e-6))


class Job(Section):
    config_file: Text | None = key(None, "The file to read; given on the command line only.")
    dump_folder: Name | None = key(None, "Folder of the run; unset means outputs/NAME-DATE-TIME.")
    description: Text = key("default job", "Free text, printed at the start of the run.")
    print_config: bool = key(False, "Print the resolved config when the run starts.")
    save_config_file: Text | None = key(None, "Also write the resolved config to this file.")
    custom_config_module: Text = key("", "Module that adds its own keys to the config.")


class Profiling(Section):
    enable_profiling: bool = key(False, "Record traces with the PyTorch profiler.")
    save_traces_folder: Name = key("profile_traces", "Folder of the traces, inside the run folder.")
    profile_freq: Positive = key(10, "Steps between traces.")
    profiler_active: Positive = key(1, "Steps recorded in each trace.")
    profiler_warmup: NonNegative = key(3, "Steps the profiler runs before it records.")
    enable_memory_snapshot: bool = key(False, "Record snapshots of the CUDA allocator.")
    save_memory_snapshot_folder: Name = key("memory_snapshot", "Folder of the snapshots.")
    record_shapes: bool = key(True, "Record the input shapes of each operation.")
    with_stack: bool = key(False, "Record the Python stack of each operation.")
    top_ops: NonNegative = key(20, "Rows of the table of the most expensive operations, written beside each trace.")


class Metrics(Section):
    log_freq: Positive = key(10, "Steps between logged rows.")
    enable_tensorboard: bool = key(False, "Write TensorBoard event files.")
    disable_color_printing: bool = key(False, "Print without colors.")
    save_tb_folder: Name = key("tb", "Folder of the TensorBoard files, inside the run folder.")
    save_for_all_ranks: bool = key(False, "Write TensorBoard and W&B metrics on every rank, not only the first.")
    enable_wandb: bool = key(False, "Send metrics to Weights & Biases.")
    wandb_project: Name | None = key(None, "Project of the W&B run; unset: $WANDB_PROJECT, or shardline.")
    wandb_entity: Name | None = key(None, "Team of the W&B run; unset: $WANDB_ENTITY or $WANDB_TEAM.")
    wandb_name: Name | None = key(None, "Name of the W&B run; unset: $WANDB_NAME, or the name of the run folder.")
    wandb_run_id: Name | None = key(None, "Id of the W&B run to start or continue; unset: $WANDB_RUN_ID.")
    wandb_group: Name | None = key(None, "Group of the W&B run; unset: $WANDB_RUN_GROUP.")
    wandb_tags: list[Text] = key([], "Tags of the W&B run.")
    wandb_mode: Literal["online", "offline", "disabled"] | None = key(None, "Mode of W&B; unset: $WANDB_MODE.")
    prometheus_port: Port | None = key(None, "Serve metrics as OpenMetrics on this port; 0: any free port.")


class Model(Section):
    name: Name = key("llama3", 'Model family, or "auto" for the Hugging Face folder in hf_assets_path.')
    flavor: Text = key("debugmodel", "Named size of the family.")
    implementation: Literal["auto", "native", "transformers"] = key(
        "auto", "Code that runs a Hugging Face folder's model; auto: native for the families that Shardline has."
    )
    hf_assets_path: Text = key(
        "./tests/assets/tokenizer", "Folder with tokenizer, config.json and weights, or owner/name@revision on the Hub."
    )
    tokenizer_path: Text | None = key(
        None, 'tokenizer.json, its folder or a name on the Hub; "bytes": byte tokenizer; unset: hf_assets_path.'
    )
    converters: list[Text] = key([], "Conversions applied to the model, such as quantize.linear.float8.")
    print_after_conversion: bool = key(False, "Print the model once it is built and has its weights.")
    overrides: dict[str, Any] = key({}, "Architecture fields that differ from the flavor.")


class HFTransformers(Section):
    model: Text = key("", 'TorchTitan\'s key for the folder of model.name = "transformers_modeling_backend".')


class Optimizer(Section):
    name: Name = key(
        "AdamW", "AdamW, Adam, Adafactor, SGD, Lion, LAMB, LARS, Muon, or one that a custom module registered."
    )
    lr: NonNegativeFloat = key(8e-4, "Peak learning rate.")
    beta1: Beta = key(0.9, "Decay of the first moment; momentum of LARS and SGD.")
    beta2: Beta = key(0.95, "Decay of the second moment.")
    eps: NonNegativeFloat = key(1e-8, "Added to the denominator of the update.")
    weight_decay: NonNegativeFloat = key(0.1, "Weight decay (decoupled for AdamW).")
    implementation: Literal["for-loop", "foreach", "fused"] = key("fused", "Kernel of the update.")
    early_step_in_backward: bool = key(False, "Update each parameter in backward, as soon as its gradient is complete.")
    early_step_clipping: Literal["refuse", "two_pass"] = key(
        "refuse", "Clipping with early_step_in_backward: refuse it, or run forward and backward twice (exact)."
    )
    decay_norms: bool = key(True, "Apply weight decay to norm weights and biases too.")
    trust_coefficient: PositiveFloat = key(0.001, "LARS: a layer's step relative to its weights, per unit of lr.")
    muon_lr_factor: PositiveFloat = key(1.0, "Muon: learning rate of the blocks' matrices, as a multiple of lr.")
    muon_momentum: Beta = key(0.95, "Muon: momentum (Nesterov) of the blocks' matrices.")
    muon_ns_steps: Positive = key(5, "Muon: Newton-Schulz iterations that orthogonalize an update.")
    muon_adjust_lr: Literal["original", "match_rms_adamw"] = key(
        "original", "Muon: how a matrix's shape scales its step; match_rms_adamw matches the size of AdamW's steps."
    )
    adafactor_scale_parameter: bool = key(False, "Adafactor: scale steps with the size of the weights.")
    adafactor_relative_step: bool = key(
        False, "Adafactor: a learning rate of its own, 0.01 and later 1 / sqrt(step), instead of lr and lr_scheduler."
    )
    adafactor_warmup_init: bool = key(False, "Adafactor: that rate starts at 1e-6 and grows by 1e-6 per step.")
    adafactor_clip_threshold: PositiveFloat = key(1.0, "Adafactor: largest root mean square of an update, before lr.")
    adafactor_decay_rate: DecayRate = key(-0.8, "Adafactor: second moments decay by 1 - step ** decay_rate.")
    adafactor_momentum: Beta = key(0.0, "Adafactor: decay of the first moment; 0 keeps none.")
    adafactor_eps: AdafactorEps = key(
        [1e-30, 1e-3], "Adafactor: added to squared gradients, and the smallest size of weights (scale_parameter)."
    )
    lr_scaling: Literal["none", "linear"] = key("none", "linear: lr x global batch size / lr_scaling_base_batch.")
    lr_scaling_base_batch: Positive = key(256, "Global batch size that lr is meant for (lr_scaling).")
    state_dtype: Literal["parameter", "bfloat16", "int8"] = key("parameter", "Type of the moments of AdamW and Adam.")


class LRScheduler(Section):
    warmup_steps: NonNegative = key(200, "Steps of warmup.")
    warmup_type: Literal["linear", "quadratic", "cosine", "sqrt"] = key("linear", "Shape of the warmup.")
    warmup_start_factor: Fraction = key(0.0, "The warmup begins at this fraction of the peak learning rate.")
    warmup_ratio: Fraction | None = key(None, "Fraction of the schedule that warms up, instead of warmup_steps.")
    total_steps: Positive | None = key(None, "Length of the schedule; unset means training.steps.")
    decay_ratio: Fraction | None = key(None, "Fraction of the schedule that decays; unset: all of it after warmup.")
    decay_steps: NonNegative | None = key(None, "Steps of decay, instead of decay_ratio.")
    decay_end_ratio: Fraction | None = key(None, "Fraction of the schedule after which the decay has ended; unset: 1.")
    decay_type: Literal["linear", "sqrt", "cosine", "rex", "polynomial", "inverse_sqrt", "constant"] = key(
        "linear", "Shape of the decay; rex stays high and falls late; constant does not decay."
    )
    decay_power: PositiveFloat = key(1.0, "polynomial: exponent of the fraction of the decay that is left.")
    timescale: Positive | None = key(None, "inverse_sqrt: the rate is halved after 3 x this many steps; unset: warmup.")
    cycles: Positive = key(1, "How often the decay runs from the peak to its end: restarts plus one.")
    min_lr_factor: Fraction = key(0.0, "The decay ends at this fraction of the peak learning rate.")
    bend_on_resume: bool = key(
        False, "Resume even if this schedule would have given the last step another learning rate."
    )
    include_ends: bool = key(False, "The first and the last step are the ends of the curve, as in one-cycle schedules.")
    momentum_range: MomentumRange | None = key(
        None, "Lowest and highest momentum (Adam's beta1), lowest where the rate peaks; unset: it is constant."
    )

    def warmup(self, total: int) -> int:
        """The steps of warmup in a schedule of `total` steps."""
        return min(total, self.warmup_steps if self.warmup_ratio is None else int(self.warmup_ratio * total))

    def decay(self, total: int, rest: int) -> int:
        """Return the requested steps of decay in a schedule of `total` steps, or `rest` if none were requested."""
        if self.decay_steps is not None:
            return self.decay_steps
        return rest if self.decay_ratio is None else round(total * self.decay_ratio)


class Dataloader(Section):
    num_workers: NonNegative = key(0, "Processes that read data ahead; 0 reads in the training process.")
    persistent_workers: bool = key(False, "Keep the reading processes between epochs.")
    pin_memory: bool = key(False, "Copy batches through page-locked memory (CUDA).")
    prefetch_factor: Positive | None = key(None, "Batches each worker keeps ready.")


class Training(Section):
    objective: Literal["next_token", "dpo"] = key(
        "next_token", "Predict each next token, or prefer the better answer of each pair (direct preference)."
    )
    dataset: Name | None = key(
        "demo", '"demo", a registered source or a Hub dataset; with dataset_path a label. Unset above 100M parameters.'
    )
    dataset_path: Text | None = key(
        None, "Files, glob, folder, or prepared store to read; on the Hub: hf://datasets/owner/name/path."
    )
    local_batch_size: Positive = key(8, "Sequences per data-parallel rank in one forward pass.")
    global_batch_size: PositiveOrAll = key(-1, "Sequences per step over all ranks; -1: one forward pass per rank.")
    gradient_accumulation_steps: Positive | None = key(
        None, "Forward passes per rank and step, instead of global_batch_size."
    )
    seq_len: Positive = key(2048, "Tokens per sequence.")
    max_norm: NonNegativeFloat = key(1.0, "Gradients with a larger norm are scaled down to it; 0 does not clip.")
    steps: Positive = key(10000, "Optimizer steps to run.")
    enable_cpu_offload: bool = key(False, "Keep parameters, gradients and optimizer state in CPU memory.")
    dtype: Literal["bfloat16", "float32"] = key("float32", "Type of the stored parameters.")
    mixed_precision_param: Literal["bfloat16", "float16", "float32"] = key(
        "bfloat16", "Compute type; unset: float32 on a CPU. float16 scales the loss."
    )
    mixed_precision_reduce: Literal["float32"] = key("float32", "Type in which gradients are summed across ranks.")
    tf32: bool = key(False, "Multiply float32 matrices with TensorFloat-32 on GPUs: faster, three digits.")
    gc_freq: Positive = key(50, "Steps between garbage collections.")
    gc_debug: bool = key(False, "Collect garbage every step and log what it freed.")
    dataloader: Dataloader = key(Dataloader(), "How batches are read.")
    epochs: PositiveFloat | None = key(None, "Passes over the data, instead of training.steps.")
    dataset_text_field: Name = key("text", "Field of each record that holds the text.")
    dataset_split: Name = key("train", "Split of a Hugging Face dataset.")
    cache_folder: Name | None = key(None, "Folder of prepared data; unset: $SHARDLINE_CACHE or ~/.cache/shardline.")
    verify_data: bool = key(
        True, "Compare prepared data, for validation too, with its checksums when it is first read."
    )
    nonfinite: Literal["stop", "skip"] = key(
        "stop", "After a NaN or infinite loss or gradient: stop the run, or skip the step."
    )
    max_loss: PositiveFloat | None = key(None, "Stop the run after max_loss_steps steps in a row above this loss.")
    max_loss_steps: Positive = key(3, "Steps in a row above max_loss that stop the run.")
    unfrozen_parameters: list[Text] = key(
        [], "Regular expressions for the Hugging Face names of weights to train; others are frozen. Empty: train all."
    )
    neftune_alpha: PositiveFloat | None = key(
        None, "Noise on embeddings in training (NEFTune), up to this / sqrt(seq_len x dim) per element; unset: none."
    )
    loss_chunk_tokens: NonNegative = key(0, "Tokens per chunk of the loss; 0 derives it from the sizes.")

    @property
    def rows_of_a_sample(self) -> int:
        """Rows of tokens that a sample has: a pair has two."""
        return 2 if self.objective == "dpo" else 1


class Dpo(Section):
    beta: PositiveFloat = key(0.1, "How strongly the model is held to its reference.")
    loss: Literal["sigmoid", "hinge", "ipo", "robust"] = key("sigmoid", "Loss on a pair's difference in log-odds.")
    label_smoothing: Beta = key(0.0, "sigmoid, robust: probability that the answers of a pair are swapped.")
    reference: Literal["auto", "base", "copy", "none"] = key(
        "auto", "LoRA's frozen weights (base), a frozen copy of the initial weights, or none; auto: base with LoRA."
    )


class Data(Section):
    sources: SourceTables = key([], "Tables with path and type: records to train on, instead of training.dataset.")
    validation_sources: SourceTables = key([], "The same for validation.")
    held_out: NonNegativeFloat = key(0.0, "Records kept for validation: a fraction below 1, or their number.")
    mixture: Literal["concatenate", "weights"] = key(
        "concatenate", "Read every record once per epoch, or sample sources by their weight."
    )
    temperature: PositiveFloat = key(1.0, "weights: each weight is raised to the power 1 / temperature.")
    packing: Literal["first_fit", "none"] = key("first_fit", "first_fit packs records into rows; none pads each.")
    deduplicate: bool = key(False, "Drop records whose tokens equal those of an earlier record.")
    excess_length: Literal["drop", "truncate", "raise"] = key("drop", "What to do with records longer than seq_len.")
    min_length: Positive | None = key(None, "Records with fewer tokens are dropped.")
    shuffle: bool = key(True, "Read in a new random order each epoch.")
    chat_template: Name | None = key(
        None, 'Name, "tokenizer_default", "tokenizer_default_fallback_NAME" or "jinja"; unset: the tokenizer\'s.'
    )
    chat_template_jinja: Text | None = key(None, "Text of a template, or a file that holds it.")
    chat_template_kwargs: dict[str, Any] = key({}, "Variables that templates get, such as enable_thinking = false.")
    default_system_message: Text | None = key(None, "System message of conversations that have none.")
    train_on_inputs: bool = key(False, "Train on prompts too, in formats with a prompt and an answer.")
    eot_tokens: list[Text] | None = key(None, "Tokens that end a turn; unset: the end-of-text token.")
    special_tokens: SpecialTokens = key(
        {}, "Special tokens that differ from the tokenizer's: bos_token, eos_token, pad_token, unk_token, ..."
    )
    added_tokens: list[Name] = key([], "Tokens added to the tokenizer; the model gets rows for them.")


class Parallelism(Section):
    data_parallel_replicate_degree: PositiveOrAll = key(
        1, "Copies of the model (DDP, or HSDP with sharding); -1: the remaining ranks."
    )
    data_parallel_shard_degree: PositiveOrAll = key(-1, "Ranks that shard a copy (FSDP); -1: the remaining ranks.")
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = key(
        "default", "Free gathered parameters after forward; default does so unless the model is pipelined."
    )
    tensor_parallel_degree: Positive = key(1, "Ranks that split each layer's matrices.")
    disable_loss_parallel: bool = key(False, "Compute the loss from the whole output layer on every rank.")
    enable_sequence_parallel: bool = key(True, "Split norms and residuals over tensor-parallel ranks, by tokens.")
    data_parallel_mode: Literal["sync", "diloco", "async"] = key(
        "sync", "How model copies synchronize: sum gradients each step, average weights periodically, or never wait."
    )
    accumulation_sync: Literal["step", "micro_batch", "scatter"] = key(
        "step", "Sum gradients per step, per micro-batch, or (HSDP) reduce-scatter each and all-reduce replicas once."
    )
    overlap_gradient_reduction: bool = key(True, "Sum replicas' gradients during backward, not after it.")
    gradient_bucket_mib: PositiveFloat = key(25.0, "MiB of gradients in one all-reduce of replicas.")
    gradient_compression: Literal["none", "bfloat16", "int8", "topk", "powersgd"] = key(
        "none", "How replicas exchange gradients: in full, rounded, only the largest, or (DDP) as low-rank matrices."
    )
    topk_fraction: Share = key(0.01, "Share of a bucket's gradients that topk sends.")
    powersgd_rank: Positive = key(4, "Rank of the matrices that powersgd sends.")
    fsdp_prefetch: NonNegative = key(1, "Decoder layers that FSDP gathers ahead; 0: one, and only in backward.")
    enable_async_tensor_parallel: bool = key(False, "Overlap tensor-parallel collectives with their matrix products.")
    async_tensor_parallel_backend: Literal["auto", "serial", "ring", "symmetric", "fused"] = key(
        "auto", "How they overlap: auto measures each product at the start; other names force a backend."
    )
    async_tensor_parallel_compare_freq: NonNegative = key(
        10, "Every n-th logged step runs serially, to measure what async TP gains; 0: never."
    )
    pipeline_parallel_degree: Positive = key(1, "Pipeline-parallel ranks.")
    module_fqns_per_model_part: list[list[Text]] | None = key(
        None, "Module names of each pipeline stage, instead of an even split."
    )
    pipeline_parallel_first_stage_less_layers: NonNegative = key(
        1, "Layers that the embedding counts as; 1 for this and the next key splits stages by weights."
    )
    pipeline_parallel_last_stage_less_layers: NonNegative = key(
        1, "Layers that the output counts as; 1 for this and the key above splits stages by weights."
    )
    pipeline_parallel_layers_per_stage: Positive | None = key(None, "Layers per stage.")
    pipeline_parallel_schedule: Name = key("1F1B", "Order of forward and backward passes.")
    pipeline_parallel_schedule_csv: Text | None = key("", "CSV file with a custom schedule.")
    pipeline_parallel_microbatch_size: Positive = key(1, "Sequences in one pipeline micro-batch.")
    pipeline_parallel_expert_parallel_overlap: bool = key(
        True, "TorchTitan's key, without effect: tokens travel within their own micro-batch."
    )
    context_parallel_degree: Positive = key(1, "Ranks that split each sequence.")
    context_parallel_load_balancer: Name | None = key(
        "headtail", "How a sequence is split: headtail gives each rank an early and a late slice, none gives one."
    )
    context_parallel_rotate_method: Literal["allgather", "alltoall", "ring", "ulysses"] = key(
        "allgather",
        "How ranks see other slices: gather keys, pass them on (ring, alltoall), or exchange heads (ulysses).",
    )
    expert_parallel_degree: Positive = key(1, "Ranks that split the experts.")
    expert_tensor_parallel_degree: Positive = key(1, "Ranks that split each expert's matrices.")
    expert_parallel_comm_backend: Literal["standard", "all_to_all", "symmetric", "deepep"] = key(
        "standard", "How tokens are sent to experts; standard: all_to_all or symmetric, whichever is faster here."
    )
    expert_parallel_dispatch_dtype: Literal["same", "float8"] = key(
        "same", "Type in which tokens are sent to experts; expert outputs and all gradients keep theirs."
    )


class Checkpoint(Section):
    enable: bool = key(False, "Save checkpoints, and resume from the latest one.")
    enable_ft_dataloader_checkpoints: bool = key(True, "Save the data position per replica group.")
    folder: Name = key("checkpoint", "Folder of the checkpoints, inside the run folder.")
    interval: Positive = key(500, "Steps, or seconds (interval_type), between checkpoints.")
    interval_type: Literal["steps", "seconds"] = key("steps", "Unit of interval; rank 0 counts the seconds.")
    interval_ratio: Fraction | None = key(None, "Fraction of the run between checkpoints, instead of interval.")
    initial_load_path: Text | None = key(None, "Checkpoint (path, fsspec URL) or Hugging Face folder of a new run.")
    initial_load_model_only: bool = key(True, "Load only the weights from initial_load_path.")
    initial_load_in_hf: bool = key(False, "initial_load_path (or hf_assets_path) is a Hugging Face folder.")
    initial_load_in_hf_quantized: bool = key(False, "The Hugging Face weights are quantized.")
    last_save_model_only: bool = key(False, "The last checkpoint holds only the weights.")
    last_save_in_hf: bool = key(False, "Write the last checkpoint in Hugging Face format.")
    export_dtype: Literal["float16", "bfloat16", "float32"] = key("float32", "Weight type of a model-only last save.")
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = key("disabled", "Background saves.")
    save_timeout_seconds: Positive = key(1800, "Longest time for one save; then the run ends and names the file.")
    keep_latest_k: NonNegative = key(10, "Checkpoints to keep; 0 keeps all.")
    mirror: URL | None = key(None, "fsspec URL to which checkpoints are copied, and from which --resume fetches them.")
    load_step: NonNegativeOrLatest = key(-1, "Step to resume from; -1 is the latest.")
    exclude_from_loading: list[Text] = key(
        [], "Parts that are not loaded: model, optimizer, lr_scheduler, dataloader, train_state."
    )
    enable_first_step_checkpoint: bool = key(False, "Also save after the first step.")
    create_seed_checkpoint: bool = key(False, "Save the initial weights as step 0 and stop.")
    load_only: bool = key(False, "Load, but never save.")
    preempted_exit_code: ExitCode = key(0, "Exit code of a run that saved and stopped for SIGTERM or a time limit.")
    save_before: Duration | None = key(None, "Time after the job's start to save and stop by; unset: SLURM's limit.")

    def every(self, total_steps: int) -> int:
        """The steps between two checkpoints of a run of this length."""
        return _steps_between(self.interval, self.interval_ratio, total_steps)


class ActivationCheckpoint(Section):
    mode: Literal["selective", "full", "memory_budget", "offload", "none"] = key(
        "none", "What to recompute in backward, or to keep in host memory until then."
    )
    selective_ac_option: EveryNth = key("2", "A number n recomputes every n-th decoder layer; op chooses by operation.")
    offload_every: Positive = key(1, "offload: every n-th decoder layer's activations are kept in host memory.")
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[Text] = key(
        ["moe.router.gate"], "With op: linear layers whose matrix shapes are always recomputed."
    )
    early_stop: bool = key(False, "End a recomputation as soon as everything needed is recomputed.")
    memory_budget: Fraction = key(0.5, "memory_budget: fraction of the activations to keep.")
    visualize_memory_budget_pareto: bool = key(False, "Plot run time against memory for all budgets.")
    preserve_rng_state: bool = key(True, "Recompute with the random state of the first pass.")
    determinism_check: Literal["default", "none"] = key("default", "Compare recomputed shapes with the first pass.")
    debug: bool = key(False, "Record operations to explain a mismatch; slow.")


class Compile(Section):
    enable: bool = key(False, "Use torch.compile.")
    components: list[Literal["model", "loss"]] = key(["model", "loss"], "What is compiled.")
    backend: Name = key("inductor", "Backend of torch.compile.")
    cuda_graphs: bool = key(False, "Record forward and backward as a CUDA graph and replay it, on one GPU.")


class Float8Linear(Section):
    enable_fsdp_float8_all_gather: bool = key(False, "Gather float8 weights instead of bfloat16 ones.")
    precompute_float8_dynamic_scale_for_fsdp: bool = key(
        False, "Compute the scales of all weights at once, after each step."
    )
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = key(None, "How scales are chosen.")
    filter_fqns: list[Text] = key([], "Modules that are not converted; auto_filter_small_kn skips small ones.")
    emulate: bool = key(False, "Multiply the rounded numbers in the type of the activations: works on any device.")


class MXLinear(Section):
    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = key("triton", "Kernel of the cast.")
    recipe_name: Name = key("mxfp8_cublas", "Name of the MX recipe.")
    filter_fqns: list[Text] = key(["output"], "Modules that are not converted.")


class QuantizeLinear(Section):
    float8: Float8Linear = key(Float8Linear(), "Float8 linear layers.")
    mx: MXLinear = key(MXLinear(), "MX linear layers.")


class Float8Grouped(Section):
    fqns: list[Text] | Text = key([], "Expert modules that compute in float8.")
    emulate: bool = key(False, "Multiply the rounded numbers in the type of the activations: works on any device.")


class MXGrouped(Section):
    recipe_name: Literal["mxfp8"] = key("mxfp8", "MX recipe of the experts.")
    fqns: list[Text] | Text = key([], "Expert modules that compute in MX formats.")


class QuantizeGrouped(Section):
    float8: Float8Grouped = key(Float8Grouped(), "Float8 experts.")
    mx: MXGrouped = key(MXGrouped(), "MX experts.")


class Quantize(Section):
    linear: QuantizeLinear = key(QuantizeLinear(), "Linear layers.")
    grouped_mm: QuantizeGrouped = key(QuantizeGrouped(), "Experts.")


class Lora(Section):
    enable: bool = key(False, "Train low-rank matrices beside frozen weights.")
    rank: Positive = key(16, "Rows of A and columns of B.")
    alpha: PositiveFloat = key(16.0, "The product of A and B is scaled by alpha / rank.")
    rank_pattern: RankPattern = key(
        {}, "Ranks of certain targets: regular expressions for the ends of their names; the first match counts."
    )
    alpha_pattern: AlphaPattern = key({}, "Alphas of certain targets, in the same way.")
    bias: Literal["none", "all", "lora_only"] = key(
        "none", "Also train the model's biases: all of them, or only those of targets."
    )
    dropout: Beta = key(0.0, "Fraction of A's input that is set to zero in training.")
    use_rslora: bool = key(False, "Scale by alpha / sqrt(rank) instead.")
    use_dora: bool = key(False, "DoRA: also train the magnitude of each row of the weight.")
    target_modules: list[Name] | Text = key(
        [], "Names or endings of modules, or one regular expression; empty: all linear layers of blocks."
    )
    modules_to_save: list[Name] = key([], "Modules that are trained in full, such as embed_tokens or norm.")
    layers: list[NonNegative] | None = key(None, "Indices of the layers with targets; unset: all.")
    base_dtype: Literal["same", "nf4", "int8"] = key(
        "same", "How frozen weights of linear layers are stored: in the compute type, in 4 bits or in 8."
    )
    double_quantization: bool = key(True, "With nf4: store the scales of blocks in 8 bits, too.")
    adapter_path: Name | None = key(None, "Folder of a PEFT adapter to start from.")
    lr_ratio: PositiveFloat = key(1.0, "Learning rate of B over that of A (LoRA+).")


class NCCL(Section):
    algorithm: Name | None = key(None, "NCCL_ALGO, such as Ring or Tree; unset lets NCCL choose.")
    protocol: Name | None = key(None, "NCCL_PROTO, such as Simple or LL128.")
    min_channels: Positive | None = key(None, "NCCL_MIN_NCHANNELS.")
    max_channels: Positive | None = key(None, "NCCL_MAX_NCHANNELS.")
    buffer_size: Positive | None = key(None, "NCCL_BUFFSIZE, in bytes.")
    net_gdr_level: Name | None = key(None, "NCCL_NET_GDR_LEVEL: LOC, PIX, PXB, PHB or SYS.")
    env: NCCLVariables = key({}, "Other NCCL_* variables, by name; they take precedence over the keys above.")


class Comm(Section):
    init_timeout_seconds: Positive = key(300, "Longest wait for a collective until the first step ends.")
    train_timeout_seconds: Positive = key(100, "Longest wait for a collective after that.")
    trace_buf_size: NonNegative = key(20000, "Collectives that the flight recorder keeps; 0 turns it off.")
    save_traces_folder: Name = key("comm_traces", "Folder of the flight recorder's files.")
    save_traces_file_prefix: Name = key("rank_", "Prefix of those file names.")
    mode: Literal["default", "fake_backend", "local_tensor"] = key("default", "Real or simulated communication.")
    stop_timeout_seconds: Positive = key(
        30, "Longest time to stop after Ctrl-C or SIGTERM; then ranks are killed, and a single process ends."
    )
    lost_machine_seconds: Positive = key(10, "Silence after which a machine is lost (--max-restarts, --nnodes 1:4).")
    bind_cpus: bool = key(False, "Bind ranks to their share of the cores, on the NUMA node of their GPU if known.")
    nccl: NCCL = key(NCCL(), "NCCL settings, the same on every rank.")


class MemoryEstimation(Section):
    enable: bool = key(False, "Estimate the memory of a run instead of running it.")
    disable_fake_mode: bool = key(False, "Estimate with real tensors.")


class FaultTolerance(Section):
    enable: bool = key(False, "Train in replica groups that may join and leave.")
    process_group: Name = key("gloo", "Backend between replica groups: gloo.")
    process_group_timeout_ms: Positive = key(10000, "Longest wait for another group in a step, which is then repeated.")
    replica_id: NonNegative = key(0, "Number of this replica group, from 0; everything else is the same in all groups.")
    group_size: NonNegative = key(
        0, "Replica groups that training.global_batch_size = -1 assumes; the batch stays fixed."
    )
    min_replica_size: Positive = key(1, "Fewest replica groups that train; fewer wait for more.")
    semi_sync_method: Literal["diloco", "local_sgd"] | None = key(
        None, "How workers are averaged periodically: diloco (the default of that mode), or a plain average."
    )
    sync_steps: Positive = key(5, "Steps between two averages of the same fragment of the model.")
    num_fragments: Positive = key(1, "Groups of consecutive layers that are averaged in turn, at even intervals.")
    fragment_sync_delay: NonNegative = key(0, "Steps between sending a fragment and applying its average.")
    fragment_update_alpha: Fraction = key(0.0, "Share of a worker's own weights that stays when an average is applied.")
    should_quantize: bool = key(False, "Send changes in 8 bits.")
    quantized_dtype: Literal["int8", "float8"] = key("int8", "8-bit type of the changes that are sent.")
    outer_lr: PositiveFloat = key(0.7, "Learning rate with which the averaged change moves the global weights.")
    outer_momentum: Beta = key(0.9, "Nesterov momentum of these outer steps.")
    async_staleness: NonNegative = key(
        2, "Steps by which an asynchronous worker's contribution may be late; a worker farther ahead waits."
    )
    async_steps: Positive = key(
        1, "Local steps of a worker in one contribution, on equal parts of its samples; 1: it sends its gradients."
    )
    async_lr_power: Fraction = key(
        0.5, "A contribution that is n steps late has its learning rate divided by (1 + n) to this power."
    )
    async_late: Literal["wait", "drop"] = key(
        "wait", "Wait for late workers, or let others redo their contributions and drop those that come late."
    )
    async_late_seconds: PositiveFloat = key(60.0, "Seconds that a worker waits for others before they count as late.")


class Experimental(Section):
    custom_import: Text = key("", "Module or .py file that registers flavors, sources, optimizers, hooks.")
    custom_args_module: Text = key("", "Older name of job.custom_config_module.")


class Validation(Section):
    enable: bool = key(False, "Run a validation loop.")
    dataset: Name = key("demo", "Held-out data, named as training.dataset is.")
    dataset_path: Text | None = key(None, "Held-out files, named as training.dataset_path is.")
    local_batch_size: Positive = key(8, "Sequences per data-parallel rank in one forward pass.")
    seq_len: Positive = key(2048, "Tokens per sequence.")
    freq: Positive = key(10, "Training steps between validations.")
    freq_ratio: Fraction | None = key(None, "Fraction of the run between validations, instead of freq.")
    patience: Positive | None = key(None, "End the run after this many validations in a row without a lower loss.")
    steps: PositiveOrAll = key(-1, "Batches per data-parallel rank; -1 reads all.")
    dataloader: Dataloader = key(Dataloader(), "How batches are read.")
    dataset_text_field: Name = key("text", "Field of each record that holds the text.")
    dataset_split: Name = key("validation", "Split of a Hugging Face dataset.")

    def every(self, total_steps: int) -> int:
        """The steps between two validations in a run of this length."""
        return _steps_between(self.freq, self.freq_ratio, total_steps)


class TextGeneration(Section):
    prompts: list[Text] = key([], "Texts that the model continues while it trains; empty: no samples.")
    freq: Positive = key(100, "Training steps between samples; the first and the last step have them too.")
    max_new_tokens: Positive = key(32, "Tokens of a sample; each is one forward pass of a training micro-batch.")
    temperature: NonNegativeFloat = key(0.0, "0 takes the likeliest token; higher is more varied.")
    top_k: Positive | None = key(None, "Sample from this many of the likeliest tokens; unset: from all.")
    seed: NonNegative = key(0, "Seed of the sampling, the same for each sample.")


class Debug(Section):
    seed: NonNegative | None = key(None, "Seed of weights and data order; unset means 0.")
    deterministic: bool = key(False, "Use deterministic kernels only: two runs are bitwise equal.")
    deterministic_warn_only: bool = key(False, "Warn instead of failing if an operation has no deterministic kernel.")
    moe_force_load_balance: bool = key(False, "Send every expert the same number of tokens; for tests.")
    check_replicas_freq: NonNegative = key(0, "Steps between checks that copies are equal; 0: at the start only.")


class Config(Section):
    """The whole config, read-only; `replace` returns a changed copy."""

    job: Job = key(Job(), "The run as a whole.")
    profiling: Profiling = key(Profiling(), "Traces and memory snapshots.")
    metrics: Metrics = key(Metrics(), "What is logged, and where.")
    model: Model = key(Model(), "What is trained.")
    hf_transformers: HFTransformers = key(HFTransformers(), "TorchTitan's experiment that runs models of transformers.")
    optimizer: Optimizer = key(Optimizer(), "How weights are updated.")
    lr_scheduler: LRScheduler = key(LRScheduler(), "Learning rate over time.")
    training: Training = key(Training(), "Data, batch, length and precision.")
    dpo: Dpo = key(Dpo(), "Training on pairs of answers (training.objective).")
    data: Data = key(Data(), "Records to fine-tune on, and mixtures of sources.")
    parallelism: Parallelism = key(Parallelism(), "How the work is split over ranks.")
    checkpoint: Checkpoint = key(Checkpoint(), "Saving and loading.")
    activation_checkpoint: ActivationCheckpoint = key(ActivationCheckpoint(), "Recomputation that saves memory.")
    compile: Compile = key(Compile(), "torch.compile.")
    quantize: Quantize = key(Quantize(), "Low precision, switched on by model.converters.")
    lora: Lora = key(Lora(), "LoRA: low-rank matrices beside frozen weights.")
    comm: Comm = key(Comm(), "Time limits and settings of communication.")
    memory_estimation: MemoryEstimation = key(MemoryEstimation(), "Memory estimates without a run.")
    fault_tolerance: FaultTolerance = key(FaultTolerance(), "Replica groups.")
    experimental: Experimental = key(Experimental(), "Extensions.")
    validation: Validation = key(Validation(), "Loss on held-out data.")
    generation: TextGeneration = key(TextGeneration(), "Samples of text while it trains.")
    debug: Debug = key(Debug(), "Seeds and determinism.")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _alias_notes: tuple[str, ...] = PrivateAttr(default=())
    _set: set[str] | None = PrivateAttr(default=None)  # the keys in _origins, and the tables that hold them
    _checked_for: int | None = PrivateAttr(default=None)  # number of ranks, see check.checked_layout

    @property
    def alias_notes(self) -> tuple[str, ...]:
        """Lines to log: older names that were translated, and keys that another one replaced."""
        return self._alias_notes

    def is_set(self, key: str) -> bool:
        """Whether a file, a flag or `replace` gave this key, or any key below it."""
        if self._set is None:
            paths = [given.split(".") for given in self._origins]
            self._set = {".".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}
        return key in self._set

    def origin(self, key: str) -> str:
        """Where the key was given (`file:line`, `command line`); empty for a default."""
        return self._origins.get(key, "")

    def given(self) -> list[str]:
        """Every key that a file, a flag or `replace` gave."""
        return list(self._origins)

    def value(self, key: str) -> Any:
        """`config.value("training.steps")`."""
        found: Any = self
        for part in key.split("."):
            found = found[part] if isinstance(found, dict) else getattr(found, part)
        return found

    def replace(self, changes: Mapping[str, Any], origin: str | None = "replace") -> Config:
        """Return a checked copy with some keys changed; with `origin` None, the keys keep their origins."""
        from shardline.config.assemble import build_config

        unknown = [key for key in changes if key not in leaves()]
        if unknown:
            raise ConfigError(f"replace: there are no such keys: {', '.join(unknown)}")
        values = {key: self.value(key) for key in leaves()} | dict(changes)
        origins = self._origins | (dict.fromkeys(changes, origin) if origin is not None else {})
        return build_config(values, origins, self._alias_notes)

    def __eq__(self, other: object) -> bool:
        """Whether all values are equal. Where they came from (`job.config_file` included) does not matter."""
        return isinstance(other, Config) and _comparable(self) == _comparable(other)

    __hash__ = None  # type: ignore[assignment]


@cache
def leaves() -> dict[str, FieldInfo]:
    """Every key (`training.dataloader.num_workers`), in the order of the schema."""
    return dict(_walk(Config, ""))


@cache
def tables() -> list[str]:
    """Every table name (`training`, `training.dataloader`, ...), in the order of the schema."""
    paths = [key.split(".") for key in leaves()]
    return list(dict.fromkeys(".".join(path[:depth]) for path in paths for depth in range(1, len(path))))


def _walk(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _walk(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _comparable(config: Config) -> dict[str, Any]:
    values = config.model_dump()
    values["job"].pop("config_file")
    return values
