"""Attention that no fused kernel computes, so that the plan can say why it is left alone.

A line an architecture: the class, and the reason. Where a part can be moved, it has a row of its
own elsewhere.
"""

from __future__ import annotations

from optimus.core.replacement import Architecture, Mixin, Replacement
from optimus.replacements._families import targets


def refused(model_type: str, *classes: str, because: str) -> Architecture:
    """The row of classes that stay as they are, with ``module:`` where it is not the type's own."""
    row = Replacement(
        name=f"{model_type}.attention.unfused",
        targets=targets(model_type, classes),
        mixin=Mixin,
        because=because,
    )
    return Architecture(model_type=model_type, replacements=(row,))


_POINTS = "weighs a few sampled points, not keys"

# Their callers keep the weights, asked or not.
GIVEN = (
    refused(
        "bridgetower",
        "BridgeTowerBertCrossLayer",
        because="its layers give the weights of self-attention out unasked",
    ),
)

# A fused kernel of another kind would do: natten.
SPARSE = (
    refused("dinat", "NeighborhoodAttention", because="neighbourhoods in two dimensions: natten"),
)

# Not softmax(QKᵀ + bias)V.
OTHER = (
    refused("autoformer", "AutoformerAttention", because="autocorrelation, by Fourier transform"),
    refused(
        "esm",
        "transformers.models.esm.modeling_esmfold:EsmFoldInvariantPointAttention",
        because="its weights also average points in space",
    ),
    refused("groupvit", "GroupViTAssignAttention", because="a hard softmax over the queries"),
    refused(
        "informer",
        "InformerProbSparseAttention",
        because="only the top queries look, chosen by a sample of keys",
    ),
    refused("mobilevitv2", "MobileViTV2LinearSelfAttention", because="one context score a token"),
    refused("mra", "MraSelfAttention", because="softmax over blocks of several resolutions"),
    refused(
        "nystromformer",
        "NystromformerSelfAttention",
        because="a pseudo-inverse of landmarks between two softmaxes",
    ),
    refused(
        "reformer", "LSHSelfAttention", "LocalSelfAttention", because="hashed and sorted buckets"
    ),
    refused("rwkv", "RwkvSelfAttention", because="a recurrence, without scores"),
    refused("slanet", "SLANetAttentionGRUCell", because="one step of a recurrent cell"),
    refused("slanext", "SLANeXtAttentionGRUCell", because="one step of a recurrent cell"),
    refused(
        "swiftformer",
        "SwiftFormerEfficientAdditiveAttention",
        because="additive: no pairs of tokens",
    ),
    refused(
        "vits",
        "VitsAttention",
        because="values have positions of their own, which need the weights",
    ),
    refused("yoso", "YosoSelfAttention", because="a hashed estimate without a softmax"),
    *(
        refused(family, f"{name}MultiscaleDeformableAttention", because=_POINTS)
        for family, name in {
            "d_fine": "DFine",
            "deformable_detr": "DeformableDetr",
            "deimv2": "Deimv2",
            "grounding-dino": "GroundingDino",
            "lw_detr": "LwDetr",
            "mask2former": "Mask2FormerPixelDecoderEncoder",
            "mm-grounding-dino": "MMGroundingDino",
            "omdet-turbo": "OmDetTurbo",
            "oneformer": "OneFormerPixelDecoderEncoder",
            "pp_doclayout_v2": "PPDocLayoutV2",
            "pp_doclayout_v3": "PPDocLayoutV3",
            "pp_doclayout_v4": "PPDocLayoutV4",
            "rf_detr": "RfDetr",
            "rt_detr": "RTDetr",
            "rt_detr_v2": "RTDetrV2",
        }.items()
    ),
)

ARCHITECTURES = (*GIVEN, *SPARSE, *OTHER)
