"""Single keys and numbers: what a config asks for in detail, and what a run and its commands say in figures."""

from __future__ import annotations

from tests.mutations.change import Change

OPTIM = "tests/unit/optim/test_"
SCHEDULE = "tests/unit/optim/test_schedule.py::test_"
ACTIVATION = "tests/unit/memory/test_activation.py::test_"
GROUPS = "tests/unit/parallel/test_replica_groups.py::test_"
TRAINING = "tests/e2e/test_training.py::test_"
RECORDS = "tests/unit/data/test_records.py::test_"
LOAD = "tests/unit/parallel/test_expert_load.py::test_"
CONSOLE = "tests/unit/telemetry/test_console.py::test_"
RANK_LOG = "tests/unit/telemetry/test_rank_log.py::test_"
PROMETHEUS = "tests/unit/telemetry/test_prometheus.py::test_"
DEVICE = "tests/unit/tools/test_bench_device.py::test_"
REPORT = "tests/unit/show/test_report.py::test_"
EXPLAIN = "tests/unit/show/test_explain.py::test_"
PLAN = "tests/unit/plan/test_plan_command.py::test_"
FILES = "tests/unit/launch/clusters/test_launch_files.py::test_"
MANIFEST = "tests/unit/checkpoint/test_"
GENERATE = "tests/unit/models/test_generate.py::test_"
PEFT = "tests/unit/adapters/test_peft.py::test_"
OVERVIEW = "tests/unit/training/test_overview.py::test_"
FLOAT8 = "tests/unit/precision/test_float8.py::test_"
DPO = "tests/e2e/test_dpo.py::test_"
KEYS = "tests/e2e/test_fine_tuning_keys.py::test_"
LORA = "tests/e2e/test_lora.py::test_"
MEMORY = "tests/unit/run/test_metrics_device.py::test_"

OPTIMIZERS = [
    Change(
        "Adam's epsilon is a constant",
        "optim/optimizer.py",
        "            eps=section.eps,",
        "            eps=1e-8,",
        f"{OPTIM}optimizer.py::test_the_implementation_reaches_torch",
    ),
    Change(
        "Adam's betas are constants",
        "optim/optimizer.py",
        "            betas=(section.beta1, section.beta2),",
        "            betas=(0.9, 0.95),",
        f"{OPTIM}optimizer.py::test_the_implementation_reaches_torch",
    ),
    Change(
        "weight decay is a constant",
        "optim/optimizer.py",
        'return [{"params": trained, "weight_decay": section.weight_decay}]',
        'return [{"params": trained, "weight_decay": 0.1}]',
        f"{OPTIM}optimizer.py::test_the_implementation_reaches_torch",
    ),
    Change(
        "the momentum of SGD is a constant",
        "optim/optimizer.py",
        'return Sgd(groups, {"lr": section.lr, "momentum": section.beta1})',
        'return Sgd(groups, {"lr": section.lr, "momentum": 0.9})',
        f"{OPTIM}lion.py::test_sgd_is_that_of_torch",
    ),
    Change(
        "the momentum of LARS is a constant",
        "optim/optimizer.py",
        '"momentum": section.beta1, "trust_coefficient"',
        '"momentum": 0.9, "trust_coefficient"',
        f"{OPTIM}lamb.py::test_steps_follow_the_paper_for_every_logical_weight",
    ),
    Change(
        "LAMB's betas are constants",
        "optim/optimizer.py",
        '"betas": (section.beta1, section.beta2), "eps": section.eps}',
        '"betas": (0.9, 0.95), "eps": section.eps}',
        f"{OPTIM}lamb.py::test_steps_follow_the_paper_for_every_logical_weight",
    ),
    Change(
        "Muon's weight decay is a constant",
        "optim/optimizer.py",
        '"weight_decay": section.weight_decay,\n        "momentum": section.muon_momentum',
        '"weight_decay": 0.1,\n        "momentum": section.muon_momentum',
        f"{OPTIM}muon.py::test_steps_are_torchs_for_every_logical_matrix",
    ),
    Change(
        "Adafactor decays by 0.8 whatever adafactor_decay_rate says",
        "optim/optimizer.py",
        '"decay_rate": section.adafactor_decay_rate',
        '"decay_rate": -0.8',
        f"{OPTIM}adafactor.py::test_steps_are_those_of_transformers",
    ),
    Change(
        "adafactor_warmup_init is ignored",
        "optim/lr_schedule.py",
        "1e-6 * (step + 1) if section.adafactor_warmup_init else 1e-2",
        "1e-2",
        f"{OPTIM}adafactor.py::test_steps_are_those_of_transformers",
    ),
    Change(
        "lr_scheduler.cycles is ignored",
        "optim/lr_schedule.py",
        "progress = section.cycles * progress % 1",
        "pass",
        f"{SCHEDULE}schedules_are_those_of_transformers",
    ),
    Change(
        "total_steps is ignored",
        "optim/lr_schedule.py",
        "return config.lr_scheduler.total_steps or steps or",
        "return steps or",
        f"{SCHEDULE}given_steps_stand_in_for_training_steps_but_not_for_total_steps",
    ),
]

SEEDS_AND_DATA = [
    Change(
        "weights are drawn from seed 0",
        "training/setup.py",
        "start.run(self.folder.resume, seed_of(self.config))",
        "start.run(self.folder.resume, 0)",
        f"{TRAINING}the_seed_decides_weights_and_the_order_of_samples",
    ),
    Change(
        "samples are ordered by seed 0",
        "data/loader.py",
        "order = Order(store.tokens, settings.seq_len, config.debug.seed or 0)",
        "order = Order(store.tokens, settings.seq_len, 0)",
        f"{TRAINING}the_seed_decides_weights_and_the_order_of_samples",
    ),
    Change(
        "records are packed by seed 0",
        "data/record_samples.py",
        "        seed = config.debug.seed or 0\n",
        "        seed = 0\n",
        f"{RECORDS}the_seed_decides_which_records_share_a_row_and_their_order",
    ),
    Change(
        "rows of records are ordered by seed 0",
        "data/record_samples.py",
        "order = Mixture(counts, config.debug.seed or 0, data.shuffle, shares)",
        "order = Mixture(counts, 0, data.shuffle, shares)",
        f"{RECORDS}the_seed_decides_which_records_share_a_row_and_their_order",
    ),
    Change(
        "the shortest records are packed first",
        "data/packing.py",
        'np.argsort(-lengths, kind="stable")',
        'np.argsort(lengths, kind="stable")',
        f"{RECORDS}the_longest_come_first_and_go_into_the_fullest_row",
    ),
    Change(
        "a record goes into the emptiest row",
        "data/packing.py",
        "left = length + (fitting & -fitting).bit_length() - 1",
        "left = length + fitting.bit_length() - 1",
        f"{RECORDS}the_longest_come_first_and_go_into_the_fullest_row",
    ),
    Change(
        "rows are always full",
        "data/packing.py",
        "return self.tokens / max(1, len(self) * self.seq_len)",
        "return 1.0",
        f"{RECORDS}the_longest_come_first_and_go_into_the_fullest_row",
    ),
    Change(
        "a pair is short where both answers are",
        "data/packing.py",
        "short = both.min(axis=1) < (shortest or 1)",
        "short = both.max(axis=1) < (shortest or 1)",
        f"{RECORDS}pairs_are_kept_dropped_or_cut_together",
    ),
    Change(
        "parts of sources leave out whole epochs",
        "data/record_samples.py",
        "times = np.full(self.order.samples_per_epoch, epochs) + np",
        "times = np.full(self.order.samples_per_epoch, 0) + np",
        f"{RECORDS}the_parts_of_sources_are_those_of_all_epochs",
    ),
    Change(
        "duplicates may be trained on other tokens",
        "data/record_samples.py",
        "tokens.astype(np.int64).tobytes() + trained.tobytes()",
        "tokens.astype(np.int64).tobytes()",
        f"{RECORDS}duplicates_are_left_out_wherever_they_are",
    ),
    Change(
        "held-out records are trained on",
        "data/record_samples.py",
        'return held if section == "validation" else ~held',
        'return held if section == "validation" else np.ones(count, bool)',
        f"{RECORDS}held_out_records_are_in_validation_and_nowhere_else",
    ),
]

THE_STEP = [
    Change(
        "activation_checkpoint.preserve_rng_state is ignored",
        "memory/activation.py",
        '"preserve_rng_state": section.preserve_rng_state',
        '"preserve_rng_state": True',
        f"{ACTIVATION}options_of_a_recomputation_reach_torch",
    ),
    Change(
        "activation_checkpoint.determinism_check is ignored",
        "memory/activation.py",
        '"determinism_check": section.determinism_check',
        '"determinism_check": "default"',
        f"{ACTIVATION}options_of_a_recomputation_reach_torch",
    ),
    Change(
        "activation_checkpoint.early_stop is ignored",
        "memory/activation.py",
        '"early_stop": section.early_stop',
        '"early_stop": False',
        f"{ACTIVATION}options_of_a_recomputation_reach_torch",
    ),
    Change(
        "activation_checkpoint.debug is ignored",
        "memory/activation.py",
        '"debug": section.debug',
        '"debug": False',
        f"{ACTIVATION}options_of_a_recomputation_reach_torch",
    ),
    Change(
        "min_replica_size is ignored",
        "parallel/replicas/groups.py",
        "if len(members) >= self.section.min_replica_size:",
        "if True:",
        f"{GROUPS}fewer_groups_than_asked_for_wait_for_others",
    ),
    Change(
        "repeats of a step are those since the start",
        "parallel/replicas/groups.py",
        "repeats, self.repeats = self.repeats, 0",
        "repeats = self.repeats",
        f"{GROUPS}a_row_says_who_took_part_and_what_happened_since_the_last_one",
    ),
    Change(
        "asynchronous: async_lr_power is a constant",
        "training/async_steps.py",
        "self.workers, self.section.async_lr_power, step",
        "self.workers, 0.5, step",
        "tests/unit/parallel/test_asynchronous.py::test_the_power_of_the_config_reaches_the_server",
    ),
    Change(
        "the mean of routers' biases moves",
        "parallel/expert/balance.py",
        "steps -= steps.mean(1, keepdim=True)",
        "pass",
        f"{LOAD}the_mean_of_biases_stays",
    ),
    Change(
        "biases of frozen routers move",
        "parallel/expert/balance.py",
        "frozen = model.adaptation is not None",
        "frozen = False",
        f"{LOAD}losses_of_workers_are_means_over_them_and_frozen_routers_keep_their_biases",
    ),
    Change(
        "router losses of workers are added up",
        "parallel/expert/balance.py",
        "losses.mean(0) / self.workers",
        "losses.mean(0)",
        f"{LOAD}losses_of_workers_are_means_over_them_and_frozen_routers_keep_their_biases",
    ),
    Change(
        "deterministic_warn_only is ignored",
        "training/setup.py",
        "warn_only=config.debug.deterministic_warn_only",
        "warn_only=False",
        f"{TRAINING}deterministic_algorithms_are_in_force",
    ),
    Change(
        "gc_debug is ignored",
        "telemetry/telemetry.py",
        "if section.gc_debug:",
        "if False:",
        f"{TRAINING}garbage_is_collected_and_counted_in_every_step_on_request",
    ),
    Change(
        "min_channels and max_channels of NCCL are one",
        "run/numa.py",
        '"min_channels": "NCCL_MIN_NCHANNELS"',
        '"min_channels": "NCCL_MAX_NCHANNELS"',
        "tests/unit/launch/test_launch.py::test_nccl_settings_become_variables_and_are_recorded",
    ),
    Change(
        "files of the flight recorder have another prefix",
        "training/setup.py",
        "traces, config.comm.save_traces_file_prefix)",
        'traces, "rank_")',
        "tests/faults/test_trainer.py::test_flight_recorders_are_written_on_request_while_training_goes_on",
    ),
    Change(
        "snapshots of memory have another folder",
        "telemetry/profile.py",
        "self.options.save_memory_snapshot_folder",
        '"memory_snapshot"',
        "tests/unit/telemetry/test_profile.py::test_snapshots_per_freq_and_at_out_of_memory",
    ),
    Change(
        "top_p is ignored",
        "models/generate.py",
        "if top_p is not None and top_p < 1:",
        "if False:",
        f"{GENERATE}sampling_stays_within_top_k_and_top_p",
    ),
    Change(
        "of several end tokens the first one counts",
        "models/generate.py",
        "set(eos_id if isinstance(eos_id, Sequence) else",
        "set(eos_id[:1] if isinstance(eos_id, Sequence) else",
        f"{GENERATE}stops_at_the_end_token",
    ),
    Change(
        "merging leaves out DoRA's magnitudes",
        "adapters/merge.py",
        "if not self.how.use_dora:",
        "if True:",
        f"{PEFT}an_adapter_of_peft_gives_its_logits_and_goes_back_to_it",
    ),
    Change(
        "small weights are chosen alike by all recipes",
        "precision/convert.py",
        "    if recipe.by_row:\n        return n <= 2048",
        "    if False:\n        return n <= 2048",
        f"{FLOAT8}which_weights_are_large_enough",
    ),
    Change(
        "sizes that kernels do not take compute in float8",
        "precision/convert.py",
        "if not recipe.emulate and (n % MULTIPLE or k % MULTIPLE):",
        "if False:",
        f"{FLOAT8}which_weights_are_large_enough",
    ),
    Change(
        "all experts compute in float8",
        "precision/convert.py",
        "if block.moe is not None and any(part in name for part in wanted):",
        "if block.moe is not None:",
        f"{FLOAT8}experts_that_are_not_named_stay_as_they_are",
    ),
    Change(
        "dpo.label_smoothing is ignored",
        "training/pairs.py",
        "section.beta, section.label_smoothing)",
        "section.beta, 0.0)",
        f"{DPO}each_loss_has_the_slope_of_its_formula",
    ),
    Change(
        "the reference has weights that are trained",
        "training/pairs.py",
        'return "copy" if how is None or how.changes_model else "base"',
        'return "copy" if how is None else "base"',
        f"{DPO}the_reference_is_a_copy_where_the_model_itself_is_trained",
    ),
    Change(
        "high losses need not come in a row",
        "training/trainer.py",
        "and loss > section.max_loss else 0",
        "and loss > section.max_loss else self.high_losses",
        f"{KEYS}high_losses_count_in_a_row",
    ),
    Change(
        "worse validations need not come in a row",
        "training/trainer.py",
        "progress.best_validation, progress.worse_validations = loss, 0",
        "progress.best_validation = loss",
        f"{KEYS}a_better_validation_begins_patience_anew",
    ),
]

SHOWN = [
    Change(
        "metrics.disable_color_printing is ignored",
        "training/setup.py",
        "color=not config.metrics.disable_color_printing",
        "color=True",
        f"{CONSOLE}a_run_has_the_colors_that_its_config_wants",
    ),
    Change(
        "the first loss of the closing table is the last",
        "telemetry/summary.py",
        "self.first = self.first or (step, loss)",
        "self.first = (step, loss)",
        f"{CONSOLE}closing_table",
    ),
    Change(
        "the rank log does not know what stopped a run",
        "telemetry/telemetry.py",
        "self.rank_log.stopped_by = self.stopped_by",
        "pass",
        f"{RANK_LOG}the_end_names_what_stopped_the_run",
    ),
    Change(
        "validations are not in the rank log",
        "telemetry/telemetry.py",
        'self.rank_log.write("validation", {"step": step, **found})',
        "pass",
        f"{RANK_LOG}a_run_writes_where_its_steps_go_its_memory_and_what_happened",
    ),
    Change(
        "idle time begins with the first action",
        "telemetry/rank_log.py",
        "span - busy + actions[0].start - began",
        "span - busy",
        f"{RANK_LOG}idle_time_is_before_and_between_actions",
    ),
    Change(
        "Prometheus gets no validation loss",
        "telemetry/telemetry.py",
        'self.exporter.update({f"validation_{name}": value for name, value in found.items()})',
        "pass",
        f"{PROMETHEUS}a_run_serves_its_newest_row_on_the_loopback_alone",
    ),
    Change(
        "Prometheus gets the phases in another order",
        "telemetry/prometheus.py",
        "in zip(OWN, seconds, strict=True):",
        "in zip(OWN[::-1], seconds, strict=True):",
        f"{PROMETHEUS}the_parser_of_prometheus_reads_every_kind_of_number",
    ),
    Change(
        "report: memory is that of the last row",
        "show/report.py",
        '"memory_gib": max((row["memory_gib"] for row in rows if',
        '"memory_gib": max((row["memory_gib"] for row in rows[-1:] if',
        f"{REPORT}the_numbers_at_the_head_are_of_all_rows_but_speeds_leave_out_the_first",
    ),
    Change(
        "report: speed has the first row",
        "show/report.py",
        "rows, later = run.rows, run.rows[1:] or run.rows",
        "rows, later = run.rows, run.rows",
        f"{REPORT}the_numbers_at_the_head_are_of_all_rows_but_speeds_leave_out_the_first",
    ),
    Change(
        "report: the validation loss is the last one",
        "show/report.py",
        'best = min((row["validation_loss"] for row in run.validation if',
        'best = min((row["validation_loss"] for row in run.validation[-1:] if',
        f"{REPORT}the_numbers_at_the_head_are_of_all_rows_but_speeds_leave_out_the_first",
    ),
    Change(
        "explain: a rank's heads are those of all",
        "show/token_life.py",
        "{arch.n_heads // layout.tp} of",
        "{arch.n_heads} of",
        f"{EXPLAIN}the_life_of_a_token_has_the_numbers_of_its_layout",
    ),
    Change(
        "explain: every data rank is a replica",
        "show/token_life.py",
        "length, ranks = path.config.training.seq_len, path.layout.data_ranks",
        "length, ranks = path.config.training.seq_len, path.layout.dp_replicate",
        f"{EXPLAIN}the_life_of_a_token_has_the_numbers_of_its_layout",
    ),
    Change(
        "explain: a whole batch goes to the next stage",
        "show/token_life.py",
        "size = path.tokens * path.row_bytes //",
        "size = path.config.training.local_batch_size * path.config.training.seq_len * path.row_bytes //",
        f"{EXPLAIN}what_travels_between_stages_is_a_micro_batch",
    ),
    Change(
        "plan: MFU is by the speed of all GPUs",
        "plan/report.py",
        "return candidate.tokens_per_second * flops /",
        "return candidate.tokens_per_second * candidate.ranks * flops /",
        f"{PLAN}speed_mfu_and_cost_follow_from_the_time_of_a_step",
    ),
    Change(
        "plan: MFU counts gradients of frozen weights",
        "plan/report.py",
        "if candidate.workload.lora_rank:",
        "if False:",
        f"{PLAN}speed_mfu_and_cost_follow_from_the_time_of_a_step",
    ),
    Change(
        "plan: the price is that of one GPU",
        "plan/report.py",
        "{hours * best.ranks * price:,.0f} at",
        "{hours * price:,.0f} at",
        f"{PLAN}speed_mfu_and_cost_follow_from_the_time_of_a_step",
    ),
    Change(
        "bench device: a product counts one operation a number",
        "tools/bench/device.py",
        '"rate": 2.0 * rows * columns * inner / seconds',
        '"rate": rows * columns * inner / seconds',
        f"{DEVICE}rates_follow_from_seconds",
    ),
    Change(
        "bench device: attention's backward is as much as forward",
        "tools/bench/device.py",
        '"backward": 2.5 * flops / backward',
        '"backward": flops / backward',
        f"{DEVICE}rates_follow_from_seconds",
    ),
    Change(
        "bench device: a copy only reads",
        "tools/bench/device.py",
        "return 2.0 * x.nbytes / timed(lambda: y.copy_(x), device)",
        "return x.nbytes / timed(lambda: y.copy_(x), device)",
        f"{DEVICE}rates_follow_from_seconds",
    ),
    Change(
        "bench device: a call takes the slowest round",
        "tools/bench/device.py",
        "return min(_round(call, device, calls)",
        "return max(_round(call, device, calls)",
        f"{DEVICE}the_time_of_a_call_is_the_best_of_three_rounds",
    ),
    Change(
        "bench device: full load changes nothing",
        "tools/bench/device.py",
        "return min(1.0, alone / timed(call, device, calls))",
        "return 1.0",
        f"{DEVICE}the_sustained_rate_is_a_share_of_the_best_product",
    ),
    Change(
        "bench device: every rank is a hop",
        "tools/bench/device.py",
        "hops = ranks - 1",
        "hops = ranks",
        f"{DEVICE}latency_and_bandwidth_follow_from_two_sizes",
    ),
    Change(
        "MFU leaves LoRA's products out",
        "training/setup.py",
        "more_flops=self._more_flops()",
        "more_flops=0.0",
        f"{LORA}frozen_weights_stay_bit_by_bit_and_have_no_gradient_and_no_state",
    ),
    Change(
        "MFU leaves the reference of pairs out",
        "training/setup.py",
        'passes = 0 if self.reference is None or self.reference.kind == "none" else 1',
        "passes = 0",
        f"{DPO}the_copy_stays_as_it_was_and_has_the_type_of_computing",
    ),
    Change(
        "each rank has the memory of the whole machine",
        "run/device.py",
        "return min(known) // ranks if known",
        "return min(known) if known",
        f"{MEMORY}ranks_share_what_the_machine_and_its_control_group_leave",
    ),
    Change(
        "memory that a control group uses is free",
        "run/device.py",
        '.read_text()) - int((folder / "memory.current").read_text())',
        ".read_text())",
        f"{MEMORY}ranks_share_what_the_machine_and_its_control_group_leave",
    ),
    Change(
        "the start's table takes a pair for a sequence",
        "training/overview.py",
        "whole * each * section.seq_len",
        "whole * section.seq_len",
        f"{OVERVIEW}the_batch_of_pairs_and_of_ranks_in_words",
    ),
    Change(
        "the start's table does not know checkpoints by the clock",
        "training/overview.py",
        'if section.interval_type == "seconds":',
        "if False:",
        f"{OVERVIEW}the_table_has_the_clock_of_saves_the_samples_of_a_validation_and_what_is_held",
    ),
    Change(
        "the start's table takes all validation samples",
        "training/overview.py",
        "run.validation.samples_in(config.validation.steps)",
        "run.validation.samples_per_epoch",
        f"{OVERVIEW}the_table_has_the_clock_of_saves_the_samples_of_a_validation_and_what_is_held",
    ),
    Change(
        "the start's table leaves out what a process holds",
        "training/overview.py",
        "about {roughly(held + need.peak)}",
        "about {roughly(need.peak)}",
        f"{OVERVIEW}the_table_has_the_clock_of_saves_the_samples_of_a_validation_and_what_is_held",
    ),
    Change(
        "the start's table has the default outer momentum",
        "training/overview.py",
        "momentum {section.outer_momentum:g}",
        "momentum 0.9",
        f"{OVERVIEW}workers_in_words",
    ),
    Change(
        "the start's table applies fragments at once",
        "training/overview.py",
        "late = section.fragment_sync_delay",
        "late = 0",
        f"{OVERVIEW}workers_in_words",
    ),
    Change(
        "the memory of a frozen copy is left out",
        "training/memory_need.py",
        'if reference_kind(config, model.adaptation) == "copy":',
        "if False:",
        f"{OVERVIEW}a_frozen_copy_for_pairs_is_kept_in_the_type_of_computing",
    ),
]

SAVES_AND_CLUSTERS = [
    Change(
        "one rank writes what all hold",
        "checkpoint/commit.py",
        "owner = min(holders[key], key=lambda rank: (load[rank], rank))",
        "owner = min(holders[key])",
        f"{MANIFEST}checkpoint_files.py::test_replicas_write_about_the_same_each",
    ),
    Change(
        "ranks need not cover a tensor",
        "checkpoint/commit.py",
        'if held != math.prod(entry["shape"]):',
        "if False:",
        f"{MANIFEST}checkpoint_files.py::test_ranks_that_do_not_cover_a_tensor_are_noticed",
    ),
    Change(
        "what is cut short stays for ever",
        "checkpoint/format.py",
        "for path in (*doomed, *_leftovers(folder)):",
        "for path in doomed:",
        f"{MANIFEST}checkpoint_files.py::test_pruning_removes_what_earlier_attempts_left",
    ),
    Change(
        "a manifest is believed without its checksum",
        "checkpoint/format.py",
        'if content["crc32"] != manifest_checksum(content):',
        "if False:",
        f"{MANIFEST}checkpoint_manifest.py::test_a_changed_number_is_found_though_it_is_good_json",
    ),
    Change(
        "a mirror keeps everything",
        "checkpoint/mirror.py",
        "kept = set(current[-self.keep :])",
        "kept = set(current)",
        f"{MANIFEST}mirror.py::test_pruned_as_here",
    ),
    Change(
        "a pod has no time to save",
        "launch/clusters/kubernetes.py",
        "int(comm.stop_timeout_seconds + saves.save_timeout_seconds)",
        "int(comm.stop_timeout_seconds)",
        f"{FILES}a_pod_has_time_to_save_memory_for_nccl_and_a_disk_of_the_given_size",
    ),
    Change(
        "a pod has no shared memory for NCCL",
        "launch/clusters/kubernetes.py",
        '"memory": "/dev/shm"}',
        '"memory": "/dev/memory"}',
        f"{FILES}a_pod_has_time_to_save_memory_for_nccl_and_a_disk_of_the_given_size",
    ),
    Change(
        "the size of a claim is ignored",
        "launch/clusters/kubernetes.py",
        '{"storage": size}',
        '{"storage": "100Gi"}',
        f"{FILES}a_pod_has_time_to_save_memory_for_nccl_and_a_disk_of_the_given_size",
    ),
    Change(
        "a PyTorchJob has one worker too many",
        "launch/clusters/kubernetes.py",
        '"replicas": self.job.nodes - 1',
        '"replicas": self.job.nodes',
        f"{FILES}a_pytorch_job_has_a_master_and_as_many_workers_as_are_left",
    ),
    Change(
        "a PyTorchJob starts again three times",
        "launch/clusters/kubernetes.py",
        '"backoffLimit": restarts,',
        '"backoffLimit": 3,',
        f"{FILES}a_pytorch_job_has_a_master_and_as_many_workers_as_are_left",
    ),
    Change(
        "a container of SLURM sees no GPU",
        "launch/clusters/slurm.py",
        '*(["--nv"] if gpus else [])',
        "*[]",
        f"{FILES}containers",
    ),
    Change(
        "one failed rank ends the launchers of srun",
        "launch/clusters/slurm.py",
        '["srun", "--kill-on-bad-exit=0",',
        '["srun",',
        f"{FILES}cores_of_a_part_of_a_machine",
    ),
]

CHANGES = [*OPTIMIZERS, *SEEDS_AND_DATA, *THE_STEP, *SHOWN, *SAVES_AND_CLUSTERS]
