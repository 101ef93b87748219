"""metrics.prometheus_port: the rows of a run as Prometheus's own parser reads them, where it listens, who may ask."""

from __future__ import annotations

import http.client
import json
import os
import socket
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from shardline import registry
from shardline.cli.main import main
from shardline.errors import UserError
from shardline.telemetry.metrics import KEYS, OPTIONAL_KEYS
from shardline.telemetry.prometheus import CONTENT, Exporter, job_address
from tests.e2e.tiny import flags, rows, run
from tests.faults.test_ranks import wait_until

ROW = {"step": 3, "loss": 2.5, "tokens": 4096, "mfu": None, "comm_bytes": {"tp": 12, "dp_shard": 7}}


def samples(text):
    families = text_string_to_metric_families(text)
    return {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}


def test_the_parser_of_prometheus_reads_every_kind_of_number():
    exporter = Exporter({"run": 'a "run"\n', "model": "llama3\\8B"})
    exporter.update(ROW, [[0.1, 0.5, 0.02], [0.1, 0.9, 0.02]])
    exporter.update({"validation_loss": 2.75})
    found = samples(exporter.text())
    assert found[("shardline_run_info", ("model", "llama3\\8B"), ("run", 'a "run"\n'))] == 1
    assert found[("shardline_loss",)] == 2.5
    assert found[("shardline_tokens_total",)] == 4096
    assert found[("shardline_comm_bytes", ("axis", "tp"))] == 12
    assert found[("shardline_validation_loss",)] == 2.75
    for phase, seconds in (("data", 0.1), ("compute", 0.9), ("optimizer", 0.02)):
        assert found[("shardline_rank_seconds", ("phase", phase), ("rank", "1"))] == seconds
    assert ("shardline_mfu",) not in found
    exporter.update({"loss": float("nan")})
    assert samples(exporter.text())[("shardline_loss",)] != samples(exporter.text())[("shardline_loss",)]


def test_every_key_of_a_row_is_a_valid_name():
    exporter = Exporter({})
    tables = {"comm_bytes": {"tp": 1}, "expert_load_layers": {"3": 1.5}}
    exporter.update({key: tables.get(key, 1.5) for key in (*KEYS, *OPTIONAL_KEYS)})
    names = {name for name, *_ in samples(exporter.text())}
    assert names >= {f"shardline_{key}{'_total' if key == 'tokens' else ''}" for key in (*KEYS, *OPTIONAL_KEYS)}


def test_a_run_serves_its_newest_row_on_the_loopback_alone(tmp_path, monkeypatch):
    answers = {}

    def ask(trainer, state):
        server = trainer.telemetry.exporter.server
        with urllib.request.urlopen(server.url, timeout=10) as answer:
            answers[state["step"]] = (answer.headers["Content-Type"], samples(answer.read().decode()))
        answers["at"] = server.server_address

    monkeypatch.setitem(registry.hooks, "after_step", [ask])
    validation = {"validation__enable": True, "validation__freq": 2, "validation__steps": 1}
    run(tmp_path / "run", metrics__prometheus_port=0, training__steps=3, **validation)
    everything = rows(tmp_path / "run")
    written = {row["step"]: row for row in everything if "loss" in row}
    validated = {row["step"]: row["validation_loss"] for row in everything if "loss" not in row}
    for step in (1, 2, 3):
        kind, found = answers[step]
        assert kind == CONTENT
        assert (found[("shardline_step",)], found[("shardline_loss",)]) == (step, written[step]["loss"])
        assert found[("shardline_tokens_total",)] == written[step]["tokens"]
        assert found.get(("shardline_validation_loss",)) == validated.get(step - 1)
        info = {"layout": "one rank", "model": "llama3 debugmodel", "run": "run"}
        assert found[("shardline_run_info", *info.items())] == 1
    assert answers["at"][0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):  # closed with the loop
        socket.create_connection(answers["at"], timeout=5)


@pytest.mark.parametrize(
    ("host", "path", "status"),
    [
        ("127.0.0.1:1", "/metrics", 200),
        ("localhost:1", "/metrics?x=1", 200),
        ("evil.example:1", "/metrics", 403),
        ("127.0.0.1:1", "/", 404),
        ("127.0.0.1:1", "/../../etc/passwd", 404),
    ],
)
def test_who_may_ask_for_what(host, path, status):
    exporter = Exporter({})
    with exporter.serving(0):
        asking = http.client.HTTPConnection("127.0.0.1", exporter.server.server_address[1], timeout=10)
        asking.request("GET", path, headers={"Host": host})
        assert asking.getresponse().status == status
        asking.close()


def test_a_port_that_is_taken_is_named(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"metrics\.prometheus_port = {port}: cannot listen .*another port, or 0"):
            with Exporter({}).serving(port):
                pass
        assert main(["train", *flags(tmp_path / "run", metrics__prometheus_port=port)]) == 2
    assert f"metrics.prometheus_port = {port}" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "log" / "heartbeat.json").read_text())["doing"] == "failed"
    assert main(["config", "--metrics.prometheus_port=65536"]) == 2
    assert "a port, 0 to 65535" in capsys.readouterr().err


def refuses(address):
    try:
        socket.create_connection(address, timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_forked_child_does_not_keep_the_port():
    exporter = Exporter({})
    read, write = os.pipe()
    with exporter.serving(0):
        address = exporter.server.server_address
        child = os.fork()
        if child == 0:  # as a data worker that outlives its rank
            os.read(read, 1)
            os._exit(0)
    try:
        wait_until(lambda: refuses(address), 10)  # a process that another thread starts has the port until it runs
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_several_machines_ask_at_the_address_of_the_job(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.9")
    assert job_address() == "127.0.0.1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    probe.connect(("127.0.0.9", 9))
    assert job_address() == probe.getsockname()[0]
    probe.close()
    monkeypatch.setenv("MASTER_ADDR", "::1")
    assert job_address() == "::1"
