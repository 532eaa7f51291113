from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextExperts

from omnistage.config.resolve import resolve_config
from omnistage.errors import ConfigError
from omnistage.models.qwen3_omni.packed import PackedExperts
from omnistage.models.qwen3_omni.thinker import Thinker
from omnistage.ops.quantize import Int4Linear, Int8Linear
from tests.models.qwen3_omni.stages import config_of, context_of


@pytest.fixture(scope="module")
def experts() -> Qwen3OmniMoeThinkerTextExperts:
    config = Qwen3OmniMoeTextConfig(hidden_size=64, moe_intermediate_size=32, num_experts=4)
    config._experts_implementation = "eager"
    made = Qwen3OmniMoeThinkerTextExperts(config)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=random) / weight.shape[-1] ** 0.5)
    return made


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    hidden = torch.randn(count, 64, generator=random)
    chosen = torch.stack([torch.randperm(4, generator=random)[:2] for _ in range(count)])
    return hidden, chosen, torch.rand(count, 2, generator=random)


def test_packed_experts_do_what_whole_ones_do(experts: Qwen3OmniMoeThinkerTextExperts) -> None:
    packed = PackedExperts(experts)
    assert all(isinstance(layer, Int4Linear) for layer in (*packed.gate_up, *packed.down))
    with torch.no_grad():
        expected, made = experts(*tokens(40)), packed(*tokens(40))
    assert float(nn.functional.cosine_similarity(expected.flatten(), made.flatten(), dim=0)) > 0.98


def test_a_token_does_not_depend_on_its_batch_mates(experts: Qwen3OmniMoeThinkerTextExperts) -> None:
    packed = PackedExperts(experts)
    hidden, chosen, weights = tokens(40)
    with torch.no_grad():
        together = packed(hidden, chosen, weights)
        alone = packed(hidden[7:8], chosen[7:8], weights[7:8])
    torch.testing.assert_close(together[7:8], alone, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_a_packed_thinker_has_packed_layers_and_head(checkpoint: Path) -> None:
    thinker = Thinker(context_of(config_of(checkpoint, quantization="int4"), "thinker"))
    assert isinstance(thinker._thinker.lm_head, Int8Linear)
    assert isinstance(thinker._text.layers[0].self_attn.q_proj, Int4Linear)
    assert isinstance(thinker._text.layers[0].mlp.experts, PackedExperts)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["talker", "code2wav"])
def test_other_stages_refuse_to_be_packed(checkpoint: Path, stage: str) -> None:
    with pytest.raises(ConfigError, match=f"stages.{stage}.quantization"):
        resolve_config(str(checkpoint), None, {f"stages.{stage}.quantization": "int4"})
