"""Which models qualify, which do not and why, and what replacing the layer leaves alone."""

import pytest
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.qwen3 import model_registry

from titan_mega_moe import config_registry, models
from titan_mega_moe.models import families, model_spec, refusal_reason
from titan_mega_moe.routed_experts import MegaMoEOptions, MegaRoutedExperts

REFERENCE = MegaMoEOptions(backend="reference")


def test_families():
    assert families() == {
        "deepseek_v3": ["debugmodel", "16B", "236B", "671B"],
        "kimi_k2_7": ["debugmodel", "moonlight-16B-A3B", "Kimi-VL-A3B", "Kimi-K2.5"],
        "qwen3": ["debugmodel_moe", "30B-A3B", "235B-A22B"],
        "qwen3_5": ["debugmodel_moe", "35B-A3B", "122B-A10B", "397B-A17B"],
    }


@pytest.mark.parametrize("name, flavor", [(name, f) for name, flavors in families().items() for f in flavors])
def test_every_layer_is_replaced(name, flavor):
    upstream = model_spec(name, flavor, options=MegaMoEOptions(backend="upstream"))
    before = {fqn: node for fqn, node, _, _ in upstream.traverse(RoutedExperts.Config)}
    ours = model_spec(name, flavor, options=MegaMoEOptions(backend="reference", keep="inputs", max_tokens=7))
    after = {fqn: node for fqn, node, _, _ in ours.traverse(MegaRoutedExperts.Config)}
    assert before and before.keys() == after.keys()
    assert not any(ours.traverse(RoutedExperts.Config))
    assert not any(upstream.traverse(MegaRoutedExperts.Config))
    for fqn, node in after.items():
        experts = before[fqn].inner_experts
        assert type(node.inner_experts) is GroupedExperts.Config
        assert (node.inner_experts.dim, node.inner_experts.hidden_dim) == (experts.dim, experts.hidden_dim)
        assert node.num_experts == experts.num_experts
        assert node.top_k == before[fqn].token_dispatcher.top_k
        assert (node.backend, node.keep, node.max_tokens) == ("reference", "inputs", 7)
    assert (ours.name, ours.flavor) == (upstream.name, upstream.flavor)
    assert ours.parallelize_fn.keywords == {"upstream": upstream.parallelize_fn}
    assert ours.state_dict_adapter is upstream.state_dict_adapter


@pytest.mark.parametrize(
    "name, flavor, reason",
    [
        ("gpt_oss", "20b", "its experts are GptOssGroupedExperts, and the layer computes only"),
        ("qwen3", "8B", "model 'qwen3' '8B' has no mixture of experts"),
        ("llama3", "8B", "model 'llama3' '8B' has no mixture of experts"),
        ("muse_glimmer", "30B", "model 'muse_glimmer' '30B' has no mixture of experts"),
        ("qwen33", "30B-A3B", "model 'qwen33' is not known; did you mean 'qwen3'?"),
        ("bert", "30B-A3B", "model 'bert' is not known; known: deepseek_v3, flux"),
        ("qwen3", "30B-A3", "model 'qwen3' has no flavor '30B-A3'; did you mean '30B-A3B'?"),
    ],
)
def test_refusal(name, flavor, reason):
    assert reason in refusal_reason(name, flavor)
    with pytest.raises(ValueError) as caught:
        model_spec(name, flavor, options=REFERENCE)
    assert str(caught.value) == refusal_reason(name, flavor)


def test_family_that_cannot_be_imported(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'fla'")

    monkeypatch.setattr(models, "_module", missing)
    reason = refusal_reason.__wrapped__("qwen3_5", "35B-A3B")
    assert reason == "model 'qwen3_5' cannot be imported here: No module named 'fla'"
    assert families.__wrapped__() == {}


@pytest.mark.parametrize("layers, moe", [(2, 1), (6, 5), (None, 5)])
def test_keeps_the_first_layers(layers, moe):
    spec = model_spec("deepseek_v3", "debugmodel", layers=layers, options=REFERENCE)
    assert len(spec.model.layers) == (layers or 6)
    assert len(list(spec.traverse(MegaRoutedExperts.Config))) == moe


@pytest.mark.parametrize(
    "layers, message",
    [
        (0, "model.layers is 0; deepseek_v3 debugmodel has 6 layers to keep from"),
        (7, "model.layers is 7; deepseek_v3 debugmodel has 6 layers to keep from"),
        (1, "model.layers is 1; the first 1 of debugmodel have no experts: keep more"),
    ],
)
def test_layers_out_of_range(layers, message):
    with pytest.raises(ValueError) as caught:
        model_spec("deepseek_v3", "debugmodel", layers=layers, options=REFERENCE)
    assert str(caught.value) == message


def test_attention_backend():
    spec = model_spec("qwen3", "debugmodel_moe", attn_backend="varlen", options=REFERENCE)
    expected = model_registry("debugmodel_moe", attn_backend="varlen").model.layers[0].attention
    assert type(spec.model.layers[0].attention.inner_attention) is type(expected.inner_attention)


CONFIGS = [name for name in vars(config_registry) if name.startswith("mega_moe_")]


@pytest.mark.parametrize("name", CONFIGS)
def test_config_registry(name):
    config = getattr(config_registry, name)()
    assert any(config.model_spec.traverse(MegaRoutedExperts.Config))
    assert not any(config.model_spec.traverse(RoutedExperts.Config))


def test_every_family_has_a_registered_configuration():
    assert len(CONFIGS) == 13
    found = {getattr(config_registry, name)().model_spec.name for name in CONFIGS}
    assert found == {"qwen3", "deepseek_v3", "kimi_k2_5", "qwen3_5"}


@pytest.mark.parametrize(("backend", "dispatcher"), [("upstream", "AllToAll"), ("minimal_async_ep", "MinimalAsyncEP")])
def test_upstreams_layer_is_left_in_place_with_the_dispatcher_asked_for(backend, dispatcher):
    for name, flavor in (("qwen3", "debugmodel_moe"), ("deepseek_v3", "debugmodel")):
        spec = model_spec(name, flavor, options=MegaMoEOptions(backend=backend))
        nodes = [node for _, node, _, _ in spec.traverse(RoutedExperts.Config)]
        assert nodes
        assert {type(n.token_dispatcher).__qualname__ for n in nodes} == {f"{dispatcher}TokenDispatcher.Config"}
