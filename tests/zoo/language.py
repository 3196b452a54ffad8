"""Language models of transformers: decoders, encoders, encoder-decoders, mixtures of experts, recurrent ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Generator, nn

from tests.zoo.specimen import Batch, Specimen, whole

WORDS = 64
TOKENS = 12

TRANSFORMER = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What most configurations call these things."""

ENCODER_DECODER = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}

T5 = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}

GPT = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": WORDS, "bos_token_id": 1}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

MAMBA_HEADS = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}


def of_transformers(model: str, config: str, **settings: Any) -> nn.Module:
    """A model of transformers with random weights."""
    import transformers

    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return built


def words(generator: Generator) -> Batch:
    """The same words as input and as labels."""
    ids = whole(generator, 2, TOKENS, below=WORDS, at_least=3)
    return {"input_ids": ids, "labels": ids}


def _made(
    family: str, name: str, batch: Callable[[Generator], Batch], model: str, config: str, settings: dict[str, Any]
) -> Specimen:
    def build() -> nn.Module:
        return of_transformers(model, config, **settings)

    return Specimen(name=name, family=family, model=build, batch=batch)


def decoder(name: str, *, model: str | None = None, family: str = "decoder", **settings: Any) -> Specimen:
    """A model that predicts the next word."""
    config = settings.pop("config", f"{name}Config")
    settings = {**TRANSFORMER, "use_cache": False, **settings}
    return _made(family, name, words, model or f"{name}ForCausalLM", config, settings)


def encoder(name: str, *, model: str | None = None, **settings: Any) -> Specimen:
    """A model that fills in words."""
    return _made("encoder", name, words, model or f"{name}ForMaskedLM", f"{name}Config", {**TRANSFORMER, **settings})


def translator(
    name: str, *, model: str | None = None, base: dict[str, Any] = ENCODER_DECODER, **settings: Any
) -> Specimen:
    """A model that reads words and writes words."""
    config = {**base, "use_cache": False, **settings}
    return _made("encoder-decoder", name, words, model or f"{name}ForConditionalGeneration", f"{name}Config", config)


DECODERS = [
    decoder("GPT2", model="GPT2LMHeadModel", **GPT),
    decoder("GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
    decoder("GPTJ", rotary_dim=8, **GPT),
    decoder("GPTNeoX"),
    decoder("GPTBigCode", **GPT),
    decoder("CodeGen", rotary_dim=8, **GPT),
    decoder("CTRL", model="CTRLLMHeadModel", dff=48, **GPT),
    decoder("OPT", ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.3),
    decoder("XGLM", d_model=32, num_layers=2, attention_heads=4, ffn_dim=48),
    decoder("Bloom"),
    decoder("Falcon"),
    decoder("Mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=WORDS),
    decoder("Llama"),
    decoder("Mistral", sliding_window=4),
    decoder("Qwen2"),
    decoder("Qwen3", head_dim=8),
    decoder("Gemma", head_dim=8),
    decoder("Gemma2", head_dim=8, sliding_window=4),
    decoder("Gemma3", config="Gemma3TextConfig", head_dim=8, sliding_window=4),
    decoder("Phi"),
    decoder("Phi3"),
    decoder("StableLm"),
    decoder("Olmo2"),
    decoder("Starcoder2"),
    decoder("Cohere"),
    decoder("Granite"),
    decoder("Persimmon"),
    decoder("Nemotron"),
    decoder("SmolLM3"),
    decoder("BioGpt"),
    decoder("DiffLlama"),
]

ENCODERS = [
    encoder("Bert"),
    encoder("Roberta"),
    encoder("Deberta"),
    encoder("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    encoder("DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    encoder("Electra", embedding_size=16),
    encoder("Albert", embedding_size=16),
    encoder("Longformer", attention_window=4),
    encoder("BigBird", attention_type="original_full"),
    encoder("MobileBert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    encoder(
        "SqueezeBert",
        embedding_size=32,
        **dict.fromkeys(("q_groups", "k_groups", "v_groups", "intermediate_groups", "output_groups"), 2),
    ),
    encoder("FNet"),
    encoder("Nystromformer", num_landmarks=4, segment_means_seq_len=TOKENS),
    encoder("MPNet"),
    encoder("ModernBert", local_attention=4, cls_token_id=1, sep_token_id=2),
    encoder("RoFormer"),
    encoder("ConvBert"),
    encoder("RemBert", input_embedding_size=16, output_embedding_size=32),
    encoder("XLM", model="XLMWithLMHeadModel", emb_dim=32, n_layers=2, n_heads=4),
    _made(
        "encoder",
        "XLNet",
        words,
        "XLNetLMHeadModel",
        "XLNetConfig",
        {"vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    ),
]

TRANSLATORS = [
    translator("T5", base=T5),
    translator("UMT5", base=T5),
    translator("LongT5", base=T5, local_radius=4),
    translator("Bart"),
    translator("MBart"),
    translator("Pegasus"),
    translator("Marian", model="MarianMTModel"),
    translator("M2M100"),
    translator("BigBirdPegasus", attention_type="original_full"),
    translator("LED", attention_window=4, max_encoder_position_embeddings=WORDS, max_decoder_position_embeddings=WORDS),
    _made(
        "encoder-decoder",
        "ProphetNet",
        words,
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        {
            **{key: ENCODER_DECODER[key] for key in ("vocab_size", "encoder_ffn_dim", "decoder_ffn_dim")},
            **{
                f"num_{side}_{part}": count
                for side in ("encoder", "decoder")
                for part, count in (("layers", 2), ("attention_heads", 4))
            },
            "hidden_size": 32,
            "max_position_embeddings": WORDS,
            "decoder_start_token_id": 2,
            "use_cache": False,
        },
    ),
]

MIXTURES = [
    decoder("Mixtral", family="mixture of experts", num_local_experts=4),
    decoder("Qwen2Moe", family="mixture of experts", shared_expert_intermediate_size=16, **EXPERTS),
    decoder(
        "Qwen3Moe", family="mixture of experts", head_dim=8, mlp_only_layers=[0], **{**EXPERTS, "num_local_experts": 4}
    ),
    decoder("Olmoe", family="mixture of experts", **EXPERTS),
    decoder("GptOss", family="mixture of experts", num_local_experts=4, head_dim=8),
    decoder("Phimoe", family="mixture of experts", num_local_experts=4),
    decoder("JetMoe", family="mixture of experts", kv_channels=8, num_local_experts=4),
    decoder(
        "DeepseekV3",
        family="mixture of experts",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
    ),
    translator("SwitchTransformers", base=T5, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    translator("NllbMoe", num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2),
]

RECURRENT = [
    decoder("Mamba", family="state space", state_size=8),
    decoder("FalconMamba", family="state space", state_size=8),
    decoder("Mamba2", family="state space", num_heads=8, head_dim=8, n_groups=1, state_size=8, chunk_size=4),
    decoder("Bamba", family="state space", attn_layer_indices=[1], **MAMBA_HEADS),
    decoder(
        "GraniteMoeHybrid",
        family="state space",
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        shared_intermediate_size=16,
        **MAMBA_HEADS,
    ),
    decoder(
        "Jamba",
        family="state space",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    decoder("Rwkv", family="recurrent", attention_hidden_size=32),
    decoder("xLSTM", family="recurrent", num_heads=2, num_blocks=2, chunk_size=4, qk_dim_factor=1.0),
    decoder(
        "RecurrentGemma", family="recurrent", num_hidden_layers=3, lru_width=32, attention_window_size=8, conv1d_width=4
    ),
    decoder(
        "Qwen3Next",
        family="recurrent",
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
        **EXPERTS,
    ),
    decoder("Lfm2", family="recurrent", layer_types=["conv", "full_attention"], conv_L_cache=3),
]

SPECIMENS = [*DECODERS, *ENCODERS, *TRANSLATORS, *MIXTURES, *RECURRENT]
