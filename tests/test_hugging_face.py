"""A Hugging Face model through two expert-parallel ranks: initial_load_in_hf and last_save_in_hf."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import ranks
from titan_mega_moe import config

CONFIG = Path(__file__).parents[1] / "train_configs" / "debug_cpu.toml"
SMALL = {
    "model.layers": "2",
    "training.local_batch_size": "1",
    "training.seq_len": "32",
    "mega_moe.compute_dtype": "float32",
    "activation_checkpoint.mode": "none",
}
EXPERT_DIM = 64  # the flavor's own 768 takes long on a CPU


def trainer(folder, **keys):
    """A Trainer of the shipped CPU configuration with few, small layers in float32, on the default group."""
    from torch.distributed.tensor import debug
    from torchtitan.models.common.moe import GroupedExperts

    # The cache knows meshes by value, FSDP by identity: a second training must not get the first one's.
    debug._clear_sharding_prop_cache()
    keys = {**SMALL, "dump_folder": str(folder), **keys}
    resolved = config.load(CONFIG, [word for key, value in keys.items() for word in (f"--{key}", value)])
    for _, experts, _, _ in resolved.model_spec.model.traverse(GroupedExperts.Config):
        experts.hidden_dim = EXPERT_DIM
    return resolved.build()


def hugging_face_model():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=2048,
            hidden_size=256,
            num_hidden_layers=2,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            moe_intermediate_size=EXPERT_DIM,
            num_experts=64,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            initializer_range=0.1,  # logits far enough from uniform for a wrong weight to show
        )
    ).eval()


def load_and_export(folder, source):
    """Logits of the model loaded from `source`, in TorchTitan; then its export, under `folder`."""
    run = trainer(
        folder,
        **{
            "hf_assets_path": source,
            "training.steps": "1",
            "checkpoint.enable": "true",
            "checkpoint.initial_load_path": source,
            "checkpoint.initial_load_in_hf": "true",
            "checkpoint.last_save_in_hf": "true",
            "loss.type": "CrossEntropyLoss",
        },
    )
    run.checkpointer.load()
    model = run.model_parts[0].eval()
    tokens = torch.arange(2 * 32).view(2, 32) * 31 % 2048
    positions = torch.arange(32).expand(2, 32)
    with torch.no_grad():
        logits = model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))
    run.checkpointer.save(1, last_step=True)
    run.close()
    return tokens, logits


@pytest.fixture(scope="module")
def passed_through(tmp_path_factory):
    """A model of transformers, its folder, what two ranks computed with it, and the folder they exported."""
    folder = tmp_path_factory.mktemp("hugging_face")
    model = hugging_face_model()
    model.save_pretrained(folder / "source")
    answers = ranks.run(2, load_and_export, str(folder / "ours"), str(folder / "source"), timeout=240)
    return model, folder / "source", answers, folder / "ours" / "checkpoint" / "step-1"


@pytest.mark.timeout(400)
def test_logits_equal_transformers(passed_through):
    model, _, answers, _ = passed_through
    for tokens, logits in answers:
        with torch.no_grad():
            expected = model(tokens).logits
        assert expected.std() > 0.3
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def weights(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.timeout(400)
def test_export_gives_every_weight_back_bit_for_bit(passed_through):
    _, source, _, exported = passed_through
    before, after = weights(source), weights(exported)
    assert before.keys() == after.keys() and len(before) > 64 * 2 * 3
    assert all(before[name].equal(after[name]) for name in before)


@pytest.mark.timeout(400)
def test_transformers_reloads_the_export(passed_through, tmp_path):
    from transformers import Qwen3MoeForCausalLM

    model, source, _, exported = passed_through
    shutil.copytree(exported, tmp_path / "model")
    shutil.copy(source / "config.json", tmp_path / "model")
    again = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert again.state_dict()[name].equal(tensor), name
