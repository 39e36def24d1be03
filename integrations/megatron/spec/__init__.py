"""GPT layer specs, and the core attention in them: what sequence parallelism needs without TransformerEngine.

`--spec overlap_train.integrations.megatron.spec gpt_block_spec` names this package.
"""

from overlap_train.integrations.megatron.spec.gpt import gpt_block_spec

__all__ = ["gpt_block_spec"]
