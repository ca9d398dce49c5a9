"""Recommendations: right for the cause, never against the evidence."""

from __future__ import annotations

import gzip
import importlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from analysis.training_loop import (
    CALL,
    HIDDEN,
    MAIN,
    OUTPUT,
    PARAMETERS,
    TORCH,
    UPDATE,
    USER,
    TrainingLoop,
)
from builders import MIB, alloc, block, columns, frame, oom, segment, segment_alloc, snapshot
from msgspec.structs import replace
from oom_messages import GIB, case_of, log_of, message, new_style, old_style, process
from oom_snapshots import LINE, calm, full, holes, interleaved, late_free, leaking, model_building

from fragdoctor.diagnosis.bench import Attempt, Effect
from fragdoctor.diagnosis.decision import SLIM_MARGIN_SHARE
from fragdoctor.diagnosis.pipeline import build_contexts, diagnose
from fragdoctor.diagnosis.remedies.allocator_settings import ExpandableSegments, GarbageCollection
from fragdoctor.diagnosis.remedies.attention import attention_frame
from fragdoctor.diagnosis.remedies.capacity import first_enough
from fragdoctor.diagnosis.remedies.catalogue import REMEDIES, rank
from fragdoctor.diagnosis.remedies.leaks import gather_on_host, is_evaluation
from fragdoctor.diagnosis.remedies.outside_pytorch import free_other_process
from fragdoctor.diagnosis.remedies.remedy import Burden, JudgedCase, Remedy, Weight, helps
from fragdoctor.diagnosis.verdict import CaseEvidence, find_verdict
from fragdoctor.errors import ConfigError
from fragdoctor.future.whatif import WhatIf
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import Case, Overrides
from fragdoctor.model.census import Census, HoldingKind, Owner
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.finding import Confidence, Location
from fragdoctor.model.simulation import Outlook, OutlookBasis, OutlookState, ReplayResult
from fragdoctor.trace.operations import Operations
from fragdoctor.trace.reproduction import reproduce
from fragdoctor.trace.trace import Trace

FRAGMENTED = new_style("500.00 MiB", "3.81 GiB", "488.00 MiB", "2.67 GiB", "673.42 MiB")
FULL = new_style("48.00 MiB", "2.93 GiB", "12.00 MiB", "2.91 GiB", "7.31 MiB")
HUGE = new_style("400.00 GiB", "23.69 GiB", "23.00 GiB", "64.83 MiB", "1.17 MiB")
LIMITED = new_style(
    "384.00 MiB", "16.00 GiB", "13.07 GiB", "2.91 GiB", "17.46 MiB", allowed="3.20 GiB"
)


def codes(diagnosis):
    return [r.code for r in diagnosis.recommendations]


def rejected(diagnosis):
    return {r.code: r for r in diagnosis.rejected}


def by_code(diagnosis, code):
    return next(r for r in diagnosis.recommendations if r.code == code)


def judged(case):
    context = build_contexts(case)[0]
    return JudgedCase(context, find_verdict(CaseEvidence(context, None)))


def test_results_joined_by_an_evaluation_are_left_out_with_the_request_that_failed():
    loop, joined = TrainingLoop(), None
    loop.build()
    for _ in range(3):
        loop.step()
    for i in range(9):
        loop.free(loop.new(MIB, HIDDEN[0]), OUTPUT)
        longer = loop.new((i + 1) * 8 * MIB, OUTPUT)
        if joined:
            loop.free(joined, OUTPUT)
        joined = longer
    loop.refuse(80 * MIB, OUTPUT)
    case = judged(Case(snapshot=loop.snapshot()))
    proposal = next(gather_on_host.propose(case))
    reproduction = reproduce(case.context.analysis.trace)
    ops = Operations.of(reproduction.operations)

    changed = proposal.attempts[0].edit.change(reproduction, ops)

    assert ops.size[ops.is_request].max() == 80 * MIB
    assert changed.size[changed.is_request].max() < 16 * MIB


class Tried(Remedy):
    """A remedy that proposes nothing by itself."""

    def __init__(self, code):
        self.code, self.title = code, f"Try {code}"

    def propose(self, case):
        yield from ()


@pytest.mark.parametrize(
    "case",
    [
        case_of(FRAGMENTED),
        case_of(FULL),
        case_of(LIMITED),
        Case(snapshot=holes()),
        Case(snapshot=full()),
        Case(snapshot=late_free()),
    ],
)
def test_recommendations_have_reason_price_proof_and_rank(case):
    diagnosis = diagnose(case)

    assert list(range(1, len(diagnosis.recommendations) + 1)) == [
        r.rank for r in diagnosis.recommendations
    ]
    for r in diagnosis.recommendations:
        assert r.why, r.code
        assert r.cost, r.code
        assert r.setting or r.change, r.code
        assert r.title[0].isupper(), r.code
    for r in diagnosis.rejected:
        assert r.why, r.code
        assert r.rank == 0


def test_fragmentation_message_gets_settings_with_the_old_variable_name():
    diagnosis = diagnose(case_of(FRAGMENTED))

    best = diagnosis.recommendations[0]

    assert best.code == "expandable-segments"
    assert best.setting == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_capacity_rejects_the_hint_with_the_missing_bytes():
    diagnosis = diagnose(case_of(FULL))

    assert codes(diagnosis)[0] == "smaller-batch"
    assert "Even without holes" in rejected(diagnosis)["expandable-segments"].why
    assert not {"max-split-size", "roundup-divisions"} & set(codes(diagnosis))


def test_single_process_failure_never_gets_empty_cache():
    for text in (FRAGMENTED, FULL):
        diagnosis = diagnose(case_of(text))

        assert "empty-cache" not in codes(diagnosis)
        assert "empty-cache" in rejected(diagnosis)


def test_starved_library_gets_empty_cache_and_headroom():
    log = log_of(message(kind="cublas", requested_bytes=None))

    found = codes(diagnose(Case(oom=log)))

    assert {"empty-cache", "library-headroom"} <= set(found)


def test_setting_that_is_on_is_not_advised_again():
    diagnosis = diagnose(
        Case(snapshot=holes(conf="expandable_segments:True", expandable_segments=True))
    )

    assert "expandable-segments" not in codes(diagnosis)
    assert "on already" in rejected(diagnosis)["expandable-segments"].why
    assert "max-split-size" in rejected(diagnosis)


def test_setting_keeps_what_is_set_already_unless_they_exclude_each_other():
    case = judged(Case(snapshot=holes(conf="roundup_power2_divisions:[256:1,>:8],"
                                            "max_split_size_mb:64")))  # fmt: skip

    assert (
        case.with_present("expandable_segments:True")
        == "roundup_power2_divisions:[256:1,>:8],expandable_segments:True"
    )
    assert case.in_place_of_present("expandable_segments:True") == "expandable_segments:True"
    assert (
        case.with_present("max_split_size_mb:128")
        == "roundup_power2_divisions:[256:1,>:8],max_split_size_mb:128"
    )


def test_old_version_is_told_to_upgrade_for_expandable_segments():
    diagnosis = diagnose(
        case_of(old_style("1.50 GiB", "23.69 GiB", "17.80 GiB", "1.06 GiB", "21.40 GiB"))
    )

    assert "Upgrade" in by_code(diagnosis, "expandable-segments").title


def test_limit_names_the_fraction_that_would_do():
    diagnosis = diagnose(case_of(LIMITED))

    best = diagnosis.recommendations[0]

    assert best.code == "raise-memory-limit"
    assert "0.208" in best.title
    assert Predicted(fits=True, method="arithmetic") == best.predicted


def test_other_process_is_named_and_peers_are_told_how_many_fit():
    one, four = (
        new_style(
            "128.00 MiB", "8.00 GiB", "68.00 MiB", "1.10 GiB", "20.34 MiB",
            processes="".join(process(4242 + i, f"{6.35 / n:.2f} GiB") for i in range(n)),
            own="1.59 GiB",
        )
        for n in (1, 4)
    )  # fmt: skip

    alone, crowded = (diagnose(case_of(text)) for text in (one, four))

    assert codes(alone)[0] == codes(crowded)[0] == "free-other-process"
    assert "4242" in alone.recommendations[0].change
    assert "fragdoctor pack" in crowded.recommendations[0].change
    assert "smaller-batch" not in codes(alone)


def test_first_advice_frees_more_than_the_failed_call_asks_for():
    frames = (
        'File "/lib/mmdet/core/bbox/assigners/max_iou_assigner.py", line 126, in assign\n'
        "    overlaps = self.iou_calculator(gt_bboxes, bboxes)\nRuntimeError: "
    )
    asked = "CUDA out of memory. Tried to allocate {} (GPU 0; 23.70 GiB total capacity; {} already "
    asked += "allocated; {} free; {} reserved in total by PyTorch)"

    less = diagnose(case_of(frames + asked.format("5.05 GiB", "7.94 GiB", "4.16 GiB", "8.03 GiB")))
    more = diagnose(case_of(frames + asked.format("9.05 GiB", "7.94 GiB", "8.16 GiB", "8.03 GiB")))

    assert less.verdict.cause is more.verdict.cause is Cause.OTHER_PROCESS
    assert codes(less)[0] == "free-other-process"
    assert codes(more)[0] == "at-the-failing-call"


def test_holes_of_freed_blocks_below_a_page_reject_expandable_segments():
    small = diagnose(Case(snapshot=interleaved()))
    large = diagnose(Case(snapshot=holes()))

    assert "expandable-segments" in rejected(small)
    assert "expandable-segments" in codes(large)


def test_stranding_blocks_are_named_with_their_line():
    diagnosis = diagnose(Case(snapshot=holes()))

    best = by_code(diagnosis, "move-stranding-blocks")

    assert (best.locations[0].filename, best.locations[0].line) == ("train.py", 88)
    assert best.predicted.fits is True


def test_stranding_blocks_of_one_line_are_one_change():
    """PyTorch makes the blocks of superres_tiles.py:32 in two ways."""
    recording = Path(__file__).parents[1] / "truth" / "superres_tiles@62.pickle.gz"
    advised = diagnose(Case(snapshot=read_snapshot(recording))).recommendations

    titles = [r.title for r in advised if r.code == "move-stranding-blocks"]
    assert "Keep the blocks of superres_tiles.py:32 in forward out of the way" in titles
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize(
    "line", [[], [frame("/v/site-packages/torch/distributed/fsdp/_collectives.py", 59, "allocate")]]
)
def test_stranding_blocks_that_no_line_of_the_user_makes_are_no_measure(line):
    assert "move-stranding-blocks" not in codes(diagnose(Case(snapshot=holes(line=line))))


@pytest.mark.parametrize("keeps", [True, False])
def test_layers_of_an_inference_are_not_to_be_checkpointed(keeps):
    """Without autograd layers let go of all but their results."""
    loop = TrainingLoop()
    loop.build()
    for _ in range(6):
        for line in range(8):
            block = loop.new(20 * MIB, (frame("model.py", line, "forward"), CALL, MAIN))
            if line and not keeps:
                loop.free(block, USER)
    loop.toy.events.append(oom(400 * MIB, 8 * MIB, frames=[CALL, MAIN]))

    found = codes(diagnose(Case(snapshot=loop.snapshot())))

    assert ("gradient-checkpointing" in found) == keeps


def test_first_pass_of_checkpointed_layers_trains_and_its_logits_can_be_made_in_chunks():
    """The layers keep nothing but their results, so only their frames show that the run trains."""
    checkpoint = frame(f"{TORCH}/utils/checkpoint.py", 5, "checkpoint")
    entropy = frame(f"{TORCH}/nn/functional.py", 9, "cross_entropy"), frame("train.py", 7, "main")
    loop = TrainingLoop()
    loop.build()
    for line in range(8):
        layer = frame("model.py", line, "forward"), checkpoint, CALL, MAIN
        scratch = loop.new(30 * MIB, layer)
        loop.new(2 * MIB, layer)
        loop.free(scratch, USER)
    loop.new(200 * MIB, (frame("model.py", 8, "forward"), CALL, MAIN))
    loop.new(200 * MIB, (*entropy, MAIN))
    loop.toy.events.append(oom(200 * MIB, 8 * MIB, frames=[*entropy, MAIN]))
    loop.event_stacks[len(loop.toy.events) - 1] = loop.stack_id((*entropy, MAIN))

    found = diagnose(Case(snapshot=loop.snapshot()))

    assert found.recommendations[0].code == "chunked-loss"
    assert "gradient-checkpointing" not in codes(found)


def test_attention_is_placed_outside_pytorch_where_a_frame_is():
    softmax = Location(f"{TORCH}/nn/functional.py", 5, "softmax")
    attend = Location("/site-packages/transformers/models/llama.py", 197, "eager_attention_forward")

    assert attention_frame([softmax, attend]) is attend
    assert attention_frame([softmax]) is softmax
    assert attention_frame([]) is None


def test_smaller_batch_leaves_some_room_where_it_is_open_whether_it_is_enough():
    found = recorded("superres_tiles@45")

    advice = by_code(found, "smaller-batch").predicted
    assert advice.outlook.state is OutlookState.OPEN
    assert advice.room_bytes >= SLIM_MARGIN_SHARE * found.devices[0].capacity_bytes


def test_pending_frees_ask_to_wait_for_streams():
    assert codes(diagnose(Case(snapshot=late_free())))[0] == "wait-for-streams"


def test_steady_sizes_do_not_get_padding():
    assert not {"bucket-shapes", "roundup-divisions"} & set(codes(diagnose(Case(snapshot=holes()))))


def test_healthy_case_gets_no_advice():
    diagnosis = diagnose(Case(snapshot=calm()))

    assert (diagnosis.recommendations, diagnosis.rejected) == ((), ())


def test_size_bug_asks_for_the_shape():
    log = log_of(message(requested_bytes=5000 * GIB))

    assert codes(diagnose(Case(oom=log)))[0] == "fix-shape"


def proposal(code, weight, **more):
    return Tried(code).proposal(weight=weight, confidence=Confidence.LIKELY, why="w", **more)


def test_remedies_have_a_code_of_their_own_and_an_imperative_title():
    assert len({remedy.code for remedy in REMEDIES}) == len(REMEDIES)
    assert all(remedy.title[0].isupper() and remedy.code.islower() for remedy in REMEDIES)


def test_rank_says_a_change_that_two_remedies_come_to_once_unless_it_was_tested():
    tested = proposal("same", 10, predicted=Predicted(fits=True, method="replay"))

    ranked, _ = rank([proposal("same", 10), proposal("same", 90)], Cause.CAPACITY)
    both, _ = rank([tested, tested], Cause.CAPACITY)

    assert [(r.code, r.rank) for r in ranked] == [("same", 1)]
    assert len(both) == 2


def test_rank_orders_by_weight_then_confidence():
    low, high = proposal("low", 10), proposal("high", 90)

    ranked, _ = rank([low, high], Cause.CAPACITY)

    assert [(r.code, r.rank) for r in ranked] == [("high", 1), ("low", 2)]


def test_rank_replayed_success_comes_first_and_rejections_apart():
    plain = proposal("plain", 90)
    fits = proposal("fits", 10).with_prediction(Predicted(fits=True, method="replay"))
    fails = Tried("fails").rejection("w", Confidence.PROVEN)

    ranked, dropped = rank([plain, fits, fails], Cause.CAPACITY)

    assert [r.code for r in ranked] == ["fits", "plain"]
    assert [r.code for r in dropped] == ["fails"]


def test_rank_lighter_burden_comes_first_whatever_the_margin():
    light, heavy = Tried("light"), Tried("heavy")
    heavy.burden = Burden.SLOWER
    proposals = [
        one.proposal(weight=1, confidence=Confidence.LIKELY, why="w").with_prediction(
            Predicted(fits=True, method="replay", margin_bytes=margin)
        )
        for one, margin in ((heavy, 500 * MIB), (light, 2 * MIB))
    ]

    ranked, _ = rank(proposals, Cause.CAPACITY)

    assert [r.code for r in ranked] == ["light", "heavy"]


def looked_on(code, state, *, setting="", weight=10, **outlook):
    """A proposal whose recorded part fits, and that goes on in some way."""
    found = Outlook(state, OutlookBasis.SCALED, **outlook)
    fits = Predicted(fits=True, method="replay", margin_bytes=GIB, outlook=found)
    return proposal(code, weight, setting=setting).with_prediction(fits)


@pytest.mark.parametrize(
    ("cause", "order"),
    [
        (Cause.FRAGMENTATION, ["sure", "open", "code", "open-code", "later"]),
        (Cause.CAPACITY, ["code", "sure", "open-code", "open", "later"]),
        (Cause.LEAK, ["code", "open-code", "open", "sure", "later"]),
    ],
)
def test_rank_goes_by_how_the_run_goes_on_and_tries_settings_first_for_holes(cause, order):
    ranked, _ = rank(
        [
            looked_on("later", OutlookState.FAILS, setting="X=2", fails_after_steps=9),
            looked_on("open-code", OutlookState.OPEN),
            looked_on("code", OutlookState.HOLDS),
            looked_on("open", OutlookState.OPEN, setting="X=3"),
            looked_on("sure", OutlookState.HOLDS, setting="X=4"),
        ],
        cause,
    )

    assert [r.code for r in ranked] == order


def test_rank_sharing_pools_comes_before_what_only_gets_further():
    code = looked_on("code", OutlookState.OPEN, weight=1)
    pools = proposal("pools", Weight.CURES)

    ranked, _ = rank([code, pools], Cause.PRIVATE_POOLS)

    assert [r.code for r in ranked] == ["pools", "code"]


def test_rank_of_two_that_fail_later_the_one_that_fails_last_comes_first():
    soon = looked_on("soon", OutlookState.FAILS, fails_after_steps=2)
    late = looked_on("z-late", OutlookState.FAILS, fails_after_steps=9)

    ranked, _ = rank([soon, late], Cause.CAPACITY)

    assert [r.code for r in ranked] == ["z-late", "soon"]


def test_settings_are_tried_beside_and_in_place_of_what_is_set_already():
    case = judged(Case(snapshot=holes(conf="roundup_power2_divisions:4")))

    assert set(ExpandableSegments().confs(case)) == {
        "roundup_power2_divisions:4,expandable_segments:True",
        "expandable_segments:True",
    }


def test_collection_without_a_fraction_is_not_tried_in_place_of_other_settings():
    case = judged(Case(snapshot=holes(conf="roundup_power2_divisions:4")))

    assert len(GarbageCollection().confs(case)) == 1


def test_collection_that_is_set_without_a_fraction_did_nothing():
    found = diagnose(Case(snapshot=holes(conf="garbage_collection_threshold:0.8")))

    assert "garbage-collection-threshold" in rejected(found)


def test_tested_rejection_comes_back_when_the_replay_fits():
    doubted = Tried("doubted").rejection("w", Confidence.LIKELY)

    assert not doubted.with_prediction(Predicted(fits=True, method="replay")).is_rejected
    assert doubted.with_prediction(Predicted(fits=False, method="replay")).is_rejected


def test_optimizer_failure_does_not_blame_the_batch():
    from builders import frame

    stack = [
        frame("/x/site-packages/torch/optim/adam.py", 120, "_init_group"),
        frame("train.py", 40, "main"),
    ]
    diagnosis = diagnose(Case(snapshot=full(frames=stack)))

    assert Cause.CAPACITY is diagnosis.verdict.cause
    assert Cause.TRANSIENT_PEAK in diagnosis.verdict.also
    assert "smaller-batch" in rejected(diagnosis)


def test_recorded_first_step_of_a_server_is_told_from_one_beside_its_cache():
    worker = "/env/site-packages/vllm/v1/worker/gpu"

    def advice(*functions, asked_mib=200):
        stack = [frame(f"{worker}/attn_utils.py", 7, name) for name in functions]
        found = diagnose(Case(snapshot=full(frames=[*stack, LINE[1]], asked_mib=asked_mib)))
        return " ".join(f"{one.title}: {one.change}" for one in found.recommendations)

    first = advice("_dummy_sampler_run", "profile_run", "determine_available_memory")
    later = advice("_dummy_run", "compile_or_warm_up_model")
    cache = advice("allocate_kv_cache", "init_kv_cache", asked_mib=2000)

    assert "the server's first step smaller" in first
    assert "lower --gpu-memory-utilization" not in first
    assert "outside the server's KV cache" in later
    assert "the server's first step" not in later
    assert "attention" not in cache


def test_leak_is_freed_at_its_line_and_arithmetic_says_that_it_fits():
    diagnosis = diagnose(Case(snapshot=leaking()))

    best = diagnosis.recommendations[0]

    assert best.code == "free-leak"
    assert (best.locations[0].filename, best.locations[0].line) == ("loop.py", 5)
    assert best.predicted.fits is True
    assert "smaller-batch" not in codes(diagnosis)


def test_leak_in_evaluation_asks_for_no_grad():
    assert "no-grad" in codes(diagnose(Case(snapshot=leaking(function="evaluate"))))
    assert "no-grad" not in codes(diagnose(Case(snapshot=leaking())))


@pytest.mark.parametrize("kind", [HoldingKind.CONTAINER, HoldingKind.GRAPH])
def test_evaluation_keeps_no_graph_if_a_census_names_a_container(kind):
    data = leaking(function="evaluate")
    trace = Trace.of(data, 0)
    lives, rows = trace.lives, trace.lives.allocated_at(trace.n_events)
    seen = Census(
        time_us=10**9,
        step=0,
        is_complete=True,
        owners=(Owner("states", kind, n_items=len(rows), class_name="list"),),
        device=np.zeros(len(rows), np.int32),
        address=lives.address[rows],
        size_bytes=lives.size_bytes[rows],
        holder=np.zeros(len(rows), np.int32),
    )

    found = codes(diagnose(Case(snapshot=data, censuses=(seen,))))

    assert ("no-grad" in found) is (kind is HoldingKind.GRAPH)


def test_frames_of_the_interpreter_do_not_evaluate():
    native = Location("/src/Python/ceval.c", 4769, "_PyEval_EvalFrameDefault")

    assert not is_evaluation([Location("loop.py", 5, "train"), native])
    assert is_evaluation([Location("loop.py", 5, "validate"), native])


def test_tensor_beyond_the_device_is_a_shape_to_print_at_its_line():
    code = 'File "/app/graph.py", line 4, in adjacency\n    return torch.zeros(n, n)\n'
    text = f"Traceback (most recent call last):\n  {code}" + HUGE

    best, *others = diagnose(case_of(text)).recommendations

    assert (best.code, best.title) == (
        "fix-shape",
        "Print the shape at graph.py:4 in adjacency and correct it",
    )
    assert not {"fused-attention", "smaller-batch"} & {r.code for r in others}


def test_tensor_beyond_the_device_in_attention_is_its_scores():
    code = 'File "/app/model.py", line 9, in attention\n    s = q @ k.transpose(-2, -1)\n'
    text = f"Traceback (most recent call last):\n  {code}" + HUGE

    found = codes(diagnose(case_of(text)))

    assert found.index("at-the-failing-call") < found.index("fix-shape")
    assert "fused-attention" not in found  # which would say the same again


def test_advice_is_in_the_words_of_the_framework_of_the_traceback():
    site = "/venv/lib/python3.11/site-packages/transformers"
    code = f'File "{site}/trainer.py", line 4020, in training_step\n    loss = f(x)\n'
    text = f"Traceback (most recent call last):\n  {code}" + FULL

    changes = {r.code: r.change for r in diagnose(case_of(text)).recommendations}

    assert changes["smaller-batch"].startswith("with Trainer: lower per_device_train_batch_size")
    assert "gradient_checkpointing=True" in changes["gradient-checkpointing"]


def test_model_that_does_not_fit_is_told_from_a_batch():
    diagnosis = diagnose(Case(snapshot=model_building()))

    assert codes(diagnosis)[0] == "less-model-memory"
    assert "gradient-checkpointing" not in codes(diagnosis)


@pytest.mark.parametrize(
    ("asked", "advised", "silent"),
    [
        (60, "compute-in-16-bits", "less-model-memory"),
        (40, "less-model-memory", "compute-in-16-bits"),
    ],
)
def test_model_that_takes_less_than_is_missing_is_not_made_smaller(asked, advised, silent):
    """Parameters and state take 30 MiB, and 20 MiB less than asked for are missing."""
    loop = TrainingLoop()
    loop.build()
    loop.step()
    loop.forward()
    loop.toy.events.append(oom(asked * MIB, 0, frames=[CALL, MAIN]))
    found = diagnose(Case(snapshot=loop.snapshot()))

    assert found.verdict.cause is Cause.CAPACITY
    assert advised in codes(found)
    assert silent not in codes(found)


def test_device_that_the_snapshot_lacks_is_an_error_not_healthy():
    case = Case(snapshot=holes(), overrides=Overrides(device=9))

    with pytest.raises(ConfigError, match="nothing of device 9"):
        diagnose(case)


def test_tensor_larger_than_all_there_is_must_shrink_itself():
    text = new_style("6.00 GiB", "8.00 GiB", "4.00 GiB", "0.50 GiB", "0.50 GiB")

    diagnosis = diagnose(case_of(text))

    assert "fix-shape" in codes(diagnosis)
    assert not {"smaller-batch", "less-model-memory"} & set(codes(diagnosis))


def replayed(retries: int, *, fits: bool = True) -> ReplayResult:
    return ReplayResult(
        conf="",
        capacity_bytes=GIB,
        fits=fits,
        oom_event=None if fits else 7,
        peak_reserved_bytes=GIB,
        peak_allocated_bytes=GIB,
        final_reserved_bytes=GIB,
        retries=retries,
        ooms=0 if fits else 1,
        driver_calls=9,
        is_conclusive=True,
    )


def test_one_retry_less_of_many_is_no_help():
    assert not helps(replayed(10), replayed(9))
    assert helps(replayed(10), replayed(5))
    assert helps(replayed(1), replayed(0))
    assert not helps(replayed(1), replayed(1))


def test_after_a_failure_it_helps_that_all_is_served():
    assert helps(replayed(0, fits=False), replayed(3))
    assert not helps(replayed(3, fits=False), replayed(0, fits=False))


def test_fraction_that_is_set_already_is_never_the_advice():
    text = new_style(
        "20.00 MiB", "10.00 GiB", "7.50 GiB", "2.07 GiB", "10.00 MiB", allowed="2.10 GiB"
    )

    advice = by_code(diagnose(case_of(text)), "raise-memory-limit")

    assert advice.title == "Raise the memory fraction from 0.21 to at least 0.211"
    assert "(0.211)" in advice.change


def test_removing_the_cause_comes_before_a_setting_of_unknown_outlook():
    def proposal(remedy, **fields):
        weight = fields.pop("weight")
        return remedy.proposal(weight=weight, confidence=Confidence.LIKELY, why="", **fields)

    def ranked(state):
        outlook = Outlook(state, OutlookBasis.REPEATED)
        predicted = Predicted(fits=True, method="replay", outlook=outlook)
        setting = proposal(
            ExpandableSegments(), weight=Weight.CURES, setting="a=b:True", predicted=predicted
        )
        free = proposal(free_other_process, weight=Weight.CURES)
        return [r.code for r in rank([setting, free], Cause.OTHER_PROCESS)[0]]

    assert ranked(OutlookState.OPEN) == ["free-other-process", "expandable-segments"]
    assert ranked(OutlookState.HOLDS) == ["expandable-segments", "free-other-process"]


class Futures:
    """A bench that knows how each outcome goes on, and which it was asked about."""

    def __init__(self, states):
        self.recorded = replayed(0, fits=False)
        self.outcomes = [
            Effect(Attempt(WhatIf(edit=str(i))), replayed(0)) for i in range(len(states))
        ]
        self.states, self.asked = states, []

    def looked_on(self, outcome):
        at = self.outcomes.index(outcome)
        self.asked.append(at)
        return replace(outcome, result=replace(outcome.result, outlook=self.states[at]))


@pytest.mark.parametrize(
    ("states", "chosen", "asked"),
    [
        ("fhh", 1, [2, 0, 1]),
        ("fff", None, [2]),
        ("flo", 2, [2, 0, 1, 2]),
        ("ffl", 2, [2]),
        ("h", 0, [0, 0]),
    ],
)
def test_first_change_that_is_enough_is_sought_only_where_the_last_may_be(states, chosen, asked):
    kinds = {
        "f": Outlook(OutlookState.FAILS),
        "h": Outlook(OutlookState.HOLDS),
        "l": Outlook(OutlookState.OPEN, likely=OutlookState.FAILS),
        "o": Outlook(OutlookState.OPEN),
    }
    bench = Futures([kinds[s] for s in states])

    found = first_enough(bench, bench.outcomes)

    assert (None if found is None else found.attempt.what_if.edit) == (
        None if chosen is None else str(chosen)
    )
    assert bench.asked == asked


@pytest.mark.parametrize(
    ("optimizer", "given"),
    [
        ("optim/adam.py", {"fused-optimizer"}),
        ("optim/rmsprop.py", {"optimizer-without-foreach"}),
        ("somebody/lion.py", set()),
    ],
)
def test_step_that_cannot_be_fused_updates_one_parameter_after_another(optimizer, given):
    recording = Path(__file__).parents[1] / "future" / "recordings" / "wide.pickle.gz"
    text = json.dumps(pickle.loads(gzip.decompress(recording.read_bytes())))
    snapshot = columns(json.loads(text.replace("optim/adam.py", optimizer)))

    diagnosis = diagnose(Case(snapshot=snapshot))

    assert given == {"fused-optimizer", "optimizer-without-foreach"} & set(codes(diagnosis))


def test_momentum_that_the_first_step_clones_is_state_and_no_temporary():
    """SGD clones the gradients where other optimizers make what they free: fusing saves nothing."""
    calls = (("_multi_tensor_sgd", 7), ("step", 2))
    sgd = (*(frame(f"{TORCH}/optim/sgd.py", line, name) for name, line in calls), *UPDATE[2:])
    loop = TrainingLoop(foreach=False)
    loop.build()
    batch, *activations = loop.forward()
    loop.backward(activations)
    loop.state = [loop.new(size, sgd) for size in PARAMETERS]
    loop.zero_grad()
    loop.free(batch, USER)
    loop.forward()
    loop.toy.events.append(oom(40 * MIB, 0, frames=[CALL, MAIN]))

    found = diagnose(Case(snapshot=loop.snapshot()))

    assert "fused-optimizer" not in codes(found)
    assert "SGD8bit" in by_code(found, "smaller-optimizer-state").change


@pytest.mark.parametrize(("own", "is_capped"), [("78.00 GiB", True), ("61.00 GiB", False)])
def test_much_memory_outside_pytorch_is_capped_also_beside_another_cause(own, is_capped):
    text = new_style(
        "2.00 GiB", "79.15 GiB", "1.10 GiB", "60.00 GiB", "100.00 MiB", pools="20.00 GiB", own=own
    )

    diagnosis = diagnose(case_of(text))

    assert diagnosis.verdict.cause is Cause.PRIVATE_POOLS
    assert is_capped == any(r.code == "cap-other-libraries" for r in diagnosis.recommendations)


@pytest.mark.parametrize(
    "searched",
    [
        "fragdoctor.analysis.growing_buffers.find_growing_buffers",
        "fragdoctor.rules.rule.find_weight_copies",
    ],
)
def test_diagnose_long_searches_run_once(searched, monkeypatch):
    module, name = searched.rsplit(".", 1)
    found, n_calls = getattr(importlib.import_module(module), name), []
    monkeypatch.setattr(searched, lambda *args: n_calls.append(1) or found(*args))

    diagnose(Case(snapshot=full()))

    assert len(n_calls) == 1


TRUTH = Path(__file__).parents[1] / "truth"


def recorded(name):
    return diagnose(Case(snapshot=read_snapshot(TRUTH / f"{name}.pickle.gz")))


def test_what_the_steps_only_read_is_kept_on_the_host():
    """A buffer of rollouts, made before the first step, in a run whose batch is full too."""
    first = recorded("ppo_rollouts@75").recommendations[0]

    assert (first.code, first.predicted.fits) == ("keep-on-host", True)
    assert (first.locations[0].basename, first.locations[0].line) == ("ppo_rollouts.py", 25)


def test_what_still_fails_comes_after_what_was_not_tried():
    for path in sorted(TRUTH.glob("*@45.pickle.gz")):
        advice = diagnose(Case(snapshot=read_snapshot(path))).recommendations
        fails = [r.predicted.fits is False for r in advice]

        assert fails == sorted(fails), path.name


@pytest.mark.parametrize(
    ("n_live", "n_tensors", "n_asked", "is_told"),
    [
        (15_000, 1, 15_000, True),
        (6_144, 2, 6_144, True),
        (6_144, 1, 6_144, False),  # of that size by chance
        (16_384, 2, 16_384, False),  # one power of two is the square of another in many a model
        (15_001, 2, 15_000, False),
    ],
)
def test_request_for_each_number_with_each_is_told_by_what_is_live(
    n_live, n_tensors, n_asked, is_told
):
    start, asked, stack = 0x7F0000000000, 4 * n_asked**2, [frame("fit.py", 7, "main")]
    size = -(-4 * n_live // 512) * 512
    live = [
        block(size, "active_allocated", requested=4 * n_live, frames=stack)
        for _ in range(n_tensors)
    ]
    events = [
        segment_alloc(start, 2 * MIB),
        *(alloc(start + i * size, size, frames=stack) for i in range(n_tensors)),
        oom(-(-asked // 512) * 512, 8 * MIB, frames=stack),
    ]
    rest = block(2 * MIB - n_tensors * size, "inactive")
    held = segment(start, *live, rest)

    found = diagnose(Case(snapshot=columns(snapshot(held, traces=[events]))))

    assert ("all-pairs" in codes(found)) is is_told


def test_checkpointing_names_the_calls_that_run_again(root: Path) -> None:
    """Of two kinds of layers, and how much of the pass they hold."""
    path = root / "tests" / "future" / "recordings" / "staged.pickle.gz"

    found = diagnose(Case(snapshot=read_snapshot(path)))

    (why,) = (r.why for r in found.recommendations if r.code == "gradient-checkpointing")
    assert "7 repeated calls of forward (train.py:89-91) and forward (transformer.py" in why
    assert "They hold 98% of what the pass keeps" in why
