"""Whatever a user writes ends in a Config or a ConfigError, and a written config loads back."""

import contextlib
import io
import json
import re
import tempfile
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.cli.main import main
from shardline.config import files
from shardline.config.assemble import build_config
from shardline.config.check import check, notes, pending
from shardline.config.features import active
from shardline.config.load import HANDED_OVER, handed_over, load_config, take_handed_over
from shardline.config.names import LAUNCHER_VARIABLE
from shardline.config.schema import Config
from shardline.config.write import diff, to_toml, toml_value
from shardline.errors import ConfigError
from shardline.precision.mixed import choose_precision
from shardline.tools.bench.comm import _with_dim
from tests.examples import examples
from tests.unit.config.config_strategies import ANYTHING, EDGES, FLAG_WORDS, KEYS, configs

quick = settings(max_examples=examples(300), deadline=None, derandomize=True)


def load_text(text, suffix=".toml"):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"run{suffix}"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return load_config(path)


def ends_well(function, *arguments):
    """Only a Config that can be written and checked, or a ConfigError with a message."""
    try:
        config = function(*arguments)
        assert isinstance(config, Config)
        assert load_text(to_toml(config)) == config
        notes(config)
        pending(config)
        check(config)
    except ConfigError as error:
        print(str(error).encode("utf-8", "backslashreplace"))


@quick
@given(st.text(max_size=200), st.sampled_from([".toml", ".yaml"]))
def test_arbitrary_text(text, suffix):
    ends_well(load_text, text, suffix)


@quick
@given(st.lists(EDGES, max_size=40).map(" ".join), st.sampled_from([".toml", ".yaml"]))
def test_text_of_config_words(text, suffix):
    ends_well(load_text, text, suffix)


@quick
@given(st.dictionaries(KEYS, ANYTHING, max_size=5))
def test_arbitrary_values_for_real_keys(tables):
    ends_well(load_config, None, tables)


def _toml(tables):
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in tables.items())


@quick
@given(st.dictionaries(KEYS.filter(lambda key: key.replace(".", "").replace("_", "").isalnum()), ANYTHING, max_size=5))
def test_arbitrary_toml(tables):
    ends_well(load_text, _toml(tables))


@quick
@given(st.dictionaries(KEYS, ANYTHING, max_size=5))
def test_arbitrary_yaml(tables):
    ends_well(load_text, json.dumps(tables), ".yaml")  # JSON is YAML


@quick
@given(FLAG_WORDS)
def test_arbitrary_flags(words):
    ends_well(load_config, None, words)


@quick
@given(st.sampled_from(["config", "train"]), FLAG_WORDS)
def test_arbitrary_command_lines(command, words):
    hushed = io.StringIO()
    with contextlib.redirect_stdout(hushed), contextlib.redirect_stderr(hushed):
        code = main([command, *words, "--dry-run=false", "--world-size=1"] if command == "train" else [command, *words])
    assert code == 2 or command == "config"
    assert code in (0, 2)


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(configs())
def test_round_trip(values):
    config = build_config(values, dict.fromkeys(values, "here"))
    text = to_toml(config)
    again = load_text(text)
    assert again == config
    assert again.is_set("training.mixed_precision_param") == config.is_set("training.mixed_precision_param")
    assert to_toml(again) == text
    assert load_text(to_toml(config, comments=True)) == config
    assert diff(config, again) == ""
    assert decisions(again) == decisions(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HANDED_OVER, "run.toml")  # somebody's own variable: only a launcher of ours is believed
        assert take_handed_over() is None
        patch.setenv(LAUNCHER_VARIABLE, "1")
        patch.setenv(HANDED_OVER, handed_over(config)[HANDED_OVER])
        taken = take_handed_over()
        assert taken == config
        assert [taken.origin(key) for key in taken.given()] == [config.origin(key) for key in config.given()]
        assert take_handed_over() is None


def decisions(config):
    """What is decided from a config by code that may ask whether a key was given."""
    try:
        check(config)
        refused = []
    except ConfigError as error:
        refused = [re.sub(r"^(here|\S+:\d+): ", "", line) for line in str(error).splitlines()]
    on_cpu = choose_precision(config, torch.device("cpu"), has_bfloat16=True)
    return refused, notes(config), pending(config), active(config), on_cpu


def test_whether_a_key_was_given_is_asked_only_where_the_written_config_tells_it():
    """`to_toml` leaves these keys out when they were not given; everywhere else the value alone decides."""
    asked = {
        argument
        for file in (Path(__file__).parents[3] / "shardline").rglob("*.py")
        for argument in re.findall(r"(?<!def )is_set\(([^)]+)\)", file.read_text())
    }
    # The questions of the writer and of the note about the cut of stages; of the command that converts checkpoints
    names = {"key", 'f"model.{key}"'}
    names |= {"other"}  # one of names.ALTERNATIVES, which the writer knows
    names |= {'"optimizer.lr"'}  # a note of the start alone
    assert asked - names == {'"training.mixed_precision_param"', '"training.dataset"'}


@pytest.mark.parametrize("given", [{}, {"parallelism.tensor_parallel_degree": 2}])
def test_a_written_config_measures_the_same_layout(given):
    config = load_config(overrides=given)
    assert _with_dim(load_text(to_toml(config)), "tp", 4) == _with_dim(config, "tp", 4)


@pytest.mark.parametrize("text", ["[" * 5000, "a=" + "[" * 5000, "a" + ".a" * 3000 + "=1", "a=" + "{a=" * 2000])
@pytest.mark.parametrize("suffix", [".toml", ".yaml"])
def test_deep_nesting(text, suffix):
    with pytest.raises(ConfigError):
        load_text(text, suffix)


def test_yaml_bombs_end_quickly():
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    with pytest.raises(ConfigError):
        load_text("\n".join([*lines, "training:", "  steps: *a39", "model: {converters: *a39}"]), ".yaml")


def test_numbers_too_long_to_print():
    with pytest.raises(ConfigError, match=r"training\.steps: expected .*, got a number with thousands of digits"):
        load_text("training.steps = 0x" + "f" * 5000)
    with pytest.raises(ConfigError, match="thousands of digits"):
        load_config(overrides={"model.overrides.dim": 0, "training.steps": 10**5000})


@pytest.mark.parametrize("part", ["a", '"a.b"', "'a'", " a "])
@pytest.mark.parametrize("line", ["{} = 1", "[{}]", "x = {{{} = 1}}"])
def test_a_key_of_many_parts_is_refused_before_it_is_read(part, line):
    """The reader of Python takes a time that grows with the square of the parts: half a minute for 20,000."""
    with pytest.raises(ConfigError, match=r"^f\.toml: nested too deeply$"):
        files._parse_toml("f.toml", line.format(".".join([part] * 64)))
    tables, _ = files._parse_toml("f.toml", line.format(".".join([part] * 63)))
    assert len(str(tables).split("{")) >= 63


def test_dots_in_texts_are_no_keys():
    text = f"a = \"{'x.' * 100}\" # {'y.' * 100}\nb = '''\n{'z.' * 100}\n'''\n"
    assert set(files._parse_toml("f.toml", text)[0]) == {"a", "b"}


def aliases(first, text, count):
    """Lines of YAML of which each stands for several of the one before."""
    return "\n".join(
        [f"a0: &a0 {first}", *(f"a{n}: &a{n} " + text.replace("*", f"*a{n - 1}") for n in range(1, count))]
    )


@pytest.mark.parametrize(
    "text",
    [
        aliases("{x: 1, y: 2}", "{x: *, y: *}", 26) + "\ndata: {sources: [*a25]}",
        aliases("{x: 1}", "{a: *, b: *, c: *, d: *, e: *, f: *, g: *}", 12) + "\ndata: {chat_template_kwargs: *a11}",
        aliases("{x: 1, y: 2}", "{<<: [*, *], z: *}", 26) + "\nmodel: {overrides: *a25}",
        aliases("[x, y]", "[*, *]", 30) + "\ndata: {sources: *a29}",
    ],
)
def test_aliases_of_yaml_that_stand_for_too_much_are_refused(text):
    with pytest.raises(ConfigError, match="its aliases stand for more than 100,000 values"):
        load_text(text, ".yaml")
    assert len(text) < 1024
    few = load_text(
        "data: {added_tokens: &a [x, y]}\nmodel: {flavor: tiny}\ntraining: {unfrozen_parameters: *a}", ".yaml"
    )
    assert few.training.unfrozen_parameters == ["x", "y"]


def test_files_that_no_config_needs_are_refused():
    with pytest.raises(ConfigError, match="has more than 20,000 values"):
        load_text("".join(f"k{n}: 1\n" for n in range(20_000)), ".yaml")
    with pytest.raises(ConfigError, match=r"has 4.00 MiB; a config has at most 4.00 MiB"):
        load_text("# " + "x" * (4 << 20))
    with pytest.raises(ConfigError) as error:
        load_text("".join(f"[training.t{n}]\nk{n} = 1\n" for n in range(3000)))
    assert str(error.value).endswith("there may be more problems: only the first are listed")
    assert len(str(error.value).splitlines()) == 31


def test_values_of_thousands_of_lines_have_their_line():
    tokens = "".join(f'  "<{n}]>",  # a comment with a bracket [\n' for n in range(20_000))
    config = load_text(f"[data]\nadded_tokens = [\n{tokens}]\n[training]\nsteps = 7\n")
    assert len(config.data.added_tokens) == 20_000
    assert config.origin("data.added_tokens").endswith(":2")
    assert config.origin("training.steps").endswith(":20005")


def _growing(text):
    """The lines of keys by joining lines until they parse: slow, and plainly right."""
    lines, header, pending, start, tables = {}, "", "", 0, {}
    for number, line in enumerate(text.split("\n"), start=1):
        start = start if pending else number
        pending = f"{pending}\n{line}" if pending else line
        try:
            statement = tomllib.loads(pending)
        except ValueError:
            continue
        is_header = pending.lstrip().startswith("[")
        for key in files._dotted(statement, "" if is_header else header):
            lines.setdefault(files._numbered(key, tables), start)
            header = key if is_header else header
        if pending.lstrip().startswith("[["):
            tables[header] = tables.get(header, -1) + 1
            lines.setdefault(files._numbered(header, tables), start)
        pending = ""
    return lines


PIECES = [
    *('a = """x\n[b]\n"quote"" \\" \n"""""', "b = '''\n\"\"\" [ \n''''", 'c = "\\"[{#"', "d = '[\"'", "'e]' = 1 # ]"),
    *(
        "f = [ # ]\n 1,\n]",
        "g = {x = '}', y = [1,\n2]}",
        "[t]",
        '[ "u#" . v ]',
        "[[l]]",
        "h.i.j = [[1],\n[2]]",
        "",
        "# [x",
    ),
]


@quick
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("\n".join))
def test_statements_of_toml_are_told_apart(text):
    try:
        tomllib.loads(text)
    except ValueError:
        return  # a key or a table twice
    assert files.toml_lines(text) == _growing(text)
