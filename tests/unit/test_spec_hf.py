"""Hugging Face configs as specs: those of the shipped models, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import Capture, error_of, run_json

from energylens.cli import main
from energylens.errors import SpecError
from energylens.lower import parameters
from energylens.spec.hf import import_spec
from energylens.spec.load import load_spec, parse_spec
from energylens.spec.model import Spec
from energylens.spec.resources import list_resources

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "configs"

pytestmark = pytest.mark.usefixtures("no_debug")


def config(name: str, **changed: Any) -> dict[str, Any]:
    """A shipped model's config with other values; None takes a key away."""
    known = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8")) | changed
    return {k: v for k, v in known.items() if v is not None}


def imported(folder: Path, values: dict[str, Any]) -> Spec:
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return import_spec(folder, "mine")


def entries(spec: Spec, block: int = 1) -> dict[str, Any]:
    return {e.name: e for e in spec.blocks[block].cascade}


@pytest.mark.parametrize("name", list_resources("specs"))
def test_the_config_of_a_shipped_model_is_its_spec(name: str, tmp_path: Path) -> None:
    shipped = load_spec(name)
    found = imported(tmp_path, config(name))
    assert found.source == f"{tmp_path} config.json"
    assert replace(found, name=name, source=shipped.source) == shipped
    assert found.layers == config(name)["num_hidden_layers"]
    assert parameters(found) == parameters(shipped)


def test_what_a_config_leaves_out_is_as_transformers_takes_it(tmp_path: Path) -> None:
    left_out = ("attention_bias", "mlp_bias", "torch_dtype", "tie_word_embeddings", "head_dim")
    values = config("llama3_8b", **dict.fromkeys((*left_out, "num_key_value_heads")))
    found = imported(tmp_path, values)
    # As many KV heads as heads, whose size is the width's part.
    assert dict(found.ranks) == {**load_spec("llama3_8b").ranks, "g": 32, "r": 1}
    assert found.precision == load_spec("llama3_8b").precision
    gpt = config("gpt_oss_20b", layer_types=None, sliding_window=None, attention_bias=None)
    assert imported(tmp_path, gpt).blocks == load_spec("gpt_oss_20b").blocks


@pytest.mark.parametrize(
    ("name", "keys", "taken"),
    [
        ("qwen3_32b", ("num_key_value_heads", "head_dim"), {"g": 32, "r": 2, "d": 128}),
        ("qwen2_5_7b", ("num_key_value_heads",), None),  # 32 do not divide its 28 heads
        ("qwen3_moe", ("num_key_value_heads",), {"g": 4, "r": 8}),
        ("mixtral_8x7b", ("num_key_value_heads",), {"g": 8, "r": 4}),
        ("gpt_oss_20b", ("num_key_value_heads", "head_dim"), {"g": 8, "r": 8, "d": 64}),
    ],
)
def test_heads_that_are_left_out_are_those_of_the_class(
    name: str, keys: tuple[str, ...], taken: dict[str, int] | None, tmp_path: Path
) -> None:
    values = config(name, **dict.fromkeys(keys))
    if taken is None:
        with pytest.raises(SpecError, match="num_key_value_heads: found 32; allowed: a divisor"):
            imported(tmp_path, values)
        return
    ranks = imported(tmp_path, values).ranks
    assert {rank: ranks[rank] for rank in taken} == taken


def test_groups_of_experts_that_are_left_out_are_those_of_the_class(tmp_path: Path) -> None:
    found = imported(tmp_path, config("deepseek_v3", n_group=None, topk_group=None))
    assert found.notes == load_spec("deepseek_v3").notes


def test_biases_dtypes_and_the_file_names_itself(tmp_path: Path) -> None:
    values = config("llama3_8b", attention_bias=True, mlp_bias=True, torch_dtype="float16")
    found = imported(tmp_path, {**values, "_name_or_path": "org/model"})
    assert {n for n, e in entries(found).items() if e.bias} == set("qkvo") | {"gate", "up", "down"}
    assert found.precision.weights == found.precision.activations == "fp16"
    assert found.source == "org/model config.json"
    newer = config("llama3_8b", torch_dtype=None, dtype="float32")
    assert imported(tmp_path, newer).precision.kv_cache == "fp32"


def test_weights_in_eight_bits_leave_embedding_head_and_router_as_they_were(tmp_path: Path) -> None:
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = imported(tmp_path, config("qwen3_moe", quantization_config=block))
    assert found.precision.weights == "fp8_block"
    assert found.precision.activations == found.precision.kv_cache == "bf16"
    wide = {e.name for b in found.blocks for e in b.cascade if e.weights == "bf16"}
    assert wide == {"embed", "router", "lm_head"}
    whole = imported(tmp_path, config("qwen3_32b", quantization_config={"quant_method": "fp8"}))
    assert whole.precision.weights == "fp8"
    assert parameters(found) == 30_532_122_624


def test_layers_with_and_without_a_window_are_blocks_of_their_own(tmp_path: Path) -> None:
    late = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    found = imported(tmp_path, config("qwen2_5_7b", **late))
    named = [(b.name, b.repeat, b.window) for b in found.blocks[1:-1]]
    assert named == [("layer", 20, None), ("window_layer", 8, 4096)]
    found = imported(tmp_path, config("qwen2_5_7b", **late | {"max_window_layers": 0}))
    assert [(b.repeat, b.window) for b in found.blocks[1:-1]] == [(28, 4096)]
    listed = ["full_attention", *["sliding_attention"] * 23]
    found = imported(tmp_path, config("gpt_oss_20b", layer_types=listed))
    named = [(b.name, b.repeat, b.window) for b in found.blocks[1:-1]]
    assert named == [("layer", 1, None), ("window_layer", 23, 128)]
    assert found.layers == 24
    (block,) = imported(tmp_path, config("mixtral_8x7b", sliding_window=4096)).blocks[1:-1]
    assert (block.repeat, block.window) == (32, 4096)


def test_layers_with_and_without_experts_are_blocks_of_their_own(tmp_path: Path) -> None:
    found = imported(tmp_path, config("qwen3_moe", mlp_only_layers=[0, 3], decoder_sparse_step=2))
    # Every second of 48 layers is sparse, the fourth of them aside.
    named = [(b.name, b.repeat) for b in found.blocks[1:-1]]
    assert named == [("dense_layer", 25), ("layer", 23)]
    assert (found.ranks["f"], found.ranks["i"]) == (6144, 768)
    dense, expert = 3 * 2048 * 6144, 128 * 3 * 2048 * 768
    router = 128 * 2048
    assert 30_532_122_624 - parameters(found) == 25 * (expert + router - dense)
    found = imported(tmp_path, config("deepseek_v3", first_k_dense_replace=0, topk_group=8))
    assert [b.name for b in found.blocks] == ["embedding", "layer", "head"]
    assert found.notes == ("the module that predicts a second token is left out",)
    found = imported(tmp_path, config("deepseek_v3", first_k_dense_replace=3, num_hidden_layers=2))
    assert [(b.name, b.repeat) for b in found.blocks[1:-1]] == [("dense_layer", 2)]


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        (
            "llama3_8b",
            {"model_type": "gemma3"},
            "model_type: found 'gemma3'; allowed: llama, qwen2, qwen3, qwen3_moe, mixtral, "
            "gpt_oss, deepseek_v3",
        ),
        ("llama3_8b", {"model_type": None}, "model_type: found nothing; allowed: llama"),
        (
            "llama3_8b",
            {"num_hidden_layers": 10**9},
            "num_hidden_layers: found 1000000000; allowed: 1 to 10000",
        ),
        ("llama3_8b", {"hidden_size": None}, "hidden_size: found nothing; allowed: a whole number"),
        ("llama3_8b", {"hidden_size": 4097}, "hidden_size: found 4097; allowed: a multiple of num"),
        ("llama3_8b", {"num_key_value_heads": 5}, "num_key_value_heads: found 5; allowed: a divis"),
        ("llama3_8b", {"hidden_act": "gelu"}, "hidden_act: found 'gelu'; allowed: silu"),
        ("llama3_8b", {"torch_dtype": "float8"}, "torch_dtype: found 'float8'; allowed: bfloat16"),
        (
            "llama3_8b",
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config.quant_method: found 'awq'; allowed: fp8",
        ),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "quantization_config.weight_block_size: found [64, 64]; allowed: [128, 128]",
        ),
        ("deepseek_v3", {"q_lora_rank": None}, "q_lora_rank: found nothing; allowed: a whole"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq: found 2; allowed: 1"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace: found -1; allowed"),
        ("gpt_oss_20b", {"layer_types": ["full_attention"]}, "layer_types: found 1 layers; allowe"),
        (
            "gpt_oss_20b",
            {"layer_types": ["linear_attention"] * 24},
            "layer_types[0]: found 'linear_attention'; allowed: full_attention, sliding_attention",
        ),
        ("mixtral_8x7b", {"num_experts_per_tok": 9}, "moe.topk: found 9; allowed: 1 to 8"),
    ],
)
def test_what_the_language_does_not_carry_is_refused_with_what_it_does(
    name: str, changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as caught:
        imported(tmp_path, config(name, **changed))
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{tmp_path / 'config.json'}: ")
    assert said in text


@pytest.mark.parametrize("content", ["", "{", "[1]", "7", "[" * 100_000])
def test_what_is_no_config_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SpecError, match=r"config\.json: ") as caught:
        import_spec(path, "mine")
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- the verb


def test_an_imported_model_is_predicted(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "Meta-Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("llama3_8b")), encoding="utf-8")
    out = tmp_path / "mine.yaml"
    assert main(["import", str(folder), "--out", str(out)]) == 0
    shown, told = capsys.readouterr()
    assert shown == ""
    assert "meta_llama_3_1_8b: 8.03 B parameters, 32 layers, bf16" in told
    assert load_spec(str(out)).name == "meta_llama_3_1_8b"
    mine, shipped = (
        run_json(capsys, "predict", spec, "--phase", "decode") for spec in (str(out), "llama3_8b")
    )
    assert mine["decode"] == shipped["decode"]


def test_without_a_file_the_spec_is_all_of_stdout(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config("gpt_oss_20b")), encoding="utf-8")
    assert main(["import", str(path), "--name", "gpt"]) == 0
    shown, _ = capsys.readouterr()
    assert parse_spec(shown).name == "gpt"
    assert parse_spec(shown).blocks == load_spec("gpt_oss_20b").blocks


def test_what_cannot_be_imported_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    assert "no such file or folder" in error_of(capsys, "import", "/nowhere")
    assert "cannot be read as a Hugging Face config" in error_of(capsys, "import", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    assert "found 'bert'; allowed: llama" in error_of(capsys, "import", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config("llama3_8b")), encoding="utf-8")
    assert "name: found ''; allowed: text" in error_of(
        capsys, "import", str(tmp_path), "--name", ""
    )
    bad = error_of(capsys, "import", str(tmp_path), "--out", str(tmp_path / "x.json"))
    assert "--out" in bad and ".yaml" in bad
