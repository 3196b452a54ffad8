"""All specimens, and what torch cannot do with some of them though nobody is watching."""

from tests.zoo import convolutions, language, others, sense, sequences
from tests.zoo.specimen import Specimen

SPECIMENS: dict[str, Specimen] = {
    specimen.name: specimen
    for part in (convolutions, sequences, others, language, sense)
    for specimen in part.SPECIMENS
}

DISTINCT = (
    *("resnet", "densenet", "efficientnet", "diffusion unet", "mixer", "lstm", "packed gru", "temporal convolution"),
    *("torch transformer", "pointer", "vector quantised autoencoder", "adversaries", "recommender", "siamese"),
    *("normalising flow", "low-rank adapter", "physics-informed", "fourier operator"),
    *("GPT2", "OPT", "Bloom", "Llama", "Gemma3", "Bert", "DebertaV2", "Albert", "T5", "Bart", "Mixtral", "DeepseekV3"),
    *("Mamba2", "Rwkv", "xLSTM", "Jamba", "ViT", "Swin", "ConvNext", "Detr", "CLIP", "Wav2Vec2", "Whisper"),
)
"""Some that differ most from one another, for what takes long."""

QUICKLY_COMPILED = (
    *("resnet", "densenet", "mixer", "lstm", "packed gru", "temporal convolution", "vector quantised autoencoder"),
    *("adversaries", "recommender", "siamese", "normalising flow", "low-rank adapter", "fourier operator"),
    *("physics-informed", "Llama", "Mixtral", "Bert"),
)
"""Some that torch compiles within a few seconds."""

UNCOMPILABLE = {"physics-informed": "double backward", "Nystromformer": "an operation fails on fake tensors"}
UNGRADED_CALLS = {"equilibrium": "compiled code does not measure the calls that are made without grad mode"}
UNCHECKPOINTABLE = {"XLM": "keeps a cache that the second forward extends"}
UNPARALLEL = {"actor-critic": "the parameters behind a distribution that it returns are taken for unused"}
UNSHARDABLE = {
    "recommender": "gradients are sparse",
    "fourier operator": "parameters of two dtypes",
    "SqueezeBert": "uses the weight of a layer outside its block",
}
FATAL_SHARDED = {
    "SwitchTransformers": "experts that one rank alone uses make reductions of two sizes, at which gloo aborts"
}
