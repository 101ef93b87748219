"""The address at which launchers meet, and what a rank of another launcher prints: without starting any rank."""

import socket

import pytest
import torch.distributed as dist

from shardline.cli.main import main
from shardline.errors import UserError
from shardline.launch import endpoint, launch
from shardline.launch.endpoint import Endpoint, gloo_interface
from shardline.launch.failures import explain


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def problem(port, number, seconds=20.0, address="127.0.0.1"):
    """The message of a launcher that cannot open the store at an endpoint."""
    with pytest.raises(UserError) as raised:
        Endpoint(f"{address}:{port}", number, seconds).open()
    return str(raised.value)


def test_an_endpoint_that_leads_nowhere(port):
    silent = problem(port, 1, seconds=0.3)
    assert f"--rdzv-endpoint 127.0.0.1:{port}: no answer within 0.3 s" in silent
    assert "the first machine has not started" in silent
    assert "'no-such-host.invalid' has no address" in problem(port, 1, address="no-such-host.invalid")


def test_an_endpoint_where_something_else_listens(port, monkeypatch):
    monkeypatch.setattr(endpoint, "CONNECT_SECONDS", 1)
    with socket.create_server(("127.0.0.1", port)):
        taken, alien = problem(port, 0), problem(port, 1)
    assert f"port {port} of this machine is taken" in taken
    assert alien == f"--rdzv-endpoint 127.0.0.1:{port}: what answers there is not a launcher"


def refuses(address, port):
    try:
        socket.create_connection((address, port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_the_store_listens_at_the_endpoint_alone(port):
    one = Endpoint(f"127.0.0.2:{port}", 0, 20.0)
    one.open().set("key", "value")
    assert (one.near, one.port) == ("127.0.0.2", port)
    assert refuses("127.0.0.1", port)
    beside = Endpoint(f"127.0.0.2:{port}", 1, 20.0)
    assert beside.open().get("key") == b"value"


def test_messages_name_the_port_that_was_found_free():
    one = Endpoint("127.0.0.1:0", None, 20.0)
    one.open()
    assert one.port > 0
    assert one.address == f"127.0.0.1:{one.port}"


@pytest.mark.parametrize("number", [0, None])
def test_a_name_that_stands_for_a_loopback_says_nothing_of_what_others_reach(port, number, monkeypatch, capsys):
    monkeypatch.setattr(Endpoint, "_addresses", lambda self: ["127.0.1.1"])
    first = Endpoint(f"first-machine:{port}", number, 20.0)
    first.open()
    note = "note: the store listens on all addresses of this machine: first-machine stands for a loopback here\n"
    assert capsys.readouterr().err == note
    assert first.near == "127.0.0.1"
    assert not refuses("127.0.0.2", port)
    monkeypatch.undo()
    with pytest.raises(UserError, match=f"port {port} of this machine is taken"):
        Endpoint(f"127.0.0.1:{port}", 0, 20.0).open()


def test_an_address_of_another_machine_is_served_where_the_number_says_so(port, monkeypatch, capsys):
    far = f"192.0.2.1:{port}"  # for documentation: nobody has it
    Endpoint(far, 0, 20.0).open()
    assert capsys.readouterr().err.endswith("all addresses of this machine: 192.0.2.1 is no address of this one\n")
    for number in (1, None):
        one = Endpoint(far, number, 20.0)
        one._serve()
        assert one.server is None


def test_gloo_gets_a_real_interface_or_the_loopback_of_a_machine_that_is_alone():
    assert gloo_interface("127.0.0.1", alone=False) is None
    assert gloo_interface("no-such-host.invalid", alone=False) is None
    assert gloo_interface("no-such-host.invalid", alone=True) == "lo"


# ---- under another launcher ------------------------------------------------------------------------------------------

RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def variables(monkeypatch):
    def give(**values):
        for name in (*RANK, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SHARDLINE_LAUNCHER"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return give


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"RANK": "1"}, "a launcher must set RANK and WORLD_SIZE to whole numbers: found RANK=1"),
        ({"WORLD_SIZE": "2"}, "found WORLD_SIZE=2"),
        (RANK | {"RANK": "first"}, "found RANK=first, WORLD_SIZE=2"),
        (RANK | {"RANK": "2"}, "RANK=2: expected a number below WORLD_SIZE=2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "set MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "set MASTER_PORT"),
        (RANK | {"MASTER_ADDR": ""}, "set MASTER_ADDR"),
        (RANK | {"MASTER_PORT": "abc"}, "MASTER_PORT=abc: expected a port of rank 0's machine, 1 to 65535"),
        (RANK | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536: expected a port"),
        (RANK | {"MASTER_ADDR": "no-such-host.invalid"}, "MASTER_ADDR=no-such-host.invalid has no address: "),
        (RANK | {"MASTER_ADDR": "a..b"}, "MASTER_ADDR=a..b has no address: "),
    ],
)
def test_variables_that_cannot_be_right_are_refused(variables, values, said, capsys, monkeypatch):
    variables(**values)
    monkeypatch.setattr(launch, "NAME_SECONDS", 0.0)
    monkeypatch.setattr(launch, "_run", lambda config, options: 0)
    assert main(["train"]) == 2
    assert said in capsys.readouterr().err


def test_a_name_may_become_known_a_little_later(variables, monkeypatch):
    answers = [socket.gaierror(socket.EAI_NONAME, "not known"), []]

    def ask(host, *given, **named):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    variables(**RANK | {"MASTER_ADDR": "comes-later"})
    assert launch.started_ranks() == 2
    assert not answers


def test_the_time_to_wait_for_a_lost_machine_needs_restarts(variables, monkeypatch, capsys):
    monkeypatch.setattr("shardline.launch.launch._run", lambda config, options: 0)
    monkeypatch.setattr("shardline.launch.agent.start_ranks", lambda launch: 0)
    monkeypatch.setattr("shardline.launch.launch.start", lambda *given: 0)
    note = "note: comm.lost_machine_seconds has no effect: neither --max-restarts nor --nnodes MIN:MAX is set\n"
    words, restarts = ["train", "--comm.lost_machine_seconds", "20", "--checkpoint.enable"], ["--max-restarts", "1"]
    variables()
    assert main(words) == 0
    assert capsys.readouterr().err == note
    assert main([*words, *restarts]) == 0
    assert capsys.readouterr().err == ""
    for values, said in ((RANK | {"RANK": "0"}, note), (RANK, ""), (RANK | {"SHARDLINE_LAUNCHER": "1"}, "")):
        variables(**values)
        assert main(words) == 0
        assert capsys.readouterr().err == said


def test_options_of_the_start_that_have_no_effect_are_named_once(variables, monkeypatch, capsys):
    monkeypatch.setattr("shardline.launch.launch._run", lambda config, options: 0)
    words = ["train", "--training.steps=1", "--nproc=4", "--nnodes=2", "--rdzv-endpoint=a:1", "--node-rank=1"]
    variables(**RANK | {"RANK": "0"})
    assert main(words) == 0
    expected = "note: no effect under another launcher: --nproc, --nnodes, --node-rank, --rdzv-endpoint\n"
    assert capsys.readouterr().err == expected
    for values in (RANK, RANK | {"RANK": "0", "SHARDLINE_LAUNCHER": "1"}):
        variables(**values)
        assert main(words) == 0
        assert capsys.readouterr().err == ""
    monkeypatch.setattr("shardline.launch.agent.start_ranks", lambda launch: 0)
    variables()
    assert main([*words, "--rdzv-backend", "c10d"]) == 0
    assert capsys.readouterr().err.endswith("where machines are numbered as they join: --node-rank\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("[/x/gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:41. This is typical. GLHF!"),
            "lost another rank, whose own error is the cause: Connection closed by peer [10.0.0.2]:41",
        ),
        (
            dist.DistStoreError("Timed out after 9 seconds waiting for clients. 1/2 clients joined."),
            "not every rank connected to 127.0.0.1:29500: Timed out after 9 seconds waiting for clients. 1/2 clients",
        ),
        (
            dist.DistNetworkError(
                "The client socket has timed out after 9ms while trying to connect to (a, 1).\nframe"
            ),
            "cannot reach rank 0 at 127.0.0.1:29500: The client socket has timed out after 9ms while trying to",
        ),
    ],
)
def test_an_error_that_other_ranks_are_the_cause_of_is_one_line(variables, error, said, monkeypatch, capsys):
    def fail(config, options):
        raise error

    monkeypatch.setattr("shardline.training.trainer.Trainer", fail)
    variables(**RANK)
    assert main(["train"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: rank 1 (host ")
    assert said in text
    assert text.count("\n") == 1
    with pytest.raises(type(error)):
        main(["train", "--debug"])
    variables(**RANK, SHARDLINE_LAUNCHER="1")  # our own launcher compares the errors of all ranks
    with pytest.raises(type(error)):
        main(["train"])


def test_an_error_of_its_own_is_no_ones_consequence():
    assert explain(RuntimeError("shape mismatch")) is None


def test_a_port_that_is_taken_is_said_in_a_line(port, variables):
    variables(**RANK | {"RANK": "0", "MASTER_PORT": str(port)})
    with socket.create_server(("", port)), pytest.raises(dist.DistNetworkError) as taken:
        dist.TCPStore("127.0.0.1", port, 2, is_master=True)
    assert f": port {port} of this machine is taken: set MASTER_PORT" in explain(taken.value)
