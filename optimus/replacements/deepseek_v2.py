"""DeepSeek-V2: latent attention, rotated by complex numbers."""

from __future__ import annotations

from optimus.replacements._rotary import rotary

ARCHITECTURE = rotary("deepseek_v2", "DeepseekV2RotaryEmbedding", "DeepseekV2Attention")
