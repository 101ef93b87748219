"""Changes around the steps: config/, data/, checkpoint/, storage/, launch/, run/, telemetry/, tools/, cli/."""

from __future__ import annotations

from tests.mutations.change import Change

METRICS = "tests/unit/telemetry/test_metrics.py::test_"
RANKS = f"{METRICS}a_row_has_the_numbers_of_the_slower_rank_and_every_token_once"
CONSOLE = "tests/unit/telemetry/test_console.py::test_"
ENGAGED = "tests/unit/telemetry/test_engaged.py::test_"
PROFILE = "tests/unit/telemetry/test_profile.py::test_"
HIDDEN = "tests/parity/test_async_tensor.py::test_hidden_time_is_compared_with_communication_alone"
SUMMARY = "tests/parity/test_async_tensor.py::test_the_summary_tells_what_was_gained_and_that_it_was_measured"
SERIAL = "tests/parity/test_async_tensor.py::test_which_logged_steps_run_serially"
START = "tests/unit/training/test_overview.py::test_every_line_of_the_table"
LOADER = "tests/unit/data/test_data_loader.py::test_"
RECORDS = "tests/unit/data/test_records.py::test_"
MIXTURE = "tests/unit/data/test_mixture.py::test_"
RESUME = "tests/e2e/test_resume.py::test_"
KEYS = "tests/e2e/test_fine_tuning_keys.py::test_"
TRAINING = "tests/e2e/test_training.py::test_"
FILES = "tests/unit/checkpoint/test_checkpoint_files.py::test_"
STOPPING = "tests/unit/run/test_stopping.py::test_"
COMM = "tests/unit/tools/test_bench_comm.py::test_"
OVERLAP = "tests/unit/tools/test_bench_overlap.py::test_"
EXPERTS = "tests/unit/tools/test_bench_experts.py::test_"
TRACE = "tests/unit/tools/test_trace_overlap.py::test_"

METRICS_ROWS = [
    Change(
        "tokens are counted once per rank",
        "training/trainer.py",
        "self.progress.tokens += self.telemetry.step_tokens",
        "self.progress.tokens += self.telemetry.step_tokens * self.mesh.world_size",
        RANKS,
    ),
    Change(
        "speed counts tokens once per rank",
        "telemetry/telemetry.py",
        "self.meter.stepped(self.step_tokens)",
        "self.meter.stepped(self.step_tokens * self.mesh.world_size)",
        RANKS,
    ),
    Change(
        "speed of a device is that of all",
        "telemetry/metrics.py",
        "per_device = self.tokens / elapsed / self.devices",
        "per_device = self.tokens / elapsed",
        f"{METRICS}meter_counts_steps_and_not_pauses",
    ),
    Change(
        "ranks of a CPU count as one device",
        "training/setup.py",
        "devices = len(set(mesh.from_everyone(device_identity(device, mesh.rank))))",
        "devices = 1",
        RANKS,
    ),
    Change(
        "MFU is a constant",
        "telemetry/metrics.py",
        "per_device * self.flops / self.peak",
        "0.4",
        f"{METRICS}mfu_is_model_flops_over_peak",
    ),
    Change(
        "FLOPs leave attention out",
        "run/device.py",
        "layers = [6.0 * (met + attention) for _, met in layer_sizes(arch)]",
        "layers = [6.0 * met for _, met in layer_sizes(arch)]",
        "tests/unit/run/test_metrics_device.py::test_flops_follow_the_convention_of_the_published_figures",
    ),
    Change(
        "validation counts as training time",
        "telemetry/metrics.py",
        "self.started += self.clock() - began",
        "pass",
        f"{METRICS}meter_counts_steps_and_not_pauses",
    ),
    Change(
        "waiting for data is not measured",
        "telemetry/metrics.py",
        "self.data += seconds",
        "pass",
        f"{METRICS}meter_counts_steps_and_not_pauses",
    ),
    Change(
        "the time of a step is that of all since the last row",
        "telemetry/metrics.py",
        '"step_seconds": elapsed / steps',
        '"step_seconds": elapsed',
        f"{METRICS}meter_counts_steps_and_not_pauses",
    ),
    Change(
        "memory is that of rank 0",
        "telemetry/telemetry.py",
        'row: dict[str, Any] = {"memory_gib": memory,',
        'row: dict[str, Any] = {"memory_gib": peak_memory_gib(self.device),',
        RANKS,
    ),
    Change(
        "exposed time is that of rank 0",
        "telemetry/telemetry.py",
        'row["dp_exposed_seconds"] = waited_longest',
        'row["dp_exposed_seconds"] = waited',
        RANKS,
    ),
    Change(
        "numbers of ranks are added up",
        "telemetry/telemetry.py",
        'highest = read(collectives.max_in_place(numbers, "world"))',
        'highest = read(collectives.sum_in_place(numbers, "world"))',
        RANKS,
    ),
    Change(
        "offloaded bytes are not written",
        "telemetry/telemetry.py",
        'row["offloaded_bytes"] = int(offloaded)',
        "pass",
        RANKS,
    ),
    Change(
        "bytes sent are those since the start",
        "telemetry/telemetry.py",
        "self.number = number\n        job.traffic.take()",
        "self.number = number",
        "tests/parity/test_bytes.py::test_tensor_parallel[2]",
    ),
    Change(
        "log_freq is ignored",
        "telemetry/telemetry.py",
        "self.number % self.config.metrics.log_freq == 0",
        "True",
        f"{KEYS}noise_changes_training_and_not_validation_and_is_the_same_after_a_resumption",
    ),
    Change(
        "hidden communication is a constant",
        "comm/hidden_time.py",
        "return max(0.0, 1 - self.exposed / self.comm) if self.comm > 0 else 0.0",
        "return 0.75",
        HIDDEN,
    ),
    Change(
        "hidden time is compared with communication beside products",
        "telemetry/serial_steps.py",
        "statistics.median(self.alone) if self.alone else times.comm",
        "times.comm",
        HIDDEN,
    ),
    Change(
        "no step runs serially to be compared with",
        "telemetry/serial_steps.py",
        "return rest == 0 and place % freq == SERIAL_PLACE % freq",
        "return False",
        f"{SERIAL}[changes1-serial1]",
    ),
    Change(
        "all products of later steps stay serial",
        "telemetry/serial_steps.py",
        "was_serial, choices.serial = choices.serial, False",
        "was_serial = choices.serial",
        HIDDEN,
    ),
    Change(
        "a validation has another name",
        "telemetry/metrics.py",
        'f"validation_{name}": value',
        "name: value",
        f"{METRICS}rows_have_the_keys_of_the_contract",
    ),
    Change(
        "TensorBoard gets no bytes of dimensions",
        "telemetry/metrics.py",
        'yield from ((f"{key}/{name}", inner) for name, inner in value.items())',
        "pass",
        f"{METRICS}tensorboard_gets_every_number",
    ),
    Change(
        "save_for_all_ranks is ignored",
        "telemetry/metrics.py",
        "if rank == 0 or config.metrics.save_for_all_ranks:",
        "if rank == 0:",
        f"{METRICS}save_for_all_ranks_gives_each_rank_a_folder",
    ),
]

TABLES = [
    Change(
        "the closing table's speed has the first row",
        "telemetry/summary.py",
        "statistics.fmean(seen.speeds[1:] or seen.speeds)",
        "statistics.fmean(seen.speeds)",
        f"{CONSOLE}closing_table[False]",
    ),
    Change(
        "the closing table's memory is the last row's",
        "telemetry/summary.py",
        'self.memory = max(self.memory, row["memory_gib"])',
        'self.memory = row["memory_gib"]',
        f"{CONSOLE}closing_table[False]",
    ),
    Change(
        "the closing table has no validation loss",
        "telemetry/console.py",
        'self.seen.validation = (step, found["loss"])',
        "pass",
        f"{CONSOLE}closing_table[False]",
    ),
    Change(
        "async TP always pays",
        "telemetry/summary.py",
        "{'' if serial > step else ' (not worth it here)'}",
        "",
        SUMMARY,
    ),
    Change(
        "the gain of async TP is turned over",
        "telemetry/summary.py",
        "{serial / step:.2f} times as fast",
        "{step / serial:.2f} times as fast",
        SUMMARY,
    ),
    Change(
        "the bubble of the closing table is the schedule's",
        "telemetry/summary.py",
        'return f"{measured:.1%} of the step"',
        'return f"{theory:.1%} of the step"',
        "tests/parity/test_pipeline.py::test_every_logged_step_has_its_bubble",
    ),
    Change(
        "the closing table's expert load is the mean",
        "telemetry/summary.py",
        "{max(loads):.2f} in the worst step",
        "{statistics.fmean(loads):.2f} in the worst step",
        "tests/unit/parallel/test_expert_load.py::test_the_closing_table_has_the_last_and_the_worst_step",
    ),
    Change(
        "engaged.json is not written",
        "telemetry/telemetry.py",
        "engaged.write(self.folder.path, self.number, found)",
        "pass",
        f"{ENGAGED}a_plain_run",
    ),
    Change(
        "ranks that did something else are not named",
        "telemetry/engaged.py",
        "        if found != first",
        "        if not found",
        f"{ENGAGED}ranks_that_differ_are_named",
    ),
    Change(
        "compile.enable without a graph is no warning",
        "telemetry/telemetry.py",
        "if self.observer.applied.graphs == []:",
        "if False:",
        f"{ENGAGED}a_compiler_that_was_never_asked_is_a_warning",
    ),
    Change(
        "the start's table leaves accumulation out",
        "training/overview.py",
        "passes = whole // (section.local_batch_size * ranks)",
        "passes = 1",
        START,
    ),
    Change(
        "the start's table counts epochs of one rank",
        "training/overview.py",
        "epochs = steps * loader.global_batch_size / loader.samples_per_epoch",
        "epochs = steps * loader.local_batch_size / loader.samples_per_epoch",
        START,
    ),
    Change(
        "the memory of the optimizer's state is left out",
        "training/memory_need.py",
        "return MOMENTS.get(section.name, 0) * elements * size",
        "return elements * size",
        START,
    ),
    Change(
        "memory that is not there is no warning",
        "training/overview.py",
        "if free is not None and need > free:",
        "if False:",
        "tests/unit/training/test_overview.py::test_memory_that_is_not_there_is_a_warning",
    ),
    Change(
        "what a resumed run changed is not said",
        "training/overview.py",
        'return [*rows, ("changed", listed(changes, 8))] if changes else rows',
        "return rows",
        "tests/unit/training/test_overview.py::test_what_differs_is_a_line_of_the_table",
    ),
    Change(
        "too few micro-batches are no warning",
        "training/setup.py",
        "pipelined = () if self.pipeline is None else warnings(self.pipeline.schedule)",
        "pipelined = ()",
        "tests/parity/test_pipeline.py",
    ),
]

DATA = [
    Change(
        "ranks read the same samples",
        "data/order.py",
        "+ step_start + rank * local_batch",
        "+ step_start",
        f"{LOADER}layouts_read_the_same_steps",
    ),
    Change(
        "every epoch has the same order",
        "data/order.py",
        "windows = permute(index, size, key(self.seed, epochs, 0))",
        "windows = permute(index, size, key(self.seed, epochs * 0, 0))",
        "tests/unit/data/test_order.py::test_seeds_and_epochs_shuffle_differently",
    ),
    Change(
        "targets cross documents",
        "data/loader.py",
        "labels[numbers[:, 1:] != numbers[:, :-1]] = IGNORE",
        "pass",
        f"{LOADER}no_target_crosses_a_document_when_block_causal",
    ),
    Change(
        "padding of a validation counts",
        "data/loader.py",
        "labels[~real] = IGNORE",
        "pass",
        f"{LOADER}validation_reads_each_sample_once",
    ),
    Change(
        "weights of sources are ignored",
        "data/mixture.py",
        "raised = np.asarray(weights, dtype=np.float64) ** (1.0 / temperature)",
        "raised = np.ones(len(weights))",
        f"{MIXTURE}weights_decide_how_often_texts_are_read",
    ),
    Change(
        "temperature is ignored",
        "data/mixture.py",
        "** (1.0 / temperature)",
        "",
        f"{MIXTURE}temperature_flattens_shares",
    ),
    Change(
        "packed rows do not keep documents apart",
        "data/loader.py",
        'changes["attn_mask_type"] = "block_causal"',
        "pass",
        f"{RECORDS}packed_rows_have_the_loss_of_unpacked_ones",
    ),
    Change(
        "epochs are rounded down",
        "data/loader.py",
        "return math.ceil(Fraction(str(epochs))",
        "return math.floor(Fraction(str(epochs))",
        f"{LOADER}steps_for_epochs",
    ),
    Change(
        "dataloader.num_workers is ignored",
        "data/loader.py",
        "workers = options.num_workers",
        "workers = 0",
        f"{LOADER}persistent_workers_stay_and_others_are_started_again",
    ),
]

SAVES_AND_STOPS = [
    Change(
        "the interval of saves is ignored",
        "checkpoint/saver.py",
        "step == total_steps or step % self.section.every(total_steps) == 0",
        "step == total_steps",
        f"{KEYS}checkpoints_and_validations_come_after_fractions_of_the_run",
    ),
    Change(
        "async_mode waits for every save",
        "checkpoint/saver.py",
        "if not save.staged:",
        "if True:",
        f"{RESUME}a_file_system_that_hangs_is_named_by_the_next_save",
    ),
    Change(
        "a save in the background has the weights of later steps",
        "checkpoint/saver.py",
        "owned = self._staging.stage(owned)",
        "self._staging.stage(owned)",
        f"{RESUME}saves_behind_the_run_hold_the_step_they_began_at",
    ),
    Change(
        "keep_latest_k is ignored",
        "checkpoint/commit.py",
        "files.prune(folder, self.section.keep_latest_k,",
        "files.prune(folder, 0,",
        f"{RESUME}pruning_keeps_the_newest_and_one_that_can_be_resumed",
    ),
    Change(
        "export_dtype is ignored",
        "checkpoint/saver.py",
        "dtype = DTYPES[self.section.export_dtype]",
        'dtype = DTYPES["float32"]',
        "tests/e2e/test_hf.py::test_the_last_save_can_be_a_hugging_face_folder",
    ),
    Change(
        "a damaged checkpoint is taken for a good one",
        "checkpoint/resume.py",
        "for problem in saved.check_sizes()[:1]:",
        "for problem in ():",
        f"{RESUME}a_damaged_checkpoint_is_skipped_for_the_one_before",
    ),
    Change(
        "a resumed run reads its data from the start",
        "training/setup.py",
        "self.loader.seek(self.progress.samples)",
        "self.loader.seek(0)",
        f"{RESUME}a_resumed_run_is_bitwise_the_uninterrupted_one",
    ),
    Change(
        "create_seed_checkpoint is ignored",
        "training/trainer.py",
        "elif self.config.checkpoint.create_seed_checkpoint:",
        "elif False:",
        f"{RESUME}seed_checkpoint_and_initial_load",
    ),
    Change(
        "a save of a stopped run is taken to last no time",
        "run/stop.py",
        "return save * (1 + another_save) + 2 * longest_step",
        "return 2 * longest_step",
        f"{STOPPING}the_rule_in_numbers",
    ),
    Change(
        "preempted_exit_code is ignored",
        "run/stop.py",
        "return config.checkpoint.preempted_exit_code if why_not_saved(config) is None else 128 + signal.SIGTERM",
        "return 0",
        f"{STOPPING}exit_codes",
    ),
    Change(
        "a request of one rank is not that of all",
        "run/stop.py",
        "*stops, save = (total > 0 for total in sums)",
        "*stops, save = (total > 1 for total in sums)",
        f"{STOPPING}ranks_agree_on_the_first_reason_and_on_saving",
    ),
    Change(
        "checksums of a checkpoint's blocks are not compared",
        "storage/blocks.py",
        'if zlib.crc32(block) != recorded["crc32"][index]:',
        "if False:",
        f"{FILES}a_shard_that_is_not_what_the_manifest_says",
    ),
]

BENCHES = [
    Change(
        "bench comm: busbw is algbw",
        "tools/bench/collectives.py",
        "algbw * factor)",
        "algbw)",
        f"{COMM}every_operation_is_right_and_counted_as_nccl_tests_do[2-layout0-tp-2]",
    ),
    Change(
        "bench comm: the time is that of each rank",
        "tools/bench/collectives.py",
        'return collectives.max_in_place(seconds, "world").item()',
        "return seconds.item()",
        f"{COMM}every_operation_is_right_and_counted_as_nccl_tests_do[2-layout0-tp-2]",
    ),
    Change(
        "bench comm: the time is a constant",
        "tools/bench/collectives.py",
        "torch.tensor([(time.perf_counter() - started) / iterations], device=self.device)",
        "torch.tensor([0.001], device=self.device)",
        f"{COMM}the_time_of_a_call_is_measured",
    ),
    Change(
        "bench comm: the time is that of all calls",
        "tools/bench/collectives.py",
        "(time.perf_counter() - started) / iterations",
        "(time.perf_counter() - started)",
        f"{COMM}the_time_of_a_call_is_measured",
    ),
    Change(
        "bench comm: results are not compared",
        "tools/bench/collectives.py",
        "        self._check(case)\n        self._fill(case)",
        "        self._fill(case)",
        f"{COMM}a_wrong_sum_ends_with_exit_code_1",
    ),
    Change(
        "bench overlap: the slowest is chosen",
        "tools/bench/overlap.py",
        "return replace(measured, chosen=fastest(ours))",
        "return measured",
        f"{OVERLAP}what_is_refused_is_left_out_of_the_choice",
    ),
    Change(
        "bench overlap: efficiency is the share of communication",
        "tools/bench/overlap.py",
        '"efficiency": round(measured.efficiency(choice), 3)',
        '"efficiency": round(measured.comm_hidden(choice), 3)',
        f"{OVERLAP}a_row_of_known_times",
    ),
    Change(
        "bench overlap: hidden is that of one product",
        "tools/bench/overlap.py",
        'exposed = sum(row["serial_ms"] for row in of_it) - alone',
        'exposed = of_it[0]["serial_ms"] - of_it[0]["matmul_ms"]',
        f"{OVERLAP}products_together",
    ),
    Change(
        "bench experts: hidden is a share of the layer",
        "tools/bench/experts.py",
        "1 - (overlapped - without) / (serial - without) if serial > without else None",
        "1 - overlapped / serial",
        f"{EXPERTS}the_hidden_share_follows_from_the_times",
    ),
    Change(
        "bench experts: rows that stay count as sent",
        "tools/bench/experts.py",
        "away = sizes - sizes.diag().diag()",
        "away = sizes",
        f"{EXPERTS}loads_are_those_of_the_busiest_rank",
    ),
    Change(
        "bench experts: --skew is ignored",
        "tools/bench/expert_layer.py",
        "share = min(skew / over.size, MOST)",
        "share = 1 / over.size",
        f"{EXPERTS}a_skewed_routing_loads_the_first_rank[4-2.5-arch0-2.5]",
    ),
    Change(
        "bench experts: results are not compared",
        "tools/bench/experts.py",
        "if not apart[worst] < allowed:",
        "if False:",
        f"{EXPERTS}one_wrong_token_is_found",
    ),
    Change(
        "trace overlap: waiting counts as computing",
        "tools/trace.py",
        "computing = without(computing, union((wait.start, wait.end) for wait in rank.waits))",
        "pass",
        f"{TRACE}without_a_gpu_computation_is_what_threads_do_and_do_not_wait_in",
    ),
    Change(
        "trace overlap: all communication is exposed",
        "tools/trace.py",
        "length(without(talking, computing))",
        "length(talking)",
        f"{TRACE}two_groups_of_nccl_with_kernels_over_each_other",
    ),
    Change(
        "trace kernels: times of all steps are added up",
        "tools/trace_kernels.py",
        "amount.ms /= max(times.steps, 1)",
        "pass",
        "tests/unit/tools/test_trace_kernels.py::test_steps_of_a_gpu",
    ),
    Change(
        "trace hang: ranks that wait are not told from those that did not come",
        "tools/trace_hang.py",
        'return "not arrived"',
        'return "issued"',
        "tests/unit/tools/test_trace_hang.py::test_the_rank_that_did_not_arrive",
    ),
]

CHANGES = [*METRICS_ROWS, *TABLES, *DATA, *SAVES_AND_STOPS, *BENCHES]
