"""Attention over windows, blocks and global tokens, or capped by chunks; a line an architecture."""

from __future__ import annotations

from optimus.replacements._windows import (
    BigBirdBlocks,
    Gemma3nAudio,
    Gemma4Audio,
    LongformerWindows,
    PegasusBlocks,
    windows,
)

ARCHITECTURES = (
    windows("big_bird", "BigBirdBlockSparseAttention", mixin=BigBirdBlocks),
    windows("bigbird_pegasus", "BigBirdPegasusBlockSparseAttention", mixin=BigBirdBlocks),
    windows(
        "gemma3n_audio",
        "transformers.models.gemma3n.modeling_gemma3n:Gemma3nAudioAttention",
        mixin=Gemma3nAudio,
    ),
    windows(
        "gemma4_audio",
        "transformers.models.gemma4.modeling_gemma4:Gemma4AudioAttention",
        mixin=Gemma4Audio,
    ),
    windows("led", "LEDEncoderSelfAttention", mixin=LongformerWindows),
    windows("longformer", "LongformerSelfAttention", mixin=LongformerWindows),
    windows("pegasus_x", "PegasusXGlobalLocalAttention", mixin=PegasusBlocks),
)
