"""The config: what is accepted, what is refused and in which words, and that it survives being written out."""

from __future__ import annotations

from pathlib import Path

import pytest

from onecurve.config import Config, config_to_toml, curve_part, load_config, make_config, resume_config
from onecurve.config_text import to_toml
from onecurve.errors import ConfigError
from onecurve.urls import without_secrets

DEMO = Path(__file__).parent.parent / "configs" / "demo.toml"


def refusal(*overrides: str) -> str:
    """The message that refuses the demo's config with these overrides: always one line."""
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, overrides)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


def test_the_defaults_are_the_demo() -> None:
    assert load_config(DEMO) == Config()


def test_every_shipped_config_loads() -> None:
    for path in DEMO.parent.glob("*.toml"):
        load_config(path)


# (override, words that the message must hold: the key, the value seen, what is allowed, a cure that works)
REFUSED = [
    ("train.leaves=0", ["train.leaves = 0", "whole number", "at least 1", "train.leaves = 4"]),
    ("train.leaves=-3", ["train.leaves = -3", "at least 1"]),
    ("train.steps=0", ["train.steps = 0", "at least 1"]),
    ("train.steps=1.5", ["train.steps = 1.5", "whole number"]),
    ("train.steps=true", ["train.steps = true", "whole number"]),
    ("train.steps=many", ['train.steps = "many"', "whole number"]),
    ("train.steps=1e30", ["train.steps", "whole number"]),
    ("train.seed=-1", ["train.seed = -1", "at least 0"]),
    ("optimizer.lr=-1", ["optimizer.lr = -1", "at least 0"]),
    ("optimizer.lr=nan", ["optimizer.lr = nan", "finite"]),
    ("optimizer.lr=inf", ["optimizer.lr = inf", "finite"]),
    ("optimizer.lr='0.1'", ['optimizer.lr = "0.1"', "number"]),
    ("optimizer.lr=fast", ['optimizer.lr = "fast"', "number"]),
    ("optimizer.betas=[0.9]", ["optimizer.betas", "2 numbers", "[0.9, 0.95]"]),
    ("optimizer.betas=[0.9, 1.0]", ["optimizer.betas = [0.9, 1.0]", "2 numbers", "below 1"]),
    ("optimizer.betas=[-0.1, 0.9]", ["optimizer.betas = [-0.1, 0.9]", "at least 0"]),
    ("optimizer.betas=['a', 0.9]", ['optimizer.betas = ["a", 0.9]', "2 numbers"]),
    ("optimizer.betas=[[0.1], 0.9]", ["optimizer.betas = [[0.1], 0.9]", "2 numbers"]),
    ("optimizer.betas={ a = 3 }", ["optimizer.betas = { a = 3 }", "2 numbers"]),
    ("optimizer.eps=0", ["optimizer.eps = 0", "above 0"]),
    ("optimizer.decay=exp", ['optimizer.decay = "exp"', '"constant", "cosine", "linear"']),
    ("optimizer.warmup_steps=21", ["optimizer.warmup_steps = 21", "train.steps = 20"]),
    ("guard.spike_factor=0.5", ["guard.spike_factor = 0.5", "more than 1"]),
    ("model.heads=5", ["model.heads = 5", "model.width = 32", "1, 2, 4, 8, 16, 32", "30 or 35"]),
    ("model.vocab=1", ["model.vocab = 1", "at least 2"]),
    ("model.dropout=1.0", ["model.dropout = 1.0", "below 1"]),
    ("model.tied=1", ["model.tied = 1", "true or false"]),
    ("data.source=", ["data.source", "not empty"]),
    ("layout.dp=5", ["layout.dp = 5", "train.leaves = 4", "train.leaves to 5"]),
    ("layout.zero=4", ["layout.zero = 4", "at most 3"]),
    ("model.layers=2000000000", ["model.layers = 2000000000", "at most 1024"]),  # plan would count for hours
    ("train.leaves=2000000000", ["train.leaves = 2000000000", "at most 65536"]),
    ("train.accumulate=2000000000", ["train.accumulate = 2000000000", "268435456 tokens", "take at most 1048576"]),
    ("layout.transport=pigeon", ["layout.transport", '"alltoall", "p2p", "shm"']),
    ("checkpoint.keep=1", ["checkpoint.keep = 1", "at least 2"]),
    ("checkpoint.every_minutes=-1", ["checkpoint.every_minutes = -1", "at least 0"]),
    ("limits.stall_seconds=0", ["limits.stall_seconds = 0", "above 0"]),
    ("numerics.threads=0", ["numerics.threads = 0", "at least 1"]),
    ("faults.lr_multiplier=3", ["faults.lr_multiplier = 3", "{ step = 12, factor = 1000.0 }"]),
    ("faults.lr_multiplier={ step = 12 }", ["faults.lr_multiplier.factor is missing"]),
    ("faults.lr_multiplier={ step = 0, factor = 2.0 }", ["faults.lr_multiplier.step = 0", "at least 1"]),
    ("faults.lr_multiplier={ step = 21, factor = 2.0 }", ["faults.lr_multiplier.step = 21", "train.steps = 20"]),
]


@pytest.mark.parametrize(("override", "words"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_bad_value_is_refused_with_what_would_work(override: str, words: list[str]) -> None:
    message = refusal(override)
    assert [word for word in words if word not in message] == [], message


NOT_BUILT = {
    "model.slices": "2",
    "train.dtype": "bfloat16",
    "layout.tp": "2 model.slices=2",
    "layout.pp": "2 layout.dp=2",
    "layout.schedule": "gpipe",
    "layout.recompute": "true",
    "observe.tensorboard": "true",
    "numerics.device": "cuda",
}


@pytest.mark.parametrize(("key", "value"), NOT_BUILT.items(), ids=list(NOT_BUILT))
def test_a_value_whose_feature_is_not_built_is_refused_by_name(key: str, value: str) -> None:
    message = refusal(*f"{key}={value}".split())
    assert message.startswith(key) and "not built yet" in message


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("train.leafs=4", "train.leaves"),
        ("train.lr=0.1", "optimizer.lr"),  # the right key in the wrong section
        ("modle.width=32", "model"),
        ("model.widht=32", "model.width"),
        ("optimizer.beta=0.9", "optimizer.betas"),
        ("faults.lr_multiplier={ step = 1, factr = 2.0, factor = 2.0 }", "faults.lr_multiplier.factor"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(override: str, near: str) -> None:
    assert f"the nearest known one is {near}; " in refusal(override)


def test_a_key_outside_its_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("lr = 0.1\n")
    with pytest.raises(ConfigError, match=r"unknown key lr: the nearest known one is optimizer\.lr"):
        load_config(path)
    path.write_text("train = 3\n")
    with pytest.raises(ConfigError, match=r"train = 3: it must be a table; write \[train\]"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("lr", "the nearest known key is optimizer.lr"),
        ("lr=1", "the nearest known key is optimizer.lr"),
        (".lr=1", "the nearest known key is optimizer.lr"),
        ("=1", "it names no key"),
        ("..=1", "it names no key"),
        ("guard", "the keys of guard are spike_factor, max_rollbacks"),
        ("guard=3", "the keys of guard are spike_factor, max_rollbacks"),
        ("guard.=3", "the keys of guard are spike_factor, max_rollbacks"),
        ("faults={}", "the keys of faults are lr_multiplier"),
        ("layout.dp", "for example layout.dp=VALUE"),
        ("layout..dp=3", "for example layout.dp=VALUE"),
    ],
)
def test_an_override_of_another_form_is_refused(text: str, hint: str) -> None:
    assert refusal(text) == f"--set {text}: write it as section.key=value; {hint}"


def test_an_override_below_a_value_is_refused() -> None:
    assert "optimizer.decay is a value, not a table" in refusal("optimizer.decay.x=3")


def test_overrides_are_toml_or_bare_strings_and_the_last_one_wins() -> None:
    config = load_config(
        DEMO,
        [
            "layout.dp=2",
            "layout.dp = 3",
            "optimizer.decay=cosine",
            "optimizer.betas=[0.8, 0.9]",
            "data.source=2024",  # a folder of that name, not a number
            "checkpoint.mirror=s3://bucket/a b",
            "faults.lr_multiplier={ step = 12, factor = 1000 }",
            "model.tied=true",
        ],
    )
    assert config.layout.dp == 3 and config.optimizer.decay == "cosine" and config.optimizer.betas == (0.8, 0.9)
    assert config.data.source == "2024" and config.checkpoint.mirror == "s3://bucket/a b" and config.model.tied
    assert config.faults.lr_multiplier is not None and config.faults.lr_multiplier.factor == 1000.0


def test_one_key_of_a_nested_table_can_be_set_and_an_empty_table_takes_the_fault_away() -> None:
    fault = "faults.lr_multiplier={ step = 12, factor = 1000.0 }"
    moved = load_config(DEMO, [fault, "faults.lr_multiplier.step=7"]).faults.lr_multiplier
    assert moved is not None and (moved.step, moved.factor) == (7, 1000.0)
    assert load_config(DEMO, [fault, "faults.lr_multiplier={}"]).faults.lr_multiplier is None


def test_an_override_can_not_smuggle_a_second_key_in() -> None:
    assert "whole number" in refusal("train.steps=1\nseed=3")


def test_a_byte_order_mark_and_crlf_are_read(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xef\xbb\xbf" + DEMO.read_bytes().replace(b"\n", b"\r\n"))
    assert load_config(path) == Config()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"[train\n", "not valid TOML"),
        (b"[train]\nsteps = \xff\n", "not UTF-8"),
        (b"[train]\nsteps = 1\nsteps = 2\n", "not valid TOML"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)


def test_the_config_is_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        Config().train.steps = 3  # type: ignore[misc]


def test_written_out_it_reads_back_equal(tmp_path: Path) -> None:
    overrides = [
        "optimizer.lr=0.1",
        "optimizer.eps=1e-30",
        "data.source='a \"b\"\\c\t\x7f é'",
        "checkpoint.mirror=" + "x" * 900,
    ]
    overrides.append("faults.lr_multiplier={ step = 3, factor = 1e22 }")
    config = load_config(DEMO, overrides)
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize(
    "value", [True, 3, 0.1, 1e-8, 1e22, "a", 'q"\\\n\t\x00\x7f', [0.9, 0.95], {"step": 1, "factor": 2.0}]
)
def test_toml_of_plain_values_reads_back(value: object) -> None:
    import tomllib

    assert tomllib.loads(to_toml({"s": {"k": value}})) == {"s": {"k": value}}


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("s3://key:secret@bucket/folder", "s3://bucket/folder"),
        ("https://token@host/x", "https://host/x"),
        ("s3://key:se/cr@et@bucket/folder", "s3://bucket/folder"),
        ("http://host:9000/plain@name", "http://host:9000/plain@name"),
        ("s3://b/f?access_key=AAA&region=eu&Secret=BBB&token=CCC", "s3://b/f?access_key=&region=eu&Secret=&token="),
        ("https://h/x?X-Amz-Signature=abc&sig=def", "https://h/x?X-Amz-Signature=&sig="),
        ("s3://bucket/plain@name", "s3://bucket/plain@name"),
        ("/some/folder?design=1", "/some/folder?design=1"),
        ("", ""),
    ],
)
def test_secrets_leave_a_url(url: str, clean: str) -> None:
    assert without_secrets(url) == clean


def test_no_secret_in_the_written_config_nor_in_a_message() -> None:
    config = load_config(DEMO, ["checkpoint.mirror=s3://user:hunter2@bucket/x?token=hunter2"])
    assert config.checkpoint.mirror == "s3://user:hunter2@bucket/x?token=hunter2"
    assert "hunter2" not in config_to_toml(config)
    assert "hunter2" not in refusal("mirror=s3://user:hunter2@bucket")
    assert "hunter2" not in refusal("train.steps=s3://user:hunter2@bucket?token=hunter2")


def test_the_curve_part_holds_no_layout() -> None:
    assert set(curve_part(Config())) == {"model", "data", "train", "optimizer", "guard", "faults"}


def test_a_resumed_run_keeps_its_curve_and_takes_the_new_layout() -> None:
    stored = load_config(DEMO, ["train.steps=40"])
    given = load_config(DEMO, ["layout.dp=2", "train.seed=7"])
    config, notes = resume_config(given, stored)
    assert config.train == stored.train and config.layout.dp == 2
    assert len(notes) == 2 and "train.seed = 7 is not applied: the run goes on with 41" in notes[0]
    assert "train.steps = 20" in notes[1]
    assert all(note.endswith("to change it, start a new curve with --from RUN") for note in notes)


def test_a_resumed_run_refuses_another_curve_by_override_and_accepts_its_own() -> None:
    stored = load_config(DEMO, ["train.steps=40"])
    resume_config(load_config(DEMO, ["train.steps=40"]), stored, ["train.steps=40"])
    with pytest.raises(ConfigError, match=r"train\.steps = 50: this run was started with 40.*--from"):
        resume_config(load_config(DEMO, ["train.steps=50"]), stored, ["train.steps=50"])
    with pytest.raises(ConfigError, match=r"layout\.dp = 4: .*train\.leaves = 2"):  # the new layout meets the old curve
        resume_config(Config(), load_config(DEMO, ["train.leaves=2", "layout.dp=2"]))


def test_plain_tables_make_a_config() -> None:
    assert make_config({}) == Config()
    with pytest.raises(ConfigError, match=r"layout\.dp = 9"):
        make_config({"layout": {"dp": 9}})
