"""Loading: files, extends, presets, flags, older names, and what errors say."""

from pathlib import Path

import pytest

from shardline.cli.main import main
from shardline.config.aliases import ALIASES, NO_EFFECT
from shardline.config.files import preset_lines, preset_names, preset_path, toml_lines
from shardline.config.load import load_config
from shardline.config.schema import leaves
from shardline.errors import ConfigError, UserError
from shardline.storage.location import locate
from shardline.words import masked, password_problem


@pytest.fixture
def write(tmp_path):
    def function(name, text):
        path = tmp_path / name
        path.write_text(text)
        return path

    return function


def message(*arguments, **named):
    with pytest.raises(ConfigError) as caught:
        load_config(*arguments, **named)
    return str(caught.value)


def test_precedence(write):
    write("base.toml", "[training]\nsteps = 1\nseq_len = 10\nlocal_batch_size = 2\n")
    file = write("run.toml", 'extends = "base.toml"\n[training]\nsteps = 2\nseq_len = 20\n')
    config = load_config(file, ["--training.steps", "3"])
    training = config.training
    assert (training.steps, training.seq_len, training.local_batch_size, training.gc_freq) == (3, 20, 2, 50)
    assert config.origin("training.steps") == "command line"
    assert config.origin("training.seq_len") == f"{file}:4"
    assert config.job.config_file == str(file)


def test_extends_chains_lists_and_presets(write):
    write("a.toml", "[training]\nsteps = 1\n[model.overrides]\ndim = 64\n")
    write("b.toml", 'extends = "a.toml"\n[training]\nsteps = 2\n')
    write("c.toml", "[training]\nseq_len = 7\nsteps = 9\n")
    file = write("d.toml", 'extends = ["c.toml", "b.toml", "demo"]\n[model.overrides]\nn_layers = 3\n')
    config = load_config(file)
    assert config.training.steps == 200
    assert config.training.seq_len == 128
    assert (config.model.overrides["dim"], config.model.overrides["n_layers"]) == (128, 3)
    assert load_config(preset="demo").model.overrides["dim"] == 128
    assert load_config(overrides=["--preset=demo", "--training.steps=5"]).training.steps == 5


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--model.flavor=tiny"], {}),
        (["--model.name=qwen3"], {}),
        (["--model.flavor=tiny", "--model.overrides.dim=32"], {"dim": 32}),
        (["--model.flavor=debugmodel", "--model.name=llama3"], {"dim": 128, "n_layers": 4}),
    ],
)
def test_another_model_leaves_the_overrides_of_the_one_before(write, words, kept):
    file = write("run.toml", '[model]\nflavor = "debugmodel"\ntokenizer_path = "bytes"\n[model.overrides]\ndim = 128\n'
                 "n_layers = 4\n")  # fmt: skip
    config = load_config(file, words)
    assert config.model.overrides == kept
    assert config.model.tokenizer_path == "bytes"
    name, _, value = words[0].removeprefix("--").partition("=")
    dropped = f"command line: {name} = {value!r} drops what {file}:5 sets for llama3 debugmodel: model.overrides.dim"
    assert config.alias_notes == (() if "n_layers" in kept else (f"{dropped}, model.overrides.n_layers",))


def test_a_file_that_extends_another_model_leaves_its_overrides(write):
    write("base.toml", '[model]\nflavor = "debugmodel"\noverrides = {dim = 128}\n')
    child = load_config(write("run.toml", 'extends = "base.toml"\n[model]\nflavor = "1B"\n'))
    assert child.model.overrides == {}
    assert "base.toml:3 sets for llama3 debugmodel: model.overrides" in child.alias_notes[0]
    write("packed.toml", '[model.overrides]\nattn_mask_type = "block_causal"\n')  # of no model
    child = load_config(write("run.toml", 'extends = "packed.toml"\n[model]\nflavor = "1B"\n'))
    assert child.model.overrides == {"attn_mask_type": "block_causal"}


def test_a_hugging_face_folder_in_place_of_a_flavor_has_its_own_tokenizer():
    config = load_config(overrides=["--preset=lora-demo", "--model.name=auto", "--model.hf_assets_path=./model"])
    assert config.model.tokenizer_path is None
    assert config.model.overrides == {}
    again = load_config(overrides=["--preset=lora-demo", "--model.name=auto", "--model.tokenizer_path=bytes"])
    assert again.model.tokenizer_path == "bytes"


def test_steps_and_epochs_replace_each_other(write):
    file = write("run.toml", "[training]\nsteps = 4\n")
    config = load_config(file, ["--training.epochs=2"])
    assert config.training.epochs == 2.0
    assert not config.is_set("training.steps")
    assert config.alias_notes == (f"command line: training.epochs replaces training.steps = 4 ({file}:2)",)
    other = write("other.toml", "[training]\nepochs = 4.0\n")
    config = load_config(other, ["--training.steps=2"])
    assert (config.training.epochs, config.training.steps) == (None, 2)
    assert load_config(file, ["--training.epochs=none"]).training.steps == 4


def test_values_inside_a_table_of_overrides_are_located(write):
    file = write("run.toml", "[model.overrides.rope_scaling]\ntype = 'foo'\nfactor = 'a'\n")
    first, second = message(file).splitlines()
    assert first.startswith(f"{file}:2: model.overrides.rope_scaling.type: expected 'linear'")
    assert second == f"{file}:3: model.overrides.rope_scaling.factor: expected a finite number, got 'a'"


def test_extends_errors(write):
    write("a.toml", 'extends = "b.toml"')
    file = write("b.toml", 'extends = "a.toml"')
    assert "circle" in message(file)
    assert "c.toml:1: extends" in message(write("c.toml", "extends = 3"))
    assert "did you mean 'demo'" in message(write("d.toml", 'extends = "dem"'))
    assert "did you mean 'demo'" in message(preset="dema")


@pytest.mark.parametrize("name", preset_names())
def test_presets_load(name):
    config = load_config(preset=name)
    assert config.is_set("training.steps") != config.is_set("training.epochs")
    assert load_config(preset=preset_path(name).name) == config


@pytest.mark.parametrize(("file", "preset"), [("finetune_hf.yaml", "finetune"), ("my_text.toml", "text")])
def test_a_config_that_is_packaged_is_written_once(file, preset):
    path = Path(__file__).parents[3] / "configs" / file
    assert path.resolve() == preset_path(preset).resolve()
    assert load_config(path) == load_config(preset=preset)


def test_every_preset_says_what_it_is_for():
    described = dict(preset_lines())
    assert list(described) == preset_names()
    assert all(lines for lines in described.values())


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--training.steps", "7"], "training.steps", 7),
        (["--training.steps=7"], "training.steps", 7),
        (["--training.seq-len=7"], "training.seq_len", 7),
        (["--lr-scheduler.warmup-steps", "0"], "lr_scheduler.warmup_steps", 0),
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--compile.enable"], "compile.enable", True),
        (["--compile.enable=false"], "compile.enable", False),
        (["--compile.enable", "true"], "compile.enable", True),
        (["--compile.no_enable"], "compile.enable", False),
        (["--training.dataloader.no-pin-memory"], "training.dataloader.pin_memory", False),
        (["--compile.components", "model"], "compile.components", ["model"]),
        (["--compile.components=model,loss"], "compile.components", ["model", "loss"]),
        (["--model.converters="], "model.converters", []),
        (["--parallelism.module_fqns_per_model_part", '[["a"],["b","c"]]'], None, [["a"], ["b", "c"]]),
        (["--optimizer.lr", "2e-5"], "optimizer.lr", 2e-5),
        (["--debug.seed", "none"], "debug.seed", None),
        (["--parallelism.pipeline_parallel_schedule_csv=None"], "parallelism.pipeline_parallel_schedule_csv", None),
        (["--activation_checkpoint.mode=none"], "activation_checkpoint.mode", "none"),
        (["--job.description", "a = b, c"], "job.description", "a = b, c"),
        (["--model.overrides.n_layers=3"], "model.overrides", {"n_layers": 3}),
        (["--model.overrides.qk-norm"], "model.overrides", {"qk_norm": True}),
        (["--model.overrides.sliding_window_layers=0,2"], "model.overrides", {"sliding_window_layers": [0, 2]}),
        (["--model.overrides.rope_scaling.factor=2"], "model.overrides", {"rope_scaling": {"factor": 2.0}}),
        (["--model.overrides.rope_scaling=none"], "model.overrides", {"rope_scaling": None}),
        (["--model.overrides", "{dim = 8, n_heads = 2}"], "model.overrides", {"dim": 8, "n_heads": 2}),
        (["--training.steps=1", "--training.steps=2"], "training.steps", 2),
    ],
)
def test_flags(words, key, value):
    key = key or words[0][2:]
    config = load_config(overrides=words)
    assert config.value(key) == value
    assert config.is_set(key)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--training.stepz", "7"], "training.stepz: there is no such key, did you mean 'training.steps'?"),
        (["--training.warmup_step=7"], "did you mean 'lr_scheduler.warmup_steps'"),
        (["--steps=7"], "did you mean 'training.steps'"),
        (["--training.steps"], "training.steps: needs a value"),
        (["--training.steps", "--compile.enable"], "training.steps: needs a value"),
        (["--training.steps=many"], "training.steps: expected a whole number, 1 or more, got 'many'"),
        (["--compile.no_enable=true"], "takes no value"),
        (["--compile.enable=maybe"], "compile.enable: expected true or false, got 'maybe'"),
        (["steps"], "'steps': expected a flag"),
        (["--model.overrides.n_layer=2"], "did you mean 'n_layers'"),
        (["--model.overrides.n_layers=two"], "model.overrides.n_layers: expected a whole number, got 'two'"),
        (["--preset"], "--preset: needs a name"),
        (["--training.no_steps"], "there is no such key"),
    ],
)
def test_flag_errors(words, expected):
    text = message(overrides=words)
    assert expected in text
    assert text.startswith("command line: ") or "preset" in text


def test_config_file_flag(write):
    file = write("run.toml", "[training]\nsteps = 4\n")
    assert load_config(None, ["--job.config_file", str(file)]).training.steps == 4
    assert load_config(file, [f"--job.config-file={file}"]).training.steps == 4
    assert "two config files" in message(file, ["--job.config_file=other.toml"])
    noted = load_config(write("in.toml", '[job]\nconfig_file = "run.toml"\n'))
    assert "job.config_file has no effect" in noted.alias_notes[0]


def test_override_tables_merge_over_layers(write):
    file = write("run.toml", "[model.overrides]\ndim = 8\nrope_scaling = {type = 'linear', factor = 2.0}\n")
    config = load_config(file, ["--model.overrides={n_layers = 3}", "--model.overrides.rope_scaling.factor=4"])
    assert config.model.overrides == {"dim": 8, "rope_scaling": {"type": "linear", "factor": 4.0}, "n_layers": 3}
    assert config.origin("model.overrides.dim") == f"{file}:2"


def test_replace_keeps_where_the_config_came_from(write):
    config = load_config(write("run.toml", "[training]\nsteps = 4\n"))
    changed = config.replace({"training.seq_len": 8})
    assert changed.job.config_file == config.job.config_file
    assert changed.origin("training.steps") == config.origin("training.steps")


def test_mapping_overrides(tmp_path):
    config = load_config(overrides={"training": {"steps": 3}, "model.overrides.dim": 8, "job.dump_folder": tmp_path})
    assert (config.training.steps, config.model.overrides) == (3, {"dim": 8})
    assert config.job.dump_folder == str(tmp_path)


def test_errors_name_file_line_key_expectation_and_value(write):
    file = write(
        "bad.toml",
        "[training]\n# a comment\nstepz = 5\nsteps = 0\n\n[optimizer]\nlr = nan\nbetas = [\n  1,\n]\n"
        'implementation = """\nfast"""\n[modle]\nx = 1\n[model]\noverrides = {dim = "x"}\n'
        'name.first = 1\n[validation]\nfreq="1"\n',
    )
    assert message(file).splitlines() == [
        f"{file}:3: training.stepz: there is no such key, did you mean 'training.steps'?",
        f"{file}:8: optimizer.betas: there is no such key, did you mean 'optimizer.beta1'?",
        f"{file}:13: [modle]: there is no such section, did you mean [model]?",
        f"{file}:17: model.name: expected a string that is not empty, got {{'first': 1}}",
        f"{file}:7: optimizer.lr: expected a finite number, 0 or more, got nan",
        f"{file}:11: optimizer.implementation: expected one of 'for-loop', 'foreach', 'fused', got 'fast'",
        f"{file}:4: training.steps: expected a whole number, 1 or more, got 0",
        f"{file}:19: validation.freq: expected a whole number, 1 or more, got '1'",
        f"{file}:16: model.overrides.dim: expected a whole number, got 'x'",
    ]


def test_a_section_must_be_a_table(write):
    assert "run.toml:1: training: expected a section with keys, got 3" in message(write("run.toml", "training = 3"))
    assert "model.overrides: expected a table, got 3" in message(write("b.toml", "[model]\noverrides = 3"))


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("[training\nsteps = 1", 1, ""),
        ("[training]\nsteps = 1\nsteps = 2", 3, ""),
        ("[compile]\n\nenable = True", 3, "TOML writes true, false"),
        ("[training]\nsteps: 3", 2, "looks like YAML"),
        ('[job]\ndescription = "open', 2, ""),
        ("a = " + "1" * 5000, 1, ""),
    ],
)
def test_toml_syntax_errors_have_a_line(write, text, line, hint):
    found = message(write("bad.toml", text))
    assert f"bad.toml:{line}: not valid TOML" in found
    assert hint in found


def test_unreadable_files(tmp_path, write):
    (tmp_path / "bytes.toml").write_bytes(b"[job]\ndescription = '\xff'")
    assert "not a UTF-8 text file" in message(tmp_path / "bytes.toml")
    assert "is a folder" in message(tmp_path)
    (tmp_path / "config.json").touch()
    assert f"for a Hugging Face model: --preset finetune --model.hf_assets_path {tmp_path}" in message(tmp_path)
    (tmp_path / "config.toml").touch()
    assert f"such as {tmp_path / 'config.toml'}" in message(tmp_path)
    assert "a key needs two dashes: --training.steps=3" in message("training.steps=3")
    write("run.toml", "")
    assert "did you mean 'run.toml'" in message(tmp_path / "runs.toml")
    assert "--preset demo" in message(tmp_path / "demo.toml")
    assert "cannot be read" in message("a\0b")


def test_byte_order_mark_and_windows_lines(tmp_path):
    (tmp_path / "w.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 3\r\nseq_len = 0\r\n")
    assert "w.toml:3: training.seq_len" in message(tmp_path / "w.toml")


def test_yaml(write):
    file = write(
        "run.yaml",
        "extends: base.toml\ntraining:\n  steps: 3\n  seq_len:\ndebug:\noptimizer:\n  lr: 2e-5\n"
        "model:\n  overrides: {rope_theta: 1e6, dim: 8}\nactivation_checkpoint:\n  mode: none\n",
    )
    write("base.toml", "[training]\nseq_len = 5\nlocal_batch_size = 6\n")
    config = load_config(file)
    assert (config.training.steps, config.training.local_batch_size, config.optimizer.lr) == (3, 6, 2e-5)
    assert config.training.seq_len == 2048  # empty in the file: back to the default
    assert config.model.overrides == {"rope_theta": 1e6, "dim": 8}
    assert config.alias_notes == (f"{file}:4: training.seq_len is empty: the default is used",)
    assert load_config(file, ["--training.seq_len=7"]).alias_notes == ()
    assert load_config(write("empty.yml", "")) == load_config()


def test_an_empty_yaml_value_of_a_key_that_can_be_unset_is_unset(write):
    text = "parallelism:\n  context_parallel_load_balancer: null\nlr_scheduler:\n  decay_ratio:\n"
    write("base.toml", "[lr_scheduler]\ndecay_ratio = 0.5\n")
    config = load_config(write("run.yaml", f"extends: base.toml\n{text}"))
    assert config.parallelism.context_parallel_load_balancer is None  # its default is 'headtail'
    assert config.lr_scheduler.decay_ratio is None
    assert config.alias_notes == ()


def test_an_empty_yaml_override_leaves_the_flavors_own_value(write):
    file = write("run.yaml", "model:\n  overrides:\n    dim:\n    rope_scaling:\n")
    config = load_config(file)
    assert config.model.overrides == {}
    assert config.alias_notes == tuple(
        f"{file}:{number}: model.overrides.{name} is empty: the default is used"
        for number, name in ((3, "dim"), (4, "rope_scaling"))
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training:\n  stepz: 1\n", "bad.yaml:2: training.stepz: there is no such key"),
        ("training:\n  steps: '5'\n", "bad.yaml:2: training.steps: expected a whole number, 1 or more, got '5'"),
        ("training:\n  steps: 5\n  steps: 6\n", "bad.yaml:3: training.steps: given twice, first on line 2"),
        ("training: [1\n", "bad.yaml:2: not valid YAML"),
        ("training:\n\tsteps: 3\n", "token (YAML indents with spaces, not with tabs)"),
        ("- 1\n", "expected sections with keys"),
        ("training: 2024-99-99\n", "not valid YAML"),
        ("a: &a {b: *a}\n", "its aliases stand for a value that contains them"),
        ("1: 2\n", "there is no such key"),
        ("a: \x01\n", "control characters"),
        ("!!python/object:os.system {}\n", "not valid YAML"),
        ("? [1, 2]\n: 3\n", "bad.yaml"),
    ],
)
def test_yaml_errors(write, text, expected):
    assert expected in message(write("bad.yaml", text))


def test_no_field_hides_that_its_table_is_none():
    both = {"model.overrides": 5, "model.overrides.dim": 64}
    with pytest.raises(ConfigError, match=r"model\.overrides: expected a table, got 5"):
        load_config(overrides=both)
    scaling = load_config(
        overrides={"model.overrides.rope_scaling": "none", "model.overrides.rope_scaling.factor": 2.0}
    )
    assert scaling.model.overrides == {"rope_scaling": {"factor": 2.0}}
    schedule = "parallelism.pipeline_parallel_schedule_csv"
    twice = {schedule: None, schedule.replace("parallelism", "experimental"): None}
    assert load_config(overrides=twice).parallelism.pipeline_parallel_schedule_csv is None


def _value_for(key):
    default = leaves()[ALIASES[key].new].default
    if ALIASES[key].values is not None or isinstance(default, bool):
        return True
    if isinstance(default, list):
        return ["output"]
    return {
        "quantize.linear.float8.recipe_name": "rowwise",
        "parallelism.fsdp_reshard_after_forward": "never",
        "parallelism.context_parallel_rotate_method": "alltoall",
        "parallelism.pipeline_parallel_schedule": "GPipe",
        "parallelism.pipeline_parallel_schedule_csv": "a.csv",
        "quantize.linear.mx.recipe_name": "mxfp8",
        "lr_scheduler.min_lr_factor": 0.5,
    }.get(ALIASES[key].new, 3)


@pytest.mark.parametrize("old", ALIASES)
def test_older_names_are_understood_and_noted(old):
    alias = ALIASES[old]
    value = _value_for(old)
    config = load_config(overrides={old: value})
    assert config.value(alias.new) == (alias.values[value] if alias.values else value)
    assert config.is_set(alias.new)
    assert config.alias_notes == (f"overrides: {old} is an older name of {alias.new}",)


@pytest.mark.parametrize("old", NO_EFFECT)
def test_keys_without_successor_are_noted(old):
    config = load_config(overrides={old: 1})
    assert config == load_config()
    assert config.alias_notes == (f"overrides: {old} is a key of an older version and has no effect",)


def test_older_names_as_flags():
    config = load_config(
        overrides=["--training.batch_size", "4", "--training.compile", "--float8.enable_float8_linear"]
    )
    assert (config.training.local_batch_size, config.compile.enable) == (4, True)
    assert config.model.converters == ["quantize.linear.float8"]
    assert load_config(overrides=["--mx.use_fp8_dim1_cast_triton_kernel=false"]).quantize.linear.mx == (
        load_config(overrides={"quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": "torch"}).quantize.linear.mx
    )


def test_converters_by_older_names(write):
    text = '[model]\nconverters = ["float8", "quantize.linear.mx"]\n[float8]\nenable_float8_linear = true\n'
    config = load_config(write("run.toml", text))
    assert config.model.converters == ["quantize.linear.float8", "quantize.linear.mx"]
    assert "'float8' is an older name of 'quantize.linear.float8'" in config.alias_notes[0]
    assert load_config(overrides={"float8.enable_float8_linear": False}).model.converters == []
    both = load_config(overrides={"model.converters": ["float8", "quantize.linear.float8"]})
    assert both.model.converters == ["quantize.linear.float8"]


def test_old_and_new_name_must_agree(write):
    same = write("same.toml", "[training]\nbatch_size = 4\nlocal_batch_size = 4\n")
    assert load_config(same).training.local_batch_size == 4
    text = message(write("other.toml", "[training]\nbatch_size = 4\nlocal_batch_size = 5\n"))
    assert "other.toml:3: training.local_batch_size: 5 contradicts training.batch_size = 4 (" in text
    assert "other.toml:2" in text
    assert load_config(same, ["--training.local_batch_size=9"]).training.local_batch_size == 9
    off = "[float8]\nenable_float8_linear = false\n[model]\nconverters = ['float8']\n"
    assert "contradicts" in message(write("off.toml", off))


def test_line_numbers_of_statements():
    text = 'a = 1\n[b]\n# note\nc = [\n 1,\n]\nd = {e = 1}\n[b.f]\n"g.h" = """\n[x]\ni = 1\n"""\n[[k]]\nl = 1\n'
    assert toml_lines(text) == {
        "a": 1,
        "b": 2,
        "b.c": 4,
        "b.d": 7,
        "b.d.e": 7,
        "b.f": 8,
        "b.f.g.h": 9,
        "k": 13,
        "k.0": 13,
        "k.0.l": 14,
    }


# ---- passwords in URLs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:pass@bucket/run", "s3://***@bucket/run"),
        ("s3://key:sl/ash+@bucket/run", "s3://***@bucket/run"),
        ("simplecache::sftp://me:pass@host/run", "simplecache::sftp://***@host/run"),
        ("ftp://:pass@host", "ftp://***@host"),
        ("https://hf_token@host/file", "https://***@host/file"),
        ("hf://hf_token@datasets/owner/name", "hf://***@datasets/owner/name"),
        (f"hf://owner/hf_{'x' * 34}", "hf://owner/***"),
        (f"hf_{'A1' * 17}", "***"),
        ("https://host/a?sv=1&sig=pass%3D&x=2", "https://host/a?sv=1&***&x=2"),
        ("https://host/a?X-Amz-Signature=pass", "https://host/a?***"),
        ("see s3://a:pass@b and s3://c:pass@d", "see s3://***@b and s3://***@d"),
    ],
)
def test_a_password_in_a_url_is_masked(text, shown):
    assert masked(text) == shown
    assert password_problem(text).startswith(f"{shown} holds a password")


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/run",
        "sftp://me@host/run",
        "abfs://container@account.dfs.core.windows.net/run",
        "hdfs://host:9000/user@realm/run",
        "http://[::1]:8080/a@b",
        "http://host:8080",
        "/data/a:b@c.txt",
        "owner/name@main:split",
        "hf://datasets/owner/name@main/data",
        "hf_models/tokenizer.json",
        "gs://bucket/a?versionId=7",
    ],
)
def test_other_urls_and_paths_are_left_alone(text):
    assert (masked(text), password_problem(text)) == (text, "")


SECRET = "hunter2hunter2"
URL_WITH_PASSWORD = f"s3://key:{SECRET}@bucket/x"
PLACES = [
    '[checkpoint]\nenable = true\nmirror = "URL"',
    '[checkpoint]\nenable = true\ninitial_load_path = "URL"',
    '[training]\ndataset = "x"\ndataset_path = "URL"',
    '[model]\nhf_assets_path = "URL"',
    '[job]\ndescription = "from URL"',
    '[experimental]\ncustom_args_module = "URL"',
    '[[data.sources]]\npath = "URL"\ntype = "completion"',
    '[training]\nsteps = "URL"',
    '[training]\nsteps = ["URL"]',
]


@pytest.mark.parametrize("text", PLACES)
def test_a_url_with_a_password_is_refused_wherever_it_stands_and_printed_nowhere(text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(text.replace("URL", URL_WITH_PASSWORD))
    for command in (["train"], ["train", "--dry-run"], ["config"], ["config", "--comments"], ["config", "--debug"]):
        assert main([*command, "run.toml"]) == 2
        out, err = capsys.readouterr()
        assert SECRET not in out + err
        assert "s3://***@bucket/x holds a password" in err
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_a_password_on_the_command_line_of_any_command_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (
        ["train", f"--checkpoint.mirror={URL_WITH_PASSWORD}"],
        ["train", "--checkpoint.mirror", URL_WITH_PASSWORD],
        ["train", "--nosuch", URL_WITH_PASSWORD],
        ["checkpoint", "ls", URL_WITH_PASSWORD],
        ["data", "prepare", URL_WITH_PASSWORD, "store"],
        ["generate", URL_WITH_PASSWORD],
    ):
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert SECRET not in out + err
        assert "s3://***@bucket/x holds a password" in err
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"s3://\*\*\*@bucket/x holds a password"):
        locate(URL_WITH_PASSWORD)
