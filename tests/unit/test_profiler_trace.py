"""Kernel traces: to whom a kernel belongs, by launch, mark and name; counters on their clock."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_trace import BASE_NS, START_US, MadeTrace, serving_steps

from energylens.errors import OutOfRangeError, SpecError
from energylens.meter.base import DeviceSeries
from energylens.profiler.trace import annotate, breakdown, kernel_csv, kernel_table, kind_of
from energylens.results import Kind

US = 1e-6
THREAD_OF_ANOTHER = 7400
FLASH = "void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>(...)"

# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_256x16_64x6_2x1_v_bz_TNT", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64>", "gemm"),
        ("ampere_bf16_s1688gemm_bf16_64x64_sliced1x2_ldg8_f2f_tn", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "gemm"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, float>", "gemm"),
        ("void marlin::Marlin<__nv_bfloat16, 256, 1, 8, 8, 4>", "gemm"),
        ("triton_tem_fused_addmm_3", "gemm"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<", "attention"),
        ("void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("kernel_unified_attention_2d", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention"),
        ("void at::native::(anonymous namespace)::softmax_warp_forward<float>", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16", "copy"),
        ("triton_red_fused_fused_add_rms_norm_2", "norm"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norm"),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", "norm"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "norm"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, MeanOps<float>>>", "norm"),
        ("triton_poi_fused_mul_silu_slice_1", "elementwise"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16, vllm::silu_kernel>", "elementwise"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", "elementwise"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>>", "copy"),
        ("void at::native::indexSelectSmallIndex<c10::BFloat16, long>", "copy"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("Memcpy PtoP (Device -> Device)", "collective"),
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs<4096ul>)",
            "collective",
        ),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", "collective"),
        ("fused_moe_kernel", "moe"),
        ("void vllm::moe::topkGating<4, 128, 4, 16, 32, int>", "moe"),
        ("void vllm::moe::moe_align_block_size_kernel<int>", "moe"),
        ("_gumbel_sample_kernel", "sampling"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, ArgMaxOps<float>>>", "sampling"),
        ("Memcpy HtoD (Pinned -> Device)", "overhead"),
        ("Memset (Device)", "overhead"),
        ("_compute_slot_mappings_kernel", "overhead"),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<int>>", "overhead"),
    ],
)
def test_kernels_are_known_by_their_names(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


# ---------------------------------------------------------------- steps


def test_kernels_count_to_the_step_that_launched_them_even_if_they_run_later(
    tmp_path: Path,
) -> None:
    rows = kernel_table(serving_steps().write(tmp_path / "trace.json"))
    found = {(r.phase, r.op): (r.kind, r.count, r.latency_s) for r in rows}
    # Two decode steps of the same kernels: count and time are of one of them.
    assert found["decode", "nvjet_sm90_tst_128x16_64x11_2x1_v_bz_TNT"] == (
        Kind.GEMM,
        1.0,
        pytest.approx(50 * US),
    )
    assert found["decode", FLASH] == (Kind.ATTENTION, 1.0, pytest.approx(25 * US))
    assert found["decode", "Memcpy DtoH (Device -> Pinned)"][2] == pytest.approx(3.4 * US)
    assert found["prefill", "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT"] == (
        Kind.GEMM,
        1.0,
        pytest.approx(600 * US),
    )
    # The copy before the first step is nobody's.
    assert not any("HtoD" in op for _, op in found)
    assert len(found) == 2 + 4


def test_rows_are_sorted_by_phase_and_time_and_shares_add_up(tmp_path: Path) -> None:
    rows = kernel_table(serving_steps().write(tmp_path / "trace.json"))
    assert [r.phase for r in rows] == ["prefill"] * 2 + ["decode"] * 4
    for phase in ("prefill", "decode"):
        own = [r for r in rows if r.phase == phase]
        assert sum(r.share for r in own) == pytest.approx(1)
        assert [r.latency_s for r in own] == sorted((r.latency_s for r in own), reverse=True)
    kinds = breakdown(rows)
    assert kinds["decode"] == {
        Kind.GEMM: pytest.approx(50 * US),
        Kind.ATTENTION: pytest.approx(25 * US),
        Kind.OVERHEAD: pytest.approx(3.4 * US),
        Kind.NORM: pytest.approx(2 * US),
    }
    assert list(kinds["decode"]) == [Kind.GEMM, Kind.ATTENTION, Kind.OVERHEAD, Kind.NORM]


def test_kernels_whose_launch_is_not_in_the_trace_count_by_the_steps_span_on_the_device(
    tmp_path: Path,
) -> None:
    trace = serving_steps()
    trace.launch("nvjet_late", 0.0, 7.0, runs=730.0, link=999_999)  # during the first decode step
    trace.launch("nvjet_early", 0.0, 7.0, runs=10.0, link=999_998)
    found = {r.op: r for r in kernel_table(trace.write(tmp_path / "trace.json"))}
    assert (found["nvjet_late"].phase, found["nvjet_late"].count) == ("decode", 0.5)
    assert "nvjet_early" not in found


def test_the_profilers_own_steps_count_where_no_phase_is_marked(tmp_path: Path) -> None:
    trace = MadeTrace()
    for step in range(3):
        trace.span("user_annotation", f"ProfilerStep#{step + 2}", 100.0 * step, 90.0)
        trace.launch("nvjet_a", 100.0 * step + 5, 20.0 + step)
    (row,) = kernel_table(trace.write(tmp_path / "trace.json"), phase="decode")
    assert (row.phase, row.count, row.latency_s) == ("decode", 1.0, pytest.approx(21 * US))


def test_b140_a_trace_without_steps_is_one_step(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.launch("nvjet_a", 5.0, 20.0)
    trace.launch("nvjet_a", 50.0, 10.0)
    (row,) = kernel_table(trace.write(tmp_path / "trace.json"))
    assert (row.phase, row.count, row.latency_s) == ("step", 2.0, pytest.approx(30 * US))


def test_b139_kernels_of_a_graph_count_without_an_operator_above_them(tmp_path: Path) -> None:
    trace = MadeTrace()
    link = trace.launch("nvjet_a", 5.0, 20.0, call="cudaGraphLaunch")
    for i in range(31):
        trace.launch("nvjet_a", 5.0, 20.0, runs=40.0 + 21 * i, link=link)
    (row,) = kernel_table(trace.write(tmp_path / "trace.json"))
    assert (row.count, row.latency_s) == (32.0, pytest.approx(640 * US))


def test_a_trace_without_kernels_has_no_rows(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.span("user_annotation", "energylens::decode", 0.0, 90.0)
    trace.span("cpu_op", "aten::mm", 10.0, 30.0)
    assert kernel_table(trace.write(tmp_path / "trace.json")) == ()


def test_kernels_that_no_step_launched_are_an_error_and_not_an_empty_table(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.span("user_annotation", "energylens::decode", 0.0, 90.0)
    trace.launch("nvjet_a", 500.0, 20.0)
    with pytest.raises(SpecError, match=r"trace.json: none of its 1 kernels was launched inside"):
        kernel_table(trace.write(tmp_path / "trace.json"))


# ---------------------------------------------------------------- marks


def test_a_kernel_is_of_the_innermost_mark_around_its_launch(tmp_path: Path) -> None:
    trace = MadeTrace()
    add = "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>"
    trace.span("user_annotation", "energylens::prefill", 0.0, 500.0)
    trace.span("user_annotation", "energylens::elementwise", 10.0, 300.0)
    trace.span("user_annotation", "energylens::norm", 20.0, 40.0)
    trace.launch(add, 30.0, 1.0)
    trace.span("cpu_op", "aten::scaled_dot_product_attention", 100.0, 50.0)
    trace.launch("ampere_bf16_s1688gemm", 110.0, 2.0)
    trace.launch("void softmax_warp_forward", 120.0, 4.0)
    trace.launch(add, 200.0, 8.0)
    trace.launch(add, 400.0, 16.0)  # after all marks: the model prepares a mask, say
    trace.launch(add, 40.0, 32.0, thread=THREAD_OF_ANOTHER)  # not under the marks of this thread
    kinds = breakdown(kernel_table(trace.write(tmp_path / "trace.json")))["prefill"]
    assert {kind: round(s / US) for kind, s in kinds.items()} == {
        Kind.NORM: 1,
        Kind.ATTENTION: 6,
        Kind.ELEMENTWISE: 8,
        Kind.OVERHEAD: 48,
    }


def test_a_collective_is_one_whoever_launches_it(tmp_path: Path) -> None:
    """Under tensor parallelism the hooks of a decoder layer launch its all-reduces."""
    trace = MadeTrace()
    trace.span("user_annotation", "energylens::elementwise", 0.0, 50.0)
    trace.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", 5.0, 9.0)
    trace.launch("vectorized_elementwise_kernel", 20.0, 2.0)
    trace.launch("at::native::reduce_kernel<512, 1, at::native::ArgMaxOps<float>>", 60.0, 3.0)
    trace.launch("vectorized_elementwise_kernel", 80.0, 1.0)
    kinds = breakdown(kernel_table(trace.write(tmp_path / "trace.json")))["step"]
    assert {k: round(s / US) for k, s in kinds.items()} == {
        Kind.COLLECTIVE: 9,
        Kind.ELEMENTWISE: 2,
        Kind.SAMPLING: 3,  # the choice of the next token is outside of the model
        Kind.OVERHEAD: 1,
    }


def test_kernels_of_a_replayed_graph_go_by_name_in_a_marked_trace(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.span("user_annotation", "energylens::gemm", 0.0, 20.0)
    trace.launch("nvjet_a", 5.0, 1.0)
    trace.launch("triton_red_fused_rms_norm_2", 50.0, 2.0, call="cudaGraphLaunch")
    kinds = breakdown(kernel_table(trace.write(tmp_path / "trace.json")))["step"]
    assert {kind: round(s / US) for kind, s in kinds.items()} == {Kind.NORM: 2, Kind.GEMM: 1}


def test_a_replay_takes_the_kinds_of_a_marked_eager_step_with_the_same_kernels(
    tmp_path: Path,
) -> None:
    """By name alone, the multiplication of a norm is elementwise."""
    add, mul = (f"void at::native::vectorized_elementwise_kernel<4, {f}>" for f in ("add", "mul"))
    step = (("nvjet_a", "gemm"), (mul, "norm"), (add, "elementwise"), (mul, "elementwise"))

    def trace(names: list[str]) -> MadeTrace:
        made = MadeTrace()
        made.launch("Memcpy HtoD (Pinned -> Device)", 1.0, 1.0, cat="gpu_memcpy")
        for i, (name, kind) in enumerate(step):
            made.span("user_annotation", f"energylens::{kind}", 20.0 * i + 10, 15.0)
            made.launch(name, 20.0 * i + 12, 100.0, runs=200.0 * i + 500)
        made.span("user_annotation", "energylens::decode", 1000.0, 50.0)
        link = None
        for i, name in enumerate(names):
            link = made.launch(
                name, 1005.0, 2.0**i, runs=2000.0 + 50 * i, call="cudaGraphLaunch", link=link
            )
        return made

    def seconds(names: list[str]) -> dict[Kind, int]:
        path = trace(names).write(tmp_path / "trace.json")
        kinds = breakdown(kernel_table(path))["decode"]
        return {kind: round(s / US) for kind, s in kinds.items()}

    names = [name for name, _ in step]
    assert seconds(names) == {Kind.ELEMENTWISE: 12, Kind.NORM: 2, Kind.GEMM: 1}
    # Other kernels than the eager step's: the names decide.
    assert seconds([*names, "nvjet_b"]) == {Kind.GEMM: 17, Kind.ELEMENTWISE: 14}


KINDS = sorted(kind.value for kind in Kind)


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.lists(st.integers(1, 50), max_size=4), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_time_is_neither_lost_nor_made_and_goes_to_the_marks_it_was_launched_under(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[str, list[int], bool]]
) -> None:
    trace, at = MadeTrace(), 0.0
    expected: dict[str, float] = defaultdict(float)
    for kind, durations, nested in blocks:
        trace.span("user_annotation", f"energylens::{kind}", at, 10.0 * len(durations) + 12)
        for i, dur in enumerate(durations):
            inner = nested and i == 1
            if inner:
                trace.span("user_annotation", "energylens::copy", at + 10 * i + 1, 8.0)
            trace.launch("k", at + 10 * i + 5, float(dur), runs=3 * at + 1000 * i)
            expected["copy" if inner else kind] += dur
        at += 10.0 * len(durations) + 20
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    kinds = breakdown(kernel_table(trace.write(path))).get("step", {})
    assert {str(k): pytest.approx(s) for k, s in kinds.items()} == {
        k: us * US for k, us in expected.items() if us
    }


# ---------------------------------------------------------------- files


def event(**fields: object) -> str:
    """A trace of one kernel with these fields."""
    whole = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1.0, "dur": 2.0, "args": {}}
    return json.dumps({"traceEvents": [whole | fields]})


def test_what_has_no_correlation_id_is_linked_to_nothing(tmp_path: Path) -> None:
    def at(ts: float, cat: str, name: str, **more: object) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 1.0, "tid": 1} | more

    path = tmp_path / "trace.json"
    events = [
        at(0.0, "user_annotation", "energylens::norm", dur=10.0),
        at(1.0, "cuda_runtime", "cudaLaunchKernel"),
        at(2.0, "kernel", "nvjet_a", args={"correlation": [1]}),
        at(3.0, "kernel", "nvjet_b"),
    ]
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    assert {row.kind for row in kernel_table(path)} == {Kind.GEMM}


def test_compressed_traces_read_the_same(tmp_path: Path) -> None:
    trace = serving_steps()
    plain = kernel_table(trace.write(tmp_path / "trace.json"))
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(trace.text().encode()))
    assert kernel_table(packed) == plain


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.999])
@pytest.mark.parametrize("compress", [False, True])
def test_a_cut_off_file_is_one_clear_error(tmp_path: Path, keep: float, compress: bool) -> None:
    data = serving_steps().text().encode()
    data = gzip.compress(data) if compress else data
    path = tmp_path / ("trace.json.gz" if compress else "trace.json")
    path.write_bytes(data[: int(keep * len(data))])
    for read in (kernel_table, lambda p: annotate(p, {}, tmp_path / "out", unix_offset_s=0.0)):
        with pytest.raises(SpecError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: cut off or ")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "no kernel trace; it must be a JSON object with traceEvents"),
        ('{"schema": "energylens/profile/v1"}', "no kernel trace"),
        ('{"traceEvents": {}}', "no kernel trace"),
        ("", "cut off or no JSON"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1}]}',
            "event 'k' needs",
        ),
        (event(dur=math.nan), "event 'k' needs numbers"),
        (event(ts=math.inf), "event 'k' needs numbers"),
        (event(dur=-1.0), "event 'k' has a duration of -1"),
        ('{"traceEvents": [], "baseTimeNanoseconds": "x"}', "baseTimeNanoseconds is 'x', and must"),
        ("[" * 100_000, "cut off or no JSON"),
    ],
)
def test_other_files_are_told_apart(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=told):
        kernel_table(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none.json: cannot be read \(No such file"):
        kernel_table(tmp_path / "none.json")


def test_the_table_is_a_csv_file_of_its_rows(tmp_path: Path) -> None:
    rows = kernel_table(serving_steps().write(tmp_path / "trace.json"))
    read = list(csv.DictReader(io.StringIO(kernel_csv(rows))))
    assert list(read[0]) == ["phase", "kind", "op", "count", "latency_s", "share"]
    assert [(r["phase"], r["kind"], r["op"]) for r in read] == [
        (r.phase, str(r.kind), r.op) for r in rows
    ]
    assert [float(r["latency_s"]) for r in read] == [r.latency_s for r in rows]


# ---------------------------------------------------------------- counters

OFFSET_S = 1796000000.0
"""Unix time less the clock of the meter in the tests below."""
BEGIN_S = BASE_NS * 1e-9 + START_US * 1e-6 - OFFSET_S
"""The trace's start on the clock of the meter: 32754.98 s."""


def board(**samples: Any) -> DeviceSeries:
    shifted = {n: tuple((BEGIN_S + t, v) for t, v in pairs) for n, pairs in samples.items()}
    return DeviceSeries(uuid="GPU-a", **shifted)


def counters(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return [e for e in document["traceEvents"] if e["ph"] == "C"]


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_samples_become_counters_at_the_same_moment_of_the_trace(tmp_path: Path, name: str) -> None:
    source = serving_steps().write(tmp_path / "trace.json")
    series = board(
        instant_power=((0.0001, 655.0), (0.0005, 690.5)),
        sm_clock=((0.0002, 1.98e9),),
        temperature=((0.0003, 56.0),),
    )
    out = tmp_path / name
    annotate(source, {0: series}, out, unix_offset_s=OFFSET_S)
    found = {(e["name"], round(e["ts"] - START_US)): (e["pid"], e["args"]) for e in counters(out)}
    assert found == {
        ("GPU 0 power", 100): (0, {"W": 655.0}),
        ("GPU 0 power", 500): (0, {"W": 690.5}),
        ("GPU 0 SM clock", 200): (0, {"MHz": pytest.approx(1980)}),
        ("GPU 0 temperature", 300): (0, {"°C": 56.0}),
    }
    assert kernel_table(out) == kernel_table(source)


def test_all_that_the_trace_held_is_kept_as_it_was(tmp_path: Path) -> None:
    source = serving_steps().write(tmp_path / "trace.json")
    out = tmp_path / "out.json"
    annotate(source, {0: board(temperature=((0.0, 50.0),))}, out, unix_offset_s=OFFSET_S)
    before, after = json.loads(source.read_text()), json.loads(out.read_text())
    assert [e for e in after["traceEvents"] if e["ph"] != "C"] == before["traceEvents"]
    assert {**after, "traceEvents": 0} == {**before, "traceEvents": 0}


def test_samples_outside_of_the_trace_do_not_stretch_it(tmp_path: Path) -> None:
    source = serving_steps().write(tmp_path / "trace.json")  # 2 to 985 µs
    series = board(
        instant_power=((-60.0, 80.0), (-0.01, 120.0), (0.0004, 600.0), (30.0, 70.0)),
        temperature=((-0.9, 41.0),),
    )
    out = tmp_path / "out.json"
    annotate(source, {0: series}, out, unix_offset_s=OFFSET_S)
    # The last value before the start holds at the start, also that of a slow sensor.
    assert [(round(e["ts"] - START_US), e["args"]) for e in counters(out)] == [
        (2, {"W": 120.0}),
        (400, {"W": 600.0}),
        (2, {"°C": 41.0}),
    ]


def test_each_board_gets_tracks_under_its_device_and_averages_say_so(tmp_path: Path) -> None:
    source = serving_steps().write(tmp_path / "trace.json")
    out = tmp_path / "out.json"
    annotate(
        source,
        {0: board(instant_power=((0.0001, 1.0),)), 3: board(average_power=((0.0001, 2.0),))},
        out,
        unix_offset_s=OFFSET_S,
    )
    assert [(e["name"], e["pid"]) for e in counters(out)] == [
        ("GPU 0 power", 0),
        ("GPU 3 power, 1 s average", 3),
    ]


def test_a_board_without_samples_adds_nothing_and_an_empty_trace_stays_valid(
    tmp_path: Path,
) -> None:
    source, out = tmp_path / "trace.json", tmp_path / "out.json"
    source.write_text('{"traceEvents": [ ], "baseTimeNanoseconds": 0}')
    annotate(source, {0: board()}, out, unix_offset_s=OFFSET_S)
    assert out.read_text() == source.read_text()


def test_clocks_that_do_not_meet_are_refused(tmp_path: Path) -> None:
    source = serving_steps().write(tmp_path / "trace.json")
    series = board(instant_power=((0.0001, 655.0), (0.5, 690.5)))
    with pytest.raises(OutOfRangeError, match=r"GPU-a: samples of power begin -1e\+03 s from the"):
        annotate(source, {0: series}, tmp_path / "out.json", unix_offset_s=OFFSET_S - 1000)
    assert not (tmp_path / "out.json").exists()


def test_traces_without_a_base_time_hold_unix_microseconds(tmp_path: Path) -> None:
    source, out = tmp_path / "trace.json", tmp_path / "out.json"
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1.7e15, "dur": 50.0}
    source.write_text(json.dumps({"traceEvents": [event]}))
    series = DeviceSeries(uuid="GPU-a", instant_power=((100.00002, 500.0),))
    annotate(source, {0: series}, out, unix_offset_s=1.7e9 - 100.0)
    (counter,) = counters(out)
    assert counter["ts"] - 1.7e15 == pytest.approx(20, abs=1)
