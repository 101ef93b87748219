"""Axolotl configs as people write them, with the native keys that they must become."""

from __future__ import annotations

from typing import Any, NamedTuple


class Example(NamedTuple):
    name: str
    text: str
    expected: dict[str, Any]
    ranks: int = 1


FULL = """
base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: data.jsonl
    type: alpaca
sequence_len: 2048
micro_batch_size: 2
learning_rate: 2e-5
"""
COMMON = """
base_model: NousResearch/Llama-3.2-1B
model_type: AutoModelForCausalLM
tokenizer_type: AutoTokenizer
strict: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/run
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true
wandb_project:
wandb_entity:
wandb_watch:
wandb_name:
wandb_log_model:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
flash_attention: true
loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
"""
LORA = """
adapter: lora
lora_model_dir:
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules:
  - gate_proj
  - down_proj
  - up_proj
  - q_proj
  - v_proj
  - k_proj
  - o_proj
"""
PARTS = ("gate", "down", "up", "q", "v", "k", "o")
_LORA = {"lora.enable": True, "lora.rank": 16, "lora.alpha": 32.0, "lora.dropout": 0.05}
_COMMON = {
    "model.name": "auto",
    "model.hf_assets_path": "NousResearch/Llama-3.2-1B",
    "checkpoint.initial_load_in_hf": True,
    "job.dump_folder": "./outputs/run",
    "training.local_batch_size": 2,
    "training.gradient_accumulation_steps": 2,
    "training.seq_len": 2048,
    "training.epochs": 1.0,
    "training.max_loss": 5.0,
    "training.max_loss_steps": 3,
    "training.tf32": False,
    "optimizer.name": "AdamW",
    "optimizer.state_dtype": "int8",
    "optimizer.lr": 2e-4,
    "optimizer.beta2": 0.999,
    "optimizer.weight_decay": 0.0,
    "lr_scheduler.decay_type": "cosine",
    "lr_scheduler.warmup_ratio": 0.1,
    "activation_checkpoint.mode": "full",
    "data.sources": [{"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}],
    "data.packing": "first_fit",
    "data.held_out": 0.1,
    "data.special_tokens": {"pad_token": "<|end_of_text|>"},
    "validation.enable": True,
    "validation.freq_ratio": 0.25,
    "validation.seq_len": 2048,
    "checkpoint.interval_ratio": 1.0,
    "metrics.log_freq": 1,
    "metrics.enable_wandb": False,
    "debug.seed": 42,
}
SEEDS = [
    Example(
        "seed-tp",
        """
base_model: meta-llama/Llama-3.1-8B
tensor_parallel_size: 2

datasets:
  - path: tatsu-lab/alpaca
    type: alpaca

sequence_len: 2048
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch_fused
learning_rate: 2e-5

bf16: true
flash_attention: true

output_dir: ./outputs/tp-test/
""",
        {
            "parallelism.tensor_parallel_degree": 2,
            "parallelism.data_parallel_shard_degree": -1,
            "optimizer.lr": 2e-5,
            "training.mixed_precision_param": "bfloat16",
            "lr_scheduler.warmup_ratio": 0.03,
        },
        2,
    ),
    Example(
        "seed-fsdp-tp",
        """
base_model: meta-llama/Llama-3.1-70B

dp_shard_size: 4
tensor_parallel_size: 2

fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
  state_dict_type: FULL_STATE_DICT
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer

datasets:
  - path: tatsu-lab/alpaca
    type: alpaca

sequence_len: 4096
micro_batch_size: 1
gradient_accumulation_steps: 4
num_epochs: 1

optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 1e-5

bf16: true
flash_attention: true

output_dir: ./outputs/fsdp-tp-70b/
""",
        {
            "parallelism.tensor_parallel_degree": 2,
            "parallelism.data_parallel_shard_degree": 4,
            "parallelism.fsdp_reshard_after_forward": "always",
            "training.gradient_accumulation_steps": 4,
        },
        8,
    ),
    Example(
        "seed-nd",
        """
base_model: meta-llama/Llama-3.1-70B

dp_shard_size: 2
dp_replicate_size: 2
tensor_parallel_size: 2
context_parallel_size: 2

fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
  state_dict_type: FULL_STATE_DICT
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer

datasets:
  - path: tatsu-lab/alpaca
    type: alpaca

sequence_len: 16384
micro_batch_size: 1
num_epochs: 1

optimizer: adamw_torch_fused
learning_rate: 5e-6

bf16: true
flash_attention: true
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
tf32: true

output_dir: ./outputs/nd-full/
""",
        {
            "parallelism.data_parallel_replicate_degree": 2,
            "parallelism.context_parallel_degree": 2,
            "activation_checkpoint.mode": "full",
            "training.tf32": True,
            "training.seq_len": 16384,
        },
        16,
    ),
]
EXAMPLES = [
    *SEEDS,
    Example(
        "minimal",
        FULL,
        {
            "training.epochs": 1.0,
            "training.gradient_accumulation_steps": 1,
            "job.dump_folder": "./model-out",
            "parallelism.data_parallel_replicate_degree": -1,
            "parallelism.data_parallel_shard_degree": 1,
            "training.tf32": True,
            "checkpoint.keep_latest_k": 4,
            "checkpoint.interval_ratio": 1.0,
            "data.packing": "none",
            "validation.enable": False,
        },
        4,
    ),
    Example("common-full", COMMON, _COMMON),
    Example(
        "lora",
        COMMON + LORA,
        {**_COMMON, **_LORA, "lora.target_modules": [f"{part}_proj" for part in PARTS]},
        2,
    ),
    Example(
        "lora-8bit",
        COMMON + LORA.replace("lora_dropout: 0.05", "lora_dropout: 0") + "load_in_8bit: true\nload_in_4bit: false\n",
        {"lora.base_dtype": "int8", "lora.dropout": 0.0},
    ),
    Example(
        "qlora",
        COMMON.replace("optimizer: adamw_8bit", "optimizer: paged_adamw_32bit")
        + """
adapter: qlora
load_in_4bit: true
load_in_8bit: false
lora_r: 32
lora_alpha: 16
lora_target_linear: true
lora_fan_in_fan_out:
lora_modules_to_save: [embed_tokens, lm_head]
""",
        {
            "lora.base_dtype": "nf4",
            "lora.rank": 32,
            "lora.target_modules": [],
            "lora.modules_to_save": ["embed_tokens", "lm_head"],
            "optimizer.state_dtype": "parameter",
        },
    ),
    Example(
        "lora-variants",
        FULL
        + """
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_modules: 'model.layers.[\\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj'
peft_use_dora: true
peft_use_rslora: true
peft_layers_to_transform: [0, 1]
loraplus_lr_ratio: 16
lora_rank_pattern: {"layers.0.*": 4, q_proj: 16}
lora_alpha_pattern: {q_proj: 64}
lora_mlp_kernel: true
lora_qkv_kernel: true
lora_o_kernel: true
""",
        {
            "lora.target_modules": r"model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj",
            "lora.use_dora": True,
            "lora.use_rslora": True,
            "lora.layers": [0, 1],
            "lora.lr_ratio": 16.0,
            "lora.rank_pattern": {"layers.0.*": 4, "q_proj": 16},
            "lora.alpha_pattern": {"q_proj": 64.0},
        },
    ),
    Example(
        "lora-experts",
        FULL
        + """
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]
expert_parallel_backend: deep_ep
""",
        {
            "lora.target_modules": ["all-linear", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "parallelism.expert_parallel_comm_backend": "deepep",
        },
    ),
    Example(
        "dpo",
        FULL.replace("type: alpaca", "type: chat_template.default")
        + """
rl: dpo
rl_beta: 0.2
dpo_label_smoothing: 0.1
precompute_ref_log_probs: true
dpo_padding_free: true
""",
        {
            "training.objective": "dpo",
            "dpo.beta": 0.2,
            "dpo.loss": "sigmoid",
            "dpo.label_smoothing": 0.1,
            "dpo.reference": "auto",
            "data.packing": "none",
        },
    ),
    Example(
        "ipo-by-its-loss",
        FULL
        + """
rl: dpo
dpo_loss_type: [ipo]
""",
        {"training.objective": "dpo", "dpo.loss": "ipo"},
    ),
    Example(
        "ipo",
        FULL
        + """
rl: ipo
dpo_beta: 0.5
""",
        {"dpo.loss": "ipo", "dpo.beta": 0.5},
    ),
    Example(
        "fsdp1-without-version",
        FULL
        + """
fsdp:
  - full_shard
  - auto_wrap
fsdp_config:
  fsdp_limit_all_gathers: true
  fsdp_sync_module_states: true
  fsdp_offload_params: true
  fsdp_use_orig_params: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_backward_prefetch: BACKWARD_PRE
""",
        {
            "parallelism.data_parallel_shard_degree": -1,
            "parallelism.data_parallel_replicate_degree": 1,
            "parallelism.fsdp_reshard_after_forward": "always",
            "training.enable_cpu_offload": True,
        },
        8,
    ),
    Example(
        "fsdp2-zero2",
        FULL
        + """
fsdp_config:
  fsdp_version: 2
  offload_params: false
  reshard_after_forward: false
  activation_checkpointing: true
  mixed_precision_policy: bf16
""",
        {
            "parallelism.fsdp_reshard_after_forward": "never",
            "training.enable_cpu_offload": False,
            "activation_checkpoint.mode": "full",
            "training.mixed_precision_param": "bfloat16",
        },
        4,
    ),
    Example(
        "hsdp-remainder",
        FULL + "dp_shard_size: 2\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n",
        {"parallelism.data_parallel_shard_degree": 2, "parallelism.data_parallel_replicate_degree": -1},
        8,
    ),
    Example(
        "replicas-given",
        FULL + "dp_replicate_size: 2\nfsdp_version: 2\nfsdp_config:\n",
        {"parallelism.data_parallel_shard_degree": -1, "parallelism.data_parallel_replicate_degree": 2},
        8,
    ),
    Example(
        "sizes-of-one",
        FULL + "dp_shard_size: 1\ndp_replicate_size: 1\ntensor_parallel_size: 1\ncontext_parallel_size: 1\n",
        {"parallelism.data_parallel_shard_degree": 1, "parallelism.data_parallel_replicate_degree": 1},
    ),
    Example(
        "long-context",
        FULL.replace("2048", "500_000")
        + """
context_parallel_size: 8
tiled_mlp: true
plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
activation_offloading: legacy
gradient_checkpointing: true
attn_implementation: flash_attention_2
sample_packing: true
""",
        {
            "training.seq_len": 500_000,
            "parallelism.context_parallel_degree": 8,
            "activation_checkpoint.mode": "offload",
        },
        8,
    ),
    Example(
        "experts",
        FULL
        + """
plugins:
  - axolotl.integrations.expert_parallel.ExpertParallelPlugin
  - axolotl.integrations.kernels.KernelsPlugin
use_kernels: true
use_scattermoe: true
expert_parallel_size: 2
dp_shard_size: 2
fsdp_version: 2
fsdp_config: {reshard_after_forward: true}
warmup_steps: 0.1
""",
        {
            "parallelism.expert_parallel_degree": 2,
            "parallelism.data_parallel_shard_degree": 4,
            "lr_scheduler.warmup_ratio": 0.1,
        },
    ),
    Example(
        "zero1",
        FULL + "deepspeed: deepspeed_configs/zero1.json\n",
        {"parallelism.fsdp_reshard_after_forward": "never", "parallelism.data_parallel_shard_degree": -1},
        2,
    ),
    Example(
        "zero3-offload",
        FULL + "deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json\n",
        {"parallelism.fsdp_reshard_after_forward": "always", "training.enable_cpu_offload": True},
        2,
    ),
    Example(
        "zero-inline",
        FULL
        + """
deepspeed:
  zero_optimization:
    stage: 2
    overlap_comm: true
    contiguous_gradients: true
    offload_optimizer: {device: cpu}
  bf16: {enabled: auto}
  gradient_clipping: 0.5
  train_batch_size: auto
  train_micro_batch_size_per_gpu: auto
  wall_clock_breakdown: false
""",
        {
            "parallelism.fsdp_reshard_after_forward": "never",
            "training.enable_cpu_offload": True,
            "training.max_norm": 0.5,
        },
        2,
    ),
    Example(
        "liger",
        FULL
        + """
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rope: true
liger_rms_norm: true
liger_glu_activation: true
liger_fused_linear_cross_entropy: true
torch_compile: auto
torch_compile_backend: inductor
""",
        {"compile.enable": True, "compile.backend": "inductor"},
    ),
    Example(
        "chat",
        FULL.replace("type: alpaca", "type: chat_template")
        + """
chat_template: llama3
eot_tokens: ["<|eot_id|>"]
default_system_message: You are helpful.
train_on_inputs: false
excess_length_strategy: truncate
min_sample_len: 4
tokens: ["<think>", "</think>"]
""",
        {
            "data.chat_template": "llama3",
            "data.eot_tokens": ["<|eot_id|>"],
            "data.default_system_message": "You are helpful.",
            "data.excess_length": "truncate",
            "data.min_length": 4,
            "data.added_tokens": ["<think>", "</think>"],
        },
    ),
    Example(
        "chat-mappings",
        """
base_model: ./model
chat_template: tokenizer_default_fallback_chatml
datasets:
  - path: mlabonne/FineTome-100k
    type: chat_template
    split: train[:20%]
    field_messages: conversations
    message_property_mappings:
      role: from
      content: value
    roles:
      user: [human]
      assistant: [gpt]
    roles_to_train: [assistant]
    train_on_eos: turn
    revision:
  - path: json
    data_files: [a.jsonl, b.jsonl]
    type: chat_template
sequence_len: 512
micro_batch_size: 4
batch_size: 16
learning_rate: 0.0001
shuffle_merged_datasets: false
""",
        {
            "data.chat_template": "tokenizer_default_fallback_chatml",
            "data.shuffle": False,
            "training.gradient_accumulation_steps": 4,
            "data.sources": [
                {
                    "path": "mlabonne/FineTome-100k",
                    "type": "chat_template",
                    "split": "train[:20%]",
                    "field_messages": "conversations",
                    "message_property_mappings": {"role": "from", "content": "value"},
                    "roles": {"user": ["human"], "assistant": ["gpt"]},
                    "roles_to_train": ["assistant"],
                    "train_on_eos": "turn",
                },
                {"path": "a.jsonl", "ds_type": "json", "type": "chat_template"},
                {"path": "b.jsonl", "ds_type": "json", "type": "chat_template"},
            ],
        },
    ),
    Example(
        "sharegpt",
        FULL.replace("type: alpaca", "type: sharegpt\n    conversation: chatml"),
        {
            "data.sources": [
                {
                    "path": "data.jsonl",
                    "type": "chat_template",
                    "field_messages": "conversations",
                    "message_property_mappings": {"role": "from", "content": "value"},
                    "chat_template": "chatml",
                }
            ]
        },
    ),
    Example(
        "custom-prompt",
        FULL.replace(
            "type: alpaca",
            """ds_type: json
    type:
      system_prompt: ""
      field_instruction: question
      field_output: answer
      format: |-
        Q: {instruction}
        A:
      no_input_format: "Q: {instruction} A:\"""",
        ),
        {
            "data.sources": [
                {
                    "path": "data.jsonl",
                    "ds_type": "json",
                    "type": {
                        "system_prompt": "",
                        "field_instruction": "question",
                        "field_output": "answer",
                        "format": "Q: {instruction}\nA:",
                        "no_input_format": "Q: {instruction} A:",
                    },
                }
            ]
        },
    ),
    Example(
        "pretraining",
        """
base_model: ./model
reinit_weights: true
pretraining_dataset:
  - path: allenai/c4
    name: en
    type: pretrain
    text_column: text
    split: train
    skip: 10
max_steps: 1000
sequence_len: 1024
micro_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 3e-4
lr_scheduler: constant_with_warmup
streaming: true
pretrain_multipack_attn: true
save_steps: 100
""",
        {
            "training.steps": 1000,
            "training.epochs": None,
            "lr_scheduler.decay_type": "constant",
            "lr_scheduler.warmup_steps": 30,
            "checkpoint.interval": 100,
            "checkpoint.initial_load_in_hf": False,
            "data.packing": "first_fit",
            "data.sources": [
                {
                    "path": "allenai/c4",
                    "name": "en",
                    "type": "completion",
                    "split": "train[10:]",
                    "field": "text",
                }
            ],
        },
    ),
    Example(
        "pretraining-path",
        "base_model: ./model\npretraining_dataset: corpus.jsonl\nmax_steps: 50\nlearning_rate: 1e-3\n",
        {"data.sources": [{"path": "corpus.jsonl", "type": "completion"}], "lr_scheduler.warmup_steps": 1},
    ),
    Example(
        "cadence",
        FULL + "num_epochs: 3\nval_set_size: 100\nsaves_per_epoch: 0.5\nevals_per_epoch: 2\nsave_total_limit: 2\n",
        {
            "checkpoint.interval_ratio": 1 / 1.5,
            "validation.freq_ratio": 1 / 6,
            "data.held_out": 100.0,
            "checkpoint.keep_latest_k": 2,
        },
    ),
    Example(
        "cadence-in-steps",
        FULL + "save_steps: 0.2\neval_steps: 50\nval_set_size: 0.05\neval_batch_size: 8\nsave_first_step: true\n",
        {
            "checkpoint.interval_ratio": 0.2,
            "validation.freq": 50,
            "validation.local_batch_size": 8,
            "checkpoint.enable_first_step_checkpoint": True,
        },
    ),
    Example(
        "no-saves-no-evals",
        FULL + "save_strategy: no\nval_set_size: 0.1\neval_strategy: no\n",
        {"checkpoint.interval_ratio": 1.0, "validation.enable": False},
    ),
    Example(
        "test-datasets",
        FULL + "test_datasets:\n  - path: test.jsonl\n    ds_type: json\n    type: alpaca\n    split: train\n",
        {
            "validation.enable": True,
            "data.validation_sources": [{"path": "test.jsonl", "ds_type": "json", "type": "alpaca", "split": "train"}],
        },
    ),
    Example(
        "cosine-floor",
        FULL + "cosine_min_lr_ratio: 0.1\ncosine_constant_lr_ratio: 0.8\nwarmup_steps: 10\nadam_beta2: 0.95\n",
        {
            "lr_scheduler.min_lr_factor": 0.1,
            "lr_scheduler.decay_end_ratio": 0.8,
            "lr_scheduler.warmup_steps": 10,
            "optimizer.beta2": 0.95,
        },
    ),
    Example(
        "cosine-with-min-lr",
        FULL + "lr_scheduler: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 2.0e-6}\n",
        {"lr_scheduler.decay_type": "cosine", "lr_scheduler.min_lr_factor": 2e-6 / 2e-5},
    ),
    Example(
        "polynomial",
        FULL + "lr_scheduler: polynomial\n",
        {"lr_scheduler.decay_type": "polynomial", "lr_scheduler.min_lr_factor": 1e-7 / 2e-5},
    ),
    Example(
        "constant",
        FULL + "lr_scheduler: constant\nwarmup_ratio: 0.1\nmax_grad_norm: 0.3\n",
        {"lr_scheduler.decay_type": "constant", "lr_scheduler.warmup_steps": 0, "training.max_norm": 0.3},
    ),
    Example(
        "sgd", FULL + "optimizer: sgd\noptim_args: momentum=0.9\n", {"optimizer.name": "SGD", "optimizer.beta1": 0.9}
    ),
    Example(
        "adafactor",
        FULL + "optimizer: adafactor\nweight_decay: 0.01\nlr_scheduler: polynomial\n"
        "lr_scheduler_kwargs: {power: 2, lr_end: 2e-6}\noptim_args: {scale_parameter: false}\n",
        {
            "optimizer.name": "Adafactor",
            "optimizer.weight_decay": 0.01,
            "optimizer.decay_norms": False,
            "lr_scheduler.decay_power": 2.0,
            "lr_scheduler.min_lr_factor": 0.1,
        },
    ),
    Example(
        "one-cycle",
        FULL + "lr_scheduler: one_cycle\nwarmup_steps: 30\nmax_steps: 100\n",
        {
            "lr_scheduler.decay_type": "cosine",
            "lr_scheduler.warmup_type": "cosine",
            "lr_scheduler.warmup_steps": 30,
            "lr_scheduler.warmup_start_factor": 0.04,
            "lr_scheduler.min_lr_factor": 4e-6,
            "lr_scheduler.include_ends": True,
            "lr_scheduler.momentum_range": [0.85, 0.95],
        },
    ),
    Example(
        "one-cycle-options",
        FULL
        + """
lr_scheduler: one_cycle
warmup_ratio: 0.1
lr_scheduler_kwargs:
  pct_start: 0.3
  anneal_strategy: linear
  div_factor: 10
  final_div_factor: 10
  cycle_momentum: false
""",
        {
            "lr_scheduler.decay_type": "linear",
            "lr_scheduler.warmup_type": "linear",
            "lr_scheduler.warmup_ratio": 0.3,
            "lr_scheduler.warmup_start_factor": 0.1,
            "lr_scheduler.min_lr_factor": 0.01,
            "lr_scheduler.momentum_range": None,
        },
    ),
    Example(
        "restarts",
        FULL + "lr_scheduler: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: 3}\n",
        {"lr_scheduler.decay_type": "cosine", "lr_scheduler.cycles": 3},
    ),
    Example(
        "inverse-sqrt",
        FULL + "lr_scheduler: inverse_sqrt\nlr_scheduler_kwargs: {timescale: 500}\nwarmup_steps: 100\n",
        {"lr_scheduler.decay_type": "inverse_sqrt", "lr_scheduler.timescale": 500, "lr_scheduler.warmup_steps": 100},
    ),
    Example(
        "warmup-stable-decay",
        FULL
        + """
lr_scheduler: warmup_stable_decay
lr_scheduler_kwargs: {num_decay_steps: 200, min_lr_ratio: 0.1, decay_type: 1-sqrt, warmup_type: cosine}
""",
        {
            "lr_scheduler.decay_type": "sqrt",
            "lr_scheduler.decay_steps": 200,
            "lr_scheduler.min_lr_factor": 0.1,
            "lr_scheduler.warmup_type": "cosine",
            "lr_scheduler.warmup_start_factor": 0.1,
        },
    ),
    Example(
        "cosine-with-a-start",
        FULL + "lr_scheduler: cosine_warmup_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\nwarmup_steps: 10\n",
        {
            "lr_scheduler.include_ends": True,
            "lr_scheduler.min_lr_factor": 0.1,
            "lr_scheduler.warmup_start_factor": 0.1,
        },
    ),
    Example("lion", FULL + "optimizer: lion_8bit\n", {"optimizer.name": "Lion", "optimizer.state_dtype": "parameter"}),
    Example(
        "muon",
        FULL + "optimizer: muon\n",
        {"optimizer.name": "Muon", "optimizer.muon_adjust_lr": "match_rms_adamw"},
    ),
    Example(
        "adamw-4bit",
        FULL + "optimizer: adamw_torch_4bit\noptim_args: {betas: [0.8, 0.9], eps: 1e-6}\n",
        {"optimizer.state_dtype": "int8", "optimizer.beta1": 0.8, "optimizer.eps": 1e-6},
    ),
    Example(
        "float8",
        FULL + "fp8: true\nfp8_enable_fsdp_float8_all_gather: true\ntorch_compile: true\nbf16: true\nfsdp_version: 2\n",
        {"model.converters": ["quantize.linear.float8"], "quantize.linear.float8.enable_fsdp_float8_all_gather": True},
        2,
    ),
    Example("float32", FULL + "bf16: false\nfp16: false\n", {"training.mixed_precision_param": "float32"}),
    Example("float16", FULL + "fp16: true\nbf16: false\n", {"training.mixed_precision_param": "float16"}),
    Example("pure-bfloat16", FULL + "bf16: true\nbfloat16: true\n", {"training.dtype": "bfloat16"}),
    Example(
        "wandb",
        FULL + "wandb_project: mine\nwandb_entity: team\nwandb_name: first\nwandb_run_id: abc\nwandb_mode: offline\n",
        {
            "metrics.enable_wandb": True,
            "metrics.wandb_project": "mine",
            "metrics.wandb_entity": "team",
            "metrics.wandb_name": "first",
            "metrics.wandb_run_id": "abc",
            "metrics.wandb_mode": "offline",
        },
    ),
    Example("wandb-disabled", FULL + "wandb_project: mine\nwandb_mode: disabled\n", {"metrics.enable_wandb": False}),
    Example(
        "workers-and-profile",
        FULL + "dataloader_num_workers: 2\ndataloader_prefetch_factor: 4\nprofiler_steps: 3\nprofiler_steps_start: 5\n",
        {
            "training.dataloader.num_workers": 2,
            "training.dataloader.prefetch_factor": 4,
            "profiling.enable_profiling": True,
            "profiling.profiler_active": 3,
            "profiling.profile_freq": 8,
        },
    ),
    Example(
        "resume",
        FULL + "resume_from_checkpoint: outputs/other/checkpoint/step-10\nseed: 7\n",
        {
            "checkpoint.initial_load_path": "outputs/other/checkpoint/step-10",
            "checkpoint.initial_load_model_only": False,
            "checkpoint.initial_load_in_hf": False,
            "debug.seed": 7,
        },
    ),
    Example(
        "mxfp4-weights-and-a-key-given-twice",
        FULL
        + """
model_quantization_config: Mxfp4Config
model_quantization_config_kwargs:
  dequantize: true
attn_implementation: flash_attention_2
attn_implementation: some-owner/some-kernel
lr_scheduler: constant_with_warmup
warmup_ratio: 0.05
eot_tokens: ["<|end|>"]
special_tokens:
""",
        {"lr_scheduler.decay_type": "constant", "lr_scheduler.warmup_ratio": 0.05, "data.eot_tokens": ["<|end|>"]},
    ),
    Example(
        "a-constant-ratio-of-0-is-off",
        FULL + "cosine_constant_lr_ratio: 0\ncosine_min_lr_ratio: 1.0\n",
        {"lr_scheduler.decay_end_ratio": None, "lr_scheduler.min_lr_factor": 1.0, "lr_scheduler.decay_type": "cosine"},
    ),
    Example(
        "a-ratio-of-cosine-with-another-schedule",
        FULL + "lr_scheduler: linear\ncosine_min_lr_ratio: 0.3\nlr_quadratic_warmup: true\n",
        {"lr_scheduler.min_lr_factor": 0.0, "lr_scheduler.warmup_type": "linear"},
    ),
    Example(
        "rex",
        FULL + "lr_scheduler: rex\ncosine_min_lr_ratio: 0.1\nwarmup_steps: 20\n",
        {"lr_scheduler.decay_type": "rex", "lr_scheduler.min_lr_factor": 0.1, "lr_scheduler.warmup_steps": 20},
    ),
    Example(
        "quadratic-warmup",
        FULL + "lr_quadratic_warmup: true\nwarmup_steps: 50\n",
        {"lr_scheduler.warmup_type": "quadratic", "lr_scheduler.warmup_steps": 50},
    ),
    Example(
        "early-stopping",
        FULL + "val_set_size: 0.05\nevals_per_epoch: 4\nnum_epochs: 2\nearly_stopping_patience: 3\n",
        {"validation.patience": 3, "validation.freq_ratio": 0.125},
    ),
    Example(
        "early-stopping-with-nothing-held-out",
        FULL + "val_set_size: 0\nearly_stopping_patience: 3\n",
        {"validation.patience": None, "validation.enable": False},
    ),
    Example(
        "noise-and-older-chats",
        """
base_model: mistralai/Mistral-7B-v0.1
is_mistral_derived_model: true
datasets:
  - path: talks.jsonl
    type: sharegpt
    conversation: chatml
    field: messages
    shards: 4
  - path: tasks.jsonl
    type: alpaca
    conversation: some-old-name
chat_template: chatml
micro_batch_size: 2
learning_rate: 7e-6
neftune_noise_alpha: 5
deepspeed: false
fsdp: false
wandb_runid: default
hub_token:
gptq_groupsize:
bfloat16: auto
tokens:
  bos_token: "<s>"
special_tokens:
  eos_token: "<|im_end|>"
""",
        {
            "training.neftune_alpha": 5.0,
            "training.dtype": "float32",
            "data.special_tokens": {"bos_token": "<s>", "eos_token": "<|im_end|>"},
            "data.sources": [
                {
                    "path": "talks.jsonl",
                    "type": "chat_template",
                    "shards": 4,
                    "shards_idx": 0,
                    "field_messages": "messages",
                    "message_property_mappings": {"role": "from", "content": "value"},
                    "chat_template": "chatml",
                },
                {"path": "tasks.jsonl", "type": "alpaca"},
            ],
        },
    ),
    Example(
        "some-weights-of-a-mixture",
        FULL
        + """
unfrozen_parameters:
  - ^lm_head.weight$
  - model.layers.3[0-1]+.block_sparse_moe.experts
model_config:
  output_router_logits: true
  max_position_embeddings: 8192
  rope_scaling: {rope_type: yarn, factor: 2.0, original_max_position_embeddings: 4096}
deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json
tokens: ["<|im_start|>"]
""",
        {
            "training.unfrozen_parameters": ["^lm_head.weight$", "model.layers.3[0-1]+.block_sparse_moe.experts"],
            "model.overrides": {
                "max_seq_len": 8192,
                "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096},
            },
            "data.added_tokens": ["<|im_start|>"],
            "training.enable_cpu_offload": True,
        },
    ),
    Example(
        "frozen-images-beside-an-adapter",
        FULL
        + LORA
        + """
model_type: Gemma3ForConditionalGeneration
chat_template: gemma3
unfrozen_parameters:
  - ^model\\.language_model\\..*
""",
        {"training.unfrozen_parameters": [], "lora.enable": True},
    ),
    Example(
        "linear-layers-and-both-ends",
        FULL
        + "adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n"
        + "lora_target_modules: [q_proj, embed_tokens, lm_head]\n",
        {"lora.target_modules": ["all-linear", "embed_tokens", "lm_head"]},
    ),
    Example(
        "an-expression-and-experts",
        FULL
        + "adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_modules: 'model.layers.[\\d]+.self_attn.(q|k)_proj'\n"
        + "lora_target_parameters: [mlp.experts.down_proj]\n",
        {
            "lora.target_modules": r"(?:model.layers.[\d]+.self_attn.(q|k)_proj)|(?:.*[.])?(?:mlp\.experts\.down_proj)",
        },
    ),
    Example(
        "codes-of-another-library",
        FULL
        + "adapter: lora\nlora_r: 8\nlora_alpha: 16\npeft: {backend: torchao, weight_dtype: nf4, group_size: 64}\n",
        {"lora.base_dtype": "nf4"},
    ),
    Example(
        "context-as-a-table",
        FULL + "context_parallel: {size: 4, backend: ulysses, load_balance: auto}\ndp_shard_size: 2\nfsdp_version: 2\n",
        {"parallelism.context_parallel_degree": 4, "parallelism.context_parallel_rotate_method": "ulysses"},
        8,
    ),
    Example(
        "older-loaders-and-roles",
        """
base_model: NousResearch/Llama-2-7b-hf
datasets:
  - path: a.jsonl
    type: sharegpt.load_role
    field_human: asker
    field_model: bot
  - path: b.jsonl
    type:
      system_prompt: ""
      field_instruction: q
      field_output: a
      format: "[INST] {instruction} [/INST]"
      field: text
micro_batch_size: 2
learning_rate: 2e-5
""",
        {
            "data.sources": [
                {
                    "path": "a.jsonl",
                    "type": "chat_template",
                    "field_messages": "conversations",
                    "message_property_mappings": {"role": "role", "content": "value"},
                    "roles": {
                        "user": ["human", "user", "asker"],
                        "assistant": ["gpt", "assistant", "bot"],
                        "system": ["system"],
                        "tool": ["tool"],
                    },
                },
                {
                    "path": "b.jsonl",
                    "type": {
                        "system_prompt": "",
                        "field_instruction": "q",
                        "field_output": "a",
                        "format": "[INST] {instruction} [/INST]",
                    },
                },
            ]
        },
    ),
    Example(
        "reasoning-in-tags",
        """
base_model: Qwen/Qwen3-8B
chat_template: qwen3
chat_template_kwargs: {enable_thinking: true}
dataset_exact_deduplication: true
datasets:
  - path: thoughts.jsonl
    type: chat_template
    split_thinking: true
    train_on_split: train[:90%]
micro_batch_size: 1
learning_rate: 1e-5
""",
        {
            "data.chat_template_kwargs": {"enable_thinking": True},
            "data.deduplicate": True,
            "data.sources": [
                {
                    "path": "thoughts.jsonl",
                    "type": "chat_template",
                    "split_thinking": True,
                    "split": "train[:90%]",
                }
            ],
        },
    ),
]

# What is added to FULL -> words of the error
WRONG = {
    "context_parapllel_size: 2": ["context_parapllel_size", "did you mean 'context_parallel_size'"],
    "adam_eps: 1e-8": ["adam_eps", "did you mean 'adam_epsilon'"],
    "micro_batchsize: 2": ["did you mean 'micro_batch_size'"],
    "optimizer: galore_adamw": ["line", "optimizer: 'galore_adamw' is refused: gradients are not projected"],
    "optimizer: schedule_free_adamw": ["'schedule_free_adamw' is refused: it trains other weights"],
    "optimizer: adafacter": ["did you mean 'adafactor'"],
    "optimizer: adamw_torch_fuzed": ["did you mean 'adamw_torch_fused'"],
    "lr_scheduler: cosinus": ["lr_scheduler: expected one of cosine"],
    "lr_scheduler: reduce_lr_on_plateau": ["is refused: the learning rate depends on the step alone"],
    "lr_scheduler_kwargs: {num_cycles: 2}": ["lr_scheduler_kwargs: num_cycles: expected 0.5, got 2"],
    "lr_scheduler: polynomial\nlr_scheduler_kwargs: {pow: 2}": ["pow: there is no such option", "did you mean 'power'"],
    "lr_scheduler: one_cycle\nlr_scheduler_kwargs: {three_phase: true}": ["three_phase: expected False"],
    "lr_scheduler: one_cycle\noptimizer: adafactor": ["set lr_scheduler_kwargs: {cycle_momentum: false}"],
    "lr_scheduler: cosine_with_min_lr": ["needs lr_scheduler_kwargs: {min_lr_rate: ...}"],
    "lr_scheduler: warmup_stable_decay": ["needs lr_scheduler_kwargs: {num_decay_steps: ...}"],
    "lr_scheduler: cosine_warmup_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}": ["needs warmup_steps"],
    "neftune_noise_alpha: -5": ["neftune_noise_alpha: training.neftune_alpha: expected"],
    "rl: dpo\nneftune_noise_alpha: 5": ["neftune_noise_alpha: training.neftune_alpha: the reference model"],
    "rl: kto\nkto_desirable_weight: 0.2": ["rl: 'kto' is not built"],
    "rl: grpo\ntrl: {num_generations: 4}": ["rl: 'grpo' is not built"],
    "relora_steps: 100": ["relora_steps: 100 is refused: adapters are not merged"],
    "use_dft: true": ["use_dft: true is refused: the loss is cross-entropy"],
    "gkd_trainer: true\ngkd_teacher: some/model": ["gkd_trainer: true is refused"],
    "nvfp4_training: {enabled: true}": ["nvfp4_training", "is refused: a 4-bit base is NF4"],
    "model_quantization_config: FineGrainedFP8Config": ["FineGrainedFP8Config: weights are trained in full"],
    "model_quantization_config: Mxfp4Config": ["needs model_quantization_config_kwargs: {dequantize: true}"],
    "processor_type: AutoProcessor": ["processor_type: 'AutoProcessor' is refused: images and audio"],
    "adapter: lora\nlora_r: 8\nlora_alpha: 8\npeft: {loftq_config: {loftq_bits: 4}}": ["peft.loftq_config: is refused"],
    "adapter: lora\nlora_r: 8\nlora_alpha: 8\npeft: {weight_dtype: int4}": ["peft.weight_dtype: expected one of"],
    "context_parallel: {size: 2, backend: usp}": ["context_parallel.backend: expected one of"],
    "context_parallel: {size: 2}\ncontext_parallel_size: 2": ["context_parallel: conflicts with"],
    "warmup_steps: 10\nwarmup_ratio: 0.1": ["warmup_ratio: conflicts with warmup_steps"],
    "saves_per_epoch: 1\nsave_steps: 10": ["saves_per_epoch: conflicts with save_steps"],
    "val_set_size: 0.1\ntest_datasets: [{path: a.jsonl}]": ["test_datasets: conflicts with val_set_size"],
    "load_in_4bit: true": ["a quantized base needs an adapter"],
    "adapter: qlora\nlora_r: 8\nlora_alpha: 8": ["qlora needs load_in_4bit"],
    "adapter: lora": ["lora needs lora_r", "lora needs lora_alpha"],
    "adapter: llama-adapter": ["expected 'lora', 'qlora' or nothing"],
    "fsdp_config: {reshard_after_forwrd: true}": ["fsdp_config.reshard_after_forwrd", "'reshard_after_forward'"],
    "fsdp_config: {sharding_strategy: HYBRID_SHARD}": ["dp_replicate_size"],
    "fsdp: [full_shard]\ndeepspeed: zero2.json": ["deepspeed: conflicts with FSDP"],
    "deepspeed: nowhere.json": ["nowhere.json", "zero3_bf16"],
    "deepspeed: {zero_optimization: {stage: 2, overlap_com: true}}": ["overlap_com", "'overlap_comm'"],
    "deepspeed: {zero_optimization: {stage: 3, zero_quantized_weights: true}}": ["zero_quantized_weights"],
    "deepspeed: {optimizer: {type: AdamW, params: {lr: 0.1}}}": ["lr: set numbers in the YAML file"],
    "plugins: [axolotl.integrations.kd.KDPlugin]": ["KDPlugin is refused"],
    "plugins: [axolotl.integrations.liger.LigrPlugin]": ["did you mean 'LigerPlugin'"],
    "model_type: AutoModelForSequenceClassification": ["expected a causal language model"],
    "model_config: {hidden_act: gelu}": ["model_config: hidden_act"],
    "ring_attn_func: batch_ring": ["it mixes packed documents"],
    "num_epochs: many": ["num_epochs: expected a number, got 'many'"],
    "gradient_accumulation_steps: 1.5": ["expected a whole number, got 1.5"],
    "bf16: maybe": ["bf16: expected one of 'auto'"],
    "weight_decay: -1": ["weight_decay", "optimizer.weight_decay: expected a finite number, 0 or more"],
    "batch_size: 5": ["5 is not a multiple of micro_batch_size = 2"],
    "save_safetensors: false": ["always written as safetensors"],
    "rl: grpo": ["rl: 'grpo' is not built: expected dpo or ipo"],
    "rl: dpo\ndpo_loss_type: [sigmoid, ipo]": ["dpo_loss_type: expected one of sigmoid, hinge, ipo, robust"],
    "rl: ipo\ndpo_loss_type: hinge": ["dpo_loss_type: conflicts with rl: ipo"],
    "rl: dpo\ndpo_use_weighting: true": ["dpo_use_weighting: true is refused"],
    "rl: dpo\nrl_beta: -1": ["rl_beta", "dpo.beta: expected"],
    "float16: true": ["not stored in float16"],
    "tensor_parallel_size: 0": ["tensor_parallel_size: expected a whole number, 1 or more"],
}
