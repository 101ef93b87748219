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
        "every block has a graph of its own",
        "parallel/apply.py",
        "compile_once = functools.cache(compile_graph)",
        "compile_once = lambda function: compile_graph(lambda *given: function(*given))",
        f"{ENGAGED}compiled_blocks_are_counted_and_their_operations_known[none]",
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
        f"{ACTIVATION}modes_differ_in_what_they_keep",
    ),
    Change(
        "op computes attention again",
        "memory/activation.py",
        "if op in _kept_attention_ops() or _travels(op):",
        "if _travels(op):",
        f"{ACTIVATION}modes_differ_in_what_they_keep",
    ),
    Change(
        "products of named modules are kept",
        "memory/activation.py",
        "if shape in recompute_shapes:",
        "if shape in ():",
        f"{ACTIVATION}products_of_named_modules_are_computed_again[attention.wq]",
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
        "parallel/tensor/async_tp.py",
        "choices.chosen[shape.product] = measured.chosen",
        "choices.chosen[shape.product] = max(measured.times, key=lambda one: measured.times[one])",
        f"{ASYNC}a_forced_backend_is_taken[serial]",
    ),
    Change(
        "the step that is compared with is not serial",
        "parallel/tensor/backend_table.py",
        "choice = SERIAL if choices.serial else choices.find(product)",
        "choice = choices.find(product)",
        f"{ASYNC}a_run_keeps_what_was_chosen_and_measures_itself",
    ),
]

CONTEXT_PARALLEL = [
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
        f"{RING}windows_and_documents_keep_keys_at_home",
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

CHANGES = [*COMPILE_AND_MEMORY, *DATA_PARALLEL, *TENSOR_PARALLEL, *CONTEXT_PARALLEL, *PIPELINES]
