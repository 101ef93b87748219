"""Changes of what a step does: parallel/, comm/, memory/, models/, precision/, training/, optim/, adapters/."""

from __future__ import annotations

from tests.mutations.change import Change

ENGAGED = "tests/unit/telemetry/test_engaged.py::test_"
ACTIVATION = "tests/unit/memory/test_activation.py::test_"
OFFLOAD = "tests/unit/memory/test_offload.py::test_"
DDP = "tests/unit/parallel/test_data_parallel.py::test_"
THIN = "tests/unit/parallel/test_data_parallel_compression.py::test_"
FSDP = "tests/unit/parallel/test_data_parallel_fsdp.py::test_"
CHOOSING = "tests/unit/parallel/test_choosing.py::test_"
CONTEXT = "tests/unit/parallel/test_context.py::test_"
RANKS = "tests/unit/telemetry/test_metrics.py::test_a_row_has_the_numbers_of_the_slower_rank_and_every_token_once"
LAYOUT = "tests/parity/test_layouts.py::test_layout"
BYTES = "tests/parity/test_bytes.py::test_"
PIPELINE = "tests/parity/test_pipeline.py::test_"
BUBBLE = f"{PIPELINE}every_logged_step_has_its_bubble"
RING = "tests/parity/test_context.py::test_"
ASYNC = "tests/parity/test_async_tensor.py::test_"
EXPERTS = "tests/e2e/test_experts.py::test_"
LOAD = "tests/unit/parallel/test_expert_load.py::test_"
FLOAT8 = "tests/unit/precision/test_float8.py::test_"
TRAINING = "tests/e2e/test_training.py::test_"
KEYS = "tests/e2e/test_fine_tuning_keys.py::test_"
DPO = "tests/e2e/test_dpo.py::test_"
TARGETS = "tests/unit/adapters/test_targets.py::test_"

COMPILE_AND_MEMORY = [
    Change(
        "blocks are never compiled",
        "parallel/apply.py",
        "block.function = compile_once(block.function)",
        "compile_once(block.function)",
        f"{ENGAGED}compiled_blocks_are_counted_and_their_operations_known[none]",
    ),
    Change(
        "another backend compiles than the config names",
        "parallel/apply.py",
        "backend=noting(compiler, graphs)",
        'backend=noting("eager", graphs)',
        f"{ENGAGED}a_memory_budget_is_kept",
    ),
    Change(
        "activation checkpointing is left out",
        "memory/activation.py",
        "block.function = wrapped[block.function]",
        "wrapped[block.function]",
        f"{ENGAGED}what_blocks_keep_tells_the_modes_of_checkpointing_apart",
    ),
    Change(
        "selective_ac_option takes every block",
        "memory/activation.py",
        "if int(layer) % every == 0]",
        "if int(layer) % every >= 0]",
        f"{ENGAGED}what_blocks_keep_tells_the_modes_of_checkpointing_apart",
    ),
    Change(
        "op keeps no product",
        "memory/activation.py",
        "if seen[phase] % 2 == 0 else CheckpointPolicy.MUST_SAVE",
        "if seen[phase] else CheckpointPolicy.MUST_SAVE",
        f"{ACTIVATION}what_is_computed_again[op]",
    ),
    Change(
        "op computes attention again",
        "memory/activation.py",
        "if op in _kept_attention_ops() or _travels(op):",
        "if _travels(op):",
        f"{ACTIVATION}what_is_computed_again[op]",
    ),
    Change(
        "products of named modules are kept",
        "memory/activation.py",
        "if shape in recompute_shapes:",
        "if shape in ():",
        f"{ACTIVATION}what_is_computed_again[op-forced]",
    ),
    Change(
        "the activation memory budget is ignored",
        "memory/activation.py",
        "section.memory_budget if wanted else 1.0",
        "1.0",
        f"{ENGAGED}a_memory_budget_is_kept",
    ),
    Change(
        "activations are not offloaded",
        "parallel/apply.py",
        'if config.activation_checkpoint.mode == "offload":',
        'if config.activation_checkpoint.mode == "":',
        f"{ENGAGED}offloaded_bytes",
    ),
    Change(
        "offload_every is ignored",
        "memory/offload.py",
        "leaves = int(layer) % every == 0",
        "leaves = True",
        f"{OFFLOAD}every_second_block_alone_is_sent_and_its_copy_has_the_time_of_two[compiled0]",
    ),
    Change(
        "what was sent to the host stays on the device, too",
        "memory/offload.py",
        "            memory.storage = None",
        "            pass",
        f"{OFFLOAD}all_but_the_last_block_are_sent_and_freed_while_forward_goes_on",
    ),
    Change(
        "nothing is fetched ahead",
        "memory/offload.py",
        "before.fetch()",
        "pass",
        f"{OFFLOAD}backward_of_a_block_fetches_the_block_before_and_no_other",
    ),
    Change(
        "offloaded bytes are those of the last block",
        "memory/offload.py",
        "self.sent += self._unsent.send()",
        "self.sent = self._unsent.send()",
        f"{OFFLOAD}all_but_the_last_block_are_sent_and_freed_while_forward_goes_on",
    ),
]

DATA_PARALLEL = [
    Change(
        "CPU offload is ignored",
        "parallel/data/fsdp.py",
        "if config.training.enable_cpu_offload else OffloadPolicy()",
        "if False else OffloadPolicy()",
        f"{FSDP}offload_works_without_a_gpu_and_changes_no_number",
    ),
    Change(
        "weights are freed after forward whatever fsdp_reshard_after_forward says",
        "parallel/data/fsdp.py",
        'reshard = one_stage if freed == "default" else freed == "always"',
        "reshard = one_stage",
        f"{FSDP}bytes_of_shards[overrides2-1-1-1]",
    ),
    Change(
        "fsdp_prefetch is ignored",
        "parallel/data/fsdp.py",
        "_prefetch(model, config.parallelism.fsdp_prefetch)",
        "_prefetch(model, 0)",
        f"{FSDP}weights_of_the_next_blocks_are_gathered_ahead",
    ),
    Change(
        "FSDP sums with every micro-batch",
        "parallel/data/fsdp.py",
        'model.set_requires_gradient_sync(last or mode != "step")',
        "model.set_requires_gradient_sync(True)",
        f"{FSDP}bytes_of_shards[overrides0-6-3-1]",
    ),
    Change(
        "accumulation_sync = scatter sums between replicas every time",
        "parallel/data/fsdp.py",
        'model.set_requires_all_reduce(last or mode != "scatter")',
        "model.set_requires_all_reduce(True)",
        f"{FSDP}bytes_of_replicated_shards[scatter-3-1]",
    ),
    Change(
        "FSDP's gradients are means over ranks",
        "parallel/data/fsdp.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        f"{LAYOUT}[fsdp2]",
    ),
    Change(
        "FSDP's exposed time is a constant",
        "parallel/data/fsdp.py",
        "exposed.add((ended - started) / 1e9)",
        "exposed.add(0.5)",
        f"{FSDP}the_time_that_is_waited_for_communication_is_measured[fsdp]",
    ),
    Change(
        "waits for gathered weights are not exposed",
        "parallel/data/fsdp.py",
        'with exposed.waiting(torch.device("cpu")):',
        "with contextlib.nullcontext():",
        f"{FSDP}the_time_that_is_waited_for_communication_is_measured[fsdp]",
    ),
    Change(
        "waits for sums between replicas are not exposed",
        "parallel/data/fsdp.py",
        "            _waited(self.ended)",
        "            pass",
        f"{FSDP}the_time_that_is_waited_for_communication_is_measured[hsdp]",
    ),
    Change(
        "bytes of FSDP count this rank among the receivers",
        "parallel/data/fsdp.py",
        "each * (over.size - 1)",
        "each * over.size",
        f"{FSDP}bytes_of_shards[overrides0-6-3-1]",
    ),
    Change(
        "sums between replicas are not counted",
        "parallel/data/fsdp.py",
        "2 * (size - 1) / size * reduced.nbytes",
        "0",
        f"{FSDP}bytes_of_replicated_shards[step-1-1]",
    ),
    Change(
        "replicas sum after backward whatever the config says",
        "parallel/data/ddp.py",
        "while self.overlap and self.next",
        "while False and self.next",
        f"{DDP}sums_hide_behind_backward",
    ),
    Change(
        "gradient_bucket_mib is ignored",
        "parallel/data/ddp.py",
        "size + added > limit",
        "False",
        f"{DDP}every_way_of_summing_gives_the_large_batch[0.00105-True-True]",
    ),
    Change(
        "gradient_compression = bfloat16 sends float32",
        "parallel/data/ddp.py",
        'rounded = section.gradient_compression == "bfloat16"',
        "rounded = False",
        f"{DDP}bfloat16_sends_half_and_rounds",
    ),
    Change(
        "PowerSGD forgets what it left out",
        "parallel/data/compression.py",
        "error.add_(gradient)",
        "error.copy_(gradient)",
        f"{THIN}what_is_left_out_is_sent_later",
    ),
    Change(
        "PowerSGD is not used",
        "parallel/data/ddp.py",
        'if section.gradient_compression == "powersgd":',
        'if section.gradient_compression == "":',
        f"{THIN}training_with_thin_gradients_learns[1-2]",
    ),
    Change(
        "copies that differ are not looked for",
        "training/trainer.py",
        "if freq and step % freq == 0:",
        "if False:",
        f"{PIPELINE}tied_copies_that_drift_apart_are_noticed",
    ),
]

TENSOR_PARALLEL = [
    Change(
        "a weight is cut over the wrong axis",
        "parallel/tensor/tensor.py",
        '"feed_forward.w2.weight": Shard(1)',
        '"feed_forward.w2.weight": Shard(0)',
        f"{LAYOUT}[tp2]",
    ),
    Change(
        "gradients of norms are not summed over tensor-parallel ranks",
        "parallel/tensor/tensor.py",
        'collectives.sum_in_place(flat, "tp")',
        "pass",
        f"{LAYOUT}[tp2]",
    ),
    Change(
        "sequence parallelism is left out",
        "parallel/apply.py",
        "section.enable_sequence_parallel,",
        "False,",
        f"{BYTES}tensor_parallel[2]",
    ),
    Change(
        "disable_loss_parallel is ignored",
        "parallel/apply.py",
        "not section.disable_loss_parallel,",
        "True,",
        f"{BYTES}without_loss_parallel_the_head_is_whole",
    ),
    Change(
        "async TP is left out",
        "parallel/apply.py",
        "section.enable_async_tensor_parallel,",
        "False,",
        f"{ASYNC}a_run_keeps_what_was_chosen_and_measures_itself",
    ),
    Change(
        "a forced backend is not taken",
        "parallel/tensor/async_tp.py",
        'forced = allowed[-1] if section.async_tensor_parallel_backend != "auto" else None',
        "forced = None",
        f"{ASYNC}a_forced_backend_is_taken[ring]",
    ),
    Change(
        "ring runs in place of a backend that cannot be used, in silence",
        "parallel/tensor/async_tp.py",
        'lines.append(f"Async TP: {asked} cannot be used here ({reason}); ring runs instead")',
        "pass",
        f"{ASYNC}symmetric_without_a_gpu_is_said_in_one_line",
    ),
    Change(
        "too little compute for its communication is not said",
        "parallel/tensor/async_tp.py",
        "if compute < ENOUGH_COMPUTE * sent:",
        "if False:",
        f"{CHOOSING}too_little_compute_for_its_communication_is_said",
    ),
    Change(
        "the slowest candidate is chosen",
        "parallel/tensor/autotune.py",
        "best = min(times, key=lambda choice: times[choice])",
        "best = max(times, key=lambda choice: times[choice])",
        f"{CHOOSING}without_serial_the_fastest_is_taken",
    ),
    Change(
        "what was chosen is not used",
        "parallel/tensor/async_tp.py",
        "choices.chosen[shape.product] = measured.chosen",
        "pass",
        f"{ASYNC}a_forced_backend_is_taken[ring]",
    ),
    Change(
        "the step that is compared with is not serial",
        "parallel/tensor/backend_table.py",
        "choice = SERIAL if choices.serial else choices.find(product)",
        "choice = choices.find(product)",
        f"{CHOOSING}a_step_that_is_compared_with_carries_every_product_serially",
    ),
]

CONTEXT_PARALLEL = [
    Change(
        "Ulysses sends heads back in another order",
        "parallel/context/ulysses.py",
        "return collectives.all_to_all(blocks, AXIS).movedim(0, 2).flatten(2, 3)",
        "return collectives.all_to_all(blocks, AXIS).flip(0).movedim(0, 2).flatten(2, 3)",
        f"{RING}attention_is_that_of_one_process[2-ulysses-1-causal]",
    ),
    Change(
        "gathered keys lack those of the last rank",
        "parallel/context/ring.py",
        "for source in range(plan.slices.ranks):\n        attending.add(",
        "for source in range(plan.slices.ranks - 1):\n        attending.add(",
        f"{RING}attention_is_that_of_one_process[2-allgather-2-causal]",
    ),
    Change(
        "slices are not dealt out head and tail",
        "parallel/context/context.py",
        'section.context_parallel_load_balancer == "headtail"',
        'section.context_parallel_load_balancer == "none"',
        f"{CONTEXT}alltoall_is_ring_and_ulysses_needs_no_balance",
    ),
    Change(
        "keys are always passed around a ring",
        "parallel/context/context.py",
        "Slices(ranks, 2 if balanced else 1), rank, method)",
        'Slices(ranks, 2 if balanced else 1), rank, "ring")',
        f"{CONTEXT}alltoall_is_ring_and_ulysses_needs_no_balance",
    ),
    Change(
        "slices of other documents are computed",
        "parallel/context/context.py",
        "table[~meet] = SKIP",
        "pass",
        f"{CONTEXT}documents_are_masked_like_those_of_whole_sequences",
    ),
    Change(
        "a ring does not wait for keys",
        "parallel/context/ring.py",
        "            transfer.wait()\n            yield source, span, block",
        "            yield source, span, block",
        f"{RING}ranks_that_are_late_change_nothing[1]",
    ),
    Change(
        "gradients of keys stay with the ranks that computed them",
        "parallel/context/ring.py",
        "own[span.start : span.stop] += into",
        "pass",
        f"{RING}attention_is_that_of_one_process[2-ring-2-causal]",
    ),
]

PIPELINES = [
    Change(
        "every schedule is 1F1B",
        "parallel/pipeline/stages.py",
        "build_schedule(section.pipeline_parallel_schedule, layout.pp",
        'build_schedule("1F1B", layout.pp',
        "tests/unit/parallel/test_stages.py",
    ),
    Change(
        "pipeline_parallel_layers_per_stage is ignored",
        "parallel/pipeline/stages.py",
        "elif section.pipeline_parallel_layers_per_stage is not None:",
        "elif False:",
        "tests/unit/parallel/test_stages.py",
    ),
    Change(
        "stages are cut without looking at the output's weight",
        "parallel/pipeline/stages.py",
        "output=(head / all_held + head / all_used) / 2",
        "output=0.0",
        "tests/unit/parallel/test_stages.py",
    ),
    Change(
        "the pipeline's bubble is a constant",
        "telemetry/telemetry.py",
        "idle_share(*self.pipeline.clock.take(), self.device)",
        "0.5",
        BUBBLE,
    ),
    Change(
        "the bubble is that of all ranks' time added up",
        "parallel/pipeline/executor.py",
        'collectives.sum_in_place(numbers[:1].clone(), "world") / collectives.axis_size("world")',
        'collectives.max_in_place(numbers[:1].clone(), "world")',
        BUBBLE,
    ),
    Change(
        "the step of a pipeline is as long as its first rank's",
        "parallel/pipeline/executor.py",
        'longest = collectives.max_in_place(numbers[1:].clone(), "world")',
        "longest = numbers[1:]",
        BUBBLE,
    ),
    Change(
        "the bubble's clock leaves backward out",
        "parallel/pipeline/executor.py",
        "with self.clock.around():",
        'with self.clock.around() if action.kind == "F" else contextlib.nullcontext():',
        BUBBLE,
    ),
    Change(
        "weight gradients do not wait",
        "parallel/pipeline/executor.py",
        "with weight_queue.deferring():",
        "with contextlib.nullcontext():",
        f"{PIPELINE}splitting_backward_computes_nothing_twice[plain-op]",
    ),
    Change(
        "stages are reduced at the end of the step",
        "parallel/pipeline/executor.py",
        "                            done(action.stage)\n                run.send(made)",
        "                            pass\n                run.send(made)",
        f"{PIPELINE}a_stage_is_reduced_as_soon_as_it_is_through",
    ),
    Change(
        "gradients of tied embeddings on two stages are not added",
        "training/pipelined_step.py",
        'gradient += self.pipeline.channels.swap(gradient, peer, "tied embedding\'s gradient")',
        'self.pipeline.channels.swap(gradient, peer, "tied embedding\'s gradient")',
        f"{PIPELINE}checkpoints_go_from_stages_to_one_process_and_back",
    ),
]

EXPERT_PARALLEL = [
    Change(
        "the load of experts is a constant",
        "parallel/expert/balance.py",
        "self.loads.amax(1) / self.loads.mean(1)",
        "self.loads.amax(1) / self.loads.amax(1)",
        f"{LOAD}loads_are_the_largest_over_the_mean_of_each_layer",
    ),
    Change(
        "the load of experts is that of the last layer",
        "parallel/expert/balance.py",
        '"expert_load": max(loads.values())',
        '"expert_load": list(loads.values())[-1]',
        f"{LOAD}loads_are_the_largest_over_the_mean_of_each_layer",
    ),
    Change(
        "biases of routers move away from equal loads",
        "parallel/expert/balance.py",
        "(self.loads.mean(1, keepdim=True) - self.loads).sign()",
        "(self.loads - self.loads.mean(1, keepdim=True)).sign()",
        f"{LOAD}biases_move_towards_equal_loads",
    ),
    Change(
        "moe_force_load_balance is ignored",
        "parallel/apply.py",
        "RouterRun(config.debug.moe_force_load_balance, batch",
        "RouterRun(False, batch",
        f"{EXPERTS}the_same_load_for_all_experts_if_it_is_forced",
    ),
    Change(
        "tokens do not travel in float8",
        "parallel/apply.py",
        'narrow = config.parallelism.expert_parallel_dispatch_dtype == "float8"',
        "narrow = False",
        "tests/parity/test_experts.py::test_tokens_travel_in_float8[float8-fsdp2-ep2]",
    ),
    Change(
        "tokens travel in one part, with nothing beside",
        "parallel/expert/expert.py",
        'parts = 2 if not moe.shared_dim and mesh.device_type == "cpu" else 1',
        "parts = 1",
        "tests/parity/test_experts.py::test_rows_travel_while_something_computes",
    ),
    Change(
        "a carrier that brings something else is used",
        "parallel/expert/choose.py",
        "if not all(torch.equal(one, another) for one, another in zip(found, wanted, strict=True)):",
        "if False:",
        "tests/unit/parallel/test_expert_carriers.py::test_a_carrier_that_brings_something_else_is_refused",
    ),
    Change(
        "the auxiliary loss is off",
        "models/experts/moe.py",
        'if "aux_loss" in spec.losses:',
        "if False:",
        "tests/unit/models/test_moe_losses.py",
    ),
    Change(
        "the z-loss has no gradient",
        "models/experts/moe.py",
        "routing.logits.logsumexp(-1).square().sum()",
        "routing.logits.detach().logsumexp(-1).square().sum()",
        "tests/unit/models/test_moe_losses.py",
    ),
]

PRECISION = [
    Change(
        "blocks compute in the type of the weights",
        "precision/mixed.py",
        "model.compute_dtype = precision.compute",
        "model.compute_dtype = precision.storage",
        f"{ENGAGED}types_of_products",
    ),
    Change(
        "training.dtype is ignored",
        "precision/mixed.py",
        "model.to(dtype=precision.storage)",
        "model.to(dtype=torch.float32)",
        f"{TRAINING}precision_is_really_in_force[settings2-stored2-computed2]",
    ),
    Change(
        "gradients are reduced in the type of products",
        "parallel/data/fsdp.py",
        "reduce_dtype=precision.reduce",
        "reduce_dtype=None",
        f"{FSDP}gradients_are_reduced_in_the_type_that_is_asked_for",
    ),
    Change(
        "float8 is left out",
        "parallel/apply.py",
        "block.spec = block.spec._replace(products=attention, ffn_products=ffn, expert_products=experts)",
        "pass",
        f"{FLOAT8}the_four_products_of_each_block_are_in_float8",
    ),
    Change(
        "filter_fqns is ignored",
        "precision/convert.py",
        "if any(part in name for part in filters for name in names):",
        "if False:",
        f"{FLOAT8}modules_that_are_named_stay_as_they_are[filters0-left0]",
    ),
    Change(
        "float8 recipes are all tensorwise",
        "precision/convert.py",
        'Recipe(section.recipe_name or "tensorwise", section.emulate)',
        'Recipe("tensorwise", section.emulate)',
        f"{FLOAT8}the_recipe_is_that_of_the_config",
    ),
    Change(
        "weights are gathered whole where float8 is asked for",
        "training/step.py",
        "applied.float8_modules if section.enable_fsdp_float8_all_gather else ()",
        "()",
        f"{BYTES}weights_gathered_in_float8[own-factors]",
    ),
    Change(
        "a float16 loss is not scaled",
        "precision/loss_scale.py",
        "FIRST if dynamic else 1.0, 0",
        "1.0, 0",
        "tests/e2e/test_float16.py::test_gradients_that_overflow_skip_the_step_and_halve_the_factor",
    ),
    Change(
        "the factor of a float16 loss never grows",
        "precision/loss_scale.py",
        "self.value, self.good_steps = self.value * 2, 0",
        "self.good_steps = 0",
        "tests/e2e/test_float16.py::test_the_factor_doubles_after_many_good_steps",
    ),
    Change(
        "debug.deterministic is ignored",
        "training/setup.py",
        "torch.use_deterministic_algorithms(deterministic,",
        "torch.use_deterministic_algorithms(False,",
        f"{TRAINING}deterministic_algorithms_are_in_force",
    ),
]

THE_STEP = [
    Change(
        "gradients are not clipped",
        "optim/clip.py",
        "torch._foreach_mul_(gradients, factor)",
        "pass",
        f"{TRAINING}clipping_is_applied",
    ),
    Change(
        "the norm of gradients counts copies",
        "optim/clip.py",
        "return (squares / copies.to(squares.device, non_blocking=True)).sum()",
        "return squares.sum()",
        f"{LAYOUT}[ddp2]",
    ),
    Change(
        "the loss is the mean over this rank's targets",
        "training/step.py",
        'collectives.sum_in_place(targets, "loss")',
        "pass",
        f"{LAYOUT}[ddp2]",
    ),
    Change(
        "validation is the loss of one rank",
        "training/validate.py",
        '        if self.mesh.world_size > 1:\n            collectives.sum_in_place(sums, "world")\n',
        "",
        f"{LAYOUT}[fsdp2-validation]",
    ),
    Change(
        "validation.steps is ignored",
        "training/validate.py",
        "None if self.section.steps < 0 else self.section.steps",
        "None",
        f"{TRAINING}validation_rows",
    ),
    Change(
        "NEFTune adds no noise",
        "training/step.py",
        "alpha / math.sqrt(config.training.seq_len * model.arch.dim)",
        "0.0",
        f"{KEYS}noise_changes_training_and_not_validation_and_is_the_same_after_a_resumption",
    ),
    Change(
        "validation.patience is ignored",
        "training/trainer.py",
        "if progress.worse_validations >= patience:",
        "if False:",
        f"{KEYS}a_run_whose_validation_gets_no_better_ends_early_and_is_finished",
    ),
    Change(
        "training.max_loss is ignored",
        "training/trainer.py",
        "if self.high_losses >= section.max_loss_steps:",
        "if False:",
        f"{KEYS}a_loss_that_stays_high_ends_the_run_before_it_is_saved",
    ),
    Change(
        "a step that is not finite is made",
        "training/step.py",
        "return math.isfinite(self.loss) and math.isfinite(self.grad_norm)",
        "return True",
        f"{TRAINING}a_nonfinite_step_can_be_skipped",
    ),
    Change(
        "optimizer in backward is left out",
        "training/step.py",
        "if config.optimizer.early_step_in_backward:",
        "if False:",
        f"{ENGAGED}a_step_in_backward",
    ),
    Change(
        "loss_chunk_tokens is ignored",
        "training/loss.py",
        "size = chunk_tokens or choose_chunk_tokens(hidden, weight.shape[0])",
        "size = choose_chunk_tokens(hidden, weight.shape[0])",
        "tests/unit/training/test_loss.py",
    ),
    Change(
        "pairs have no reference",
        "training/pairs.py",
        'if self.reference.kind == "none":',
        "if True:",
        f"{DPO}the_reference_of_lora_is_the_frozen_model[same]",
    ),
    Change(
        "the reward margin is that of log-probabilities",
        "training/pairs.py",
        "rewards = self.options.beta * (leaf.detach() - reference)",
        "rewards = leaf.detach() - reference",
        f"{DPO}loss_and_gradients_are_those_of_the_formula[sigmoid-0.0]",
    ),
    Change(
        "the reward accuracy is a constant",
        "training/pairs.py",
        "(margins > 0).to(margins.dtype)",
        "torch.ones_like(margins)",
        f"{DPO}loss_and_gradients_are_those_of_the_formula[sigmoid-0.0]",
    ),
]

OPTIMIZERS = [
    Change(
        "optimizer.implementation is always foreach",
        "optim/optimizer.py",
        "return build(section.implementation)",
        'return build("foreach")',
        f"{ENGAGED}a_plain_run",
    ),
    Change(
        "foreach takes the place of fused in silence",
        "optim/optimizer.py",
        'log.warning("optimizer.implementation: fused cannot be used here (%s); foreach is used instead", error)',
        "pass",
        "tests/unit/optim/test_optimizer.py::test_where_fused_does_not_run_a_line_says_what_does",
    ),
    Change(
        "optimizer.state_dtype is ignored",
        "optim/optimizer.py",
        'if section.state_dtype != "parameter" and wide:',
        "if False:",
        f"{ENGAGED}updates",
    ),
    Change(
        "decay_norms is ignored",
        "optim/optimizer.py",
        "    if decay_norms:",
        "    if True:",
        "tests/unit/optim/test_optimizer.py::test_norms_and_biases_are_not_decayed_by_option",
    ),
    Change(
        "the learning rate does not grow with the batch",
        "optim/optimizer.py",
        "return section.lr * global_batch_size / section.lr_scaling_base_batch",
        "return section.lr",
        "tests/unit/optim/test_optimizer.py::test_the_learning_rate_grows_with_the_batch_by_option",
    ),
    Change(
        "LAMB's ratios are of whole fused weights",
        "optim/optimizer.py",
        "parts = fused_parts(model)",
        "parts = {}",
        "tests/unit/optim/test_lamb.py::test_parts_of_a_fused_weight_have_ratios_of_their_own",
    ),
    Change(
        "muon_ns_steps is ignored",
        "optim/muon.py",
        'steps=group["ns_steps"]',
        "steps=5",
        "tests/unit/optim/test_muon.py::test_steps_are_torchs_for_every_logical_matrix",
    ),
    Change(
        "Adafactor does not scale by the size of weights",
        "optim/adafactor.py",
        'if one.group["scale_parameter"]]',
        "if False]",
        "tests/unit/optim/test_adafactor.py::test_steps_are_those_of_transformers[at-once-plain]",
    ),
    Change(
        "Lion's moment decays by beta1",
        "optim/lion.py",
        "torch._foreach_lerp_(moments, gradients, 1 - beta2)",
        "torch._foreach_lerp_(moments, gradients, 1 - beta1)",
        "tests/unit/optim/test_lion.py::test_lion_is_that_of_the_paper",
    ),
    Change(
        "the schedule has no warmup",
        "optim/lr_schedule.py",
        "warmup = section.warmup(total)",
        "warmup = 0",
        "tests/unit/optim/test_schedule.py::test_factors",
    ),
    Change(
        "momentum_range is ignored",
        "optim/lr_schedule.py",
        "return highest - (highest - lowest) * height",
        "return highest",
        "tests/unit/optim/test_schedule.py::test_one_cycle_is_that_of_torch[cosine-cos-0]",
    ),
]

ADAPTERS = [
    Change(
        "lora.alpha is ignored",
        "adapters/lora.py",
        "return self.alphas.get(module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)",
        "return self.alphas.get(module, 1.0) / (math.sqrt(rank) if self.use_rslora else rank)",
        f"{TARGETS}the_scale_and_the_number_of_parameters",
    ),
    Change(
        "use_rslora is ignored",
        "adapters/lora.py",
        "(math.sqrt(rank) if self.use_rslora else rank)",
        "rank",
        f"{TARGETS}the_scale_and_the_number_of_parameters",
    ),
    Change(
        "lora.layers is ignored",
        "adapters/targets.py",
        "if layers is None or layer_of(arch, one) is None or layer_of(arch, one) in layers]",
        "]",
        f"{TARGETS}layers_limit_the_blocks_but_not_what_is_outside",
    ),
    Change(
        "lora.dropout is ignored",
        "models/adapted/low_rank.py",
        "return F.dropout(x, w.dropout) if w.dropout and torch.is_grad_enabled() else None",
        "return None",
        "tests/unit/models/test_low_rank.py::test_dropout_is_before_a_and_only_in_training",
    ),
    Change(
        "DoRA has no magnitudes",
        "models/adapted/low_rank.py",
        "return any(part is not None and part.magnitude is not None for part in self.parts)",
        "return False",
        "tests/unit/models/test_low_rank.py::test_the_product_and_its_gradients_are_those_of_the_merged_weight",
    ),
    Change(
        "lora.lr_ratio is ignored",
        "optim/optimizer.py",
        "if config.lora.enable and config.lora.lr_ratio != 1:",
        "if False:",
        "tests/e2e/test_lora.py::test_b_learns_faster_with_a_ratio",
    ),
    Change(
        "lora.base_dtype is ignored",
        "parallel/apply.py",
        "hold_quantized(model, config.lora, 1 if mesh is None else mesh.layout.tp)",
        "pass",
        "tests/e2e/test_lora.py::test_memory_is_what_the_formula_says",
    ),
    Change(
        "double_quantization is ignored",
        "models/adapted/quantized.py",
        "if shared is None:",
        "if True:",
        "tests/unit/adapters/test_quantized.py::test_double_quantisation_is_that_of_bitsandbytes",
    ),
    Change(
        "unfrozen_parameters is ignored",
        "adapters/freeze.py",
        "parameter.requires_grad_(wanted and parameter.requires_grad)",
        "pass",
        "tests/unit/adapters/test_freeze.py::test_frozen_weights_have_no_gradient_to_compute",
    ),
    Change(
        "rows that are frozen move",
        "optim/frozen_rows.py",
        "            held[place] = values",
        "            pass",
        f"{KEYS}rows_of_a_fused_weight_that_are_not_named_stay_bit_by_bit",
    ),
]

COMMUNICATION = [
    Change(
        "a sum counts the bytes of one way",
        "comm/collectives.py",
        "x, 2 * (over.size - 1) / over.size * x.nbytes, directly)",
        "x, (over.size - 1) / over.size * x.nbytes, directly)",
        f"{BYTES}without_sequence_parallel_the_bytes_are_those_of_all_reduces",
    ),
    Change(
        "bytes are not counted",
        "comm/observe.py",
        "job.traffic.add(axis, sent)",
        "pass",
        "tests/unit/comm/test_observe.py::test_a_collective_is_counted_numbered_and_waited_in",
    ),
    Change(
        "waits count as communication",
        "comm/hidden_time.py",
        "for span in of_axis if not span.waiting)",
        "for span in of_axis)",
        f"{CHOOSING}times_of_a_step_on_the_host",
    ),
    Change(
        "exposed time of a GPU has waits that were none",
        "comm/exposed_time.py",
        "seconds += max(0.0, first.elapsed_time(done) - first.elapsed_time(ready)) / 1000",
        "seconds += abs(first.elapsed_time(done) - first.elapsed_time(ready)) / 1000",
        f"{FSDP}only_what_a_stream_waited_for_counts",
    ),
    Change(
        "a step does not wait for a collective in the background",
        "comm/observe.py",
        "done = self.work.wait(timeout)",
        "done = True",
        f"{DDP}every_way_of_summing_gives_the_large_batch[0.00105-True-True]",
    ),
    Change(
        "train_timeout_seconds is ignored",
        "telemetry/telemetry.py",
        "watchdog.set_timeouts(self.config.comm.train_timeout_seconds)",
        "pass",
        RANKS,
    ),
    Change(
        "the flight recorder keeps everything",
        "comm/flight_recorder.py",
        "collections.deque(maxlen=size)",
        "collections.deque()",
        "tests/unit/tools/test_trace_hang.py::test_the_ring_keeps_the_last_ones_and_a_quiet_end_is_said",
    ),
    Change(
        "settings of NCCL are not set",
        "run/numa.py",
        "os.environ.update(variables)",
        "pass",
        "tests/unit/launch/test_launch.py::test_nccl_settings_become_variables_and_are_recorded",
    ),
    Change(
        "ranks are not bound to cores",
        "run/numa.py",
        "os.sched_setaffinity(0, share)",
        "pass",
        "tests/unit/launch/test_launch.py::test_a_rank_is_bound_and_says_so",
    ),
]

MODELS = [
    Change(
        "packed documents see each other",
        "models/attention.py",
        "return (allowed & (documents[:, queries, None] == documents[:, None, keys]))[:, None]",
        "return allowed[None, None]",
        "tests/unit/models/test_model_block.py::test_packed_documents_do_not_see_each_other",
    ),
    Change(
        "positions go on over documents",
        "models/decoder.py",
        "positions = document_positions(documents)",
        "pass",
        "tests/unit/models/test_model_block.py::test_packed_documents_do_not_see_each_other",
    ),
    Change(
        "sliding_window is ignored",
        "models/attention.py",
        "return [arch.sliding_window or 0 if layer in chosen else 0 for layer in range(arch.n_layers)]",
        "return [0 for layer in range(arch.n_layers)]",
        "tests/unit/models/test_attention.py::test_masks_by_window",
    ),
    Change(
        "logits are not capped",
        "models/decoder.py",
        "return capped(linear(hidden, self.output_weight(), None), self.arch.logit_cap)",
        "return linear(hidden, self.output_weight(), None)",
        "tests/unit/models/test_dense_families.py::test_logits_and_folders_equal_transformers",
    ),
    Change(
        "residual_scale is ignored",
        "models/decoder.py",
        "return x + out if spec.residual_scale == 1.0 else x + out * spec.residual_scale",
        "return x + out",
        "tests/unit/models/test_dense_families.py::test_logits_and_folders_equal_transformers",
    ),
    Change(
        "a tied output is a weight of its own",
        "models/decoder.py",
        "self.output = Linear(arch.vocab_size, arch.dim) if last and not tied else None",
        "self.output = Linear(arch.vocab_size, arch.dim) if last else None",
        "tests/unit/models/test_model_block.py::test_tied_output_is_the_embedding",
    ),
    Change(
        "--top-k is ignored",
        "models/generate.py",
        "if top_k is not None and top_k < logits.numel():",
        "if False:",
        "tests/unit/models/test_generate.py::test_sampling_stays_within_top_k_and_top_p",
    ),
    Change(
        "another kernel of attention is taken in silence",
        "models/partial_attention.py",
        'logger.warning("attention: the %s kernel does not run here, the next one is used (%s)", name, error)',
        "pass",
        "tests/unit/models/test_attention.py::test_a_failing_probe_is_logged",
    ),
]

CHANGES = [
    *COMPILE_AND_MEMORY,
    *DATA_PARALLEL,
    *TENSOR_PARALLEL,
    *CONTEXT_PARALLEL,
    *PIPELINES,
    *EXPERT_PARALLEL,
    *PRECISION,
    *THE_STEP,
    *OPTIMIZERS,
    *ADAPTERS,
    *COMMUNICATION,
    *MODELS,
]
