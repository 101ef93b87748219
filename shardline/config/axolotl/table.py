"""What becomes of every key of an Axolotl config: one row per key.

`DIRECT` keys have one native key each. The functions of the other modules read `BY_RULE` keys together.
`WITHOUT_EFFECT` and `REFUSED` give the reason, once for all keys that share it. A refused key that is off (false,
empty, 0) is accepted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shardline.config.axolotl.reader import Read, number, or_if_zero, switch, table, text, texts, whole


class To(NamedTuple):
    """A key whose value goes to one native key; with a `default`, also where the file does not give it."""

    native: str
    read: Read
    default: Any = None


DIRECT: dict[str, To] = {
    "sequence_len": To("training.seq_len", whole, 512),
    "micro_batch_size": To("training.local_batch_size", whole, 1),
    "seed": To("debug.seed", whole, 42),
    "learning_rate": To("optimizer.lr", number),
    "weight_decay": To("optimizer.weight_decay", number, 0.0),
    "adam_beta1": To("optimizer.beta1", number, 0.9),
    "adam_beta2": To("optimizer.beta2", number, 0.999),
    "adam_epsilon": To("optimizer.eps", number, 1e-8),
    "max_grad_norm": To("training.max_norm", number),
    "loss_watchdog_threshold": To("training.max_loss", number),
    "loss_watchdog_patience": To("training.max_loss_steps", whole),
    "output_dir": To("job.dump_folder", text, "./model-out"),
    "save_total_limit": To("checkpoint.keep_latest_k", or_if_zero(4), 4),
    "save_first_step": To("checkpoint.enable_first_step_checkpoint", switch),
    "logging_steps": To("metrics.log_freq", whole),
    "use_tensorboard": To("metrics.enable_tensorboard", switch),
    "wandb_entity": To("metrics.wandb_entity", text),
    "wandb_name": To("metrics.wandb_name", text),
    "wandb_run_id": To("metrics.wandb_run_id", text),
    "tokenizer_config": To("model.tokenizer_path", text),
    "torch_compile_backend": To("compile.backend", text),
    "dataloader_num_workers": To("training.dataloader.num_workers", whole),
    "dataloader_pin_memory": To("training.dataloader.pin_memory", switch),
    "dataloader_prefetch_factor": To("training.dataloader.prefetch_factor", whole),
    "chat_template_jinja": To("data.chat_template_jinja", text),
    "default_system_message": To("data.default_system_message", text),
    "eot_tokens": To("data.eot_tokens", texts),
    "train_on_inputs": To("data.train_on_inputs", switch),
    "min_sample_len": To("data.min_length", whole),
    "excess_length_strategy": To("data.excess_length", text),
    "shuffle_merged_datasets": To("data.shuffle", switch),
    "dataset_exact_deduplication": To("data.deduplicate", switch),
    "chat_template_kwargs": To("data.chat_template_kwargs", table),
    "ddp_timeout": To("comm.train_timeout_seconds", whole),
    "ddp_bucket_cap_mb": To("parallelism.gradient_bucket_mib", number),
}

# Keys read by a function -> what they set
BY_RULE: dict[str, str] = {
    "base_model": "model.hf_assets_path, model.name = auto, checkpoint.initial_load_in_hf",
    "model_type": "refused unless it is a causal language model; of one with images, only the text model is trained",
    "type_of_model": "as model_type",
    "model_config": "model.overrides, for the fields that it has",
    "overrides_of_model_config": "as model_config",
    "reinit_weights": "checkpoint.initial_load_in_hf = false: new weights, of the folder's architecture",
    "chat_template": "data.chat_template; a name that is not packaged stands for the tokenizer's own template",
    "special_tokens": "data.special_tokens",
    "tokens": "data.added_tokens; a table, as older versions have it, is data.special_tokens",
    "datasets": "data.sources",
    "pretraining_dataset": "data.sources, of type completion",
    "test_datasets": "data.validation_sources, validation.enable",
    "val_set_size": "data.held_out, validation.enable",
    "sample_packing": "data.packing = first_fit, or none",
    "eval_sequence_len": "validation.seq_len; unset: sequence_len",
    "eval_batch_size": "validation.local_batch_size; unset: micro_batch_size",
    "curriculum_sampling": "data.shuffle = false",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "batch_size": "training.gradient_accumulation_steps = batch_size / micro_batch_size",
    "num_epochs": "training.epochs",
    "max_steps": "training.steps, instead of num_epochs",
    "lr_scheduler": "lr_scheduler.decay_type, warmup_type, include_ends; momentum_range for one_cycle",
    "cosine_min_lr_ratio": "lr_scheduler.min_lr_factor, for cosine and rex without lr_quadratic_warmup",
    "cosine_constant_lr_ratio": "lr_scheduler.decay_end_ratio, with cosine_min_lr_ratio",
    "lr_quadratic_warmup": "lr_scheduler.warmup_type = quadratic, for cosine",
    "lr_scheduler_kwargs": "the other keys of lr_scheduler, by the names that the schedule has for them",
    "warmup_steps": "lr_scheduler.warmup_steps; below 1: lr_scheduler.warmup_ratio",
    "warmup_ratio": "lr_scheduler.warmup_ratio",
    "optimizer": "optimizer.name, optimizer.state_dtype",
    "optim_args": "optimizer.beta1, beta2, eps, weight_decay",
    "bf16": "training.mixed_precision_param; auto leaves it to the device",
    "fp16": "training.mixed_precision_param = float16",
    "bfloat16": "training.dtype = bfloat16",
    "float16": "refused",
    "float32": "training.mixed_precision_param = float32",
    "tf32": "training.tf32; auto is true",
    "fp8": "model.converters = quantize.linear.float8",
    "fp8_enable_fsdp_float8_all_gather": "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "attn_implementation": "nothing: Shardline chooses the kernel; fp8 is refused",
    "unfrozen_parameters": "training.unfrozen_parameters; with an adapter: nothing, since it freezes the rest",
    "neftune_noise_alpha": "training.neftune_alpha",
    "noisy_embedding_alpha": "as neftune_noise_alpha",
    "gradient_checkpointing": "activation_checkpoint.mode = full; offload: offload",
    "selective_checkpointing": "activation_checkpoint.mode = selective, by operation",
    "activation_offloading": "activation_checkpoint.mode = offload",
    "torch_compile": "compile.enable; auto is true",
    "adapter": "lora.enable",
    "load_in_4bit": "lora.base_dtype = nf4",
    "model_quantization_config": "nothing for Mxfp4Config with dequantize: true; refused otherwise",
    "model_quantization_config_kwargs": "as model_quantization_config",
    "load_in_8bit": "lora.base_dtype = int8",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_rank_pattern": "lora.rank_pattern",
    "lora_alpha_pattern": "lora.alpha_pattern",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "lora_target_linear": "lora.target_modules = [], every linear layer of the blocks",
    "lora_target_parameters": "lora.target_modules, for experts",
    "lora_modules_to_save": "lora.modules_to_save",
    "lora_model_dir": "lora.adapter_path",
    "peft_use_dora": "lora.use_dora",
    "peft_use_rslora": "lora.use_rslora",
    "peft_layers_to_transform": "lora.layers",
    "peft_init_lora_weights": "only true: A is random, B is zero",
    "loraplus_lr_ratio": "lora.lr_ratio",
    "bnb_config_kwargs": "lora.double_quantization",
    "peft": "lora.base_dtype (weight_dtype nf4 or int8)",
    "fsdp": "parallelism.data_parallel_shard_degree, training.enable_cpu_offload",
    "fsdp_version": "nothing: sharding is always FSDP2",
    "fsdp_config": "parallelism.fsdp_reshard_after_forward, training.enable_cpu_offload, activation_checkpoint.mode",
    "deepspeed": "the FSDP settings that its ZeRO stage stands for",
    "dp_shard_size": "parallelism.data_parallel_shard_degree",
    "dp_replicate_size": "parallelism.data_parallel_replicate_degree",
    "tensor_parallel_size": "parallelism.tensor_parallel_degree",
    "context_parallel_size": "parallelism.context_parallel_degree",
    "sequence_parallel_degree": "as context_parallel_size",
    "context_parallel": "parallelism.context_parallel_degree (size), context_parallel_rotate_method (backend)",
    "expert_parallel_size": "parallelism.expert_parallel_degree, data_parallel_shard_degree",
    "expert_parallel_backend": "parallelism.expert_parallel_comm_backend",
    "ring_attn_func": "refused if it is not varlen_llama3",
    "resume_from_checkpoint": "checkpoint.initial_load_path, checkpoint.initial_load_model_only = false",
    "saves_per_epoch": "checkpoint.interval_ratio = 1 / (saves_per_epoch x num_epochs)",
    "save_steps": "checkpoint.interval; below 1: checkpoint.interval_ratio",
    "save_strategy": "checkpoint.interval_ratio",
    "save_safetensors": "refused if it is false",
    "evals_per_epoch": "validation.freq_ratio = 1 / (evals_per_epoch x num_epochs)",
    "eval_steps": "validation.freq; below 1: validation.freq_ratio",
    "early_stopping_patience": "validation.patience",
    "eval_strategy": "validation.enable, validation.freq_ratio",
    "evaluation_strategy": "as eval_strategy",
    "wandb_project": "metrics.wandb_project, metrics.enable_wandb",
    "use_wandb": "metrics.enable_wandb",
    "wandb_mode": "metrics.wandb_mode",
    "profiler_steps": "profiling.enable_profiling, profiling.profiler_active",
    "profiler_steps_start": "profiling.profile_freq",
    "gc_steps": "training.gc_freq; 0 and -1 leave it as it is",
    "gc_collect_steps": "as gc_steps",
    "plugins": "see the table of plugins below",
    "rl": "training.objective = dpo, for dpo and ipo",
    "rl_beta": "dpo.beta",
    "dpo_beta": "dpo.beta",
    "dpo_label_smoothing": "dpo.label_smoothing",
    "dpo_loss_type": "dpo.loss",
}


def _rows(*groups: tuple[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in groups for name in names.split()}


_OTHER_TRACKER = "metrics go to metrics.jsonl, TensorBoard and Weights & Biases"
_FUSED = "Shardline's own kernels and torch.compile do this"
_NO_SERVER = "there is no server for inference"

WITHOUT_EFFECT: dict[str, str] = _rows(
    ("the folder's config.json decides", "base_model_config cls_model_config tokenizer_type"),
    ("tokenizer.json is always read", "tokenizer_use_fast tokenizer_legacy"),
    ("code in a model folder is never run", "trust_remote_code"),
    ("derived from the model", "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model"),
    ("derived from the model", "is_qwen_derived_model model_kwargs overrides_of_model_kwargs"),
    ("a folder has one revision", "model_revision revision_of_model"),
    ("rows for new tokens are added one by one", "resize_token_embeddings_to_32x shrink_embeddings"),
    ("rows for new tokens are the mean of the others", "mean_resizing_embeddings"),
    ("the tokenizer's files are copied as they are", "tokenizer_save_jinja_files"),
    ("prepared data is kept in training.cache_folder", "dataset_prepared_path num_dataset_shards_to_save"),
    ("prepared data is kept in training.cache_folder", "dataset_keep_in_memory skip_prepare_dataset is_preprocess"),
    ("one process per core tokenizes the data", "dataset_num_proc dataset_processes"),
    ("only the columns that the format names are read", "remove_unused_columns"),
    ("each epoch is shuffled as a whole", "shuffle_before_merging_datasets"),
    ("records are read by index, not as a stream", "streaming streaming_multipack_buffer_size"),
    ("records are read by index, not as a stream", "pretrain_multipack_buffer_size preprocess_iterable"),
    ("records are read by index, not as a stream", "dispatch_batches split_batches accelerator_config"),
    (
        "documents in a row never attend to each other",
        "pretrain_multipack_attn batch_flattening multipack_real_batches",
    ),
    ("documents are packed first-fit over the whole data", "sample_packing_group_size sample_packing_bin_size"),
    ("documents are packed first-fit over the whole data", "sample_packing_sequentially sample_packing_eff_est"),
    ("documents are packed first-fit over the whole data", "sample_packing_mp_start_method total_num_tokens"),
    ("validation is packed as training is", "eval_sample_packing"),
    ("every row has sequence_len tokens, and its padding has no targets", "pad_to_sequence_len pad_to_multiple_of"),
    ("the order depends only on seed and position; packing fills rows", "group_by_length length_column_name"),
    ("every batch is full: the last one of an epoch reaches into the next", "dataloader_drop_last"),
    ("the size of a batch is what the config says", "auto_find_batch_size"),
    ("all trained tokens of a step are counted", "total_supervised_tokens"),
    ("Shardline chooses the attention kernel", "flash_attention sdp_attention flex_attention xformers_attention"),
    ("Shardline chooses the attention kernel", "eager_attention sage_attention flash_optimum sdpa_varlen"),
    ("Shardline chooses the attention kernel", "large_head_attention gemma4_hybrid_attn_impl flash_attn_d512"),
    ("Shardline chooses the attention kernel", "flex_attn_compile_kwargs attention"),
    ("there is only one kind of recomputation", "gradient_checkpointing_kwargs"),
    ("each decoder layer is compiled in the default mode", "torch_compile_mode torch_compile_options deepcompile"),
    (_FUSED, "liger_rope liger_rms_norm liger_layer_norm liger_glu_activation liger_swiglu liger_cross_entropy"),
    (_FUSED, "liger_fused_linear_cross_entropy liger_use_token_scaling cut_cross_entropy flash_attn_cross_entropy"),
    (_FUSED, "flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv fused_attn_kernel use_kernels"),
    (_FUSED, "use_scattermoe use_sonicmoe experts_implementation lora_mlp_kernel lora_qkv_kernel lora_o_kernel"),
    (_FUSED, "lora_embedding_kernel unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o"),
    (_FUSED, "unsloth_rms_norm unsloth_rope use_dsv4_kernels dsv4_fp4_grouped_mode liger_rms_norm_gated"),
    (_FUSED, "moe_kernels moe_backend moe_group_size moe_persistent_kernel moe_bnb_fast moe_dequant_chunk_size"),
    ("the loss is always computed in chunks", "chunked_cross_entropy chunked_cross_entropy_num_chunks"),
    ("activation_checkpoint bounds the memory of a block", "tiled_mlp tiled_mlp_num_shards"),
    ("activation_checkpoint bounds the memory of a block", "tiled_mlp_use_original_mlp"),
    ("each rank reads only its own rows", "low_cpu_mem_usage qlora_sharded_model_loading lora_on_cpu"),
    ("each rank reads only its own rows", "experimental_skip_move_to_device device device_map max_memory"),
    ("a rank uses the memory it needs", "gpu_memory_limit torch_empty_cache_steps"),
    ("weights have one orientation", "lora_fan_in_fan_out"),
    ("adapters are trained in float32", "peft_autocast_adapter_dtype embeddings_skip_upcast"),
    ("there is one way to merge: shardline export --merge", "merge_method merge_lora"),
    ("tied weights stay tied", "peft_ensure_weight_tying"),
    ("ranks come from --nproc, --nnodes or torchrun", "ddp world_size local_rank use_ray ray_num_workers"),
    ("ranks come from --nproc, --nnodes or torchrun", "ray_run_name resources_per_worker"),
    ("nothing is broadcast, and unused parameters need no search", "ddp_find_unused_parameters ddp_broadcast_buffers"),
    ("keys and values of all heads are sent together", "heads_k_stride"),
    ("experts take as many tokens as are routed to them", "expert_parallel_token_capacity"),
    ("tokens are sent in whole batches, and sent again where they are recomputed", "expert_parallel_dispatch_chunks"),
    ("tokens are sent in whole batches, and sent again where they are recomputed", "expert_parallel_save_dispatch"),
    ("buffers are as large as the tokens need", "expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes"),
    ("a backend that is missing is an error", "expert_parallel_fallback_on_unsupported"),
    ("norms are computed in float32", "fp32_norms fp32_norm_classes"),
    ("DEPRECATED: checkpoints have one format", "fsdp_final_state_dict_type"),
    ("a folder with a checkpoint of the same model is resumed", "auto_resume_from_checkpoints"),
    ("every checkpoint can be resumed", "save_only_model"),
    ("nothing is uploaded; huggingface-cli upload does it", "hub_model_id hub_strategy hub_revision"),
    ("nothing is uploaded; huggingface-cli upload does it", "push_dataset_to_hub hf_use_auth_token use_auth_token"),
    ("SIGUSR1 saves, SIGTERM saves and stops", "dynamic_checkpoint save_on_interrupt"),
    ("checkpoints are kept by age", "metric_for_best_model greater_is_better"),
    ("weights are not sent to Weights & Biases", "wandb_watch wandb_log_model wandb_silent"),
    (_OTHER_TRACKER, "use_mlflow mlflow_experiment_name mlflow_run_name mlflow_tracking_uri hf_mlflow_log_artifacts"),
    (_OTHER_TRACKER, "use_comet comet_api_key comet_experiment_config comet_experiment_key comet_mode comet_online"),
    (_OTHER_TRACKER, "comet_project_name comet_workspace use_trackio trackio_project_name trackio_run_name"),
    (_OTHER_TRACKER, "trackio_space_id use_otel_metrics otel_metrics_host otel_metrics_port use_swanlab"),
    (_OTHER_TRACKER, "swanlab_project swanlab_experiment_name swanlab_workspace swanlab_mode swanlab_description"),
    (_OTHER_TRACKER, "swanlab_api_key swanlab_log_model swanlab_web_host swanlab_api_host swanlab_log_completions"),
    (_OTHER_TRACKER, "swanlab_completion_log_interval swanlab_completion_max_buffer swanlab_lark_webhook_url"),
    (_OTHER_TRACKER, "swanlab_lark_secret"),
    ("tokens per second are always logged", "include_tkps include_tokens_per_second include_num_input_tokens_seen"),
    ("overrides are --section.key=value", "strict axolotl_config_path"),
    ("validation computes the loss", "do_bench_eval bench_dataset bench_split eval_table_size eval_max_new_tokens"),
    ("validation computes the loss", "do_causal_lm_eval eval_causal_lm_metrics lm_eval_tasks lm_eval_batch_size"),
    ("validation computes the loss", "lm_eval_post_train lm_eval_model eval_table_max_new_tokens"),
    ("shardline generate continues prompts", "generate_samples num_generation_samples generation_max_new_tokens"),
    ("shardline generate continues prompts", "generation_temperature generation_top_p generation_top_k"),
    ("shardline generate continues prompts", "generation_do_sample generation_prompt_ratio"),
    (_NO_SERVER, "gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens"),
    (_NO_SERVER, "gradio_temperature vllm"),
    ("it is for another optimizer", "adam_beta3 adam_epsilon2 torchdistx_path dion_lr dion_momentum"),
    ("it is for another optimizer", "dion_rank_fraction dion_rank_multiple_of optim_target_modules"),
    ("it is for another optimizer", "qgalore_rank qgalore_update_proj_gap qgalore_scale qgalore_proj_type"),
    ("it is for another optimizer", "qgalore_proj_quant qgalore_proj_bits qgalore_proj_group_size"),
    ("it is for another optimizer", "qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size"),
    ("it belongs to a key that is refused or off", "image_size image_resize_algorithm processor_kwargs"),
    ("it belongs to a key that is refused or off", "nvfp4_merge_aware_latent_mix nvfp4_merge_aware_start_step"),
    ("images are not trained on", "freeze_mm_modules role_boundaries"),
    ("a key of older versions", "debug data_seed max_packed_sequence_len dpo_norm_loss dpo_generate_during_eval"),
    ("a key of older versions", "dpo_use_logits_to_keep rpo_alpha base_model_ignore_patterns collator_pad_to_longest"),
    ("the last checkpoint is the adapter", "lora_out_dir"),
    ("the reference of an adapter is its frozen base, from the same weights", "rl_adapter_ref_model"),
    ("it belongs to a key that is refused or off", "gptq_disable_exllama relora_cpu_offload relora_prune_method"),
    ("it belongs to a key that is refused or off", "relora_prune_ratio jagged_restart_warmup_steps"),
    ("it belongs to a key that is refused or off", "jagged_restart_anneal_steps lisa_step_interval trl ebft"),
    ("it belongs to a key that is refused or off", "lisa_layers_attribute pose_split_on_token_ids"),
    ("it belongs to a key that is refused or off", "pose_max_context_len"),
    ("it belongs to a key that is refused or off", "pose_num_chunks scaling_softmax_factor scaling_softmax_bias"),
    ("it belongs to a key that is refused or off", "eaft_alpha eaft_k num_labels center_rewards_coefficient"),
    ("an adapter of the embedding learns at the rates of the others", "loraplus_lr_embedding"),
    ("it belongs to a key that is refused or off", "gptq_groupsize gptq_model_v1"),
    ("it belongs to a key that is refused or off", "log_sweep_min_lr log_sweep_max_lr"),
    ("it belongs to a key that is refused or off", "relora_warmup_steps relora_anneal_steps gkd_teacher"),
    ("it belongs to a key that is refused or off", "gkd_teacher_init_kwargs gkd_lmbda gkd_seq_kd gkd_max_new_tokens"),
    ("it belongs to a key that is refused or off", "gkd_top_k gkd_beta gkd_divergence gkd_temperature"),
    ("Axolotl does not read it either", "wandb_run wandb_runid hub_repo hub_token full_finetune torch_dtype"),
    ("Axolotl does not read it either", "sample_packing_seq_len_multiplier"),
    ("it belongs to a key that is refused or off", "kto_desirable_weight kto_undesirable_weight orpo_alpha cpo_alpha"),
    ("it belongs to a key that is refused or off", "simpo_gamma max_prompt_len"),
    ("every answer of a pair has a row of its own", "dpo_padding_free"),
    (_FUSED, "dpo_use_liger_kernel"),
    ("the reference's log-probabilities are computed with each batch", "precompute_ref_log_probs"),
)

REFUSED: dict[str, str] = _rows(
    ("mistral-common tokenizers are not read; the folder needs a tokenizer.json", "tokenizer_use_mistral_common"),
    ("the vocabulary's tokens keep their text; add new ones with tokens", "added_tokens_overrides"),
    ("data is cut by source: shards and shards_idx of a dataset", "dataset_shard_num dataset_shard_idx"),
    ("packed documents never run into each other; set sample_packing: true", "pretraining_sample_concatenation"),
    (
        "all parameters have one learning rate, except with loraplus_lr_ratio",
        "embedding_lr embedding_lr_scale lr_groups",
    ),
    ("the schedule has no such factor; remove the key", "lr_div_factor"),
    ("the last weights are kept, not the best; keep more with save_total_limit", "load_best_model_at_end"),
    ("layers stay where they are computed; use fsdp_config.offload_params", "layer_offloading"),
    ("layers are not measured; name them in unfrozen_parameters", "spectrum_top_fraction spectrum_model_name"),
    ("the set of trained layers does not change during a run; use unfrozen_parameters", "lisa_n_layers"),
    ("the model keeps its layers", "peft_layer_replication"),
    ("layers are named by index: use peft_layers_to_transform", "peft_layers_pattern"),
    ("embeddings are trained in full: use lora_modules_to_save", "peft_trainable_token_indices fix_untrained_tokens"),
    ("experts keep their type; quantize linear layers with load_in_4bit", "quantize_moe_experts"),
    ("adapters are not merged during a run; use adapter: lora", "relora relora_steps jagged_restart_steps"),
    ("a 4-bit base is NF4: use load_in_4bit", "gptq use_onebitllms qat quantization nvfp4_training nvfp4_merge_aware"),
    ("weights are not pruned or compressed in training", "llmcompressor"),
    ("the folder's config.json has it; --model.overrides.rope_scaling changes it", "rope_scaling use_pose xpos_rope"),
    ("attention is exact", "s2_attention scaling_softmax landmark_attention"),
    ("the loss is cross-entropy", "use_eaft kd_trainer kd_ce_alpha kd_alpha kd_temperature dense_mixer diffusion"),
    ("the loss is cross-entropy", "kd_zscore_base_temp kd_top_k_before_softmax grokfast_alpha grokfast_lamb"),
    (
        "the loss is cross-entropy",
        "kd_beta kd_normalize_topk kd_online_server_base_url kd_online_topk kd_online_server",
    ),
    ("the loss is cross-entropy", "kd_online_server_model kd_online_timeout kd_online_max_new_tokens"),
    ("the loss is cross-entropy", "kd_temperature_min gkd_trainer use_dft enable_dft_loss"),
    ("one DPO loss at a time, without weights", "dpo_loss_weights dpo_use_weighting"),
    ("rewards are not trained", "reward_model process_reward_model"),
    ("the trainer is Shardline's; experimental.custom_import adds hooks", "trainer_cls"),
    ("llama4 experts are computed as they are stored", "llama4_linearized_experts"),
    ("images and audio are not trained on; remove it to train on text", "processor_type"),
)

PLUGINS: dict[str, str] = {
    "LigerPlugin": _FUSED,
    "CutCrossEntropyPlugin": _FUSED,
    "KernelsPlugin": _FUSED,
    "UnslothPlugin": _FUSED,
    "ExpertParallelPlugin": "",
    "SwanLabPlugin": _OTHER_TRACKER,
    "LMEvalPlugin": "validation computes the loss",
}
REFUSED_PLUGINS: dict[str, str] = {
    "SpectrumPlugin": REFUSED["spectrum_top_fraction"],
    "GrokfastPlugin": REFUSED["grokfast_alpha"],
    "KDPlugin": REFUSED["kd_trainer"],
    "GKDPlugin": REFUSED["gkd_trainer"],
    "DiffusionPlugin": REFUSED["diffusion"],
    "DenseMixerPlugin": REFUSED["dense_mixer"],
    "LLMCompressorPlugin": REFUSED["llmcompressor"],
}


def known_keys() -> list[str]:
    return [*DIRECT, *BY_RULE, *WITHOUT_EFFECT, *REFUSED]


def keys_page() -> str:
    """The page `docs/axolotl-keys.md`."""
    rows = {name: ("understood", f"`{to.native}`") for name, to in DIRECT.items()}
    rows |= {name: ("understood", words) for name, words in BY_RULE.items()}
    rows |= {name: ("no effect", reason) for name, reason in WITHOUT_EFFECT.items()}
    rows |= {name: ("refused", reason) for name, reason in REFUSED.items()}
    lines = [_PAGE_HEAD, "| key | | what it becomes, or why not |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {kind} | {words} |" for name, (kind, words) in sorted(rows.items())]
    lines += ["", "| plugin | |", "| --- | --- |"]
    lines += [f"| `{name}` | {reason or 'expert_parallel_size is understood'} |" for name, reason in PLUGINS.items()]
    lines += [f"| `{name}` | refused: {reason} |" for name, reason in REFUSED_PLUGINS.items()]
    return "\n".join(lines) + "\n"


_PAGE_HEAD = """# Keys of an Axolotl config

What becomes of each; `shardline config --axolotl` prints this page. A key that is refused is accepted where it is off:
false, empty or 0. A key that is not here is an error that names the nearest one.
See [from-axolotl.md](from-axolotl.md) for how to move from Axolotl to Shardline.
"""
