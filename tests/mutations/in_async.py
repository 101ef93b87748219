"""Promises of workers that do not wait for each other (`data_parallel_mode = "async"`)."""

from tests.mutations.change import Change

UNIT = "tests/unit/parallel/test_asynchronous.py::test_"
RUNS = "tests/parity/test_async.py::test_"
RANK_LOG = "tests/unit/telemetry/test_rank_log.py::test_"
FOLDER = "parallel/data/asynchronous/"

ASYNCHRONOUS = [
    Change(
        "asynchronous: staleness has no bound",
        FOLDER + "tickets.py",
        "return version >= step - staleness and not",
        "return not",
        f"{UNIT}without_staleness_nothing_of_a_later_step_is_taken",
    ),
    Change(
        "asynchronous: nobody waits at a meeting",
        FOLDER + "tickets.py",
        "not any(ends(number) for number in range(made + 1, step + 1))",
        "True",
        f"{UNIT}nothing_of_a_later_step_is_begun_before_a_meeting",
    ),
    Change(
        "asynchronous: requests of others are not seen",
        FOLDER + "tickets.py",
        "if any(taken.asks):",
        "if any(taken.asks) and taken.worker == self.worker:",
        f"{UNIT}whoever_takes_a_ticket_knows_what_was_asked_before",
    ),
    Change(
        "asynchronous: what a late worker brings counts too",
        FOLDER + "tickets.py",
        'return self.store.offer(f"through/{number}", TakenTicket(self.worker, ())._asdict(), decode) is None',
        "return True",
        f"{UNIT}what_a_late_worker_brings_is_dropped",
    ),
    Change(
        "asynchronous: a late contribution keeps its rate",
        FOLDER + "server.py",
        "return (1.0 + stale) ** -power",
        "return 1.0",
        f"{UNIT}a_late_contribution_has_a_smaller_learning_rate",
    ),
    Change(
        "asynchronous: contributions weigh the same",
        FOLDER + "server.py",
        "fresh = [report.targets * freshness(",
        "fresh = [(report.targets > 0) * freshness(",
        f"{UNIT}a_step_is_the_mean_over_targets",
    ),
    Change(
        "asynchronous: the state of all tensors stays everywhere",
        FOLDER + "server.py",
        "            if parameter not in twins:\n",
        "            if False:\n",
        f"{UNIT}the_state_stays_with_who_serves",
    ),
    Change(
        "asynchronous: all workers read the samples of the first",
        "training/async_steps.py",
        "place = slot * self.mesh.layout.dp_shard",
        "place = 0 * self.mesh.layout.dp_shard",
        f"{RUNS}a_slow_worker_reads_less_and_no_sample_is_lost",
    ),
    Change(
        "asynchronous: late workers are never dropped",
        "training/async_steps.py",
        'if self.section.async_late == "drop" and',
        "if False and",
        f"{RUNS}what_a_late_worker_does_is_made_again_and_counts_once",
    ),
    Change(
        "asynchronous: waits for other workers count as computation",
        FOLDER + "exchange.py",
        "exposed.add((ended - started) / 1e9)",
        "pass",
        f"{RANK_LOG}waits_for_other_workers_are_exposed_and_not_idle",
    ),
    Change(
        "asynchronous: waits for other workers are a pipeline's bubble, too",
        "telemetry/rank_log.py",
        "actions[0].start - began - waited)",
        "actions[0].start - began)",
        f"{RANK_LOG}waits_for_other_workers_are_exposed_and_not_idle",
    ),
    Change(
        "asynchronous: the rate of a late step counts as that of the schedule",
        "training/trainer.py",
        "self.progress.lr, self.progress.last_step = self._rate(self.progress.step)[0], self.total_steps",
        "self.progress.lr, self.progress.last_step = result.lr, self.total_steps",
        f"{RUNS}a_run_is_resumed_after_a_step_that_was_late",
    ),
    Change(
        "asynchronous: who was asked to stop tells nobody",
        "training/async_steps.py",
        "ticket = tickets.take(self._pending)",
        "ticket = tickets.take(no_requests())",
        "tests/faults/test_asynchronous.py::test_workers_save_when_they_are_asked_and_go_on_from_there",
    ),
    Change(
        "asynchronous: each worker moves the biases of routers by its own counts",
        FOLDER + "server.py",
        "self.balance(self.biases, totals(reports))",
        "self.balance(self.biases, list(reports[-1].sums))",
        f"{UNIT}biases_of_routers_move_once_a_step_by_the_counts_of_all",
    ),
    Change(
        "asynchronous: biases of routers are not pulled",
        FOLDER + "server.py",
        "kept = self.biases if biases else []",
        "kept = [torch.zeros_like(bias) for bias in self.biases] if biases else []",
        f"{RUNS}one_worker_is_synchronous_training",
    ),
    Change(
        "asynchronous: a change of weights has the wrong sign",
        "training/async_steps.py",
        "return before[index] - self.tensors[index]",
        "return self.tensors[index] - before[index]",
        f"{RUNS}without_staleness_local_steps_are_diloco",
    ),
    Change(
        "asynchronous: the momentum of outer steps is not saved",
        "checkpoint/replicas/worker_state.py",
        "return [*state, *self._momenta()]",
        "return state",
        f"{RUNS}local_steps_are_resumed",
    ),
    Change(
        "asynchronous: every worker continues with the optimizer of the first",
        "checkpoint/replicas/worker_state.py",
        "        _fill(self._momenta(), shards)\n        source = self.mesh.worker % saved if saved else 0",
        "        _fill(self._momenta(), shards)\n        source = 0",
        f"{RUNS}local_steps_are_resumed",
    ),
]
