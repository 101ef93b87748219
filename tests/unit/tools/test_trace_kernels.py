"""`shardline trace kernels`: kinds by name, times of steps, gaps, and a real run on the CPU."""

from __future__ import annotations

import json

import pytest

from shardline.cli.main import main
from shardline.tools.trace_kernels import kind_of
from tests.e2e.tiny import run
from tests.unit.tools.test_trace_overlap import event, nccl, step, write


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>", "matrix products"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32", "matrix products"),
        ("gather_matmul", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128", "attention"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("triton_tem_fused_flex_attention_3", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<Adam>", "optimizer and clipping"),
        ("adam_kernel", "optimizer and clipping"),
        ("squares_kernel", "optimizer and clipping"),
        ("loss_kernel", "loss"),
        ("triton_red_fused__log_softmax_nll_loss_forward_2", "loss"),
        ("triton_poi_fused_mm_mul_silu_7", "compiled elementwise"),
        ("triton_per_fused__fused_rms_norm_flash_1", "compiled elementwise"),
        ("Memcpy DtoH (Device -> Pinned)", "casts and copies"),
        ("Memset (Device)", "casts and copies"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "casts and copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>", "elementwise"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("send_rows_kernel", "rows of experts"),
        ("swiglu_gradient_kernel", "SwiGLU and float8"),
        ("add_up_kernel", "rows of experts"),
        ("void at::native::radixSortKVInPlace<2>", "other"),
        ("aten::mm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::_fused_adamw_", "optimizer and clipping"),
        ("aten::_log_softmax", "loss"),
        ("aten::copy_", "casts and copies"),
        ("aten::mul", "elementwise"),
        ("aten::add_", "elementwise"),
        ("shardline::expert_put", "rows of experts"),
        ("aten::view", "other"),
    ],
)
def test_kinds_follow_from_names(name, kind):
    assert kind_of(name) == kind


def launched(number, name, at, start, end, kind="kernel"):
    launch = event("cuda_runtime", "cudaLaunchKernel", at, at + 1, correlation=number)
    return [launch, event(kind, name, start, end, thread=7, correlation=number)]


def shown(capsys, *words):
    assert main(["trace", "kernels", *map(str, words), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def amounts(rows):
    return {row.get("name", row["kind"]): (row["ms"], row["launches"]) for row in rows}


def gpu_trace(path):
    """
    host      0 [ step 0 --------- ] 1000 [ step 1 ------------ ] 2000
    GPU           100 [ mm ] 500   [ nccl 600 - 900 ]   1000 [ mm ] 1400 [ adam ] 1500   [ mm ] 2100
    step 0    0 ................................................... 1400
    step 1                                                           1400 ................... 2100
    """
    events = [
        step(0, 0, 1000),
        step(1, 1000, 2000),
        *launched(1, "nvjet_a", 50, 100, 500),
        nccl(600, 900, "5", correlation=9),
        *launched(2, "nvjet_a", 900, 1000, 1400),
        *launched(3, "adam_kernel", 1100, 1400, 1500),
        *launched(4, "gemm_b", 1200, 1900, 2100),
        event("cpu_op", "aten::mm", 0, 900),  # the host does not count where there is a GPU
    ]
    return write(path, events)


def test_steps_of_a_gpu(tmp_path, capsys):
    found = shown(capsys, gpu_trace(tmp_path / "trace.json"))
    assert (found["device"], found["steps"], found["step_ms"]) == ("gpu", 2, (1.4 + 0.7) / 2)
    assert amounts(found["kinds"]) == {
        "matrix products": (pytest.approx((0.8 + 0.2) / 2), 1.5),
        "collectives": (pytest.approx(0.15), 0.5),
        "optimizer and clipping": (pytest.approx(0.05), 0.5),
    }
    assert found["kinds"][0]["kind"] == "matrix products"
    assert amounts(found["top"])["nvjet_a"] == (pytest.approx(0.4), 1)
    # 0 to 100, 500 to 600 and 900 to 1000 in the first step, 1500 to 1900 in the second
    assert found["idle"] == {"ms": pytest.approx(0.35), "share": pytest.approx(0.35 / 1.05), "gaps": 2}


def test_the_table_and_its_length(tmp_path, capsys):
    path = gpu_trace(tmp_path / "trace.json")
    assert main(["trace", "kernels", str(path), "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mean of 2 steps on rank 3: 1.050 ms"
    assert lines[2].split() == ["0.500", "47.6%", "1.5", "matrix", "products"]
    assert lines[5].split()[:4] == ["0.350", "33.3%", "2.0", "idle"]
    assert [line.split()[-1] for line in lines[8:]] == ["nvjet_a", "k"]
    assert main(["trace", "kernels", str(path), "--top", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_on_a_cpu_operations_count_without_what_they_call(tmp_path, capsys):
    """
    main      0 [ linear [ mm 10-40 ] ] 50    60 [ c10d [ waiting 65-90 ] ] 90
    """
    events = [
        step(0, 0, 100),
        event("cpu_op", "aten::linear", 0, 50),
        event("cpu_op", "aten::mm", 10, 40),
        event("cpu_op", "aten::view", 5, 8),
        event("cpu_op", "c10d::allreduce_", 60, 90),
        event("communication_wait", "all_reduce", 65, 90, "waiting for tp", axis="tp", ranks=[0, 1]),
        event("cpu_op", "aten::mm", 0, 100, thread=3),  # of a backend's thread
        event("cpu_op", "aten::mm", 200, 300),  # after the step
    ]
    found = shown(capsys, write(tmp_path / "trace.json", events))
    assert amounts(found["kinds"]) == {
        "matrix products": (pytest.approx(0.047), 2),
        "other": (pytest.approx(0.003), 1),
        "collectives": (pytest.approx(0.03), 2),
    }
    assert found["idle"]["ms"] == pytest.approx(0.02)
    assert amounts(found["top"])["aten::linear"] == (pytest.approx(0.017), 1)


def test_ranks_of_a_folder_are_averaged(tmp_path, capsys):
    folder = tmp_path / "profile_traces" / "iteration_4"
    folder.mkdir(parents=True)
    for rank, end in ((0, 200), (1, 400)):
        header = {"rank": rank, "first_step": 4, "axes": {}}
        events = [step(0, 0, 1000), event("kernel", "gemm", 0, end)]
        write(folder / f"rank{rank}_trace.json", events, shardline=header)
    found = shown(capsys, tmp_path)
    assert amounts(found["kinds"]) == {"matrix products": (pytest.approx(0.3), 1)}
    assert (found["steps"], len(found["traces"])) == (2, 2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"traceEvents": [', "damaged, or not JSON"),
        ('{"loss": 1}', "it has no list of traceEvents"),
        ('{"traceEvents": []}', "shows neither kernels nor operations"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, capsys, content, said):
    path = tmp_path / "t.json"
    path.write_text(content)
    assert main(["trace", "kernels", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_folder_without_traces_names_the_key_that_makes_some(tmp_path, capsys):
    assert main(["trace", "kernels", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds no traces; profiling.enable_profiling writes some" in line


def test_a_real_run(tmp_path, capsys):
    profiling = {"enable_profiling": True, "profile_freq": 3, "profiler_warmup": 1, "profiler_active": 2}
    run(tmp_path, training__steps=3, **{f"profiling__{key}": value for key, value in profiling.items()})
    capsys.readouterr()
    found = shown(capsys, tmp_path)
    assert (found["device"], found["steps"]) == ("cpu", 2)
    kinds = {row["kind"]: row for row in found["kinds"]}
    expected = {"matrix products", "attention", "optimizer and clipping", "elementwise", "casts and copies"}
    assert expected <= kinds.keys()
    assert kinds["matrix products"]["launches"] >= 2 * 4 * 3  # two layers, four products, three passes
    assert sum(row["ms"] for row in found["kinds"]) + found["idle"]["ms"] == pytest.approx(found["step_ms"])
    assert len(found["top"]) == 15
