"""What heuristics cannot know: the table of model types that need a word of their own."""

from __future__ import annotations

from typing import Any

from .sizes import BLOCK, RANDOM, SPAN

# Arguments without which a config cannot be made even at its own sizes.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
}

_MIXED = {"layer_types": ["linear_attention", "full_attention"]}

_PYRAMID = {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}

# Arguments that replace what the names of the fields suggest, by the type of the (sub-)config.
SIZES: dict[str, dict[str, Any]] = {
    "align": {"projection_dim": 80},
    "align_vision_model": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"block_size": BLOCK, "num_random_blocks": RANDOM},
    "bigbird_pegasus": {"block_size": BLOCK, "num_random_blocks": RANDOM},
    "blip-2": {"image_token_index": 98},
    "blt": {"num_hidden_layers": 2},
    "chmv2": {"backbone_config": {"return_class_token": True}},
    "clap_audio_model": {"hidden_size": 512},
    "clvp_encoder": {"num_attention_heads": 2},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "depth_pro": {"patch_size": 64, "intermediate_hook_ids": [1, 0]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 96},
    "efficientloftr": {
        "out_features": [16, 16, 32, 64],
        "stage_num_blocks": [1, 1, 1, 1],
        "num_attention_heads": 8,
    },
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [3, 3, 2],
        }
    },
    "esm": {"pad_token_id": 1, "mask_token_id": 32},
    "falcon_h1": {"mamba_d_ssm": 128},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "funnel": {"block_sizes": [1, 1, 1]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {
        "deepstack_layer_map": [],
        "spatial_target_layers": [],
        "downsample_rate": "2/4",
    },
    "granitemoehybrid": _MIXED,
    "instructblip": {"image_token_index": 98},
    "instructblipvideo": {"video_token_index": 98},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kosmos-2": {"latent_query_num": 4},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 96},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "mamba2": {"num_heads": 8},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_glimmer_assistant": {"target_layer_ids": [0]},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "neucodec": {"quantization_dim": 128},
    "omdet-turbo": {
        "encoder_in_channels": [32, 48, 64],
        "apply_layernorm_after_vision_backbone": False,
        "encoder_hidden_dim": 32,
        "decoder_hidden_dim": 32,
        "vision_features_channels": [32, 32, 32],
    },
    "paddleocr_vl_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        }
    },
    "pegasus_x": {"block_size": SPAN},
    "pi0": {"chunk_size": 9},
    "pp_doclayout_v2": {"class_thresholds": [0.5] * 2, "class_order": [0, 1]},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 8]},
    "sam2_hiera_det_model": {"hidden_size": 96, "image_size": [64, 64]},
    "sam2_vision_model": _PYRAMID,
    "sam3_tracker": {"vision_config": _PYRAMID},
    "sam3_vision_model": _PYRAMID,
    "seggpt": {"image_size": [128, 64]},
    "shieldgemma2": {"yes_token_index": 97, "no_token_index": 96},
    "step3p5": {"sliding_window": 4},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "tvp": {"max_img_size": 128},
    "uvdoc": {"backbone_config": {"out_features": [f"stage{i}" for i in range(1, 7)]}},
    "vitmatte": {"fusion_hidden_sizes": [256, 128, 64, 32]},
    "xcodec2": {"quantization_dim": 128},
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zoedepth": {"bottleneck_features": 64},
}
# Types that answer to one row at a time: TVP shapes its column embeddings by the batch.
ALONE = ("tvp",)

# Packages without which a type cannot be built, and that are not installed here.
NEEDS: dict[str, str] = {
    "dinat": "natten",
    "higgs_audio_v2_tokenizer": "torchaudio",
    "layoutlmv2": "detectron2",
} | dict.fromkeys(
    (
        "edgetam",
        "edgetam_vision_model",
        "fast_vlm",
        "gemma3n",
        "gemma3n_vision",
        "pe_audio_video",
        "pe_audio_video_encoder",
        "pe_video",
        "pe_video_encoder",
        "perception_lm",
        "timm_wrapper",
    ),
    "timm",
)

_SESSION = "its forward takes a video session, not tensors"
_INCOMPLETE = "its default config has no kernels for its neck"
_DRAFT = "a draft model: reads the keys and values of the model that it drafts for"

# Types that could not be built or run, and why.
CANNOT: dict[str, str] = {
    "edgetam_video": _SESSION,
    "fun_asr_nano_encoder": "its mask has the length of stacked frames, which is not deduced",
    "gemma4_assistant": _DRAFT,
    "gemma4_unified_assistant": _DRAFT,
    "glm_image_vqmodel": "has no forward, only encode",
    "inkling2_vision": "its patches have a layout of their own, which is not deduced",
    "jev": "its questions have a structure of their own, which is not deduced",
    "muse_glimmer_assistant": _DRAFT,
    "pp_ocrv5_server_det": _INCOMPLETE,
    "pp_ocrv6_medium_det": _INCOMPLETE,
    "pp_ocrv6_small_det": "its neck expects other channels than the backbone of its own default",
    "qwen3_asr_encoder": "its lengths are those of windows of a hundred frames",
    "qwen3_omni_moe": "its talker reads a size that its own config does not have",
    "sam2_video": _SESSION,
    "sam3_tracker_video": _SESSION,
    "sam3_video": _SESSION,
    "voxtral_realtime_text": "is listed, but transformers has no such class",
}
