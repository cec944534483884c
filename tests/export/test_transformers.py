"""An exported run as transformers sees it: the same function, the same ids, tied where it was."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from onecurve.checkpoint import parse_place
from onecurve.cli import main
from onecurve.model import GPT
from onecurve.trained import Trained, open_trained

pytestmark = pytest.mark.slow  # importing transformers takes as long as many other tests together

# Not bits: GPT-2 multiplies by the transposed matrix and adds a bias, so a sum may be ordered otherwise than in ours.
# In float64 that touches the last of 16 digits, and any other difference shows.
AGREE = 1e-10


@pytest.fixture(scope="module")
def transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    return transformers


@pytest.fixture(scope="module")
def exported(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exported")
    for name in ("byte", "bpe", "cycle"):
        assert main(["export", str(runs[name]), "--out", str(folder / name)]) == 0
    return {path.name: path for path in folder.iterdir()}


def trained(run: Path) -> Trained:
    return open_trained(parse_place(str(run)), lambda text: None)


def differences(transformers: Any, folder: Path, ours: GPT) -> list[str]:
    """In what the model that transformers loads from `folder` is not `ours`."""
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is transformers.GPT2LMHeadModel and loaded.dtype == torch.float32
    found = [kind for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]]
    head, embedding = loaded.lm_head.weight, loaded.transformer.wte.weight
    if (head.data_ptr() == embedding.data_ptr()) != bool(ours.tied_uses):
        found.append("tied")
    tokens = torch.randint(len(embedding), (3, ours.context), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = copy.deepcopy(ours).double()(tokens)
        logits = loaded.double()(tokens).logits
    if not float((logits - expected).abs().max()) <= AGREE:
        found.append("logits")
    return found


@pytest.mark.parametrize("kind", ["byte", "bpe", "cycle"])
def test_case_13_it_is_the_same_function(
    kind: str, runs: dict[str, Path], exported: dict[str, Path], transformers: Any
) -> None:
    """Loaded strictly; tied (byte) and not; in float64 the same logits."""
    model = trained(runs[kind]).model
    assert differences(transformers, exported[kind], model) == []
    assert bool(model.tied_uses) == (kind == "byte")


def test_case_13_what_is_tied_changes_together(exported: dict[str, Path], transformers: Any) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(exported["byte"])
    with torch.no_grad():
        loaded.transformer.wte.weight[5, 3] = 7.0
        assert loaded.lm_head.weight[5, 3] == 7.0
        loaded.lm_head.weight[6, 2] = 9.0
        assert loaded.transformer.wte.weight[6, 2] == 9.0
    stored = load_file(exported["byte"] / "model.safetensors")
    assert "lm_head.weight" not in stored and "transformer.wte.weight" in stored
    assert sum(p.numel() for p in loaded.parameters()) == sum(values.numel() for values in stored.values())


Weights = dict[str, torch.Tensor]


def untie(config: dict[str, Any], weights: Weights) -> None:
    config["tie_word_embeddings"] = False
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()


def untie_and_change(config: dict[str, Any], weights: Weights) -> None:
    untie(config, weights)
    weights["lm_head.weight"][3, 3] += 1e-6


def forget_the_head(config: dict[str, Any], weights: Weights) -> None:
    config["tie_word_embeddings"] = False


def forget_a_transposition(config: dict[str, Any], weights: Weights) -> None:
    name = "transformer.h.1.attn.c_proj.weight"
    weights[name] = weights[name].t().contiguous()


def forget_that_gelu_is_exact(config: dict[str, Any], weights: Weights) -> None:
    config["activation_function"] = "gelu_new"


def add_a_bias(config: dict[str, Any], weights: Weights) -> None:
    weights["transformer.h.0.attn.c_attn.bias"][40] = 1e-6


@pytest.mark.parametrize(
    ("spoil", "caught"),
    [
        (untie, ["tied"]),
        (untie_and_change, ["tied", "logits"]),
        (forget_the_head, ["missing_keys", "tied", "logits"]),
        (forget_a_transposition, ["logits"]),
        (forget_that_gelu_is_exact, ["logits"]),
        (add_a_bias, ["logits"]),
    ],
    ids=lambda value: value.__name__.replace("_", " ") if callable(value) else "",
)
def test_control_a_wrong_export_is_caught(
    spoil: Callable[[dict[str, Any], Weights], None],
    caught: list[str],
    runs: dict[str, Path],
    exported: dict[str, Path],
    tmp_path: Path,
    transformers: Any,
) -> None:
    folder = Path(shutil.copytree(exported["byte"], tmp_path / "wrong"))
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    spoil(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert differences(transformers, folder, trained(runs["byte"]).model) == caught


def sampled(capsys: pytest.CaptureFixture[str], run: Path, prompt: str, tokens: int) -> str:
    capsys.readouterr()
    assert main(["sample", str(run), "--temperature", "0", "--prompt", prompt, "--tokens", str(tokens)]) == 0
    return capsys.readouterr().out[:-1]


def test_greedy_text_is_that_of_sample(
    runs: dict[str, Path], exported: dict[str, Path], transformers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the context: beyond it GPT-2 has no positions, where `sample` drops the older half and reads on."""
    for kind, prompt in (("cycle", "5 6 7"), ("byte", "the "), ("bpe", "the river")):
        model = transformers.AutoModelForCausalLM.from_pretrained(exported[kind])
        context = model.config.n_positions
        if kind == "cycle":
            ids = [int(word) for word in prompt.split()]
            assert model.generation_config.eos_token_id is None
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(exported[kind])
            ids = tokenizer(prompt)["input_ids"]
            assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.vocab_size - 1
        count = context - len(ids)
        written = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=count, pad_token_id=0)[0].tolist()
        text = " ".join(map(str, written)) if kind == "cycle" else tokenizer.decode(written, skip_special_tokens=True)
        assert len(written) > len(ids) and text == sampled(capsys, runs[kind], prompt, count)


NASTY = [
    "",
    "plain",
    " the river  returns ,\tgrößer than\n\n  before . isn't it 's 12345",
    "one\r\ntwo\rthree\r\n",
    "\ufeffwith a mark\ufeff",
    "nul \0 nul\0",
    "🙂👩‍👩‍👧 é e\u0301 \u202e\u2028 日本語 \U0010ffff",
    "<|endoftext|>",
    "a<|endoftext|>b <|endoftext|> <|endoftext|><|endoftext|>\r\n",
    "".join(map(chr, range(0x250))),
    "x" * 5000 + " y" * 5000,
]


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_the_tokenizer_gives_our_ids_for_every_text(
    kind: str, runs: dict[str, Path], exported: dict[str, Path], transformers: Any
) -> None:
    ours = trained(runs[kind]).tokenizer
    assert ours is not None
    theirs = transformers.AutoTokenizer.from_pretrained(exported[kind])
    again = transformers.PreTrainedTokenizerFast.from_pretrained(exported[kind])
    bare = Tokenizer.from_file(str(exported[kind] / "tokenizer.json"))
    for text in NASTY:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == theirs.encode(text) == again(text)["input_ids"] == ids, repr(text)
        assert bare.encode(text).ids == ids, repr(text)
        assert theirs.decode(ids) == again.decode(ids) == bare.decode(ids) == text
        assert ours.end_of_document not in ids
    assert theirs(NASTY)["input_ids"] == [ours.encode(text) for text in NASTY]
    end = ours.end_of_document
    assert theirs.eos_token_id == theirs.bos_token_id == end == ours.vocab - 1
    assert theirs.convert_tokens_to_ids(theirs.eos_token) == end
    assert theirs.decode([*ours.encode("a"), end, *ours.encode("b")], skip_special_tokens=True) == "ab"
    assert theirs.decode(list(range(end - 5, end))) == ours.decode(range(end - 5, end))
    assert theirs.model_max_length == 24
    assert end in theirs("a<|endoftext|>", split_special_tokens=False)["input_ids"]  # what its config keeps away


def test_a_tokenizer_that_was_saved_again_is_the_same(
    exported: dict[str, Path], tmp_path: Path, transformers: Any
) -> None:
    for kind in ("byte", "bpe"):
        theirs = transformers.AutoTokenizer.from_pretrained(exported[kind])
        theirs.save_pretrained(tmp_path / kind)
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / kind)
        assert again(NASTY)["input_ids"] == theirs(NASTY)["input_ids"]
        assert again.eos_token_id == theirs.eos_token_id
