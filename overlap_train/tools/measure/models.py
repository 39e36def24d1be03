"""The models that tools and recipes know by name: the sizes of their linears, as published."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A transformer whose layers are alike; the fields that are flags of Megatron-Core have their names.

    kv_channels: width of a head; 0: hidden_size / num_attention_heads. is_gated: fc1 computes gate and up together (SwiGLU).
    vocab_size 0: the user's.
    """

    source: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int = 0
    kv_channels: int = 0
    is_gated: bool = True

    @property
    def head_width(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The weights of a layer by linear slot: [N, K], output times input features, over all ranks."""
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        queries, keys = self.num_attention_heads * self.head_width, self.num_query_groups * self.head_width
        return {
            "qkv": (queries + 2 * keys, hidden),
            "proj": (hidden, queries),
            "fc1": ((1 + self.is_gated) * ffn, hidden),
            "fc2": (hidden, ffn),
        }


_LLAMA3 = "The Llama 3 Herd of Models, arXiv 2407.21783, table 3"
TINY = "tiny"  # for CPU processes
OPS_OF_LINEARS = {"qkv": "ag_gemm", "proj": "gemm_rs", "fc1": "ag_gemm", "fc2": "gemm_rs", "output": "ag_gemm"}
OPS_OF_PROJECTIONS = {"qkv": "gemm_a2a", "proj": "a2a_gemm"}  # under Ulysses

MODELS = {
    "llama-7b": Model("LLaMA, arXiv 2302.13971, table 2", 32, 4096, 11008, 32, 32, 32000),
    "llama3-8b": Model(f"{_LLAMA3}; config.json of meta-llama/Meta-Llama-3-8B", 32, 4096, 14336, 32, 8, 128256),
    "llama3-70b": Model(f"{_LLAMA3}; config.json of meta-llama/Meta-Llama-3-70B", 80, 8192, 28672, 64, 8, 128256),
    "llama3-405b": Model(f"{_LLAMA3}", 126, 16384, 53248, 128, 8, 128256),
    "qwen2-72b": Model("Qwen2 Technical Report, arXiv 2407.10671, table 1", 80, 8192, 29568, 64, 8, 152064),
    "qwen3-32b": Model(
        "Qwen3 Technical Report, arXiv 2505.09388, table 1; config.json of Qwen/Qwen3-32B",
        64, 5120, 25600, 64, 8, 151936, kv_channels=128,
    ),
    "seed-oss-36b": Model(
        "config.json of ByteDance-Seed/Seed-OSS-36B-Base", 64, 5120, 27648, 80, 8, 155136, kv_channels=128
    ),
    "gpt3-175b": Model("GPT-3, arXiv 2005.14165, table 2.1", 96, 12288, 49152, 96, 96, 50257, is_gated=False),
    TINY: Model("none", 1, 32, 32, 4, 2),
}  # fmt: skip
