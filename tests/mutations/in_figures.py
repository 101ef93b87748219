"""Figures that commands show, the planner's arithmetic, details of formats, and what a start or a failure decides."""

from __future__ import annotations

from tests.mutations.change import Change

CHAT = "tests/unit/data/test_chat_format.py::test_"
CHECKPOINT = "tests/unit/checkpoint/test_"
DATA = "tests/unit/data/test_"
DOCTOR = "tests/unit/tools/test_doctor.py::test_"
EXPLAIN = "tests/unit/show/test_explain.py::test_"
HANG = "tests/unit/comm/test_launch_hang.py::test_"
HARDWARE = "tests/unit/plan/test_hardware.py::test_"
OPTIM = "tests/unit/optim/test_"
OVERVIEW = "tests/unit/training/test_overview.py::test_"
PLAN = "tests/unit/plan/test_"
REPORT = "tests/unit/show/test_report.py::test_"
START = "tests/unit/adapters/test_start.py::test_"
TAIL = "tests/unit/show/test_tail.py::test_"
TELEMETRY = "tests/unit/telemetry/test_"

OF_TRAINING = [
    Change(
        "biases of experts are decayed",
        "optim/optimizer.py",
        'if p.ndim <= 1 or name.endswith(".bias")}',
        "if p.ndim <= 1}",
        f"{OPTIM}optimizer.py::test_biases_of_experts_are_not_decayed_either",
    ),
    Change(
        "LAMB divides by an update of zeros",
        "optim/lamb.py",
        "(weights > 0) & (updates > 0)",
        "weights > 0",
        f"{OPTIM}lamb.py::test_an_update_of_zeros_changes_nothing[LAMB]",
    ),
    Change(
        "LARS divides by a gradient of zeros",
        "optim/lamb.py",
        "(of_weights > 0) & (of_gradients > 0)",
        "of_weights > 0",
        f"{OPTIM}lamb.py::test_an_update_of_zeros_changes_nothing[LARS]",
    ),
    Change(
        "all experts begin with the same matrices of LoRA",
        "adapters/start.py",
        "[_matrix(seed, name, expert, shape[1:], embeds)",
        "[_matrix(seed, name, 0, shape[1:], embeds)",
        f"{START}every_expert_begins_with_numbers_of_its_own",
    ),
    Change(
        "LoRA's A begins as large whatever its columns",
        "models/adapted/low_rank.py",
        "return 1 / math.sqrt(columns)",
        "return 0.1",
        f"{START}a_is_uniform_within_a_bound_by_its_columns_and_b_is_zero",
    ),
    Change(
        "LoRA of an embedding begins with a uniform B",
        "adapters/start.py",
        "    if normal:\n",
        "    if False:\n",
        f"{START}of_an_embedding_b_is_normal_and_a_is_zero",
    ),
    Change(
        "the first steps of a resumed run are told to compile again",
        "telemetry/recompiles.py",
        "if step <= first_step + SETTLED_AFTER:",
        "if step <= SETTLED_AFTER:",
        f"{TELEMETRY}compile_report.py::test_a_resumed_run_may_compile_in_its_own_first_steps",
    ),
    Change(
        "shares in the table of ops count what ops call",
        "telemetry/profile.py",
        "{own / whole:>8.1%}",
        "{total / whole:>8.1%}",
        f"{TELEMETRY}profile.py::test_shares_in_the_table_are_of_the_time_of_ops_alone",
    ),
    Change(
        "writing a trace counts as training",
        "telemetry/profile.py",
        "(self.at + 1) % self.options.profile_freq == 0",
        "self.at % self.options.profile_freq == 0",
        f"{TELEMETRY}profile.py::test_time_is_set_aside_for_the_step_that_writes",
    ),
    Change(
        "pruning takes what is protected",
        "checkpoint/format.py",
        "{saved.path for saved in every if saved.step in protected}",
        "set()",
        f"{CHECKPOINT}checkpoint_files.py::test_pruning_leaves_what_is_protected",
    ),
    Change(
        "a mirrored checkpoint without a file counts as copied",
        "checkpoint/mirror.py",
        "if there != digest or look_at(target).check():",
        "if there != digest:",
        f"{CHECKPOINT}mirror.py::test_a_copy_that_lost_a_file_is_made_again",
    ),
    Change(
        "dropout stays off after a validation",
        "training/validate.py",
        "model.train(was_training)",
        "pass",
        "tests/e2e/test_training.py::test_validation_rows",
    ),
    Change(
        "dropout stays off after samples",
        "training/samples.py",
        "model.train(was_training)",
        "pass",
        "tests/e2e/test_training.py::test_validation_rows",
    ),
    Change(
        "differences below a millisecond make slow ranks",
        "telemetry/slow_ranks.py",
        "SHARE, SECONDS = 0.1, 1e-3",
        "SHARE, SECONDS = 0.1, 0.0",
        f"{TELEMETRY}watching.py::test_less_than_a_millisecond_makes_no_slow_rank",
    ),
    Change(
        "a pipeline's wait for all ranks is no idle time",
        "telemetry/slow_ranks.py",
        'row["idle"] + exposed.get("other", 0.0)',
        'row["idle"]',
        f"{TELEMETRY}watching.py::test_what_a_pipeline_waits_for_is_idle_time",
    ),
    Change(
        "a time limit is a request",
        "telemetry/console.py",
        "if stopped_by == TIME_LIMIT else",
        "if False else",
        f"{TELEMETRY}console.py::test_a_run_that_its_time_limit_stops_says_so_and_pairs_have_two_columns",
    ),
    Change(
        "the accuracy of pairs is shown as a share of one",
        "telemetry/console.py",
        'f"accuracy {value:.1%}"',
        'f"accuracy {value:.1f}%"',
        f"{TELEMETRY}console.py::test_a_run_that_its_time_limit_stops_says_so_and_pairs_have_two_columns",
    ),
    Change(
        "a hang counts as a consequence",
        "launch/failures.py",
        '"hang": 1,',
        '"hang": 4,',
        "tests/unit/launch/test_launch.py::test_the_failure_that_others_followed_from_is_shown",
    ),
    Change(
        "silent ranks are missed for as long as the limit",
        "comm/hang.py",
        "min(self.limit, LONG_SILENCE)",
        "self.limit",
        f"{HANG}silence_is_noticed_where_nobody_waits_in_a_watched_collective",
    ),
    Change(
        "missing ranks beyond the first ones are not counted",
        "comm/hang.py",
        "if len(missing) > MOST_NAMED else [])",
        "if False else [])",
        f"{HANG}of_many_missing_ranks_some_are_named",
    ),
]

OF_DATA = [
    Change(
        "the last tokens of a text are in no window",
        "data/order.py",
        "% np.uint64(spare + 1)",
        "% np.uint64(max(spare, 1))",
        f"{DATA}order.py::test_every_token_is_in_a_window_of_some_epoch",
    ),
    Change(
        "one record to hold out is all of them",
        "data/record_samples.py",
        "int(amount) if amount >= 1 else",
        "int(amount) if amount > 1 else",
        f"{DATA}records.py::test_held_out_records_are_in_validation_and_nowhere_else",
    ),
    Change(
        "a record without a system prompt has none",
        "data/formats/instruction.py",
        "needed=self.needs_system) or system",
        "needed=self.needs_system)",
        f"{DATA}formats.py::test_a_table_describes_a_format_of_ones_own",
    ),
    Change(
        "roles_to_train knows the template's names alone",
        "data/formats/chat.py",
        "frozenset(messages.roles.get(role, role) for role in wanted)",
        "frozenset(wanted)",
        f"{CHAT}roles_to_train_and_turns_that_say_so_themselves",
    ),
    Change(
        "parts of a turn that are not to be trained are",
        "data/formats/chat.py",
        'for part in detail if part.get("train", True)]',
        "for part in detail]",
        f"{CHAT}roles_to_train_and_turns_that_say_so_themselves",
    ),
    Change(
        "field_thinking is ignored",
        "data/formats/chat.py",
        'table.field_thinking or "reasoning_content"',
        '"reasoning_content"',
        f"{CHAT}reasoning_may_have_another_name_in_the_data_and_in_the_template",
    ),
    Change(
        "template_thinking_key is ignored",
        "data/formats/chat.py",
        'table.template_thinking_key or "reasoning_content": table',
        '"reasoning_content": table',
        f"{CHAT}reasoning_may_have_another_name_in_the_data_and_in_the_template",
    ),
    Change(
        "message_field_role is ignored",
        "data/formats/chat.py",
        'table.message_field_role or "role"',
        '"role"',
        f"{CHAT}the_older_shape_of_records_by_mappings",
    ),
    Change(
        "message_field_content is ignored",
        "data/formats/chat.py",
        'table.message_field_content or "content"',
        '"content"',
        f"{CHAT}the_older_shape_of_records_by_mappings",
    ),
    Change(
        "field_tools is ignored",
        "data/formats/chat.py",
        'table.field_tools or "tools"',
        '"tools"',
        f"{CHAT}tool_calls_are_trained_and_tool_answers_are_not",
    ),
    Change(
        "another weight of a source tokenizes it again",
        "data/formats/base.py",
        '{"weight"}\n',
        "set()\n",
        f"{CHAT}names_that_templates_get",
    ),
]

OF_COMMANDS = [
    Change(
        "the card of a dataset names files of this machine",
        "run/dataset_card.py",
        ' and not pattern.startswith("/")',
        "",
        "tests/unit/run/test_hub_names.py::test_a_card_names_the_files_of_a_split",
    ),
    Change(
        "the card of a dataset names files of other machines",
        "run/dataset_card.py",
        '"://" not in pattern and ',
        "",
        "tests/unit/run/test_hub_names.py::test_a_card_names_the_files_of_a_split",
    ),
    Change(
        "the start's table does not say where another schedule ends",
        "training/overview.py",
        "{'' if total == steps else f' at step {total}'}",
        "",
        f"{OVERVIEW}the_schedule_in_words",
    ),
    Change(
        "the start's table has the rate before it grows with the batch",
        "training/overview.py",
        "section, peak = config.lr_scheduler, scaled_lr(config, batch)",
        "section, peak = config.lr_scheduler, config.optimizer.lr",
        f"{OVERVIEW}the_schedule_in_words",
    ),
    Change(
        "the start's table promises a last save that can be resumed",
        "training/overview.py",
        "if section.last_save_model_only or section.last_save_in_hf else",
        "if section.last_save_in_hf else",
        f"{OVERVIEW}the_table_has_the_clock_of_saves_the_samples_of_a_validation_and_what_is_held",
    ),
    Change(
        "report: ranks of all stages are compared",
        "show/step_parts.py",
        'layout.coordinates(rank)["pp"]',
        'layout.coordinates(rank)["tp"]',
        f"{REPORT}ranks_are_compared_with_those_of_their_stage_and_without_the_first_step",
    ),
    Change(
        "report: the pace of ranks has the first step",
        "show/step_parts.py",
        "steps = self.seconds[1:] or self.seconds",
        "steps = self.seconds",
        f"{REPORT}ranks_are_compared_with_those_of_their_stage_and_without_the_first_step",
    ),
    Change(
        "report: only a rank that takes half as long again is slow",
        "show/step_parts.py",
        "SLOW = 1.1",
        "SLOW = 1.5",
        f"{REPORT}ranks_are_compared_with_those_of_their_stage_and_without_the_first_step",
    ),
    Change(
        "report: ranks of earlier starts are still there",
        "show/step_parts.py",
        "return [rank for rank in run.ranks if rank < size]",
        "return list(run.ranks)",
        f"{REPORT}ranks_of_an_earlier_and_larger_start_are_left_out",
    ),
    Change(
        "tail without following waits for a restart",
        "show/tail.py",
        "patience=RESTART_SECONDS if follow else 0.0",
        "patience=RESTART_SECONDS",
        f"{TAIL}without_following_a_failure_counts_at_once",
    ),
    Change(
        "tail does not say what stopped a run",
        "show/tail.py",
        'if self.beat.get("stopped_by") else ""',
        'if False else ""',
        f"{TAIL}what_stopped_a_run_is_named",
    ),
    Change(
        "explain: all ranks of a pipeline idle like the first",
        "show/chapters.py",
        "*(timeline.idle[at], held[at]),",
        "*(timeline.idle[0], held[at]),",
        f"{EXPLAIN}the_table_of_the_schedule_has_the_numbers_of_its_drawing",
    ),
    Change(
        "explain: all ranks of a pipeline hold as much as the first",
        "show/chapters.py",
        "*(timeline.idle[at], held[at]),",
        "*(timeline.idle[at], held[0]),",
        f"{EXPLAIN}the_table_of_the_schedule_has_the_numbers_of_its_drawing",
    ),
    Change(
        "explain: a pipeline runs once in a step",
        "show/chapters.py",
        'words.append(f"A step repeats this {count} times before the update.")',
        "pass",
        f"{EXPLAIN}the_table_of_the_schedule_has_the_numbers_of_its_drawing",
    ),
    Change(
        "explain: bytes of an axis are those of its last collective",
        "show/chapters.py",
        'found[axis] += numbers["bytes"]',
        'found[axis] = numbers["bytes"]',
        f"{EXPLAIN}the_mesh_has_all_bytes_of_an_axis",
    ),
    Change(
        "explain: defaults differ from the defaults",
        "show/chapters.py",
        "if value != defaults.get(key)]",
        "if value]",
        f"{EXPLAIN}what_differs_from_the_defaults_is_shown_and_what_has_no_effect_is_noted",
    ),
    Change(
        "explain: keys without effect are not noted",
        "show/chapters.py",
        "words += notes(with_degrees(subject.config, subject.layout))",
        "pass",
        f"{EXPLAIN}what_differs_from_the_defaults_is_shown_and_what_has_no_effect_is_noted",
    ),
    Change(
        "doctor: memory for one rank is enough for all",
        "tools/doctor/findings.py",
        "LEAST_MEMORY * ranks",
        "LEAST_MEMORY",
        f"{DOCTOR}what_is_wrong_with_a_machine_is_named_with_its_remedy",
    ),
    Change(
        "doctor: open files for one rank are enough for all",
        "tools/doctor/findings.py",
        "64 + FILES_OF_RANK * len(seen.ranks)",
        "64 + FILES_OF_RANK",
        f"{DOCTOR}what_is_wrong_with_a_machine_is_named_with_its_remedy",
    ),
    Change(
        "doctor: shared memory for one rank is enough for all",
        "tools/doctor/findings.py",
        "free < LEAST_SHARED * connected",
        "free < LEAST_SHARED",
        f"{DOCTOR}what_is_wrong_with_a_machine_is_named_with_its_remedy",
    ),
    Change(
        "doctor: an error of measuring is a wrong clock",
        "tools/doctor/findings.py",
        "abs(worst.clock_ahead) - worst.clock_error > SKEW_SECONDS",
        "abs(worst.clock_ahead) > SKEW_SECONDS",
        f"{DOCTOR}machines_that_differ_and_clocks_that_disagree",
    ),
    Change(
        "doctor: versions of NCCL may differ",
        "tools/doctor/findings.py",
        '("shardline", "torch", "cuda", "nccl")',
        '("shardline", "torch", "cuda")',
        f"{DOCTOR}each_version_that_must_be_alike_is_compared",
    ),
    Change(
        "doctor: a new checkpoint needs no room beside the others",
        "tools/doctor/findings.py",
        "need.size * (kept + 1)",
        "need.size * kept",
        f"{DOCTOR}what_is_wrong_with_a_job_is_named",
    ),
    Change(
        "doctor: writing and reading a disk change places",
        "tools/doctor/storage.py",
        "return size / written, size / taken",
        "return size / taken, size / written",
        f"{DOCTOR}the_numbers_of_a_disk_are_told_apart",
    ),
    Change(
        "doctor: all of a disk is free",
        "tools/doctor/storage.py",
        "shutil.disk_usage(there).free",
        "shutil.disk_usage(there).total",
        f"{DOCTOR}the_numbers_of_a_disk_are_told_apart",
    ),
    Change(
        "doctor: a folder is on the mount that is named last",
        "tools/doctor/storage.py",
        "if inside and len(point) >= len(found[0]):",
        "if inside:",
        f"{DOCTOR}a_folder_is_on_the_deepest_mount",
    ),
]

OF_PLANS = [
    Change(
        "plan: attention is as fast on narrow heads",
        "plan/hardware.py",
        "min(1.0, (head_dim / 128) ** NARROW_HEADS)",
        "1.0",
        f"{HARDWARE}attention_slows_down_on_narrow_heads_short_sequences_and_backward",
    ),
    Change(
        "plan: attention is as fast on short sequences",
        "plan/hardware.py",
        "length / (length + HALF_RATE_LENGTH)",
        "1.0",
        f"{HARDWARE}attention_slows_down_on_narrow_heads_short_sequences_and_backward",
    ),
    Change(
        "plan: attention's backward has the rate of forward",
        "plan/hardware.py",
        "rates[backward]",
        "rates[False]",
        f"{HARDWARE}attention_slows_down_on_narrow_heads_short_sequences_and_backward",
    ),
    Change(
        "plan: attention's backward has the products of forward",
        "plan/passes.py",
        "2.5 * work.attention, True",
        "work.attention, True",
        f"{PLAN}simulate.py::test_backward_of_attention_has_two_and_a_half_times_the_products",
    ),
    Change(
        "plan: every layer is computed again whatever the number says",
        "plan/passes.py",
        "(products + attention + moved) / int(mode)",
        "products + attention + moved",
        f"{PLAN}simulate.py::test_recomputation_costs_what_it_computes",
    ),
    Change(
        "plan: queries see keys that come later",
        "plan/work.py",
        "whole = length / 2 if workload.causal else length",
        "whole = length",
        f"{PLAN}work.py::test_a_window_and_context_parallelism_change_what_attention_computes",
    ),
    Change(
        "plan: the first queries see a whole window",
        "plan/work.py",
        "(arch.sliding_window - arch.sliding_window**2 / (2 * length))",
        "arch.sliding_window",
        f"{PLAN}work.py::test_a_window_and_context_parallelism_change_what_attention_computes",
    ),
    Change(
        "plan: a ring passes keys once more than it has to",
        "plan/work.py",
        "own * (layout.cp - 1)",
        "own * layout.cp",
        f"{PLAN}work.py::test_context_parallel_ranks_send_keys_and_values_of_their_own_tokens",
    ),
    Change(
        "plan: ranks of different nodes share heads",
        "plan/search.py",
        "(tp > per_node and",
        "(False and",
        f"{PLAN}plan_command.py::test_candidates_cover_every_dimension",
    ),
    Change(
        "plan: slices of a sequence may have any length",
        "plan/search.py",
        "length // cp >= SHORTEST_SLICE",
        "length // cp >= 1",
        f"{PLAN}plan_command.py::test_candidates_cover_every_dimension",
    ),
    Change(
        "plan: other programs take no memory of a GPU",
        "plan/search.py",
        "return self.hardware.memory - self.hardware.allowance",
        "return self.hardware.memory",
        f"{PLAN}plan_command.py::test_room_is_what_other_programs_leave",
    ),
    Change(
        "plan: all rows to experts leave the node",
        "plan/collectives.py",
        "size * away / speed",
        "size / speed",
        f"{HARDWARE}rows_to_experts_and_between_stages_take_the_slowest_link_on_their_way",
    ),
    Change(
        "plan: stages are connected as if they shared a node",
        "plan/collectives.py",
        "net.latency + size / speed if nodes > 1 else",
        "net.latency + size / speed if False else",
        f"{HARDWARE}rows_to_experts_and_between_stages_take_the_slowest_link_on_their_way",
    ),
]

CHANGES = [*OF_TRAINING, *OF_DATA, *OF_COMMANDS, *OF_PLANS]
