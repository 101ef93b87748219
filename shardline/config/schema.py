"""Every section and key of the config, with type, default and one line of meaning. Names are TorchTitan 0.2.2's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, Field, PrivateAttr

from shardline.config.types import (
    URL,
    Beta,
    Duration,
    EveryNth,
    ExitCode,
    Fraction,
    Name,
    NCCLVariables,
    NonNegative,
    NonNegativeFloat,
    NonNegativeOrLatest,
    Positive,
    PositiveFloat,
    PositiveOrAll,
    Section,
    Text,
)
from shardline.errors import ConfigError


class Job(Section):
    config_file: Text | None = Field(default=None, description="The file to read; given on the command line only.")
    dump_folder: Name | None = Field(default=None, description="Folder of the run; unset means outputs/NAME-DATE-TIME.")
    description: Text = Field(default="default job", description="Free text, printed at the start of the run.")
    print_config: bool = Field(default=False, description="Print the resolved config when the run starts.")
    save_config_file: Text | None = Field(default=None, description="Also write the resolved config to this file.")
    custom_config_module: Text = Field(default="", description="Module that adds keys of its own to the config.")


class Profiling(Section):
    enable_profiling: bool = Field(default=False, description="Record traces with the PyTorch profiler.")
    save_traces_folder: Name = Field(
        default="profile_traces", description="Folder of the traces, inside the run folder."
    )
    profile_freq: Positive = Field(default=10, description="Steps from one trace to the next.")
    profiler_active: Positive = Field(default=1, description="Steps recorded in each trace.")
    profiler_warmup: NonNegative = Field(default=3, description="Steps the profiler runs before it records.")
    enable_memory_snapshot: bool = Field(default=False, description="Record snapshots of the CUDA allocator.")
    save_memory_snapshot_folder: Name = Field(default="memory_snapshot", description="Folder of the snapshots.")
    record_shapes: bool = Field(default=True, description="Keep the shapes of the inputs of each operation in traces.")
    with_stack: bool = Field(default=False, description="Keep the Python stack of each operation in traces.")
    top_ops: NonNegative = Field(
        default=20, description="Rows of the table of the costliest operations beside each trace."
    )


class Metrics(Section):
    log_freq: Positive = Field(default=10, description="Steps from one logged row to the next.")
    enable_tensorboard: bool = Field(default=False, description="Write TensorBoard event files.")
    disable_color_printing: bool = Field(default=False, description="Print without colours.")
    save_tb_folder: Name = Field(default="tb", description="Folder of the TensorBoard files, inside the run folder.")
    save_for_all_ranks: bool = Field(
        default=False, description="Write TensorBoard and W&B metrics on every rank, not only the first."
    )
    enable_wandb: bool = Field(default=False, description="Send metrics to Weights & Biases.")


class Model(Section):
    name: Name = Field(
        default="llama3", description='Model family, or "auto" for the Hugging Face folder in hf_assets_path.'
    )
    flavor: Text = Field(default="debugmodel", description="Named size of the family.")
    hf_assets_path: Text = Field(
        default="./tests/assets/tokenizer", description="Folder with tokenizer, config.json and weights."
    )
    tokenizer_path: Text | None = Field(
        default=None,
        description='tokenizer.json or its folder; "bytes" is the embedded byte tokenizer; unset uses hf_assets_path.',
    )
    converters: list[Text] = Field(
        default=[], description="Changes made to the built model, such as quantize.linear.float8."
    )
    print_after_conversion: bool = Field(
        default=False, description="Print the model once it is built and has its weights."
    )
    overrides: dict[str, Any] = Field(default={}, description="Architecture fields that differ from the flavor.")


class Optimizer(Section):
    name: Name = Field(default="AdamW", description="AdamW, Adam, LAMB, LARS, or one that a custom module registered.")
    lr: NonNegativeFloat = Field(default=8e-4, description="Peak learning rate.")
    beta1: Beta = Field(default=0.9, description="Decay of the first moment; momentum of LARS.")
    beta2: Beta = Field(default=0.95, description="Decay of the second moment.")
    eps: NonNegativeFloat = Field(default=1e-8, description="Added to the denominator of the update.")
    weight_decay: NonNegativeFloat = Field(default=0.1, description="Weight decay (decoupled for AdamW).")
    implementation: Literal["for-loop", "foreach", "fused"] = Field(
        default="fused", description="Kernel of the update."
    )
    early_step_in_backward: bool = Field(
        default=False, description="Step each parameter as soon as its gradient is there."
    )
    early_step_clipping: Literal["refuse", "two_pass"] = Field(
        default="refuse",
        description="Clipping with early_step_in_backward: refused, or exact by running forward and backward twice.",
    )
    decay_norms: bool = Field(default=True, description="Apply weight decay to norm weights and biases too.")
    trust_coefficient: PositiveFloat = Field(
        default=0.001, description="LARS: length of a layer's step relative to its weights, per unit of lr."
    )
    lr_scaling: Literal["none", "linear"] = Field(
        default="none", description="linear multiplies lr by the global batch size / lr_scaling_base_batch."
    )
    lr_scaling_base_batch: Positive = Field(
        default=256, description="Sequences per optimizer step that lr is meant for (lr_scaling)."
    )
    state_dtype: Literal["parameter", "bfloat16"] = Field(
        default="parameter", description="Type of the moments of AdamW and Adam between steps."
    )


class LRScheduler(Section):
    warmup_steps: NonNegative = Field(default=200, description="Steps of linear warmup.")
    total_steps: Positive | None = Field(
        default=None, description="Length of the schedule; unset means training.steps."
    )
    decay_ratio: Fraction | None = Field(
        default=None, description="Share of the schedule that decays; unset decays from the end of warmup."
    )
    decay_type: Literal["linear", "sqrt", "cosine"] = Field(default="linear", description="Shape of the decay.")
    min_lr_factor: Fraction = Field(default=0.0, description="The decay ends at this share of the peak learning rate.")


class Dataloader(Section):
    num_workers: NonNegative = Field(default=0, description="Processes that read data ahead; 0 reads in place.")
    persistent_workers: bool = Field(default=False, description="Keep the reading processes between epochs.")
    pin_memory: bool = Field(default=False, description="Copy batches through page-locked memory (CUDA).")
    prefetch_factor: Positive | None = Field(default=None, description="Batches each worker keeps ready.")


class Training(Section):
    dataset: Name = Field(
        default="demo", description='"demo", a registered source, a Hub name; a mere label with dataset_path.'
    )
    dataset_path: Text | None = Field(
        default=None, description="Files, glob, folder, prepared store, or dataset name to read."
    )
    local_batch_size: Positive = Field(default=8, description="Sequences per data-parallel rank in one forward pass.")
    global_batch_size: PositiveOrAll = Field(
        default=-1, description="Sequences per optimizer step over all ranks; -1 means one forward pass of each."
    )
    seq_len: Positive = Field(default=2048, description="Tokens per sequence.")
    max_norm: NonNegativeFloat = Field(
        default=1.0, description="Gradients with a larger norm are scaled down to it; 0 does not clip."
    )
    steps: Positive = Field(default=10000, description="Optimizer steps to run.")
    enable_cpu_offload: bool = Field(
        default=False, description="Keep parameters, gradients and optimizer state in CPU memory."
    )
    dtype: Literal["bfloat16", "float32"] = Field(default="float32", description="Type of the stored parameters.")
    mixed_precision_param: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Type to compute in; when not given, CPU computes in float32."
    )
    mixed_precision_reduce: Literal["float32"] = Field(
        default="float32", description="Type gradients are summed in across ranks."
    )
    gc_freq: Positive = Field(default=50, description="Steps from one garbage collection to the next.")
    gc_debug: bool = Field(default=False, description="Collect garbage every step and log what it freed.")
    dataloader: Dataloader = Field(default=Dataloader(), description="How batches are read.")
    epochs: PositiveFloat | None = Field(default=None, description="Passes over the data, instead of training.steps.")
    dataset_text_field: Name = Field(default="text", description="Field of each record that holds the text.")
    dataset_split: Name = Field(default="train", description="Split of a Hugging Face dataset.")
    cache_folder: Name | None = Field(
        default=None, description="Where prepared data is kept; unset means $SHARDLINE_CACHE or ~/.cache/shardline."
    )
    nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="What a NaN or infinite loss or gradient does."
    )
    loss_chunk_tokens: NonNegative = Field(
        default=0, description="Tokens per chunk of the loss; 0 chooses from the sizes."
    )


class Parallelism(Section):
    data_parallel_replicate_degree: Positive = Field(
        default=1, description="Copies of the model (DDP, or HSDP with sharding)."
    )
    data_parallel_shard_degree: PositiveOrAll = Field(
        default=-1, description="Ranks that share one copy (FSDP); -1 takes the rest."
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = Field(
        default="default",
        description="Free gathered parameters after forward; default does so without pipeline stages.",
    )
    tensor_parallel_degree: Positive = Field(default=1, description="Ranks that share each layer's matrices.")
    disable_loss_parallel: bool = Field(
        default=False, description="Compute the loss with the whole output layer on every rank."
    )
    enable_sequence_parallel: bool = Field(
        default=True, description="Share norms and the residual stream between tensor-parallel ranks, by tokens."
    )
    accumulation_sync: Literal["step", "micro_batch", "scatter"] = Field(
        default="step",
        description="Sum gradients once a step, after every micro-batch, or (HSDP) scatter each and sum replicas once.",
    )
    overlap_gradient_reduction: bool = Field(
        default=True, description="Sum replicas' gradients while backward goes on; false waits for its end."
    )
    gradient_bucket_mib: PositiveFloat = Field(default=25.0, description="MiB of gradients replicas sum in one piece.")
    gradient_compression: Literal["none", "bfloat16", "powersgd"] = Field(
        default="none", description="How replicas (DDP) exchange gradients: whole, rounded, or as thin matrices."
    )
    powersgd_rank: Positive = Field(default=4, description="Columns of the thin matrices that powersgd sends.")
    fsdp_prefetch: NonNegative = Field(
        default=1, description="Blocks whose weights FSDP gathers ahead; 0 gathers ahead in backward alone, by one."
    )
    enable_async_tensor_parallel: bool = Field(
        default=False, description="Run tensor-parallel collectives inside their matrix products."
    )
    async_tensor_parallel_backend: Literal["auto", "serial", "ring", "symmetric", "fused"] = Field(
        default="auto", description="How they run inside: auto measures each product at the start, others are forced."
    )
    pipeline_parallel_degree: Positive = Field(default=1, description="Pipeline ranks.")
    module_fqns_per_model_part: list[list[Text]] | None = Field(
        default=None, description="Module names of each pipeline stage, instead of an even cut."
    )
    pipeline_parallel_first_stage_less_layers: NonNegative = Field(
        default=1, description="Layers the embedding counts as; both this and the next at 1 leave the cut to weights."
    )
    pipeline_parallel_last_stage_less_layers: NonNegative = Field(
        default=1,
        description="Layers the output counts as; both this and the one before at 1 leave the cut to weights.",
    )
    pipeline_parallel_layers_per_stage: Positive | None = Field(default=None, description="Layers of each stage.")
    pipeline_parallel_schedule: Name = Field(default="1F1B", description="Order of forward and backward passes.")
    pipeline_parallel_schedule_csv: Text | None = Field(default="", description="File with a schedule of one's own.")
    pipeline_parallel_microbatch_size: Positive = Field(default=1, description="Sequences in one pipeline micro-batch.")
    pipeline_parallel_expert_parallel_overlap: bool = Field(
        default=True, description="Overlap expert communication with other micro-batches where the schedule allows it."
    )
    context_parallel_degree: Positive = Field(default=1, description="Ranks that share each sequence.")
    context_parallel_load_balancer: Name | None = Field(
        default="headtail",
        description="How the sequence is dealt out: headtail, an early and a late slice for each; none, one piece.",
    )
    context_parallel_rotate_method: Literal["allgather", "alltoall", "ring", "ulysses"] = Field(
        default="allgather",
        description="How ranks see others' tokens: keys gathered, passed on (alltoall is ring), or heads traded.",
    )
    expert_parallel_degree: Positive = Field(default=1, description="Ranks that share the experts.")
    expert_tensor_parallel_degree: Positive = Field(default=1, description="Ranks that share each expert's matrices.")
    expert_parallel_comm_backend: Literal["standard", "deepep"] = Field(
        default="standard", description="Kernels that carry tokens to experts."
    )


class Checkpoint(Section):
    enable: bool = Field(default=False, description="Save checkpoints, and resume from the latest one.")
    enable_ft_dataloader_checkpoints: bool = Field(
        default=True, description="Save the data position per replica group."
    )
    folder: Name = Field(default="checkpoint", description="Folder of the checkpoints, inside the run folder.")
    interval: Positive = Field(default=500, description="Steps from one checkpoint to the next.")
    initial_load_path: Text | None = Field(
        default=None, description="Checkpoint (also its fsspec URL) or Hugging Face folder a new run starts from."
    )
    initial_load_model_only: bool = Field(default=True, description="Load only the weights from initial_load_path.")
    initial_load_in_hf: bool = Field(
        default=False, description="initial_load_path (or hf_assets_path) is a Hugging Face folder."
    )
    initial_load_in_hf_quantized: bool = Field(default=False, description="The Hugging Face weights are quantized.")
    last_save_model_only: bool = Field(default=True, description="The last checkpoint holds only the weights.")
    last_save_in_hf: bool = Field(default=False, description="Write the last checkpoint in Hugging Face format.")
    export_dtype: Literal["float16", "bfloat16", "float32"] = Field(
        default="float32", description="Type of a last, model-only save."
    )
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = Field(
        default="disabled", description="Write checkpoints while training goes on."
    )
    save_timeout_seconds: Positive = Field(
        default=1800, description="Longest time one save may take before the run ends and names the file it is at."
    )
    keep_latest_k: NonNegative = Field(default=10, description="Checkpoints to keep; 0 keeps all.")
    mirror: URL | None = Field(
        default=None, description="fsspec URL each finished checkpoint is copied to, and --resume fetches from."
    )
    load_step: NonNegativeOrLatest = Field(default=-1, description="Step to resume from; -1 is the latest.")
    exclude_from_loading: list[Text] = Field(
        default=[], description="What a run begins without: model, optimizer, lr_scheduler, dataloader, train_state."
    )
    enable_first_step_checkpoint: bool = Field(default=False, description="Also save after the first step.")
    create_seed_checkpoint: bool = Field(default=False, description="Save the initial weights as step 0 and stop.")
    load_only: bool = Field(default=False, description="Load, but never save.")
    preempted_exit_code: ExitCode = Field(
        default=0, description="Exit code of a run that SIGTERM or a time limit stopped, once it has saved."
    )
    save_before: Duration | None = Field(
        default=None,
        description="Time from the job's start by which the run has saved and stopped; unset: the end of a SLURM job.",
    )


class ActivationCheckpoint(Section):
    mode: Literal["selective", "full", "memory_budget", "none"] = Field(
        default="none", description="What to recompute in backward."
    )
    selective_ac_option: EveryNth = Field(
        default="2", description="Every n-th block is recomputed, or op to choose by operation."
    )
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[Text] = Field(
        default=["moe.router.gate"], description="Linears whose matrix shapes are always recomputed with op."
    )
    early_stop: bool = Field(default=False, description="End a recomputation as soon as everything needed is there.")
    memory_budget: Fraction = Field(default=0.5, description="memory_budget: share of the activations to keep.")
    visualize_memory_budget_pareto: bool = Field(
        default=False, description="Draw run time against memory for all budgets."
    )
    preserve_rng_state: bool = Field(default=True, description="Recompute with the random state of the first pass.")
    determinism_check: Literal["default", "none"] = Field(
        default="default", description="Compare shapes of the recomputation."
    )
    debug: bool = Field(default=False, description="Record operations so that a mismatch can be explained; slow.")


class Compile(Section):
    enable: bool = Field(default=False, description="Use torch.compile.")
    components: list[Literal["model", "loss"]] = Field(default=["model", "loss"], description="What is compiled.")
    backend: Name = Field(default="inductor", description="Backend of torch.compile.")


class Float8Linear(Section):
    enable_fsdp_float8_all_gather: bool = Field(
        default=False, description="Gather float8 weights instead of bfloat16 ones."
    )
    precompute_float8_dynamic_scale_for_fsdp: bool = Field(
        default=False, description="Compute all weight scales in one go."
    )
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = Field(
        default=None, description="How scales are chosen."
    )
    filter_fqns: list[Text] = Field(
        default=[], description="Modules to leave alone; auto_filter_small_kn leaves small ones."
    )
    emulate: bool = Field(default=False, description="Compute in float32 what float8 would give; for tests.")


class MXLinear(Section):
    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = Field(
        default="triton", description="Kernel of the cast."
    )
    recipe_name: Name = Field(default="mxfp8_cublas", description="Name of the MX recipe.")
    filter_fqns: list[Text] = Field(default=["output"], description="Modules to leave alone.")


class QuantizeLinear(Section):
    float8: Float8Linear = Field(default=Float8Linear(), description="Float8 linears.")
    mx: MXLinear = Field(default=MXLinear(), description="MX linears.")


class Float8Grouped(Section):
    fqns: list[Text] | Text = Field(default=[], description="Expert modules that compute in float8.")


class MXGrouped(Section):
    recipe_name: Literal["mxfp8"] = Field(default="mxfp8", description="MX recipe of the experts.")
    fqns: list[Text] | Text = Field(default=[], description="Expert modules that compute in MX formats.")


class QuantizeGrouped(Section):
    float8: Float8Grouped = Field(default=Float8Grouped(), description="Float8 experts.")
    mx: MXGrouped = Field(default=MXGrouped(), description="MX experts.")


class Quantize(Section):
    linear: QuantizeLinear = Field(default=QuantizeLinear(), description="Linear layers.")
    grouped_mm: QuantizeGrouped = Field(default=QuantizeGrouped(), description="Experts.")


class NCCL(Section):
    algorithm: Name | None = Field(default=None, description="NCCL_ALGO, such as Ring or Tree; unset lets NCCL choose.")
    protocol: Name | None = Field(default=None, description="NCCL_PROTO, such as Simple or LL128.")
    min_channels: Positive | None = Field(default=None, description="NCCL_MIN_NCHANNELS.")
    max_channels: Positive | None = Field(default=None, description="NCCL_MAX_NCHANNELS.")
    buffer_size: Positive | None = Field(default=None, description="NCCL_BUFFSIZE, in bytes.")
    net_gdr_level: Name | None = Field(default=None, description="NCCL_NET_GDR_LEVEL: LOC, PIX, PXB, PHB or SYS.")
    env: NCCLVariables = Field(default={}, description="Any other NCCL_* variables, by name; they win over the above.")


class Comm(Section):
    init_timeout_seconds: Positive = Field(
        default=300, description="Longest wait for a collective before the first step ends."
    )
    train_timeout_seconds: Positive = Field(default=100, description="Longest wait for a collective after that.")
    trace_buf_size: NonNegative = Field(
        default=20000, description="Collectives the flight recorder remembers; 0 is off."
    )
    save_traces_folder: Name = Field(default="comm_traces", description="Folder of the flight recorder's files.")
    save_traces_file_prefix: Name = Field(default="rank_", description="How those file names begin.")
    mode: Literal["default", "fake_backend", "local_tensor"] = Field(
        default="default", description="Real or simulated communication."
    )
    stop_timeout_seconds: Positive = Field(
        default=30,
        description="Longest wait for ranks to end, and save, after Ctrl-C or SIGTERM; then they are killed.",
    )
    lost_machine_seconds: Positive = Field(
        default=10,
        description="With --max-restarts or --nnodes MIN:MAX: a machine that is silent for so long is given up.",
    )
    bind_cpus: bool = Field(
        default=False, description="Bind each rank to its share of the cores, on the NUMA node of its GPU where known."
    )
    nccl: NCCL = Field(default=NCCL(), description="Settings of NCCL, set in every rank.")


class MemoryEstimation(Section):
    enable: bool = Field(default=False, description="Estimate the memory of a run instead of running it.")
    disable_fake_mode: bool = Field(default=False, description="Estimate with real tensors.")


class FaultTolerance(Section):
    enable: bool = Field(default=False, description="Train in replica groups that can come and go.")
    process_group: Name = Field(default="gloo", description="Backend between replica groups.")
    process_group_timeout_ms: Positive = Field(default=10000, description="Longest wait between replica groups.")
    replica_id: NonNegative = Field(default=0, description="Number of this replica group.")
    group_size: NonNegative = Field(default=0, description="Number of replica groups.")
    min_replica_size: Positive = Field(default=1, description="Fewest replica groups that may go on.")
    semi_sync_method: Name | None = Field(default=None, description="How replica groups synchronise, such as diloco.")


class Experimental(Section):
    custom_import: Text = Field(
        default="", description="Module or .py file that registers flavors, sources, optimizers, hooks."
    )
    custom_args_module: Text = Field(default="", description="Older name of job.custom_config_module.")


class Validation(Section):
    enable: bool = Field(default=False, description="Run a validation loop.")
    dataset: Name = Field(default="demo", description="As training.dataset, for the held-out data.")
    dataset_path: Text | None = Field(
        default=None, description="Files, glob, folder, prepared store, or dataset name to read."
    )
    local_batch_size: Positive = Field(default=8, description="Sequences per data-parallel rank in one forward pass.")
    seq_len: Positive = Field(default=2048, description="Tokens per sequence.")
    freq: Positive = Field(default=10, description="Training steps from one validation to the next.")
    steps: PositiveOrAll = Field(default=-1, description="Batches of each data-parallel rank; -1 reads all.")
    dataloader: Dataloader = Field(default=Dataloader(), description="How batches are read.")
    dataset_text_field: Name = Field(default="text", description="Field of each record that holds the text.")
    dataset_split: Name = Field(default="validation", description="Split of a Hugging Face dataset.")


class Debug(Section):
    seed: NonNegative | None = Field(default=None, description="Seed of weights and data order; unset means 0.")
    deterministic: bool = Field(
        default=False, description="Use deterministic kernels only: two runs are bitwise equal."
    )
    deterministic_warn_only: bool = Field(
        default=False, description="Warn, not fail, where no deterministic kernel exists."
    )
    moe_force_load_balance: bool = Field(
        default=False, description="Send every expert the same number of tokens; for tests."
    )
    check_replicas_freq: NonNegative = Field(
        default=0, description="Steps between checks that copies of the model are equal; 0 checks at the start only."
    )


class Config(Section):
    """The whole config. Read-only: `replace` makes a changed copy."""

    job: Job = Field(default=Job(), description="The run as a whole.")
    profiling: Profiling = Field(default=Profiling(), description="Traces and memory snapshots.")
    metrics: Metrics = Field(default=Metrics(), description="What is logged, and where.")
    model: Model = Field(default=Model(), description="What is trained.")
    optimizer: Optimizer = Field(default=Optimizer(), description="How weights are updated.")
    lr_scheduler: LRScheduler = Field(default=LRScheduler(), description="Learning rate over time.")
    training: Training = Field(default=Training(), description="Data, batch, length and precision.")
    parallelism: Parallelism = Field(default=Parallelism(), description="How the work is spread over ranks.")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="Saving and loading.")
    activation_checkpoint: ActivationCheckpoint = Field(
        default=ActivationCheckpoint(), description="Memory for time in backward."
    )
    compile: Compile = Field(default=Compile(), description="torch.compile.")
    quantize: Quantize = Field(default=Quantize(), description="Low precision, switched on by model.converters.")
    comm: Comm = Field(default=Comm(), description="Time-outs and records of communication.")
    memory_estimation: MemoryEstimation = Field(default=MemoryEstimation(), description="Memory without a run.")
    fault_tolerance: FaultTolerance = Field(default=FaultTolerance(), description="Replica groups.")
    experimental: Experimental = Field(default=Experimental(), description="Extensions.")
    validation: Validation = Field(default=Validation(), description="Loss on held-out data.")
    debug: Debug = Field(default=Debug(), description="Seeds and determinism.")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _alias_notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def alias_notes(self) -> tuple[str, ...]:
        """Lines to log: older names that were understood, and keys that another one replaced."""
        return self._alias_notes

    def is_set(self, key: str) -> bool:
        """Whether a file, a flag or `replace` gave this key; a dotted prefix asks for any key below it."""
        return key in self._origins or any(given.startswith(key + ".") for given in self._origins)

    def origin(self, key: str) -> str:
        """Where the key was given (`file:line`, `command line`), or nothing for a default."""
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

    def replace(self, changes: Mapping[str, Any]) -> Config:
        """A copy with some keys changed, checked like any other config."""
        from shardline.config.assemble import build_config

        unknown = [key for key in changes if key not in leaves()]
        if unknown:
            raise ConfigError(f"replace: there are no such keys: {', '.join(unknown)}")
        values = {key: self.value(key) for key in leaves()} | dict(changes)
        origins = self._origins | dict.fromkeys(changes, "replace")
        return build_config(values, origins, self._alias_notes)

    def __eq__(self, other: object) -> bool:
        """Same values; where they came from (`job.config_file` included) does not matter."""
        return isinstance(other, Config) and _comparable(self) == _comparable(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Leaf:
    """One key of the config: `training.dataloader.num_workers`."""

    key: str
    annotation: Any
    metadata: tuple[Any, ...]
    default: Any
    description: str


@cache
def leaves() -> dict[str, Leaf]:
    """Every key, in the order of the schema."""
    return {leaf.key: leaf for leaf in _walk(Config, "")}


@cache
def tables() -> dict[str, type[Section]]:
    """Every table name (`training`, `training.dataloader`, ...), in the order of the schema."""
    return dict(_tables(Config, ""))


def _walk(section: type[BaseModel], prefix: str) -> Iterator[Leaf]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _walk(field.annotation, f"{prefix}{name}.")
        else:
            yield Leaf(prefix + name, field.annotation, tuple(field.metadata), field.default, field.description or "")


def _tables(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield prefix + name, field.annotation
            yield from _tables(field.annotation, f"{prefix}{name}.")


def _comparable(config: Config) -> dict[str, Any]:
    values = config.model_dump()
    values["job"].pop("config_file")
    return values
