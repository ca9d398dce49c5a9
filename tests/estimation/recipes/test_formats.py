"""Each program's own file: it is recognised, and becomes the command that one would have typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fragdoctor.cli.estimate_options import EstimateOptions
from fragdoctor.cli.estimate_recipes import with_recipes
from fragdoctor.errors import ConfigError, InputError, LimitExceeded
from fragdoctor.estimation.recipes.question import FORMATS, format_of, reading_of
from fragdoctor.model.recipe import Bearing, RecipeUse

AXOLOTL = """
base_model: NousResearch/Llama-2-7b-hf
chunked_cross_entropy: true
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_target_linear: true
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: paged_adamw_8bit
gradient_checkpointing: true
bf16: auto
flash_attention: true
wandb_project: mine
datasets: [{path: a/b, type: alpaca}]
my_own_kv_cache: 3
my_own_entry: 3
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: dpo
finetuning_type: lora
lora_rank: 8
lora_target: all
template: qwen
cutoff_len: 1024
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
bf16: true
dataset: mine
"""
TORCHTUNE = """
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 16
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 2048
batch_size: 4
batch_size_val: ${batch_size}
gradient_accumulation_steps: 2
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 1e-4}
loss: {_component_: torch.nn.CrossEntropyLoss}
enable_activation_checkpointing: true
enable_activation_offloading: true
dtype: bf16
epochs: 1
"""
TORCHTITAN = """
[job]
description = "mine"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
TRL = """
model_name_or_path: Qwen/Qwen2.5-1.5B
torch_dtype: bfloat16
attn_implementation: flash_attention_2
bf16: true
max_length: 8192
packing: true
torch_compile: true
per_device_train_batch_size: 2
per_device_eval_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
learning_rate: 1.0e-5
"""
VLLM = """
model: meta-llama/Llama-3.1-8B-Instruct
max-model-len: 16k
gpu-memory-utilization: 0.85
kv-cache-dtype: fp8
max-num-seqs: 64
no-enable-prefix-caching: true
served-model-name: mine
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_activation_checkpointing: true
  fsdp_offload_params: true
"""
DEEPSPEED = json.dumps(
    {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    }
)


def asked(folder: Path, *files: tuple[str, str], **options: object) -> RecipeUse:
    paths = []
    for name, text in files:
        path = folder / name
        if text:
            path.write_text(text, encoding="utf-8")
        paths.append(str(path) if text else name)
    chosen = EstimateOptions(inputs=paths, **options)  # type: ignore[arg-type]
    given = frozenset({"inputs", *options})
    _, use = with_recipes(chosen, given)
    assert use is not None
    return use


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        (
            "a.yml",
            AXOLOTL,
            (
                "NousResearch/Llama-2-7b-hf --optimizer paged-adamw-8bit --batch 2 --seq 4096 "
                "--attention flash --checkpointing full --grad-accumulation 4 --lora 32 "
                "--lora-targets all-linear --dtype int4"
            ),
        ),
        (
            "a.yaml",
            LLAMA_FACTORY,
            (
                "Qwen/Qwen2.5-7B-Instruct --optimizer adamw-fused --batch 4 --seq 1024 "
                "--checkpointing full --grad-accumulation 8 --lora 8 --lora-targets all-linear "
                "--dtype bf16"
            ),
        ),
        (
            "a.yaml",
            TORCHTUNE,
            (
                "llama-3.1-8b --optimizer adamw-fused --batch 4 --seq 2048 "
                "--checkpointing full --grad-accumulation 2 --lora 16 "
                "--lora-targets q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj "
                "--offload activations --dtype bf16"
            ),
        ),
        (
            "a.toml",
            TORCHTITAN,
            (
                "llama-3.1-8b --optimizer adamw-fused --batch 2 --seq 4096 --checkpointing full "
                "--tensor-parallel 2 --sequence-parallel --expandable-segments --world-size 8 "
                "--fsdp --dtype fsdp-bf16"
            ),
        ),
        (
            "a.yaml",
            TRL,
            (
                "Qwen/Qwen2.5-1.5B --optimizer adamw-fused --batch 2 --seq 8192 --attention flash "
                "--checkpointing full --grad-accumulation 4 --dtype bf16"
            ),
        ),
        (
            "a.yaml",
            VLLM,
            (
                "meta-llama/Llama-3.1-8B-Instruct --seq 16000 --inference --kv-dtype fp8 "
                "--gpu-memory-utilization 0.85 --max-num-seqs 64"
            ),
        ),
        (
            "a.sh",
            "vllm serve meta-llama/Llama-3.1-8B -tp 2 --quantization fp8 --max-model-len 4096\n",
            (
                "meta-llama/Llama-3.1-8B --seq 4096 --tensor-parallel 2 --inference "
                "--gpu-memory-utilization 0.9 --dtype fp8-weights"
            ),
        ),
        (
            "a.sh",
            (
                "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --use_peft --lora_r 32 "
                "--load_in_4bit --lora_target_modules q_proj k_proj v_proj o_proj\n"
            ),
            (
                "Qwen/Qwen2.5-0.5B --optimizer adamw-fused --batch 8 --seq 1024 "
                "--checkpointing full --lora 32 --dtype nf4"
            ),
        ),
    ],
)
def test_recipe_becomes_the_command_that_one_would_type(
    tmp_path: Path, name: str, text: str, options: str
) -> None:
    assert f"fragdoctor estimate {options}" == asked(tmp_path, (name, text)).command


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        (
            "a.yaml",
            ACCELERATE,
            (
                "--checkpointing full --world-size 8 --fsdp --offload optimizer,parameters "
                "--dtype fsdp-bf16"
            ),
        ),
        ("a.json", DEEPSPEED, "--optimizer adamw-fused --batch 4 --dtype deepspeed-bf16"),
    ],
)
def test_launch_file_goes_beside_a_model(
    tmp_path: Path, name: str, text: str, options: str
) -> None:
    use = asked(tmp_path, (name, text), ("llama-3.1-8b", ""))

    assert f"fragdoctor estimate llama-3.1-8b {options}" == use.command


def test_launch_file_alone_asks_for_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not name a known model") as caught:
        asked(tmp_path, ("a.yaml", ACCELERATE))

    assert "a.yaml llama-3.1-8b" in caught.value.hint


def test_version_of_fsdp_is_taken_where_weights_are_frozen(tmp_path: Path) -> None:
    launch = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n  fsdp_version: 1\n"
    words = "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B"
    frozen = asked(tmp_path, ("a.yaml", launch), ("a.sh", f"{words} --use_peft --lora_r 8\n"))
    trained = asked(tmp_path, ("a.yaml", launch), ("b.sh", f"{words}\n"))

    assert "--fsdp --fsdp-kind 1" in frozen.command
    assert "--fsdp-kind" not in trained.command


def test_evaluation_is_no_training(tmp_path: Path) -> None:
    text = "python examples/scripts/evals/judge_tldr.py --model_name_or_path Qwen/Qwen2.5-0.5B\n"

    with pytest.raises((ConfigError, InputError)):
        asked(tmp_path, ("a.sh", text))


def test_run_and_launch_file_are_one_question(tmp_path: Path) -> None:
    use = asked(tmp_path, ("sft.yaml", TRL), ("fsdp.yaml", ACCELERATE))

    assert "--fsdp" in use.command
    assert "--dtype fsdp-bf16" in use.command
    assert ["sft.yaml", "fsdp.yaml"] == [Path(file.source).name for file in use.files]


def test_what_is_not_counted_is_listed_with_its_reason(tmp_path: Path) -> None:
    (file,) = asked(tmp_path, ("a.yml", AXOLOTL)).files

    matters = {entry.key: entry.reason for entry in file.unused_that(Bearing.MATTERS)}
    assert {"chunked_cross_entropy"} == matters.keys()
    assert "logits are counted in full" in matters["chunked_cross_entropy"]
    assert ["my_own_kv_cache"] == [entry.key for entry in file.unused_that(Bearing.UNKNOWN)]
    assert {"wandb_project", "datasets", "my_own_entry"} <= {
        e.key for e in file.unused_that(Bearing.NONE)
    }


def test_every_entry_is_used_or_named(tmp_path: Path) -> None:
    for name, text in (("a.yml", AXOLOTL), ("b.yaml", LLAMA_FACTORY), ("c.yaml", TRL)):
        (file,) = asked(tmp_path, (name, text)).files
        named = {e.key for e in file.used} | {e.key for e in file.unused}
        written = {line.partition(":")[0] for line in text.splitlines() if ":" in line}

        assert written <= named


def test_default_of_the_program_is_told_from_an_entry(tmp_path: Path) -> None:
    (file,) = asked(tmp_path, ("a.yaml", LLAMA_FACTORY)).files

    defaults = {entry.key for entry in file.used if entry.is_default}
    assert {"disable_gradient_checkpointing", "optim"} == defaults


@pytest.mark.parametrize("name", ["apollo_adamw", "lomo", "no_such_optimizer"])
def test_unknown_optimizer_is_refused_by_its_entry(tmp_path: Path, name: str) -> None:
    text = AXOLOTL.replace("paged_adamw_8bit", name)

    with pytest.raises(ConfigError, match=f"optimizer '{name}' is not a known optimizer"):
        asked(tmp_path, ("a.yml", text))
    assert "--optimizer adamw" in asked(tmp_path, ("a.yml", text), optimizer="adamw").command


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"finetuning_type": "oft"}, "trains what no estimate can count"),
        ({"quantization_bit": 3}, "not a known quantization"),
        ({"use_badam": True}, "not a known optimizer"),
    ],
)
def test_training_that_cannot_be_said_is_refused(
    tmp_path: Path, entries: dict[str, object], said: str
) -> None:
    text = json.dumps({"model_name_or_path": "gpt2", "stage": "sft", "cutoff_len": 8, **entries})

    with pytest.raises(ConfigError, match=said):
        asked(tmp_path, ("a.json", text))


@pytest.mark.parametrize(
    "entries",
    [{"name": "mine", "version": 3}, {"services": {"web": {"image": "x"}}}, {"model": "x"}, {}],
)
def test_file_of_nobody_is_refused_in_one_sentence(entries: dict[str, object]) -> None:
    assert format_of(entries) is None
    with pytest.raises(InputError, match="shows which program it is for"):
        reading_of(entries, "compose.yaml")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"model_type": "llama", "hidden_size": 64, "zero_optimization": {}}'),
        ("index.json", '{"weight_map": {}}'),
        ("other.json", '{"a": 1}'),
    ],
)
def test_description_of_a_model_is_no_recipe(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)

    chosen = EstimateOptions(inputs=[str(path)])

    same = (chosen, None)
    assert same == with_recipes(chosen, frozenset({"inputs"}))


@pytest.mark.parametrize("where", ["beside", "current"])
def test_file_that_an_entry_names_is_read_beside_it_or_from_here(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    ((folder if where == "beside" else tmp_path) / "ds.json").write_text(DEEPSPEED)
    monkeypatch.chdir(tmp_path)

    use = asked(folder, ("a.yml", AXOLOTL + "deepspeed: ds.json\n"), world_size=8)

    assert "--zero 2" in use.command
    assert 2 == len(use.files)


def test_file_that_is_not_here_is_listed_and_nothing_is_guessed(tmp_path: Path) -> None:
    use = asked(tmp_path, ("a.yml", AXOLOTL + "deepspeed: ds.json\n"), world_size=8)

    assert "--zero" not in use.command
    (entry,) = [e for e in use.files[0].unused if e.key == "deepspeed"]
    assert (Bearing.MATTERS, "is missing") == (entry.bearing, entry.reason[:10])


def test_configuration_inside_of_an_entry_is_read(tmp_path: Path) -> None:
    held = "deepspeed: {zero_optimization: {stage: 1}, bf16: {enabled: true}}\n"

    assert "--zero 1" in asked(tmp_path, ("a.yaml", TRL + held), world_size=4).command


def test_entries_of_a_file_are_changed_by_the_command_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(AXOLOTL)

    use = asked(tmp_path, ("run.sh", "axolotl train a.yml --micro_batch_size=16\n"))

    assert "--batch 16" in use.command


def test_preference_pairs_are_counted_twice(tmp_path: Path) -> None:
    use = asked(tmp_path, ("a.yaml", TRL + "beta: 0.1\nmax_prompt_length: 512\n"))

    assert "--batch 4" in use.command
    assert any("reference model" in note for note in use.notes)


def test_pattern_of_targets_is_counted_as_everything(tmp_path: Path) -> None:
    text = TRL + "use_peft: true\nlora_target_modules: '.*(q|v)_proj'\n"

    assert "--lora-targets all-linear" in asked(tmp_path, ("a.yaml", text)).command


def test_each_format_is_recognised_as_itself() -> None:
    from fragdoctor.estimation.recipes.documents import parse_yaml

    texts = (DEEPSPEED, TORCHTUNE, AXOLOTL, LLAMA_FACTORY, ACCELERATE, TRL, VLLM)
    titles = [format_of(parse_yaml(text, "a")).title for text in texts]

    assert len(set(titles)) == len(texts) == len(FORMATS) - 1  # torchtitan's is TOML


@pytest.mark.parametrize(
    ("conf", "is_counted"),
    [
        ("expandable_segments:True", True),
        ("expandable_segments:False", False),
        ("expandable_segments:True,roundup_power2_divisions:16", False),
        ("expandable", False),
    ],
)
@pytest.mark.parametrize("command", ["python sft.py --model_name_or_path gpt2", "vllm serve gpt2"])
def test_allocator_settings_in_the_environment_are_read(
    tmp_path: Path, conf: str, command: str, is_counted: bool
) -> None:
    text = f"export PYTORCH_CUDA_ALLOC_CONF={conf}\n{command} --max_model_len 512\n"
    use = asked(tmp_path, ("a.sh", text))

    assert is_counted is ("--expandable-segments" in use.command)
    matters = {entry.key for entry in use.files[0].unused_that(Bearing.MATTERS)}
    assert (":False" in conf or is_counted) is ("PYTORCH_CUDA_ALLOC_CONF" not in matters)


def test_files_that_name_each_other_end(tmp_path: Path) -> None:
    own = "compute_environment: X\ndeepspeed_config: {deepspeed_config_file: loop.yaml}\n"

    with pytest.raises(LimitExceeded, match="more and more files"):
        asked(tmp_path, ("loop.yaml", own), ("gpt2", ""))


@pytest.mark.parametrize("value", ["/dev/zero", "x" * 5000])
def test_model_that_is_no_file_of_a_model_is_not_opened(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="neither the name nor the folder"):
        asked(tmp_path, ("a.yml", AXOLOTL.replace("NousResearch/Llama-2-7b-hf", value)))


def test_name_that_no_file_can_have_is_not_here(tmp_path: Path) -> None:
    use = asked(tmp_path, ("a.yml", AXOLOTL + f"deepspeed: {'d' * 5000}\n"))

    assert "deepspeed" in [entry.key for entry in use.files[0].unused_that(Bearing.MATTERS)]


def test_long_names_are_shortened(tmp_path: Path) -> None:
    use = asked(tmp_path, ("a.yml", AXOLOTL + f"{'k' * 900}: 1\n"))

    assert max(len(entry.key) for entry in use.files[0].unused) <= 80


OWN = "torchrun --nproc_per_node=2 my/t.py --model_name_or_path {} --per_device_train_batch_size 1"


def test_rank_given_to_a_program_of_ones_own_trains_adapters(tmp_path: Path) -> None:
    text = OWN.format("gpt2") + " --lora_r 64 --max_source_length 96 --max_target_length 32"

    command = asked(tmp_path, ("run.sh", text)).command

    assert "--lora 64" in command
    assert "--seq 128" in command
    assert "--world-size 2" in command


def test_rank_without_use_peft_trains_none_in_trl_and_is_said(tmp_path: Path) -> None:
    use = asked(tmp_path, ("a.yaml", TRL + "lora_r: 64\n"))

    assert "--lora" not in use.command
    assert any("without use_peft" in note for note in use.notes)


def test_folder_of_another_machine_is_known_by_its_name(tmp_path: Path) -> None:
    text = OWN.format("/data/models/Qwen2.5-3B-Instruct")

    assert "estimate Qwen2.5-3B-Instruct" in asked(tmp_path, ("run.sh", text)).command


@pytest.mark.parametrize("model", ["/data/models/mine", "org/unknown-7b"])
def test_model_that_is_not_known_says_what_to_put_beside(tmp_path: Path, model: str) -> None:
    with pytest.raises(InputError) as caught:
        asked(tmp_path, ("run.sh", OWN.format(model)))

    assert "with the recipe" in caught.value.hint


def test_variable_that_is_not_set_is_no_model(tmp_path: Path) -> None:
    text = OWN.format('"${BASE_MODEL}"')

    with pytest.raises(ConfigError, match="does not name a known model"):
        asked(tmp_path, ("run.sh", text))
    use = asked(tmp_path, ("run.sh", text), ("gpt2", ""))

    assert any("model_name_or_path" in note for note in use.notes)
