"""Models of transformers that see, hear or read tables and series."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tests.zoo.language import ENCODER_DECODER, TRANSFORMER, WORDS, of_transformers, words
from tests.zoo.specimen import Batch, Specimen, of_output, real, whole

CLASSES = 4
PIXELS = 32

VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": PIXELS,
    "patch_size": 8,
    "num_labels": CLASSES,
}
SWIN = {
    "image_size": PIXELS,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": CLASSES,
}
PYRAMID = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": CLASSES}
RESIDUAL = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": CLASSES}
WAV2VEC = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 16,
    "pad_token_id": 0,
    "ctc_zero_infinity": True,
    "mask_time_prob": 0.0,
}
SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}

Batches = Callable[[Generator], Batch]


def seen(name: str, batch: Batches, *, model: str | None = None, **settings: Any) -> Specimen:
    return _made("vision", name, batch, model or f"{name}ForImageClassification", settings)


def heard(name: str, batch: Batches, *, model: str | None = None, **settings: Any) -> Specimen:
    return _made("audio", name, batch, model or f"{name}ForCTC", settings)


def read(name: str, batch: Batches, *, model: str, **settings: Any) -> Specimen:
    return _made("table and series", name, batch, model, settings)


def _made(family: str, name: str, batch: Batches, model: str, settings: dict[str, Any]) -> Specimen:
    loss = settings.pop("loss", of_output)

    def build() -> nn.Module:
        return of_transformers(model, f"{name}Config", **settings)

    return Specimen(name=name, family=family, model=build, batch=batch, loss=loss)


def pictures(generator: Generator) -> Batch:
    return {"pixel_values": real(generator, 2, 3, PIXELS, PIXELS), "labels": whole(generator, 2, below=CLASSES)}


def unlabelled(generator: Generator) -> Batch:
    return {"pixel_values": real(generator, 2, 3, PIXELS, PIXELS)}


def segmented(generator: Generator) -> Batch:
    return {**unlabelled(generator), "labels": whole(generator, 2, PIXELS, PIXELS, below=CLASSES)}


def boxed(generator: Generator) -> Batch:
    label = {"class_labels": whole(generator, 1, below=CLASSES), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}
    return {**unlabelled(generator), "labels": [label, label]}


def captioned(generator: Generator) -> Batch:
    return {**unlabelled(generator), **words(generator)}


def contrasted(generator: Generator) -> Batch:
    return {**unlabelled(generator), "input_ids": words(generator)["input_ids"], "return_loss": True}


def pointed(generator: Generator) -> Batch:
    points = torch.rand((2, 1, 2, 2), generator=generator) * PIXELS
    return {**unlabelled(generator), "input_points": points, "multimask_output": True}


def shown(generator: Generator) -> Batch:
    """Words that begin with the places of a picture."""
    told = words(generator)
    places = torch.full((2, 16), WORDS - 1)
    ids = torch.cat([places, told["input_ids"].clamp(max=WORDS - 2)], 1)
    return {**unlabelled(generator), "input_ids": ids, "labels": ids.masked_fill(ids == WORDS - 1, -100)}


def films(generator: Generator) -> Batch:
    return {"pixel_values": real(generator, 2, 4, 3, 16, 16), "labels": whole(generator, 2, below=CLASSES)}


def spoken(generator: Generator) -> Batch:
    return {"input_values": real(generator, 2, 800), "labels": whole(generator, 2, 5, below=16, at_least=1)}


def spectra(generator: Generator) -> Batch:
    return {"input_features": real(generator, 2, 8, 40), "labels": words(generator)["labels"]}


def frames(generator: Generator) -> Batch:
    return {"input_features": real(generator, 2, 40, 8), "labels": words(generator)["labels"]}


def sounds(generator: Generator) -> Batch:
    return {"input_values": real(generator, 2, 24, 16), "labels": whole(generator, 2, below=CLASSES)}


def dictated(generator: Generator) -> Batch:
    return {"input_values": real(generator, 2, 800), "labels": words(generator)["labels"]}


def past_and_future(generator: Generator) -> Batch:
    return {"past_values": real(generator, 2, 32, 2), "future_values": real(generator, 2, 4, 2)}


def series(generator: Generator) -> Batch:
    return {
        "past_values": real(generator, 2, 10),
        "past_time_features": real(generator, 2, 10, 1),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": real(generator, 2, 4),
        "future_time_features": real(generator, 2, 4, 1),
    }


def plays(generator: Generator) -> Batch:
    return {
        "states": real(generator, 2, 5, 4),
        "actions": real(generator, 2, 5, 2),
        "rewards": real(generator, 2, 5, 1),
        "returns_to_go": real(generator, 2, 5, 1),
        "timesteps": torch.arange(5).repeat(2, 1),
        "attention_mask": torch.ones(2, 5),
    }


def pages(generator: Generator) -> Batch:
    return {
        **words(generator),
        "labels": whole(generator, 2, 12, below=2),
        "bbox": torch.zeros(2, 12, 4, dtype=torch.long),
    }


def arrays(generator: Generator) -> Batch:
    return {"inputs": real(generator, 2, 10, 16)}


def squares(*names: str) -> Callable[[nn.Module, Batch], Tensor]:
    """The mean square of these outputs, for a model without a loss of its own."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        output = model(**batch)
        return torch.stack([getattr(output, name).square().mean() for name in names]).sum()

    return loss


def _detr() -> nn.Module:
    import transformers

    backbone = transformers.ResNetConfig(**RESIDUAL, layer_type="basic", out_features=["stage2"])
    settings = {**ENCODER_DECODER, "num_queries": 4, "num_labels": CLASSES, "backbone_config": backbone}
    return of_transformers("DetrForObjectDetection", "DetrConfig", **settings)


def _captioner() -> nn.Module:
    import transformers

    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**VIT),
        transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=1, n_head=4, n_positions=32, use_cache=False),
    )
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return transformers.VisionEncoderDecoderModel(config=config)


VISION = [
    seen("ViT", pictures, **VIT),
    seen("DeiT", pictures, **VIT),
    seen("Beit", pictures, **VIT),
    seen("Dinov2", pictures, **VIT),
    seen("Swin", pictures, **SWIN),
    seen("Swinv2", pictures, **SWIN),
    seen("ConvNext", pictures, **PYRAMID),
    seen("ConvNextV2", pictures, **PYRAMID),
    seen("ResNet", pictures, layer_type="basic", **RESIDUAL),
    seen("RegNet", pictures, groups_width=4, **RESIDUAL),
    seen("Bit", pictures, num_groups=4, **RESIDUAL),
    seen("MobileNetV2", pictures, depth_multiplier=0.25, num_labels=CLASSES),
    seen(
        "MobileViT",
        pictures,
        image_size=PIXELS,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32],
        num_attention_heads=4,
        num_labels=CLASSES,
    ),
    seen("Pvt", pictures, image_size=PIXELS, num_attention_heads=[1, 2, 2, 2], **PYRAMID),
    seen("PoolFormer", pictures, **PYRAMID),
    seen(
        "FocalNet",
        pictures,
        image_size=PIXELS,
        embed_dim=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        focal_levels=[1, 1],
        focal_windows=[3, 3],
        num_labels=CLASSES,
    ),
    seen(
        "Hiera", pictures, image_size=[32, 32], embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2], num_labels=CLASSES
    ),
    seen(
        "Segformer",
        segmented,
        model="SegformerForSemanticSegmentation",
        num_attention_heads=[1, 2, 2, 2],
        decoder_hidden_size=16,
        **PYRAMID,
    ),
    seen(
        "DPT",
        unlabelled,
        model="DPTForDepthEstimation",
        loss=squares("predicted_depth"),
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        reassemble_factors=[4, 2, 1, 0.5],
        **{**VIT, "num_hidden_layers": 4},
    ),
    seen(
        "ViTMAE",
        unlabelled,
        model="ViTMAEForPreTraining",
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=48,
        **VIT,
    ),
    seen(
        "Yolos",
        boxed,
        model="YolosForObjectDetection",
        num_detection_tokens=4,
        **{**VIT, "image_size": [PIXELS, PIXELS]},
    ),
    Specimen(name="Detr", family="vision", model=_detr, batch=boxed),
    seen("VideoMAE", films, model="VideoMAEForVideoClassification", num_frames=4, **{**VIT, "image_size": 16}),
    seen(
        "Vivit",
        films,
        model="VivitForVideoClassification",
        num_frames=4,
        tubelet_size=[2, 8, 8],
        **{**VIT, "image_size": 16},
    ),
    seen(
        "Sam",
        pointed,
        model="SamModel",
        loss=squares("pred_masks", "iou_scores"),
        vision_config={
            **{key: VIT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size")},
            "patch_size": 8,
            "output_channels": 16,
            "mlp_dim": 48,
            "window_size": 2,
            "global_attn_indexes": [1],
            "num_pos_feats": 8,
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": PIXELS, "patch_size": 8, "mask_input_channels": 4},
        mask_decoder_config={
            "hidden_size": 16,
            "mlp_dim": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "iou_head_hidden_dim": 16,
        },
    ),
    seen("CLIP", contrasted, model="CLIPModel", text_config=TRANSFORMER, vision_config=VIT, projection_dim=16),
    seen("Siglip", contrasted, model="SiglipModel", text_config=TRANSFORMER, vision_config=VIT),
    seen(
        "Blip",
        captioned,
        model="BlipForConditionalGeneration",
        text_config={**TRANSFORMER, "encoder_hidden_size": 32},
        vision_config=VIT,
    ),
    seen("Git", captioned, model="GitForCausalLM", vision_config=VIT, use_cache=False, **TRANSFORMER),
    seen(
        "Llava",
        shown,
        model="LlavaForConditionalGeneration",
        text_config={**TRANSFORMER, "model_type": "llama", "use_cache": False},
        vision_config={**VIT, "model_type": "clip_vision_model"},
        image_token_index=WORDS - 1,
        vision_feature_select_strategy="default",
    ),
    Specimen(
        name="VisionEncoderDecoder",
        family="vision",
        model=_captioner,
        batch=lambda generator: {**unlabelled(generator), "labels": words(generator)["labels"]},
    ),
]

AUDIO = [
    heard("Wav2Vec2", spoken, **WAV2VEC),
    heard("Wav2Vec2Conformer", spoken, **WAV2VEC),
    heard("Hubert", spoken, **WAV2VEC),
    heard("WavLM", spoken, **WAV2VEC),
    heard("SEW", spoken, **WAV2VEC),
    heard(
        "Whisper",
        spectra,
        model="WhisperForConditionalGeneration",
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=WORDS,
        use_cache=False,
        **ENCODER_DECODER,
    ),
    heard(
        "Speech2Text",
        frames,
        model="Speech2TextForConditionalGeneration",
        input_feat_per_channel=8,
        conv_channels=16,
        max_source_positions=40,
        max_target_positions=WORDS,
        use_cache=False,
        **ENCODER_DECODER,
    ),
    heard(
        "SpeechT5",
        dictated,
        model="SpeechT5ForSpeechToText",
        speech_decoder_prenet_units=16,
        use_cache=False,
        **{**WAV2VEC, **ENCODER_DECODER},
    ),
    heard(
        "AST",
        sounds,
        model="ASTForAudioClassification",
        frequency_stride=8,
        time_stride=8,
        max_length=24,
        num_mel_bins=16,
        **{key: value for key, value in VIT.items() if key != "image_size"},
    ),
]

TABLES_AND_SERIES = [
    read(
        "PatchTST",
        past_and_future,
        model="PatchTSTForPrediction",
        num_input_channels=2,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        d_model=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        prediction_length=4,
    ),
    read(
        "PatchTSMixer",
        past_and_future,
        model="PatchTSMixerForPrediction",
        num_input_channels=2,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        d_model=16,
        num_layers=2,
        prediction_length=4,
    ),
    read("TimeSeriesTransformer", series, model="TimeSeriesTransformerForPrediction", **SERIES),
    read("Informer", series, model="InformerForPrediction", **SERIES),
    read(
        "DecisionTransformer",
        plays,
        model="DecisionTransformerModel",
        loss=squares("action_preds", "state_preds", "return_preds"),
        state_dim=4,
        act_dim=2,
        hidden_size=32,
        n_head=4,
        n_layer=2,
        max_ep_len=16,
    ),
    read("LayoutLM", pages, model="LayoutLMForTokenClassification", max_2d_position_embeddings=16, **TRANSFORMER),
    read(
        "Perceiver",
        arrays,
        model="PerceiverModel",
        loss=squares("last_hidden_state"),
        num_latents=8,
        d_latents=32,
        d_model=16,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
    ),
]

SPECIMENS = [*VISION, *AUDIO, *TABLES_AND_SERIES]
