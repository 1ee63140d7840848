from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from energylens.errors import SpecError
from energylens.spec.load import dump_spec, load_spec, parse_spec
from energylens.spec.machines import load_cluster, load_device, load_engine
from energylens.spec.resources import data_dir, list_resources

SPEC = """\
schema: energylens/spec/v1
name: tiny
source: invented
ranks: {m: 8, f: 16, e: 4}
blocks:
  - name: layer
    repeat: 2
    cascade:
      - {name: norm, op: rmsnorm, in: "x[b,s,m], Wnorm[m]"}
      - {name: gate, einsum: "x[b,s,m], Wgate[m,f] -> h[b,s,f]"}
      - {name: up, einsum: "x[b,s,m], Wup[m,f] -> u[b,s,f]"}
      - {name: down, einsum: "h[b,s,f], Wdown[f,m] -> y[b,s,m]"}
"""

DEVICE = """\
schema: energylens/device/v1
name: mine
source: invented
memory_bytes: 1e10
memory_bandwidth_bytes_s: 1.0e12
l2_bytes: 5e+7
peak_flops: {bf16: 1e14}
sm_count: 10
clock_max_hz: 1.5e9
power_limit_w: 300
idle_w: 30
"""

CLUSTER = """\
schema: energylens/cluster/v1
name: pair
source: invented
device: h200
gpus: 2
link: {name: nvlink, BANDWIDTH, latency_s: 2e-6}
"""


def message(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, path="my.yaml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(old: str, new: str) -> str:
    assert SPEC.count(old) == 1
    return SPEC.replace(old, new)


# ---- names and paths


@pytest.mark.parametrize(
    "name", ["llama3_8b", "llama3_8b.yaml", "specs/llama3_8b.yaml", "/nowhere/specs/llama3_8b.yaml"]
)
def test_a_shipped_spec_is_found_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_spec(name).name == "llama3_8b"


def test_a_file_of_the_user_wins_over_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "llama3_8b.yaml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    spec = load_spec("specs/llama3_8b.yaml")
    assert (spec.name, spec.path) == ("tiny", "specs/llama3_8b.yaml")


def test_a_missing_file_in_a_folder_of_the_user_is_not_guessed() -> None:
    with pytest.raises(SpecError, match="did you mean llama3_8b"):
        load_spec("finetunes/llama3_8b.yaml")


@pytest.mark.parametrize(
    ("load", "name", "near", "known"),
    [
        (load_spec, "llama3-8b", "llama3_8b", "qwen3_32b"),
        (load_engine, "hff", "hf", "hf"),
        (load_device, "H100", "h200", "jetson_orin_nano"),
        (load_device, "NVIDIA H200 NVL", "h200", "a6000"),
        (load_cluster, "h200x3", "h200x", "h200x8"),
    ],
)
def test_an_unknown_name_gets_near_names_and_the_list(
    load: Callable[[str], object], name: str, near: str, known: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load(name)
    text = str(caught.value)
    assert f"{name!r}" in text
    assert f"did you mean {near}" in text
    assert known in text.partition("; known: ")[2]


def test_every_shipped_file_loads_under_its_own_name() -> None:
    for kind, load in (
        ("specs", load_spec),
        ("devices", load_device),
        ("engines", load_engine),
        ("clusters", load_cluster),
    ):
        names = list_resources(kind)
        assert names
        assert [load(name).name for name in names] == list(names)


def test_an_unknown_kind_of_resource_is_refused() -> None:
    with pytest.raises(SpecError, match="'models'; allowed: specs, devices, engines, clusters"):
        list_resources("models")


def test_a_data_folder_that_does_not_ship_is_an_error() -> None:
    assert (data_dir("specs") / "llama3_8b.yaml").is_file()
    with pytest.raises(SpecError, match="no folder 'nothing'"):
        data_dir("nothing")


# ---- YAML


def test_broken_yaml_names_file_and_line() -> None:
    assert message(SPEC + "fusion: [a\n").startswith("my.yaml:14: broken YAML: ")


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just text"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    assert "my.yaml: top level: found" in message(text)


def test_a_key_given_twice_is_refused() -> None:
    text = message(SPEC + "name: other\n")
    assert text == "my.yaml:13: broken YAML: key 'name' is given twice; keep one"


@pytest.mark.parametrize(
    "value", ["2024-13-45", "!!python/object:os.system x", "!!int many", "\x07"]
)
def test_values_that_yaml_cannot_make_are_broken_yaml(value: str) -> None:
    assert "broken YAML" in message(changed("invented", value))


def test_unreadable_bytes_are_an_error_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match=r"binary\.yaml: cannot be read"):
        load_spec(str(path))


# ---- validation


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("spec/v1", "spec/v2", "schema: found 'energylens/spec/v2'; allowed: energylens/spec/v1"),
        ("schema: energylens/spec/v1\n", "", "top level: key 'schema' is missing"),
        ("name: tiny\n", "", "top level: key 'name' is missing"),
        ("source: invented", "source:", "source: found nothing; allowed: text"),
        ("source: invented", "source: x\nblock: []", "unknown key 'block' (did you mean blocks?)"),
        ("m: 8,", "m: 0,", "ranks.m: found 0; allowed: a whole number of at least 1"),
        ("m: 8,", "m: true,", "ranks.m: found True; allowed: a whole number"),
        ("m: 8,", "m: 8.0,", "ranks.m: found 8.0; allowed: a whole number"),
        ("m: 8,", "m: 8, s: 3,", "ranks: rank 's' is sized by the engine step; remove it"),
        ("m: 8,", "1: 8,", "ranks: found the key 1; allowed: text"),
        ("repeat: 2", "repeats: 2", "blocks[0]: unknown key 'repeats' (did you mean repeat?)"),
        ("repeat: 2", "repeat: two", "blocks[0].repeat: found 'two'"),
        ("repeat: 2", "window: 4", "blocks[0].window: this block has no entry with a `mask`; rem"),
        ("repeat: 2", "window: 0", "blocks[0].window: found 0; allowed: a whole number of at"),
        (
            'Wnorm[m]"',
            'Wnorm[m]", weights: fp8',
            "cascade[0].weights: weights of rmsnorm are stored as activations are; remove it",
        ),
        ('h[b,s,f]"}\n', 'h[b,s,f]", weights: fp9}\n', "cascade[1].weights: found 'fp9'; allowed"),
        (
            'y[b,s,m]"}\n',
            'y[b,s,m]"}\n      - {name: x, einsum: "h[b,s,f] -> z[b,s]", weights: fp8}\n',
            "cascade[4].weights: this entry reads no weight; remove it",
        ),
        ("source: invented", "source: x\nnotes: [1]", "notes[0]: found 1; allowed: text"),
        ("name: up,", "name: gate,", "blocks[0].cascade: two entries have the name 'gate'"),
        (
            "op: rmsnorm,",
            "op: rmsnrom,",
            "blocks[0].cascade[0].op: found 'rmsnrom'; allowed: add, argmax",
        ),
        (
            "op: rmsnorm,",
            "",
            "blocks[0].cascade[0]: an entry is either a contraction or a named op",
        ),
        (
            ', in: "x[b,s,m], Wnorm[m]"',
            "",
            "cascade[0]: key 'in' is missing; required: name, op, in",
        ),
        (
            "op: rmsnorm,",
            "op: rmsnorm, bias: true,",
            "cascade[0]: unknown key 'bias'; allowed: name, op, in",
        ),
        ('h[b,s,f]"}\n', 'h[b,s,f]", mask: full}\n', "mask: found 'full'; allowed: causal"),
        ('h[b,s,f]"}\n', 'h[b,s,f]", cache: 1}\n', "cache: found 1; allowed: true, false"),
        ("Wup[m,f]", "up[m,f]", None),
        (
            "Wgate[m,f]",
            "Wgate[m f]",
            "blocks[0].cascade[1].einsum: 'x[b,s,m], Wgate[m f] -> h[b,s,f]', character 19: "
            "expected , or ], found f",
        ),
        (
            "x[b,s,m], Wup[m,f]",
            "x[b,s,n], Wup[n,f]",
            "blocks[0].cascade[2].einsum: rank 'n' of x[b,s,n] has no size; allowed: b, s, t, m, "
            "f, e, or add a size to `ranks`",
        ),
        ("Wup[m,f]", "Wup[m,f,t]", "rank 't' of Wup[m,f,t] is no rank of a weight; allowed: m, f"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(
    old: str, new: str, expected: str | None
) -> None:
    if expected is None:
        assert parse_spec(changed(old, new)).blocks[0].cascade[2].accesses[1].tensor == "up"
    else:
        text = message(changed(old, new))
        assert text.startswith("my.yaml: ")
        assert expected in text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("precision: {weights: bf15}", "precision.weights: found 'bf15'; allowed: fp32, bf16"),
        ("parallelism: {tp: [m, q]}", "parallelism.tp[1]: found 'q'; allowed: m, f, e"),
        ("parallelism: {tp: [m, m]}", "parallelism.tp: 'm' occurs twice"),
        ("parallelism: {pp: [m]}", "parallelism: unknown key 'pp'"),
        ("fusion: [[gate, upp]]", "fusion[0][1]: found 'upp'; allowed: norm, gate, up, down (did"),
        ("fusion: [[gate]]", "fusion[0]: found ['gate']; allowed: a list with at least 2 items"),
        ("fusion: [{members: [gate, up], kernal: x}]", "fusion[0]: unknown key 'kernal' (did you"),
        (
            "overlap: [{collective: o, with: gate, sm: 16}]",
            "overlap[0].collective: found 'o'; allowed: norm, gate, up, down",
        ),
        (
            "overlap: [{collective: down, with: up_gate, sm: 16}]",
            "overlap[0].with: found 'up_gate'; allowed: norm, gate, up, down",
        ),
        ("overlap: [{collective: down, with: gate}]", "overlap[0]: key 'sm' is missing"),
        ("moe: {rank: x, topk: 2}", "moe.rank: found 'x'; allowed: m, f, e"),
        ("moe: {rank: e, topk: 5}", "moe.topk: found 5; allowed: 1 to 4, the size of rank 'e'"),
        ("moe: {rank: e, topk: 2, routing: {kind: zip}}", "moe.routing.kind: found 'zip'"),
        ("moe: {rank: e, topk: 2, routing: {kind: zipf}}", "routing: key 'alpha' is missing"),
        ("moe: {rank: e, topk: 2, routing: {alpha: 1}}", "routing: unknown key 'alpha'"),
    ],
)
def test_annotations_refer_only_to_what_exists(line: str, expected: str) -> None:
    assert expected in message(SPEC + line + "\n")


def test_annotations_are_kept() -> None:
    spec = parse_spec(
        SPEC
        + """
precision: {weights: mxfp4}
parallelism: {tp: [f, m], ep: [e]}
fusion: [[gate, up], {members: [norm, down], kernel: k}]
overlap: [{collective: down, with: gate_up, sm: 16, chunks: 4}]
moe: {rank: e, topk: 2, routing: {kind: zipf, alpha: 1.5}}
"""
    )
    assert (spec.precision.weights, spec.precision.kv_cache) == ("mxfp4", "bf16")
    assert dict(spec.parallelism) == {"tp": ("f", "m"), "ep": ("e",)}
    assert [(f.members, f.kernel) for f in spec.fusion] == [
        (("gate", "up"), None),
        (("norm", "down"), "k"),
    ]
    assert (spec.overlap[0].beside, spec.overlap[0].sm, spec.overlap[0].chunks) == (
        "gate_up",
        16,
        4,
    )
    assert spec.moe == {"rank": "e", "topk": 2, "routing": {"kind": "zipf", "alpha": 1.5}}
    assert parse_spec(dump_spec(spec)) == spec


TIED = """  - name: head
    cascade:
      - {name: lm_head, einsum: "x[b,m], Wlm[f,m] -> logits[b,f]", tied: WEIGHT}
"""


def test_a_tied_weight_must_exist_with_the_same_size() -> None:
    assert parse_spec(SPEC + TIED.replace("WEIGHT", "Wup")).blocks[1].cascade[0].tied == "Wup"
    path = "my.yaml: blocks[1].cascade[0].tied: "
    assert message(SPEC + TIED.replace("WEIGHT", "Wupp")).startswith(path + "found 'Wupp'; allowed")
    assert message(SPEC + TIED.replace("WEIGHT", "Wnorm")) == (
        path + "Wnorm[m] and Wlm[f,m] do not have the same number of values"
    )
    assert "allowed: Wnorm, Wgate" in message(SPEC + TIED.replace("WEIGHT", "Wlm"))


def test_entries_of_two_blocks_cannot_be_one_kernel() -> None:
    text = SPEC + TIED.replace(", tied: WEIGHT", "") + "fusion: [[down, lm_head]]\n"
    assert message(text) == "my.yaml: fusion[0]: down, lm_head are not entries of one block"


def test_two_blocks_cannot_share_a_name() -> None:
    text = SPEC + TIED.replace("name: head", "name: layer").replace(", tied: WEIGHT", "")
    assert "blocks: two blocks have the name 'layer'" in message(text)


# ---- devices, clusters, engines


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h200", "h200"),
        ("H200-SXM", "h200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA RTX A6000", "a6000"),
        ("rtx-a6000", "a6000"),
        ("Jetson Orin Nano", "jetson_orin_nano"),
        ("Jetson Orin Nano@15W", "jetson_orin_nano"),
        ("jetson_orin_nano@maxn_super", "jetson_orin_nano@MAXN_SUPER"),
        ("NVIDIA Jetson Orin Nano Developer Kit@25W", "jetson_orin_nano@25W"),
        ("specs/devices/h200.yaml", "h200"),
    ],
)
def test_the_usual_spellings_of_a_board_mean_one_device(spelling: str, name: str) -> None:
    assert load_device(spelling).name == name


def test_a_device_file_may_write_powers_of_ten_in_any_way(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(DEVICE)
    device = load_device(str(path))
    assert (device.memory_bytes, device.l2_bytes, device.idle_w) == (1e10, 5e7, 30.0)
    assert (device.aliases, device.unified_memory) == ((), False)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("idle_w: 30", "idle_w: -1", "idle_w: found -1; allowed: a number above 0"),
        ("idle_w: 30", "idle_w: .nan", "idle_w: found nan; allowed: a number above 0"),
        ("idle_w: 30", "idle_w: 30 W", "idle_w: found '30 W'; allowed: a number above 0"),
        ("{bf16: 1e14}", "{bf17: 1e14}", "peak_flops: unknown key 'bf17' (did you mean bf16"),
        ("{bf16: 1e14}", "{}", "peak_flops: found {}; allowed: at least one of: fp32, bf16"),
        ("/device/v1", "/devices/v1", "schema: found 'energylens/devices/v1'"),
    ],
)
def test_a_wrong_device_file_is_named(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(DEVICE.replace(old, new))
    with pytest.raises(SpecError) as caught:
        load_device(str(path))
    assert f"{path}: {expected}" in str(caught.value)


MODES = """\
power_mode: 15w
modes:
  30W: {clock_max_hz: 3.0e9, memory_bandwidth_bytes_s: 1.5e12, power_limit_w: 45}
"""


def test_a_device_in_another_power_mode_has_its_own_name_and_figures(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(DEVICE + MODES)
    device, faster = load_device(str(path)), load_device(f"{path}@30w")
    assert (device.name, device.power_mode) == ("mine", "15W")
    assert load_device(f"{path}@15W") == device
    assert (faster.name, faster.power_mode, faster.clock_max_hz) == ("mine@30W", "30W", 3e9)
    assert faster.peak_flops == {"bf16": 2e14}  # goes with the clock
    assert (faster.memory_bandwidth_bytes_s, faster.power_limit_w) == (1.5e12, 45)
    assert (faster.memory_bytes, faster.idle_w) == (device.memory_bytes, device.idle_w)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (DEVICE + MODES, "@7W", "no figures for power mode '7W'; known: 15W, 30W"),
        (DEVICE, "@7W", "no figures for power mode '7W'; known: none"),
        (DEVICE + MODES.replace("power_mode: 15w\n", ""), "", "key 'power_mode' is missing"),
        (DEVICE + MODES.replace("3.0e9", "-1"), "", "modes.30W.clock_max_hz: found -1"),
        (DEVICE + MODES.replace(", power_limit_w: 45", ""), "", "key 'power_limit_w' is missing"),
    ],
)
def test_a_wrong_power_mode_is_named(tmp_path: Path, text: str, name: str, expected: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_device(f"{path}{name}")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "bandwidth", ["bandwidth_gb_s_bidirectional: 900", "bandwidth_gb_s_per_direction: 450"]
)
def test_the_bandwidth_of_a_link_says_its_direction(tmp_path: Path, bandwidth: str) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(CLUSTER.replace("BANDWIDTH", bandwidth))
    link = load_cluster(str(path)).link
    assert link is not None
    assert link.bandwidth_bytes_s == 450e9


@pytest.mark.parametrize(
    ("bandwidth", "expected"),
    [
        ("bandwidth_gb_s: 900", "link: unknown key 'bandwidth_gb_s' (did you mean"),
        (
            "bandwidth_gb_s_bidirectional: 900, bandwidth_gb_s_per_direction: 450",
            "link: found 2 bandwidths; give one of",
        ),
    ],
)
def test_a_bandwidth_without_one_direction_is_refused(
    tmp_path: Path, bandwidth: str, expected: str
) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(CLUSTER.replace("BANDWIDTH", bandwidth))
    with pytest.raises(SpecError) as caught:
        load_cluster(str(path))
    assert expected in str(caught.value)


def test_several_gpus_need_a_link(tmp_path: Path) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text("".join(CLUSTER.splitlines(keepends=True)[:-1]))
    with pytest.raises(SpecError, match="gpus: found 2 GPUs without a link"):
        load_cluster(str(path))


def test_an_engine_may_leave_lists_empty_but_not_invent_modes(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = (data_dir("specs") / "engines" / "hf.yaml").read_text()
    path.write_text(text.replace("repeat_kv: [cuda_graph]", "repeat_kv: []"))
    assert load_engine(str(path)).repeat_kv == ()
    path.write_text(text.replace("decode: eager", "decode: graph"))
    with pytest.raises(SpecError, match=r"modes.decode: found 'graph'; allowed: eager, cuda_graph"):
        load_engine(str(path))
