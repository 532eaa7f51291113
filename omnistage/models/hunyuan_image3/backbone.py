"""The decoder layers, which both stages run: transformers' HunYuan MoE layers under our positions and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import HunYuanMoEV1Config
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1DecoderLayer, HunYuanMoEV1RMSNorm

from omnistage.models.hunyuan_image3.attention import IMPLEMENTATION, DocumentPlan
from omnistage.models.hunyuan_image3.checkpoint import Checkpoint
from omnistage.models.hunyuan_image3.rotary import Angles
from omnistage.ops.paged_attention import AttentionPlan


class Backbone(nn.Module):
    """Token embedding and layers. Stateless, so that stages of one process may share it."""

    def __init__(self, checkpoint: Checkpoint, experts: str = "eager") -> None:
        """`experts` is the library's name of an implementation of the expert layers."""
        super().__init__()
        config = library_config(checkpoint, experts)
        self.embed = nn.Embedding(checkpoint.vocab, checkpoint.hidden)
        self.layers = nn.ModuleList([HunYuanMoEV1DecoderLayer(config, index) for index in range(checkpoint.layers)])

    def forward(self, rows: Tensor, angles: Angles, plan: AttentionPlan | DocumentPlan) -> Tensor:
        """Hidden states [N, hidden] of a flat batch of embedded rows [N, hidden]; no norm at the end."""
        hidden = rows[None]
        turned = (angles[0][None], angles[1][None])
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=turned, plan=plan)
        return hidden[0]


class TextHead(nn.Module):
    """Final norm and output head of the text stage."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.norm = HunYuanMoEV1RMSNorm(checkpoint.hidden, eps=checkpoint.eps)
        self.head = nn.Linear(checkpoint.hidden, checkpoint.vocab, bias=False)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, vocab] of normed rows [R, hidden]."""
        logits: Tensor = self.head(hidden)
        return logits.float()


def library_config(checkpoint: Checkpoint, experts: str) -> Any:
    """The configuration of the library's layers."""
    config = HunYuanMoEV1Config(
        vocab_size=checkpoint.vocab,
        hidden_size=checkpoint.hidden,
        intermediate_size=checkpoint.expert_width,
        num_hidden_layers=checkpoint.layers,
        num_attention_heads=checkpoint.heads,
        num_key_value_heads=checkpoint.kv_heads,
        head_dim=checkpoint.head_dim,
        hidden_act="silu",
        max_position_embeddings=checkpoint.max_positions,
        rms_norm_eps=checkpoint.eps,
        rope_parameters={"rope_type": "default", "rope_theta": checkpoint.theta},
        attention_bias=False,
        num_experts=checkpoint.experts,
        moe_topk=list(checkpoint.top_k),
    )
    config._attn_implementation = IMPLEMENTATION
    config._experts_implementation = experts
    return config


def embedded(backbone: Backbone, ids: list[int]) -> Tensor:
    """Rows [n, hidden] of token ids."""
    weight = backbone.embed.weight
    rows: Tensor = backbone.embed(torch.tensor(ids, device=weight.device))
    return rows
