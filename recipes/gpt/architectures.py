"""The models that --model names: their published shapes, and where each is published.

The text is always bytes, so a published vocabulary is used for its size only: the embedding and the output layer have as
many rows as in the real model, and cost as much.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """A GPT with RMSNorm, rotary positions, grouped queries and a gated MLP, dense or of experts.

    vocab_size 0: that of the byte tokenizer. kv_channels: width of a head; 0: hidden_size / num_attention_heads.
    experts 0: a dense MLP; else each of `experts` MLPs is ffn_hidden_size wide and a token goes to `experts_per_token`.
    """

    title: str
    source: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int = 0
    kv_channels: int = 0
    norm_eps: float = 1e-5
    rope_base: int = 10000
    activation: str = "silu"
    has_qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_balance: float = 0.0

    @property
    def head_width(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def parameters(self) -> int:
        """In all: embedding and output layer, four or more matrices a layer, norms."""
        queries, keys = self.num_attention_heads * self.head_width, self.num_query_groups * self.head_width
        mlps, router = (self.experts, self.experts * self.hidden_size) if self.experts else (1, 0)
        matrices = (
            self.hidden_size * (2 * queries + 2 * keys) + mlps * 3 * self.hidden_size * self.ffn_hidden_size + router
        )
        norms = 2 * self.hidden_size + 2 * self.head_width * self.has_qk_norm
        return self.num_layers * (matrices + norms) + 2 * self.vocab_size * self.hidden_size + self.hidden_size


# What flags may change: these are settings of the same name, the architecture gives their defaults.
SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
SMALL = "small"

ARCHITECTURES = {
    SMALL: Architecture(
        title="small GPT",
        source="this recipe; trains on two CPU cores",
        num_layers=4,
        hidden_size=128,
        ffn_hidden_size=384,
        num_attention_heads=4,
        num_query_groups=2,
    ),
    "llama3-8b": Architecture(
        title="Llama-3 8B",
        source="The Llama 3 Herd of Models, arXiv 2407.21783, table 3; config.json of meta-llama/Meta-Llama-3-8B",
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=128256,
        rope_base=500000,
    ),
    "llama3-70b": Architecture(
        title="Llama-3 70B",
        source="The Llama 3 Herd of Models, arXiv 2407.21783, table 3; config.json of meta-llama/Meta-Llama-3-70B",
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=28672,
        num_attention_heads=64,
        num_query_groups=8,
        vocab_size=128256,
        rope_base=500000,
    ),
    "qwen3-32b": Architecture(
        title="Qwen3-32B",
        source="Qwen3 Technical Report, arXiv 2505.09388, table 1; config.json of Qwen/Qwen3-32B",
        num_layers=64,
        hidden_size=5120,
        ffn_hidden_size=25600,
        num_attention_heads=64,
        num_query_groups=8,
        vocab_size=151936,
        kv_channels=128,
        norm_eps=1e-6,
        rope_base=1000000,
        has_qk_norm=True,
    ),
    "mixtral-8x7b": Architecture(
        title="Mixtral 8x7B",
        source="Mixtral of Experts, arXiv 2401.04088, table 1; config.json of mistralai/Mixtral-8x7B-v0.1",
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=32000,
        rope_base=1000000,
        experts=8,
        experts_per_token=2,
        expert_balance=0.02,
    ),
}


def shape_of(model: str) -> dict[str, int]:
    """The settings that a model's name stands for."""
    return {name: getattr(ARCHITECTURES[model], name) for name in SHAPE}
