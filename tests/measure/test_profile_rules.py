"""Reading of traces, and the rules, on hand-made traces with hand-computed shares."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import space, steps

from tfgpu.errors import InputError
from tfgpu.measure.profiling import (
    findings,
    knobs,
    reading,
    session,
    stages,
    trace,
    verdict,
    writing,
)
from tfgpu.measure.profiling.hooks import Around, Change, Stage
from tfgpu.measure.profiling.reading import Shares
from tfgpu.measure.profiling.session import profile
from tfgpu.measure.profiling.sorting import uses_tensor_cores

TENSOR, PLAIN = "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_nn", "ampere_sgemm_64x64_nn"


def gpu(kernels, copies=(), host=()):
    """A host with two blocks of two steps in 1,000 µs, and one GPU."""
    return {
        "/host:CPU": {"python": [*steps((0, 400), (500, 1000), count=2), *host]},
        "/device:GPU:0": {
            "Stream #7(Compute)": list(kernels),
            "Stream #9(MemcpyH2D)": list(copies),
            "XLA Modules": [("module", 0, 1000, {})],  # a derived line, which is no work of its own
        },
    }


def judged(planes, around=None):
    return verdict.judge(trace.of_space(space(planes)), lambda retraced: around or Around())


def test_a_gpus_time_is_divided_as_on_paper():
    report = judged(
        gpu(
            kernels=[
                (TENSOR, 0, 300, {"tf_op": "dense/MatMul:MatMul"}),
                (PLAIN, 300, 350, {"tf_op": "dense_1/MatMul:MatMul"}),
                ("relu_kernel", 520, 620, {}),
                ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 600, 800, {}),
            ],
            copies=[("MemcpyH2D", 800, 850, {})],
            host=[("IteratorGetNextOp::DoCompute", 840, 900, {"id": 1})],
        )
    )
    assert report.verdict == "launch-bound"  # 0.45 computes: less than two thirds
    expected = {"compute": 0.45, "communication": 0.18, "copy in": 0.05, "input": 0.05, "launch": 0.17, "between": 0.1}
    assert {name: share for name, share in report.shares.parts.items() if share} == pytest.approx(expected)
    assert report.step_s == pytest.approx(250e-6) and report.window.steps == 4
    assert report.tensor_cores == pytest.approx((300 / 450, 350 / 450))
    assert report.gaps[0].seconds == pytest.approx(380e-6) and report.gaps[0].during == "communication"
    assert (report.top[0].name, report.top[0].share) == ("dense/MatMul:MatMul", pytest.approx(300 / 450))
    assert not any("No GPU" in text for text in report.unknown)


def test_of_several_gpus_the_mean_counts():
    planes = gpu(kernels=[(TENSOR, 0, 1000, {})])
    planes["/device:GPU:1"] = {"Stream #7(Compute)": [(TENSOR, 0, 400, {})]}
    report = judged(planes)
    assert report.shares["compute"] == pytest.approx(0.7) and report.verdict == "compute-bound"


@pytest.mark.parametrize(
    "parts, expected",
    [
        ({"compute": 0.67, "input": 0.33}, "compute-bound"),
        ({"compute": 0.6, "input": 0.3, "launch": 0.1}, "input-bound"),
        ({"compute": 0.6, "copy in": 0.3, "launch": 0.1}, "input-bound"),
        ({"compute": 0.4, "communication": 0.4, "launch": 0.2}, "communication-bound"),
        ({"compute": 0.4, "launch": 0.21, "between": 0.2, "input": 0.19}, "launch-bound"),
        ({"compute": 0.4, "launch": 0.1, "between": 0.1, "python": 0.1, "input": 0.3}, "python-bound"),
        ({"compute": 0.4, "compile": 0.2, "graphs": 0.2, "between": 0.2}, "compile-bound"),
        ({"compute": 0.4, "compile": 0.1, "between": 0.2, "input": 0.3}, "python-bound"),
        ({"graphs": 0.5, "input": 0.5}, "input-bound"),
        ({}, "unknown"),
    ],
)
def test_the_verdict_is_a_function_of_the_shares(parts, expected):
    assert verdict.bound(Shares(parts, device=True)) == expected


def names(report):
    return [finding.name for finding in report.findings]


def test_tensor_cores_that_lie_idle_are_found():
    busy = [(PLAIN, at, at + 99, {}) for at in range(0, 1000, 100)]
    report = judged(gpu(kernels=busy))
    assert names(report) == ["no_tensor_cores"] and report.findings[0].figures == {"on": 0.0, "could": 1.0}
    assert names(judged(gpu(kernels=[(TENSOR, 0, 1000, {})]))) == []


@pytest.mark.parametrize(
    "kernel, on",
    [
        ("volta_h884gemm_64x128_ldg8_nn", True),
        ("turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu", True),
        ("sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nchw_tilesize128x128x32", True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", True),
        ("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x64_32x4_nn_align8", True),
        ("nvjet_hsh_128x64_64x6_1x2_h_bz_coopA_NNN", True),
        ("ampere_sgemm_128x64_nn", False),
        ("volta_sgemm_32x32_sliced1x4_nn", False),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW", False),
    ],
)
def test_kernels_of_tensor_cores_are_known_by_name(kernel, on):
    assert uses_tensor_cores(kernel) is on


def test_collectives_that_nothing_hides_are_found():
    report = judged(gpu(kernels=[(TENSOR, 0, 300, {}), ("ncclDevKernel_AllReduce", 300, 1000, {})]))
    assert (report.verdict, names(report)) == ("communication-bound", ["slow_collectives"])
    hidden = judged(gpu(kernels=[(TENSOR, 0, 1000, {}), ("ncclDevKernel_AllReduce", 300, 1000, {})]))
    assert (hidden.verdict, names(hidden)) == ("compute-bound", [])


def test_short_kernels_are_a_tiny_batch():
    kernels = [("relu_kernel", at, at + 3, {}) for at in range(0, 1000, 10)]
    batch = [("Iterator::Root::Batch", 0, 1, {"name": "BatchDataset:1", "id": 7, "batch_size": 4})]
    planes = gpu(kernels)
    planes["/host:CPU"]["input"] = batch
    found = judged(planes).findings[0]
    assert (found.name, found.figures["rows"]) == ("tiny_batch", 4) and ".batch(32)" in found.knob


def host(**lines):
    return {"/host:CPU": lines}


def test_a_trace_without_a_gpu_claims_nothing_of_one():
    report = judged(host(python=steps((0, 1000)), pool=[("dense/MatMul:MatMul", 0, 900, {})]))
    assert report.verdict == "compute-bound" and report.tensor_cores is None and names(report) == []
    assert "Tensor Cores, kernels and gaps between kernels are unknown" in report.unknown[0]
    there_is_one = judged(host(python=steps((0, 1000))), Around(devices=("GPU:0",)))
    assert any("There is a GPU" in text for text in there_is_one.unknown)


def test_an_empty_trace_is_unknown():
    report = judged({})
    assert report.verdict == "unknown" and report.findings == () and report.step_s is None
    assert "nothing was recorded" in writing.text(report)


def test_steps_are_found_without_marks_too():
    calls = [
        ("step", at, at + 60, {"tf_function_call": "notTraced-nonXla", "tracing_count": 1}) for at in (0, 100, 200)
    ]
    inner = [("helper", 10, 20, {"tf_function_call": "notTraced-nonXla", "tracing_count": 1})] * 1
    window = judged(host(python=[*calls, *inner])).window
    assert (window.marked_by, window.steps, window.start, window.end) == ("step", 2, 0, 200_000)
    fetches = [("EagerLocalExecute: IteratorGetNext", at, at + 10, {}) for at in (0, 100)]
    assert judged(host(python=fetches)).window.marked_by == "batches"
    marks = [("mine", at, at + 50, {"step_num": at, "_r": 1}) for at in (0, 100)]
    assert judged(host(python=[*calls, *marks])).window.marked_by == "script"
    assert judged(host(python=[*steps((0, 50), kind="test"), *steps((100, 150))])).window.start == 100_000


def work(end):
    """Operations that take all the time up to `end`."""
    return [("dense/MatMul:MatMul", 0, end, {})]


def call(at, traced, count, name="step"):
    way = "traced-nonXla" if traced else "notTraced-nonXla"
    return name, at, at + 90, {"tf_function_call": way, "tracing_count": count}


@pytest.mark.parametrize(
    "change, text, knob",
    [
        (Change("step", 3, "epoch", ("0", "1", "2"), "python"), "`epoch` changes: 0, 1, 2.", "tf.constant(epoch)"),
        (Change("step", 3, "x", ("float32(4, 8)", "float32(5, 8)"), "shape"), "`x` changes", "reduce_retracing=True"),
        (Change("other", 3, "x", ("1", "2"), "python"), "unknown", "reduce_retracing=True"),
    ],
)
def test_retracing_names_the_function_and_the_argument(change, text, knob):
    calls = [call(0, True, 2), call(100, False, 2), call(200, True, 3), call(300, False, 3)]
    found = judged(host(python=calls, pool=work(400)), Around(changes=(change,))).findings[0]
    assert (found.name, found.where, found.share) == ("retracing", "step", pytest.approx(180 / 390))
    assert "2 of 4 calls" in found.seen and text in found.seen and knob in found.knob
    healthy = [call(0, True, 1), call(100, False, 1), call(200, False, 1)]
    assert names(judged(host(python=healthy, pool=work(300)))) == []


def test_recreated_functions_are_distinguished():
    (found,) = judged(host(python=[call(at, True, 1) for at in (0, 100, 200)])).findings
    assert "a new tf.function of that name" in found.seen and "once, before the loop" in found.knob


def test_the_loops_of_tfgpu_itself_are_no_functions_made_anew():
    loops = [call(at, True, 1, name="wrapper") for at in (0, 100, 200)]
    marks = steps((0, 95), (100, 195), (200, 295), eager=True)  # the calls are above
    assert names(judged(host(python=[*marks, *loops], pool=[("MatMul:MatMul", 0, 290, {})]))) == []
    again = [call(at, True, count, name="wrapper") for at, count in ((0, 2), (100, 3), (200, 4))]
    assert "retracing" in names(judged(host(python=[*marks, *again])))


def test_xla_that_compiles_again_is_found():
    name = "a_inference_step_76__XlaMustCompile_true_.2"
    compiles = [("CpuCompiler::RunBackend", at, at + 50, {"name": name}) for at in (10, 110, 210)]
    report = judged(host(python=[*steps((0, 260)), *compiles]))
    (found,) = report.findings
    assert report.verdict == "compile-bound"
    assert (found.name, found.where, found.figures["times"]) == ("recompiling", "step", 3)
    assert found.share == pytest.approx(150 / 260)


def test_a_read_in_each_step_is_found_and_one_now_and_then_is_not():
    marks = steps(*[(at, at + 100) for at in range(0, 1000, 100)])
    work = [("dense/MatMul:MatMul", at, at + 80, {}) for at in range(0, 1000, 100)]
    reads = [("tfgpu.host_read", at + 85, at + 95, {"where": "train.py:31"}) for at in range(0, 1000, 100)]
    (found,) = judged(host(python=[*marks, *reads], pool=work)).findings
    assert (found.name, found.where, found.share) == ("host_read", "train.py:31", pytest.approx(0.1))
    assert names(judged(host(python=[*marks, *reads[:3]], pool=work))) == []


def iterator(name, start, end, number, parent, **more):
    return (
        f"Iterator::Root::{name}",
        start,
        end,
        {"name": f"{name}Dataset:{number}", "id": number, "parent_id": parent, **more},
    )


def test_a_stage_works_for_as_long_as_it_lasts_less_the_one_before():
    line = [
        iterator("Batch", 0, 1000, 3, 99),
        iterator("Map", 10, 910, 2, 3),
        iterator("Shuffle", 20, 120, 1, 2),
    ]
    found = {stage.kind: stage for stage in stages.input_stages(trace.of_space(space(host(input=line))).host)}
    work = {kind: round(1e6 * stage.work_s) for kind, stage in found.items()}
    assert work == {"Batch": 100, "Map": 800, "Shuffle": 100} and found["Map"].index == 2


def test_a_parallel_stage_works_in_its_own_threads():
    waiting = [iterator("ParallelMapV2", 0, 1000, 2, 99, parallelism=4)]
    runner = []
    for run, at in enumerate((0, 100)):
        runner.append(("ParallelMapProduce", at, at + 50, {"element_id": run}))
        runner.append(iterator("Shuffle", at, at + 10, 1, 2))
        runner.append(("InstantiatedCapturedFunction::RunAsync", at + 20, at + 30, {"id": 500 + run}))
    pool = [("ExecutorState::Process", at + 30, at + 420, {"id": 500 + run}) for run, at in enumerate((0, 400))]
    pool += [("Decode:DecodeJpeg", 40, 340, {})]
    recorded = trace.of_space(space(host(input=waiting, runner=runner, pool=pool)))
    found = stages.input_stages(recorded.host)[0]
    assert (found.kind, found.calls, found.parallel) == ("ParallelMap", 2, 4)
    assert found.work_s == pytest.approx((400 + 700) * 1e-6) and found.busy_s == pytest.approx(found.work_s / 4)
    assert found.operations[0] == ("DecodeJpeg", pytest.approx(300e-6))
    assert not verdict.judge(recorded).top  # what the input computes is no work of the model


def test_a_function_of_the_last_stage_is_its_work_though_the_root_bears_its_name():
    name = "fused(MapDataset:1,BatchDatasetV2:2)"
    waiting = [("Iterator::Root", 0, 1000, {"name": name, "id": 3})]
    waiting += [("Iterator::Root::MapAndBatch", 5, 995, {"name": name, "id": 2, "parent_id": 3, "parallelism": 2})]
    runner = [
        ("MapAndBatchProduce", 0, 50, {"element_id": 1}),
        iterator("TensorSlice", 0, 10, 1, 2),
        ("InstantiatedCapturedFunction::RunAsync", 20, 30, {"id": 500}),
    ]
    done = [("ExecutorDoneCallback", 400, 420, {"id": 500})]
    found = stages.input_stages(trace.of_space(space(host(get=waiting, runner=runner, pool=done))).host)
    assert (found[0].name, found[0].kind, found[0].calls) == (name, "MapAndBatch", 1)
    assert found[0].work_s == pytest.approx(400e-6) and found[0].index == 1


@pytest.mark.parametrize("operation, kinds", [("PyFunc:PyFunc", ["Generator"]), ("Next:RemoteCall", [])])
def test_a_generator_works_only_where_it_is_pythons(operation, kinds):
    feed = [
        iterator("Generator", 0, 900, 6, 99),
        ("InstantiatedCapturedFunction::Run", 10, 890, {"id": 500}),
        ("ExecutorState::Process", 20, 880, {"id": 500}),
        (operation, 30, 870, {}),
    ]
    found = stages.input_stages(trace.of_space(space(host(feed=feed))).host)
    assert [stage.kind for stage in found] == kinds


def test_an_input_without_an_outstanding_stage_is_still_slow():
    wait = [("IteratorGetNextOp::DoCompute", at, at + 80, {"id": 1}) for at in range(0, 1000, 100)]
    planes = host(python=[*steps((0, 1000), count=10), *wait], feed=[iterator("Map", 0, 5, 2, 99)])
    (found,) = judged(planes).findings
    assert (found.name, found.where) == ("slow_input", "") and "no stage stands out" in found.seen


def slow_input(around):
    wait = [("IteratorGetNextOp::DoCompute", at, at + 80, {"id": 1}) for at in range(0, 1000, 100)]
    feed = [iterator("Map", at, at + 80, 2, 99) for at in range(0, 1000, 100)]
    return judged(host(python=[*steps((0, 1000), count=10), *wait], feed=feed), around)


def test_a_slow_map_is_named_where_its_function_is_known_without_doubt():
    stage = Stage("Map", 2, "augment", "train.py:4")
    (found,) = slow_input(Around(stages=(stage, Stage("Map", 5, "other", "train.py:9")))).findings
    assert (found.name, found.where) == ("slow_map", "augment (train.py:4)") and found.share == pytest.approx(0.8)
    assert "dataset.map(augment, num_parallel_calls=tf.data.AUTOTUNE)" in found.knob
    doubtful = (Stage("Map", 4, "augment", "train.py:4"), Stage("Map", 5, "other", "train.py:9"))
    assert slow_input(Around(stages=doubtful)).findings[0].where == "MapDataset:2"


@pytest.mark.parametrize(
    "shapes, batch",
    [("[16,8,8,1] [16]", 16), ("[?,8] [?]", None), ("[16,8] []", None), ("<unknown> [16]", None), ("", None)],
)
def test_rows_of_a_step_are_read_from_the_shapes_where_they_are_sure(shapes, batch):
    root = [("Iterator::Root", 0, 10, {"name": "root", "id": 1, "shapes": shapes})]
    assert judged(host(python=steps((0, 1000)), feed=root)).batch == batch


def test_input_that_no_worker_shards_is_found():
    calls = [call(at, False, 1) for at in (0, 100, 200)]
    feed = [iterator("Map", 0, 10, 2, 99)]
    pool = work(300)
    (found,) = judged(host(python=calls, feed=feed, pool=pool), Around(workers=4)).findings
    assert found.name == "unsharded_input" and found.share is None and "unless you divide the files" in found.seen
    sharded = [*feed, iterator("Shard", 0, 5, 1, 2)]
    assert names(judged(host(python=calls, feed=sharded, pool=pool), Around(workers=4))) == []
    assert names(judged(host(python=calls, feed=feed, pool=pool), Around(workers=1))) == []


def test_python_in_the_compiled_step_is_found():
    work = [("EagerPyFunc:EagerPyFunc", 100, 300, {}), ("MatMul:MatMul", 300, 990, {})]
    (found,) = judged(host(python=steps((0, 1000)), pool=work)).findings
    assert (found.name, found.share) == ("python_in_step", 0.2)


def test_work_between_steps_is_found_unless_it_is_one_pause():
    marks = [(at, at + 60) for at in range(0, 1000, 100)]
    work = [("MatMul:MatMul", start, end, {}) for start, end in marks]
    assert names(judged(host(python=steps(*marks), pool=work))) == ["work_between_steps"]
    once = [(0, 300), (700, 1000)]
    work = [("MatMul:MatMul", start, end, {}) for start, end in once]
    report = judged(host(python=steps(*once), pool=work))
    assert (report.verdict, names(report)) == ("python-bound", ["python_time"])
    assert "a single pause" in report.findings[0].seen and "record more steps" in report.findings[0].knob


def test_pythons_time_between_the_calls_of_a_function_is_its_own():
    calls = [call(at, False, 1) for at in range(0, 2000, 400)]
    report = judged(host(python=calls, pool=[("MatMul:MatMul", at, at + 90, {}) for at in range(0, 2000, 400)]))
    assert report.verdict == "python-bound" and names(report) == ["work_between_steps"]
    assert report.shares["between"] == pytest.approx(310 / 400) and report.shares["launch"] == 0
    assert "several steps per call: @tf.function" in report.findings[0].knob
    marks = [("mine", at, at + 400, {"step_num": at, "_r": 1}) for at in range(0, 2000, 400)]
    report = judged(host(python=[*marks, *calls]))
    assert report.verdict == "python-bound" and report.shares["python"] == pytest.approx(310 / 400)
    knob = judged(host(python=steps(*[(at, at + 90) for at in range(0, 2000, 400)]))).findings[0].knob
    assert 'steps_per_execution="auto"' in knob and "every_batch" in knob


def blocks_of_one(work, by):
    """Ten steps of 80 µs in 100 µs each, of which `work` µs compute."""
    marks = [(at, at + 80) for at in range(0, 1000, 100)]
    pool = [("MatMul:MatMul", at, at + work, {}) for at, _ in marks]
    return judged(host(python=steps(*marks, set_by=by), pool=pool))


def test_a_callback_that_looks_at_single_batches_is_named():
    report = blocks_of_one(20, "callbacks: Watch, TensorBoard")  # in 980 µs: 10 x 60 launch, 9 x 20 lie between
    (found,) = report.findings
    assert (found.name, found.where, report.verdict) == ("batch_callback", "Watch, TensorBoard", "launch-bound")
    assert found.share == pytest.approx(780 / 980) and found.figures == {"share": found.share}
    assert 'TensorBoard: update_freq="epoch"' in found.knob and "Watch: `every_batch = False`" in found.knob
    assert "steps_per_execution" not in found.knob and "Watch, TensorBoard need each batch" in found.seen
    assert names(blocks_of_one(70, "callbacks: Watch")) == ["batch_callback"]  # 280 of 980 µs
    assert names(blocks_of_one(80, "callbacks: Watch")) == ["batch_callback"]  # 180 of 980 µs
    assert names(judged(host(python=steps((0, 980), set_by="callbacks: Watch"), pool=work(900)))) == []


@pytest.mark.parametrize(
    ("by", "launching", "between"),
    [
        ("pace", "jit_compile=True", "dataset.repeat(10)"),
        ("steps_per_execution", 'steps_per_execution="auto"', 'steps_per_execution="auto"'),
        ("steps_per_call", "tfgpu.Trainer(model) without steps_per_call", "without steps_per_call"),
        ("train_on_batch", "model.fit(dataset)", "model.fit(dataset)"),
        ("test_on_batch", "model.evaluate(dataset)", "model.evaluate(dataset)"),
        ("run_eagerly", "run_eagerly=False", "run_eagerly=False"),
        ("callbacks: Watch", "`every_batch = False`", "`every_batch = False`"),
    ],
)
def test_the_fix_does_not_conflict_with_what_sets_the_steps(by, launching, between):
    window = blocks_of_one(20, by).window
    assert (window.set_by, window.steps) == (by, 10)
    assert launching in knobs.launches(window) and between in knobs.python(window)
    for knob in (knobs.launches(window), knobs.python(window)):
        assert ("steps_per_execution" in knob) == (by == "steps_per_execution")


def test_xla_is_no_fix_if_it_is_already_used():
    pace, number = (judged(host(python=steps((0, 1000), set_by=by, jit=1))) for by in ("pace", "steps_per_execution"))
    assert names(pace) == ["launching"] and pace.findings[0].knob.startswith("If other processes")
    assert 'compile(..., steps_per_execution="auto").' in number.findings[0].knob
    without = judged(host(python=steps((0, 1000), set_by="pace", jit=0)))
    assert "jit_compile=True" in without.findings[0].knob


def test_tiny_batches_get_the_fix_for_their_caller():
    assert [names(blocks_of_one(20, by)) for by in ("train_on_batch", "pace")] == [["tiny_batch"]] * 2
    (found,) = blocks_of_one(20, "train_on_batch").findings
    assert "model.fit(dataset)" in found.knob and ".batch(256)" in found.knob
    report = judged(host(python=steps((0, 1000), set_by="train_on_batch"), pool=work(100)))  # 100 µs: not tiny
    assert names(report) == ["launching"] and "model.fit(dataset)" in report.findings[0].knob


def test_an_eager_fit_is_python_bound_like_a_loop():
    marks, events = [(0, 400), (500, 900)], []
    for begin, _ in marks:  # 20 operations of 10 µs, of which 4 compute; then a read of 50 µs, and Python's own lines
        for at in range(begin, begin + 200, 10):
            events.append(("EagerExecute", at, at + 10, {"eager_op": "Mul"}))
            events.append(("KernelAndDeviceFunc::Run", at + 5, at + 9, {}))
        events.append(("tfgpu.host_read", begin + 300, begin + 350, {"where": "model.py:8"}))
    report = judged(host(python=[*steps(*marks, eager=True, set_by="run_eagerly"), *events]))
    expected = {"compute": 160 / 900, "python": 640 / 900, "between": 100 / 900}
    assert {name: share for name, share in report.shares.parts.items() if share} == pytest.approx(expected)
    assert (report.verdict, names(report)) == ("python-bound", ["eager_step", "host_read"])
    assert [finding.share for finding in report.findings] == pytest.approx([540 / 900, 100 / 900])
    assert "run_eagerly=False" in report.findings[0].knob


def test_what_python_does_around_a_call_in_a_block_is_its_own():
    calls = [call(at + 5, False, 1, name="wrapper") for at in (0, 100)]
    report = judged(host(python=[*steps((0, 100), (100, 200), eager=True), *calls]))
    assert report.shares["python"] == pytest.approx(0.1) and report.shares["launch"] == pytest.approx(0.9)


def one_block(*events, kernels=()):
    return judged({**host(python=[*steps((0, 1000), count=4), *events]), "/device:GPU:0": {"Stream #7": list(kernels)}})


@pytest.mark.parametrize(
    "events, bound, knob",
    [
        ([], "launch-bound", "jit_compile"),
        ([("tf.function-graph_building", 100, 900, {})], "compile-bound", "drop_remainder=True"),
        ([("CpuCompiler::RunBackend", 100, 900, {"name": "a"})], "compile-bound", "--skip 20 --calls 100"),
        ([("tfgpu.host_read", 100, 900, {"where": "a.py:1"})], "python-bound", "more steps per call"),
        ([("IteratorGetNextOp::DoCompute", 100, 900, {})], "input-bound", "prefetch"),
    ],
)
def test_every_verdict_has_a_fix(events, bound, knob):
    kernels = [("long_kernel", 0, 100, {})]
    report = one_block(*events, kernels=kernels)
    assert report.verdict == bound
    (found,) = [one for one in report.findings if one.name in (*verdict.NAMES, *verdict.SPEAKING[bound])]
    assert found.knob and knob in found.knob and found.share > 1 / 3
    assert found.name in writing.text(report)


def test_small_collectives_that_still_bound_the_steps_have_a_fix():
    kernels = [("long_kernel", 0, 600, {}), ("ncclDevKernel_AllReduce", 600, 740, {})]
    report = one_block(("IteratorGetNextOp::DoCompute", 740, 870, {}), kernels=kernels)
    assert report.shares["communication"] == pytest.approx(0.14) and findings.WORTH > 0.14
    assert (report.verdict, names(report)) == ("communication-bound", ["communication"])


def test_a_loop_of_eager_operations_is_pythons():
    fetches = [("EagerLocalExecute: IteratorGetNext", at, at + 10, {}) for at in range(0, 1000, 100)]
    report = judged(host(python=fetches))
    assert (report.verdict, names(report)) == ("python-bound", ["python_time"])
    assert "decorate the step with @tf.function" in report.findings[0].knob


pairs = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda p: (min(p), max(p))), max_size=12)


@given(pairs, pairs, pairs)
def test_time_is_divided_without_loss_or_overlap(first, second, third):
    found = trace.divided({"a": first, "b": second, "c": [*third, (5, 50)]}, 5, 50)
    owner = {}
    for name, parts in found.items():
        for start, end in parts:
            for at in range(start, end):
                assert owner.setdefault(at, name) == name
    assert sorted(owner) == list(range(5, 50))
    for at, name in owner.items():
        claims = {"a": first, "b": second, "c": third}
        best = next((n for n, spans_ in claims.items() if any(s <= at < e for s, e in spans_)), "c")
        assert name == best


def test_all_files_are_written_and_can_be_read(tmp_path):
    planes = gpu(kernels=[(TENSOR, 0, 300, {}), ("relu", 500, 900, {})])
    recorded = tmp_path / "plugins" / "profile" / "1" / "host.xplane.pb"
    recorded.parent.mkdir(parents=True)
    recorded.write_bytes(space(planes).SerializeToString())
    report = session.read_trace(tmp_path, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(writing.FILES)
    found = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert found["verdict"] == report.verdict == "compute-bound" and found["shares"]["compute"] == 0.7
    html = (tmp_path / "out" / "profile.html").read_text()
    assert html.count("<svg") == 3 and "src=" not in html and "compute-bound" in html
    with pytest.raises(InputError, match="There is no trace in"):
        trace.read(tmp_path / "out" / "none")


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "is not a complete trace"), (b"no trace at all\n", "is not a complete trace"), (b"", "is empty")],
)
def test_a_broken_trace_is_named(content, said, tmp_path):
    whole = space(gpu(kernels=[(TENSOR, 0, 300, {})])).SerializeToString()
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(whole[:-3] if content is None else content)
    with pytest.raises(InputError, match=rf"host\.xplane\.pb {said}"):
        session.read_trace(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_where_the_folder_goes_is_told_before_anything_is_recorded(tmp_path):
    (tmp_path / "notes").write_text("kept")
    for folder in (tmp_path / "notes", tmp_path / "notes" / "profile"):
        with pytest.raises(InputError, match="notes is a file"), profile(folder):
            raise AssertionError("not reached")
    assert (tmp_path / "notes").read_text() == "kept"


def test_every_rule_has_its_row_in_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "profiling.md").read_text()
    for name in (*findings.RULES, *verdict.NAMES, *reading.PARTS):
        assert f"| `{name}` |" in page, name
    for name in ("compute-bound", *verdict.OVERHEADS, *verdict.SPEAKING):
        assert f"**{name}**" in page, name
