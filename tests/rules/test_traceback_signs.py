"""What the calls above a failure say, and that it comes before advice that fits any failure."""

from __future__ import annotations

import pytest
from oom_messages import case_of, old_style

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.messages import find_messages
from fragdoctor.model.case import TracebackFrame
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.frameworks import FRAMEWORKS, Change
from fragdoctor.rules.traceback_signs import SIGNS, sign_of

FULL = old_style("1.00 GiB", "23.69 GiB", "22.10 GiB", "412.00 MiB", "22.60 GiB")
LIB = "/env/lib/python3.11/site-packages"


def frame(file: str, function: str, code: str, line: int = 7) -> str:
    return f'  File "{file}", line {line}, in {function}\n    {code}\n'


def failing(*frames: str, message: str = FULL) -> str:
    start = "Traceback (most recent call last):\n" + frame("/job/fit.py", "main", "main()")
    return start + "".join(frames) + message + "\n"


TORCH = f"{LIB}/torch"
SHAPES = {
    "pasted-masks of an evaluation": failing(
        frame("/job/eval.py", "prep_metrics", "dets, w, h, crop_masks=crop)"),
        frame("/job/output_utils.py", "postprocess", "masks = F.interpolate(masks)"),
    ),
    "pasted-masks": failing(
        frame(f"{LIB}/detectron2/layers/mask_ops.py", "_do_paste_mask", "y = F.grid_sample(m, g)"),
        frame(f"{TORCH}/nn/functional.py", "grid_sample", "return torch.grid_sampler(x, g)"),
    ),
    "ran-before": f"My notebook trains once; when I run the cell again I get\n{FULL}",
    "ran-before in another trial": "The search fails with CUDA out of memory after a few trials.",
    "ran-before in another fold": f"It crashes after two of the five folds.\n{FULL}",
    "kept-in-use": "I unload the model in my app, but its VRAM is not released.\n",
    "growth of what batches leave": "I see that memory is not freed between batches.\n" + FULL,
    "moved-before-offload": "pipe = Pipeline.from_pretrained('m').to('cuda')\n"
    "pipe.enable_model_cpu_offload()\nimage = pipe(prompt)\nCUDA out of memory\n",
    "quantizing": f"It fails in quantization of a 30B model.\n{FULL}",
    "quantizing by a call": f"model.quantize(samples)\n{FULL}",
    "growth and no loading": "GPU memory usage keeps increasing until CUDA out of memory; when I "
    "resume training, it does so again.",
    "growth in code": f"kept = []\nfor x in data:\n    kept.append(model(x))\n{FULL}\n",
    "evaluation in code": "for i, x in enumerate(data):\n    if i % 9 == 0:\n"
    f"        y = net(tests)\n    else:\n        net(x).sum().backward()\n{FULL}\n",
    "inference in code": f"emb = encoder(images.cuda())\n{FULL}\n",
    "later-step by its number": f"step: 1200 loss: 0.31\n{FULL}\n",
    "later-step by its bar": f" 41%|####      | 812/1980 [10:01<14:20, 1.36it/s]{FULL}\n",
    "later-step": f"Training runs out of memory after the first epoch.\n{FULL}",
    "first-gpu": "Training is on four GPUs, and gpu 0 takes more memory than the others.\n" + FULL,
    "server-start after its weights": "vLLM: Loading safetensors checkpoint shards: 100% Completed "
    f"| 5/5\n{FULL}\n",
    "evaluation by its progress": f"Steps: 0/100 - INFO - Running validation...\n{FULL}\n",
    "first-gpu by its processes": f"DDP: processes of other GPUs appear on GPU0.\n{FULL}",
    "first-gpu by a process on two": "|    0   N/A  N/A   91   C   python   9212MiB |\n"
    "|    0   N/A  N/A   92   C   python   726MiB |\n"
    f"|    1   N/A  N/A   92   C   python   9212MiB |\nTraining fails:\n{FULL}",
    "inference by its method": f'r = model.predict(source="imgs/")\n{FULL}\n',
    "sliding-window": failing(
        frame(f"{LIB}/monai/inferers/utils.py", "sliding_window_inference", "x = zeros(n)")
    ),
    # vllm, csrc/cumem_allocator.cpp
    "graph-capture of a training run": failing(
        frame("/job/megatron/training.py", "train", "helper.create_cudagraphs()"),
        frame(
            f"{LIB}/transformer_engine/pytorch/graph.py", "make_graphed_callables", "graphs = f(c)"
        ),
    ),
    "graph-capture": failing(
        frame(f"{LIB}/vllm/v1/worker/gpu_model_runner.py", "capture_model", "self.run(n)")
    ),
    "spilled": "Since the update training is very slow: the task manager shows 4 GB of Shared GPU "
    "memory in use.\n",
    "optimizer-state in 32 bits": failing(
        frame(f"{LIB}/colossalai/zero/low_level_optim.py", "__init__", "fp32_flat = half.float()")
    ),
    "evaluation of PyTorch 0.3": "UserWarning: volatile was removed and now has no effect.\n"
    "RuntimeError: CUDA error: out of memory\n",
    "gathered-save": failing(
        frame("/job/save.py", "save", "sd = net.state_dict()"),
        frame(f"{TORCH}/distributed/fsdp/_state_dict_utils.py", "_common_unshard", "unshard()"),
    ),
    "gathered-save by DeepSpeed": failing(
        frame(f"{LIB}/deepspeed/runtime/engine.py", "save_16bit_model", "sd = self.gather()")
    ),
    "gathered-save of a sharded optimizer": failing(
        frame(f"{LIB}/fairscale/optim/oss.py", "consolidate_state_dict", "send(objects, group)"),
        frame(f"{TORCH}/distributed/distributed_c10d.py", "_tensor_to_object", "b = t.cpu()"),
    ),
    "saved-state": failing(
        frame(f"{LIB}/bitsandbytes/nn/modules.py", "_save_to_state_dict", "w = undo_layout(w, i)")
    ),
    "saved-state of a trainer": failing(
        frame(f"{LIB}/transformers/trainer.py", "_maybe_log_save_evaluate", "self._save_it(model)"),
        frame(f"{LIB}/transformers/trainer.py", "_save", "state = self.net.state_dict()"),
    ),
    "merged-adapter": failing(
        frame("/job/export.py", "export", "net = PeftModel.from_pretrained(net, path)"),
        frame(f"{LIB}/peft/peft_model.py", "load_adapter", "weights = load_weights(path)"),
        frame(f"{TORCH}/serialization.py", "_cuda_deserialize", "return storage(n)"),
    ),
    "merged-adapter in words": f"It runs out of memory when merging the LoRA.\n{FULL}\n",
    "metric-state": failing(
        frame(f"{LIB}/torchmetrics/classification/auroc.py", "update", "self.preds.append(preds)")
    ),
    "metric-state in words": "I use torchmetrics, and the GPU memory keeps increasing.\n" + FULL,
    "gathered-results": failing(
        frame("/job/eval.py", "evaluate", "results = gather(results)"),
        frame(f"{TORCH}/distributed/distributed_c10d.py", "all_gather_object", "gather(t, n)"),
    ),
    "gathered-results of a detector": failing(
        frame("/job/dist.py", "all_gather", "data.append(pickle.loads(buffer))"),
        frame(f"{TORCH}/serialization.py", "_cuda_deserialize", "return storage(n)"),
    ),
    "loaded-checkpoint": failing(
        frame("/job/fit.py", "resume", "state = torch.load(path)"),
        frame(f"{TORCH}/serialization.py", "_cuda_deserialize", "return storage(n)"),
    ),
    "loaded-checkpoint of an optimizer": failing(
        frame(f"{TORCH}/optim/optimizer.py", "load_state_dict", "state = _cast(value)")
    ),
    "loading-weights": failing(
        frame("/job/fit.py", "build", "net.to(device)"),
        frame(f"{TORCH}/nn/modules/module.py", "convert", "return t.to(device)"),
    ),
    "loading-weights under DeepSpeed": failing(
        frame(f"{LIB}/deepspeed/runtime/engine.py", "_configure_distributed_model", "m.to(d)"),
        frame(f"{TORCH}/nn/modules/module.py", "convert", "return t.to(device)"),
    ),
    "loading-weights of a program that took ComfyUI's code": failing(
        frame("/app/ldm_patched/modules/model_management.py", "cast_to_device", "return t.to(d)"),
    ),
    "loading-weights of a server": failing(
        frame(f"{LIB}/vllm/worker/model_runner.py", "load_model", "self.model = get_model()"),
        frame(f"{LIB}/vllm/somewhere.py", "create_weights", "w = torch.empty(n)"),
    ),
    "loading-weights by the code below": f"{FULL}\n"
    'model = AutoModel.from_pretrained("a/b", device_map="auto").cuda()\n',
    "loading-weights of a box without files": "│ ❱  905 │   │   return t.to(device, dtype if "
    f"t.is_floating_point() or\n╰────────╯\n{FULL}\n",
    "loading-weights of a pipeline": failing(
        frame("/job/train.py", "validate", "pipeline = pipeline.to(accelerator.device)"),
        frame(f"{LIB}/diffusers/pipelines/pipeline_utils.py", "to", "module.to(torch_device)"),
    ),
    "attention-scores of old code": failing(
        frame("/job/attention.py", "forward", "out = einsum('b i j, b j d -> b i d', attn, v)")
    ),
    "loading-weights of a trainer": failing(
        frame("/job/workflow.py", "run", "trainer = PairwiseTrainer(")
    ),
    "loading-weights by the name of a function": failing(
        frame("/job/wgp.py", "load_models", "model = handlers[kind].make(name)"),
        frame("/job/any2video.py", "__init__", "self.model = offload.fast(name, kind=Model)"),
    ),
    "evaluation by the call": failing(
        frame("/job/trainer.py", "loop", "self.eval_iteration(step)"),
        frame("/job/decorators.py", "wrapper", "ret = func(self, *args)"),
    ),
    "inference by the call": failing(frame("/job/pipeline.py", "run", "model.transcribe(path)")),
    "inference of a video": f"video 1/1 (frame 252/4272) /a/b.mp4: 1024x1024 1 0, 66.7ms\n{FULL}\n",
    "server-step": failing(
        frame(f"{LIB}/vllm/v1/worker/gpu_worker.py", "execute_model", "out = self.run()")
    ),
    "kept-predictions": failing(
        frame(f"{LIB}/transformers/trainer_pt_utils.py", "nested_concat", "torch.cat((a, b))")
    ),
    "box-assignment": failing(
        frame(f"{LIB}/mmdet/core/bbox/assigners/max_iou_assigner.py", "assign", "o = iou(a, b)")
    ),
    "all-pairs by its function": failing(
        frame("/job/match.py", "compute_distances", "d = torch.zeros((len(q), len(k)))")
    ),
    "all-pairs by its code": failing(frame("/job/match.py", "knn", "d = torch.cdist(x, x)")),
    "all-pairs": f"The distance_matrix(x, y) of my test is too large.\n{FULL}",
    "first-gpu by its call": failing(
        frame(f"{TORCH}/nn/parallel/comm.py", "gather", "return torch._C._gather(tensors)")
    ),
    "optimizer-state under DeepSpeed": failing(
        frame(f"{LIB}/deepspeed/runtime/zero/stage3.py", "_setup_for_real_optimizer", "a()")
    ),
    "optimizer-state": failing(
        frame(f"{TORCH}/optim/adamw.py", "_init_group", "state['exp_avg'] = zeros_like(p)")
    ),
    "vae-decode": failing(frame("/comfy/nodes.py", "decode", "img = vae.decode(samples)")),
    "sampled-grid": failing(
        frame(f"{TORCH}/nn/functional.py", "grid_sample", "return torch.grid_sampler(x, g)")
    ),
    "loaded-checkpoint in words": f"When I resume training from a checkpoint:\n{FULL}\n",
    "growth": f"The memory keeps growing from step to step until it fails:\n{FULL}\n",
    "loaded-checkpoint that is resumed": f"It only fails when resuming:\n{FULL}\n",
    "evaluation in other words": f"Training works, validation fails with this:\n{FULL}\n",
    "evaluation told as a test": f"Hi, train is ok.\ntest is error.\n{FULL}\n",
    "evaluation with a trained model": f"I am trying to test the pretrained model.\n{FULL}\n",
    "loaded-checkpoint that exists": f"When it loads the existing checkpoint:\n{FULL}\n",
    "growth of what Lightning keeps": "    def training_epoch_end(self, outputs):\n        ...\n"
    f"{FULL}\n",
    "kept-predictions in words": f"{FULL}\nIt happens during evaluation: memory usage starts to "
    "creep up at some batch until it overflows.\n",
    "kept-predictions of many images": f"In testing, it fails after 1000 images:\n{FULL}",
    "loading-weights in a loader's own functions": failing(
        frame("/job/models.py", "loader", "return Quantized.from_pretrained(name)"),
        frame(f"{LIB}/exl/moe_mlp.py", "load", "self.w3[e].load()"),
    ),
    "loading-weights of an adapter": f"ERROR lora blocks.18.txt_mod.lin.weight {FULL}\n",
    "growth told below the message": f"{FULL}\n\nThe GPU memory is slowly increasing.\n",
    "attention-scores": failing(
        frame("/job/net.py", "forward", "w = torch.matmul(q, key_states.transpose(2, 3))")
    ),
    "inference": failing(
        frame(f"{TORCH}/utils/_contextlib.py", "decorate_context", "return func(*args)"),
        frame("/job/net.py", "forward", "x = self.conv(x)"),
    ),
    "inference by what the script is called": f"$ python tools/inference_sr.py -i in.png\n{FULL}\n",
    "inference by what was run": f"After training I ran render.py and it failed:\n{FULL}\n",
    "graph-capture of a log": "INFO [model_runner.py:1442] Capturing cudagraphs for decoding.\n"
    f"{FULL}\n",
    "server-start of a router": f"ERROR text_generation_launcher: Method Warmup failed\n{FULL}\n",
    "server-start": failing(
        frame(
            "/x/vllm/v1/engine/core.py", "run_engine_core", "engine_core = EngineCoreProc(*args)"
        ),
        frame("/x/vllm/v1/engine/core.py", "__init__", "super().__init__(config, executor)"),
    ),
    "server-step of a router": f"ERROR text_generation_client: router/lib.rs:33: {FULL}\n",
    "growing-concatenation": failing(
        frame("/job/fit.py", "collect", "seen = torch.cat([seen, new])")
    ),
    "loss-of-vocabulary": failing(
        frame("/job/net.py", "loss", "logits = logits.float()"),
    ),
    "optimizer-state of bitsandbytes": failing(
        frame(f"{LIB}/bitsandbytes/optim/optimizer.py", "step", "self.init_state(group, p)")
    ),
    "optimizer-state in pages": "Error out of memory at line 7 in file /csrc/pythonInterface.cpp\n",
    "optimizer-state in the step of DeepSpeed": failing(
        frame(f"{LIB}/deepspeed/runtime/zero/stage3.py", "_optimizer_step", "self.opt.step()"),
        frame(f"{TORCH}/optim/adam.py", "_init_group", "state['exp_avg'] = zeros_like(p)"),
    ),
    "ctranslate2": "RuntimeError: CUDA failed with error out of memory\n",
    "loading-weights at the end of what was pasted": failing(
        frame("/job/workflow.py", "run_sft", "model = load_model(tokenizer, args)")
    ),
    "ctranslate2 in small letters": "I get cuda failed with error out of memory after a while.\n",
    "generation": failing(
        frame(f"{LIB}/transformers/generation/utils.py", "_sample", "out = self(**inputs)")
    ),
    "generation in a cache made at once": failing(
        frame("/job/infer.py", "<module>", "cache = ExLlamaV2Cache(model)"),
        frame(f"{LIB}/ex/cache.py", "make", "key_states = torch.zeros(shape, device=device)"),
    ),
    "kept-predictions of a call": f"trainer.evaluate() aggregates logits on the GPU:\n{FULL}\n",
    "evaluation": failing(
        frame(f"{LIB}/lightning/loops/evaluation_loop.py", "_evaluation_step", "out = step()"),
        frame(f"{TORCH}/nn/modules/conv.py", "forward", "return F.conv2d(x, w)"),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_traceback_shows_its_sign(name):
    (message,) = find_messages(SHAPES[name]).messages
    sign = sign_of(message)

    assert sign is not None
    assert sign.name == name.partition(" ")[0]


def test_search_that_found_no_batch_says_that_the_batch_is_one_already():
    result = diagnose(case_of("RuntimeError: No executable batch size found, reached zero.\n"))

    assert result.verdict.cause is Cause.CAPACITY
    assert "find_executable_batch_size" in result.verdict.summary
    assert "a batch of one failed as well" in result.verdict.summary
    assert Cause.HOST_MEMORY in result.verdict.also
    assert (
        result.recommendations[0].title == "Use less for one sample: a smaller batch did not help"
    )


def test_search_that_found_no_batch_says_where_it_failed():
    loading = frame(f"{TORCH}/nn/modules/module.py", "convert", "return t.to(device)")
    text = failing(loading, message="RuntimeError: No executable batch size found, reached zero.")

    result = diagnose(case_of(text))

    assert result.recommendations[0].title == "Load smaller weights"
    assert "while a model's weights were being moved to the GPU" in result.verdict.summary


@pytest.mark.parametrize(
    "told",
    [
        "The GPU memory keeps increasing until it fails.\n",
        "GPU memory usage seems to climb steadily with every step.\n",
        "There seems to be a leak in the training loop.\n",
        "The tensors of earlier batches accumulate on the GPU.\n",
    ],
)
def test_memory_that_was_seen_to_grow_is_a_leak_until_a_large_request_fails(told):
    large = old_style("9.00 GiB", "23.69 GiB", "14.10 GiB", "8.41 GiB", "14.60 GiB")

    bare = diagnose(case_of(f"RuntimeError: CUDA out of memory.\n{told}"))
    last_straw = diagnose(case_of(f"{FULL}\n{told}"))
    at_once = diagnose(case_of(f"{large}\n{told}"))

    assert bare.verdict.cause is last_straw.verdict.cause is Cause.LEAK
    assert Cause.CAPACITY in bare.verdict.also
    assert bare.recommendations[0].code == "at-the-failing-call"
    assert at_once.verdict.cause is not Cause.LEAK


def test_every_sign_of_the_table_is_shown_by_a_text():
    assert {name.partition(" ")[0] for name in SHAPES} == {sign.name for sign in SIGNS}


def test_frameworks_have_words_for_changes_and_signs_only():
    known = {*Change, *(sign.name for sign in SIGNS)}

    assert {key for f in FRAMEWORKS for key in f.words} <= known


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.name)
def test_sign_says_what_was_going_on_and_how_it_is_seen(sign):
    assert sign.doing
    assert sign.places or sign.intro or sign.in_words


@pytest.mark.parametrize("name", SHAPES)
def test_advice_at_the_failing_call_comes_first(name):
    first, *others = diagnose(case_of(SHAPES[name])).recommendations

    assert first.code == "at-the-failing-call"
    sign = sign_of(find_messages(SHAPES[name]).messages[0])
    assert sign is not None
    if sign.is_of_model:
        assert "smaller-batch" not in [r.code for r in others]


BACKWARD = frame(f"{TORCH}/_tensor.py", "backward", "torch.autograd.backward(self)")
CONTRADICTED = {
    "a step that Lightning runs inside the optimizer's": failing(
        frame(f"{TORCH}/optim/adamw.py", "step", "loss = closure()"),
        frame("/job/fit.py", "training_step", "y = self(x)"),
    ),
    "a backward pass is no evaluation": failing(
        frame("/job/fit.py", "validate", "loss.backward()"), BACKWARD
    ),
    "a function that trains and evaluates": failing(
        frame("/job/fit.py", "train_and_evaluate", "out = net(x)")
    ),
    "one tensor beyond the device": failing(
        frame("/job/eval.py", "validate", "y = interpolate(x)"),
        message=old_style("37.37 GiB", "7.79 GiB", "1.40 GiB", "4.21 GiB", "2.58 GiB"),
    ),
    "training that runs a part without gradients": failing(
        frame("/job/fit.py", "training_step", "loss = self.step(batch)"),
        frame(f"{TORCH}/utils/_contextlib.py", "decorate_context", "return func(*args)"),
    ),
    "memory that is higher on one rank than on others": f"{FULL}\nMemory of rank 0 is higher than "
    "that of the other ranks.\n",
    "an evaluation that works": f"{FULL}\nTraining fails, but the evaluation is fine.\n",
    "a part of the data of a cross-validation": f"{FULL}\nIt happens in cross validation.\n",
    "inference that works, where training fails": f"{FULL}\nI fine-tune it. Inference works.\n",
    "a checkpoint that goes to the CPU": failing(
        frame("/job/fit.py", "resume", "state = torch.load(path, map_location='cpu')"),
        frame(f"{TORCH}/serialization.py", "load", "return _load(f)"),
    ),
}


@pytest.mark.parametrize("name", CONTRADICTED)
def test_sign_that_the_message_contradicts_is_none(name):
    (message,) = find_messages(CONTRADICTED[name]).messages

    assert sign_of(message) is None


@pytest.mark.parametrize(
    ("file", "function", "code"),
    [
        (r"torch\nn\modules\module.py", "convert", "return t.to(device)"),
        (f"{TORCH}/nn/modules/linear.py", "__init__", "self.weight = Parameter(torch.empty(n))"),
        ("/job/fit.py", "main", "model = model.to(device)"),
    ],
    ids=["relative path", "layer that is made", "last frame of a cut traceback"],
)
def test_weights_are_seen_however_the_traceback_is_cut(file, function, code):
    sign = sign_of(find_messages(failing(frame(file, function, code))).messages[0])

    assert sign is not None
    assert sign.name == "loading-weights"


@pytest.mark.parametrize(
    "said",
    [
        "during the validation",
        "In the validation step it fails",
        "but it fails as soon as it starts evaluating",
        "but on the fifth iteration the evaluation loop started and the error arose",
        "and I get this error right after the first evaluation",
        "but it errors out in the final step of saving predictions",
    ],
)
def test_evaluation_is_read_from_words_without_a_traceback(said):
    (message,) = find_messages(f"Training is fine, {said}:\n{FULL}\n").messages
    sign = sign_of(message)

    assert sign is not None
    assert sign.name == "evaluation"


def test_verdict_says_what_was_going_on():
    verdict = diagnose(case_of(SHAPES["kept-predictions"])).verdict

    assert "in an evaluation whose results pile up on the GPU" in verdict.summary


def test_frames_of_plain_layers_are_no_sign():
    text = failing(
        frame("/job/net.py", "forward", "x = self.conv(x)"),
        frame(f"{TORCH}/nn/modules/conv.py", "_conv_forward", "return F.conv2d(x, w)"),
    )

    (message,) = find_messages(text).messages

    assert sign_of(message) is None
    assert diagnose(case_of(text)).recommendations[0].code == "smaller-batch"


def test_layers_of_pixels_speak_of_images():
    text = failing(
        frame("/job/net.py", "forward", "x = self.conv(x)"),
        frame(f"{TORCH}/nn/modules/conv.py", "_conv_forward", "return F.conv2d(x, w)"),
    )
    sound = text.replace("F.conv2d", "F.conv1d")

    first, of_sound = (diagnose(case_of(t)).recommendations[0] for t in (text, sound))

    assert first.title == "Use a smaller batch or smaller images"
    assert "tiles" in first.change
    assert "tiles" not in of_sound.change


@pytest.mark.parametrize(
    ("code", "is_attention"),
    [
        ("s = einsum('b i d, b j d -> b i j', q, k)", True),
        ("s = torch.einsum('bhqd,bhkd->bhqk', q, k)", True),
        ("y = torch.einsum('bhqk,bhkd->bhqd', w, v)", False),
        ("y = torch.einsum('bij,bjk->bik', a, b)", False),
    ],
)
def test_product_of_all_pairs_is_attention_in_any_letters(code, is_attention):
    sign = sign_of(find_messages(failing(frame("/job/net.py", "attend", code))).messages[0])

    assert (sign is not None and sign.name == "attention-scores") == is_attention


def test_function_that_is_named_after_an_evaluation_is_one():
    text = failing(
        frame("/job/fit.py", "val_one_epoch", "loss = net(x)"),
        frame(f"{TORCH}/nn/modules/linear.py", "forward", "return F.linear(x, w)"),
    )
    other = text.replace("val_one_epoch", "interval_of_values")

    found = [sign_of(find_messages(t).messages[0]) for t in (text, other)]

    assert found[0] is not None
    assert found[0].name == "evaluation"
    assert found[1] is None


def test_innermost_sign_counts():
    text = failing(
        frame(f"{LIB}/transformers/trainer.py", "evaluation_loop", "out = self.step()"),
        frame(f"{TORCH}/nn/functional.py", "grid_sample", "return torch.grid_sampler(x, g)"),
    )

    (message,) = find_messages(text).messages
    sign = sign_of(message)

    assert sign is not None
    assert sign.name == "sampled-grid"


def test_retry_inside_a_handler_is_advised_against():
    text = failing() + (
        "\nDuring handling of the above exception, another exception occurred:\n\n" + failing()
    )
    passed_on = text.replace("main()", "raise RuntimeError(str(error))")

    assert diagnose(case_of(text)).recommendations[0].code == "retry-outside-except"
    others = diagnose(case_of(passed_on)).recommendations
    assert "retry-outside-except" not in [r.code for r in others]


@pytest.mark.parametrize("code", ["x = torch.cat([a, b])", "x, y = torch.cat([z, x]), 1"])
def test_joining_other_tensors_is_no_growing_one(code):
    sign = next(s for s in SIGNS if s.name == "growing-concatenation")

    assert not sign.matches(TracebackFrame("a.py", 1, "f", code))


@pytest.mark.parametrize(("name", "grows"), [("x", False), ("self.bank", True)])
def test_what_a_layer_joins_grows_only_if_the_layer_keeps_it(name, grows):
    code = f"{name} = self.up(torch.cat([{name}, skip], 1))"

    title = (
        diagnose(case_of(failing(frame("/job/net.py", "forward", code)))).recommendations[0].title
    )

    assert title.startswith("Collect the pieces") == grows


def how(text: str) -> str:
    return diagnose(case_of(text)).recommendations[0].change


def test_advice_names_the_options_of_the_framework_at_hand_only():
    served = f"(VllmWorker rank=1 pid=29) ERROR [multiproc_executor.py:375] {FULL}\n"
    evaluated = failing(frame(f"{LIB}/transformers/trainer.py", "evaluation_loop", "step()"))
    own = failing(frame("/job/fit.py", "validate", "score = net(x).clone()"))

    assert "zero.Init" in how(SHAPES["loading-weights under DeepSpeed"])
    assert "zero.Init" not in how(SHAPES["loading-weights"])
    assert "zero_to_fp32.py" in how(SHAPES["gathered-save by DeepSpeed"])
    assert "--gpu-memory-utilization" in how(served)
    assert "--mem-fraction-static" not in how(served)
    assert "per_device_eval_batch_size" in how(evaluated)
    assert "torch.no_grad()" in how(own)
    assert "per_device_eval_batch_size" not in how(own)


def test_step_of_an_optimizer_that_runs_the_model_in_a_closure_is_no_sign_of_its_state():
    step = frame("/job/fit.py", "fit", "optimizer.step(closure)")
    inside = frame("/job/net.py", "forward", "x = self.up(x)")

    (alone,) = find_messages(failing(step)).messages
    (around,) = find_messages(failing(step, inside)).messages

    assert getattr(sign_of(alone), "name", "") == "optimizer-state"
    assert sign_of(around) is None


def test_loading_on_the_cpu_helps_a_program_that_has_its_model_on_the_gpu_already():
    load = frame(f"{TORCH}/serialization.py", "_cuda_deserialize", "return storage(n)")
    begun = old_style("20.00 MiB", "11.17 GiB", "962.69 MiB", "17.19 MiB", "967.50 MiB")
    empty = old_style("20.00 MiB", "11.78 GiB", "46.62 MiB", "12.38 MiB", "58.00 MiB")

    first = [diagnose(case_of(failing(load, message=m))).recommendations[0] for m in (begun, empty)]

    assert [r.code for r in first] == ["at-the-failing-call", "free-other-process"]


def test_step_of_a_server_is_told_a_cache_that_leaves_it_room():
    budget = "INFO: Current kv cache memory in use is 4509715660 bytes.\n"
    failed = old_style("1.10 GiB", "23.53 GiB", "21.90 GiB", "300.00 MiB", "22.10 GiB")

    said = how(f"{budget}(EngineCore_DP0 pid=12) ERROR [core.py:700] {failed}\n")

    assert said.startswith("--kv-cache-memory-bytes 3758096384 leaves the step the 621.60 MiB")


def test_line_that_calls_a_validation_shows_it_where_its_frame_has_another_name():
    text = failing(
        frame("/job/main.py", "train", "best = validation(loader)"),
        frame("/job/main.py", "<listcomp>", "[post(x) for x in outputs]"),
    )

    sign = sign_of(find_messages(text).messages[0])

    assert sign is not None
    assert sign.name == "evaluation"


@pytest.mark.parametrize(
    "bar",
    # catalyst 20, callbacks/logging.py; lightning 1.5 to 2.5, callbacks/progress
    ["0/9 * Epoch (valid):   3% 1/32 [00:01]", "Validation DataLoader 0:  12%", "Validating: 5%"],
)
def test_bar_of_a_validation_shows_an_evaluation(bar):
    (message,) = find_messages(f"{bar}\nRuntimeError: CUDA error: out of memory\n").messages

    assert getattr(sign_of(message), "name", "") == "evaluation"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("I train with FSDP, and get CUDA OOM when saving the final checkpoint.", "gathered-save"),
        ("ComfyUI crashes: an OOM error during VAE decoding.", "vae-decode"),
        ("Node Type: TangoFluxVAEDecodeAndPlay. CUDA out of memory.", "vae-decode"),
        ("It says CUDA out of memory in Vae Decode.", "vae-decode"),
        ("It saves the model, with FSDP on 8 GPUs, then CUDA OOM. Why?", "gathered-save"),
        ("We tune it under ZeRO-3, and it runs out of memory in save_checkpoint.", "gathered-save"),
        ("zero3: an OOM on rank 0 once the model is saved in one piece.", "gathered-save"),
        ("All workers load it onto one GPU: CUDA OOM. Each should have its own.", "first-gpu"),
        ("With sliding_window_inference on large CTs I get CUDA OOM errors.", "sliding-window"),
        ("训练没有问题, 验证的时候 OOM 报错 (GPU).", "evaluation"),
        ("GPU consumption keeps increasing as the training goes on, then OOM.", "growth"),
        ("I train it, and GPU memory keeps adding up until the CUDA OOM.", "growth"),
        ("I train it: CUDA OOM. It keeps using more memory with each iteration.", "growth"),
        ("When training reached 22000 iterations, I got CUDA out of memory.", "later-step"),
        ("I train with DDP: CUDA OOM. Why does rank 0 use more memory than others?", "first-gpu"),
        ("CUDA out of memory around image 900 of training.", "later-step"),
        ("It goes OOM. GPU memory gets more and more filled by each trial.", "growth"),
    ],
)
def test_phase_is_read_from_prose(said, name):
    sign = sign_of(find_messages(f"{said}\n").messages[0])

    assert sign is not None
    assert sign.name == name
